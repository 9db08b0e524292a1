"""Stages that a partition goes through, in one table. Pure.

The switch in ``core/stage.pxd`` implements the stages.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class Stage(IntEnum):
    """Stages, named as in BytePS (its docs/timeline.md).

    The codes are those of ``core/partition.pxd``; a test compares them.
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
    COPY = 13


class MachineRole(Enum):
    """Role of a process in its machine."""

    DIRECT = "communicates with the servers itself"
    MEMBER = "gives its data to the machine's root"
    ROOT = "sums the machine's data and communicates with the servers"
    ONLY_ROOT = "sums the machine's data; there are no servers"
    ONLY_MEMBER = "gives its data to the machine's root; there are no servers"


#: Work of a machine's GPUs before one of them speaks to the servers, and afterwards.
_ADD = (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.COPYD2H, Stage.COORDINATE_PUSH)
_SPREAD = (Stage.COPYH2D, Stage.COORDINATE_BROADCAST, Stage.BROADCAST)
#: (device, compressed, place) -> stages. A CPU tensor is pushed from its own memory. The core skips
#: COPY where the answer is in its place already.
_TABLE: dict[tuple[str, bool, MachineRole], tuple[Stage, ...]] = {
    ("cpu", False, MachineRole.DIRECT): (Stage.PUSH, Stage.PULL, Stage.COPY),
    ("cpu", False, MachineRole.MEMBER): (Stage.REDUCE, Stage.COORDINATE_BROADCAST, Stage.BROADCAST),
    ("cpu", False, MachineRole.ROOT): (
        Stage.COORDINATE_REDUCE,
        Stage.REDUCE,
        Stage.PUSH,
        Stage.PULL,
        Stage.COPY,
        Stage.BROADCAST,
    ),
    ("cpu", False, MachineRole.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.BROADCAST),
    ("cpu", True, MachineRole.DIRECT): (Stage.COMPRESS, Stage.PUSH, Stage.PULL, Stage.DECOMPRESS),
    # Only the machine's sum is compressed: nothing else crosses the network.
    ("cpu", True, MachineRole.MEMBER): (Stage.REDUCE, Stage.COORDINATE_BROADCAST, Stage.BROADCAST),
    ("cpu", True, MachineRole.ROOT): (
        Stage.COORDINATE_REDUCE,
        Stage.REDUCE,
        Stage.COMPRESS,
        Stage.PUSH,
        Stage.PULL,
        Stage.DECOMPRESS,
        Stage.BROADCAST,
    ),
    ("cpu", True, MachineRole.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE, Stage.BROADCAST),
    ("cpu", False, MachineRole.ONLY_MEMBER): (
        Stage.REDUCE,
        Stage.COORDINATE_BROADCAST,
        Stage.BROADCAST,
    ),
    ("cpu", True, MachineRole.ONLY_MEMBER): (
        Stage.REDUCE,
        Stage.COORDINATE_BROADCAST,
        Stage.BROADCAST,
    ),
    ("gpu", False, MachineRole.DIRECT): (
        Stage.COPYD2H,
        Stage.PUSH,
        Stage.PULL,
        Stage.COPY,
        Stage.COPYH2D,
    ),
    ("gpu", False, MachineRole.MEMBER): (*_ADD, *_SPREAD),
    # The core skips PCIE_REDUCE where all GPUs reduce together.
    ("gpu", False, MachineRole.ROOT): (
        *_ADD,
        Stage.PCIE_REDUCE,
        Stage.PUSH,
        Stage.PULL,
        Stage.COPY,
        *_SPREAD,
    ),
    # Without servers, NCCL's all-reduce does all the work.
    ("gpu", False, MachineRole.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE),
    ("gpu", False, MachineRole.ONLY_MEMBER): (Stage.COORDINATE_REDUCE, Stage.REDUCE),
    # Compressed on the GPU or, if that is impossible, on the host: of each pair of COMPRESS or
    # DECOMPRESS stages the core skips one.
    ("gpu", True, MachineRole.DIRECT): (
        Stage.COMPRESS,
        Stage.COPYD2H,
        Stage.COMPRESS,
        Stage.PUSH,
        Stage.PULL,
        Stage.DECOMPRESS,
        Stage.COPYH2D,
        Stage.DECOMPRESS,
    ),
    ("gpu", True, MachineRole.MEMBER): (*_ADD, *_SPREAD),
    ("gpu", True, MachineRole.ROOT): (
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
    ("gpu", True, MachineRole.ONLY_ROOT): (Stage.COORDINATE_REDUCE, Stage.REDUCE),
    ("gpu", True, MachineRole.ONLY_MEMBER): (Stage.COORDINATE_REDUCE, Stage.REDUCE),
}


def stages_for(
    device: str = "cpu", compressed: bool = False, place: MachineRole = MachineRole.DIRECT
) -> bytes:
    """Return the codes of the stages of a tensor's partitions, in order.

    Raises :class:`KeyError` for an unsupported combination.
    """
    return bytes(_TABLE[device, compressed, place])
