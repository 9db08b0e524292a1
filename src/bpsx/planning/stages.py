"""Which stages a partition goes through. Pure; one table.

What a stage does is the one switch in ``core/stage.pxd``.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class Stage(IntEnum):
    """Stages by upstream's names (its docs/run/tracing.md).

    The codes are those of ``core/stage.pxd``; a test compares them.
    """

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
    ONLY_MEMBER = "gives its share to the machine's root, and there are no servers"


#: What GPUs of a machine do before one of them speaks to the servers, and afterwards.
_ADD = (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.COPYD2H, Stage.COORDINATE_PUSH)
_SPREAD = (Stage.COPYH2D, Stage.COORDINATE_BROADCAST, Stage.BROADCAST)
#: (device, compressed, place) -> stages. A CPU tensor is pushed from where it lies and pulled to
#: where it shall be.
_TABLE: dict[tuple[str, bool, Place], tuple[Stage, ...]] = {
    ("cpu", False, Place.DIRECT): (Stage.PUSH, Stage.PULL),
    ("cpu", False, Place.MEMBER): (Stage.REDUCE, Stage.COORDINATE_BROADCAST, Stage.BROADCAST),
    ("cpu", False, Place.ROOT): (
        Stage.COORDINATE_REDUCE,
        Stage.REDUCE,
        Stage.PUSH,
        Stage.PULL,
        Stage.BROADCAST,
    ),
    ("cpu", False, Place.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.BROADCAST),
    ("cpu", True, Place.DIRECT): (Stage.COMPRESS, Stage.PUSH, Stage.PULL, Stage.DECOMPRESS),
    # Only what crosses the network is compressed: the machine's sum.
    ("cpu", True, Place.MEMBER): (Stage.REDUCE, Stage.COORDINATE_BROADCAST, Stage.BROADCAST),
    ("cpu", True, Place.ROOT): (
        Stage.COORDINATE_REDUCE,
        Stage.REDUCE,
        Stage.COMPRESS,
        Stage.PUSH,
        Stage.PULL,
        Stage.DECOMPRESS,
        Stage.BROADCAST,
    ),
    ("cpu", True, Place.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.BROADCAST),
    ("cpu", False, Place.ONLY_MEMBER): (Stage.REDUCE, Stage.COORDINATE_BROADCAST, Stage.BROADCAST),
    ("cpu", True, Place.ONLY_MEMBER): (Stage.REDUCE, Stage.COORDINATE_BROADCAST, Stage.BROADCAST),
    ("gpu", False, Place.DIRECT): (Stage.COPYD2H, Stage.PUSH, Stage.PULL, Stage.COPYH2D),
    ("gpu", False, Place.MEMBER): (*_ADD, *_SPREAD),
    # The core leaves PCIE_REDUCE out where all GPUs reduce together.
    ("gpu", False, Place.ROOT): (*_ADD, Stage.PCIE_REDUCE, Stage.PUSH, Stage.PULL, *_SPREAD),
    # Without servers NCCL's all-reduce does it all.
    ("gpu", False, Place.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE),
    ("gpu", False, Place.ONLY_MEMBER): (Stage.COORDINATE_REDUCE, Stage.REDUCE),
    # Compressed on the GPU, or, if that cannot be, on the host: the core leaves out one of each
    # two.
    ("gpu", True, Place.DIRECT): (
        Stage.COMPRESS,
        Stage.COPYD2H,
        Stage.COMPRESS,
        Stage.PUSH,
        Stage.PULL,
        Stage.DECOMPRESS,
        Stage.COPYH2D,
        Stage.DECOMPRESS,
    ),
    ("gpu", True, Place.MEMBER): (*_ADD, *_SPREAD),
    ("gpu", True, Place.ROOT): (
        Stage.COORDINATE_REDUCE,
        Stage.REDUCE,
        Stage.COMPRESS,
        Stage.COPYD2H,
        Stage.COORDINATE_PUSH,
        Stage.PCIE_REDUCE,
        Stage.COMPRESS,
        Stage.PUSH,
        Stage.PULL,
        Stage.DECOMPRESS,
        Stage.COPYH2D,
        Stage.DECOMPRESS,
        Stage.COORDINATE_BROADCAST,
        Stage.BROADCAST,
    ),
    ("gpu", True, Place.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE),
    ("gpu", True, Place.ONLY_MEMBER): (Stage.COORDINATE_REDUCE, Stage.REDUCE),
}


def stages_for(device: str = "cpu", compressed: bool = False, place: Place = Place.DIRECT) -> bytes:
    """The stage codes of a tensor's partitions, in order.

    Raises :class:`KeyError` for what this version cannot move.
    """
    return bytes(_TABLE[device, compressed, place])
