"""Which stages a partition goes through. Pure; one table. What a stage does is the one switch in ``core/stage.pxd``."""

from __future__ import annotations

from enum import Enum, IntEnum


class Stage(IntEnum):
    """Stages by upstream's names (its docs/timeline.md). The codes are those of ``core/stage.pxd``; a test compares them."""

    END = 0
    COORDINATE_REDUCE = 1
    REDUCE = 2
    COPYD2H = 3
    PCIE_REDUCE = 4
    COORDINATE_PUSH = 5
    COMPRESS = 6
    PUSH = 7
    PULL = 8
    DECOMPRESS = 9
    COPYH2D = 10
    COORDINATE_BROADCAST = 11
    BROADCAST = 12


class Place(Enum):
    """What a process is to its machine."""

    DIRECT = "speaks to the servers for itself"
    MEMBER = "gives its share to the machine's root"
    ROOT = "adds the machine's shares and speaks to the servers"
    ONLY_ROOT = "adds the machine's shares, and there are no servers"


#: (device, compressed, place) -> stages. A CPU tensor is pushed from where it lies and pulled to where it shall be.
_TABLE: dict[tuple[str, bool, Place], tuple[Stage, ...]] = {
    ("cpu", False, Place.DIRECT): (Stage.PUSH, Stage.PULL),
    ("cpu", False, Place.MEMBER): (Stage.REDUCE, Stage.COORDINATE_BROADCAST, Stage.BROADCAST),
    ("cpu", False, Place.ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.PUSH, Stage.PULL, Stage.BROADCAST),
    ("cpu", False, Place.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.BROADCAST),
    ("cpu", True, Place.DIRECT): (Stage.COMPRESS, Stage.PUSH, Stage.PULL, Stage.DECOMPRESS),
    # Only what crosses the network is compressed: the machine's sum.
    ("cpu", True, Place.MEMBER): (Stage.REDUCE, Stage.COORDINATE_BROADCAST, Stage.BROADCAST),
    ("cpu", True, Place.ROOT): (
        Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.COMPRESS, Stage.PUSH, Stage.PULL, Stage.DECOMPRESS, Stage.BROADCAST),
    ("cpu", True, Place.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.BROADCAST),
}


def stages_for(device: str = "cpu", compressed: bool = False, place: Place = Place.DIRECT) -> bytes:
    """The stage codes of a tensor's partitions, in order. Raises :class:`KeyError` for what this version cannot move."""
    return bytes(_TABLE[device, compressed, place])
