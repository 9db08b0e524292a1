"""Which stages a partition goes through. Pure; one table. What a stage does is the one switch in ``core/stage.pxd``."""

from __future__ import annotations

from enum import IntEnum


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


#: (device, compressed) -> stages. A CPU tensor is pushed from where it lies and pulled to where it shall be.
_TABLE: dict[tuple[str, bool], tuple[Stage, ...]] = {
    ("cpu", False): (Stage.PUSH, Stage.PULL),
}


def stages_for(device: str = "cpu", compressed: bool = False) -> bytes:
    """The stage codes of a tensor's partitions, in order. Raises :class:`KeyError` for what this version cannot move."""
    return bytes(_TABLE[device, compressed])
