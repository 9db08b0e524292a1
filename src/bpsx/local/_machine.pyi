"""The processes of one machine; see ``_machine.pyx``."""

from typing import Any

def head_bytes(size: int) -> int:
    """Bytes before the shares in a segment of a machine with ``size`` processes."""

class Machine:
    """This process's shared memory, and its neighbours'. Made before the core, closed after it."""

    def __init__(
        self, *, size: int, me: int, first_rank: int, alone: bool, name: str, room: int
    ) -> None:
        """``room``: bytes of address space for shares.

        Raises :class:`~bpsx.errors.ConfigError`, :class:`OSError`.
        """
    @property
    def descriptor(self) -> int:
        """Of this process's segment."""
    def meet(self, local_rank: int, descriptor: int, wake: int) -> None:
        """Map a neighbour's segment; takes ``wake`` over.

        Raises :class:`~bpsx.errors.ConfigError`.
        """
    def load(self, dtype: int) -> None:
        """Make sure that the kernels of a dtype code are there.

        Raises :class:`KeyError` for an unknown code.
        """
    def left(self, local_rank: int) -> None:
        """A neighbour has left the job in good order. Any thread."""
    def joined(self, local_rank: int) -> None:
        """A process has called join(): rounds close without it. Any thread."""
    def rest(self, on: bool) -> None:
        """This process has called join(), or is back."""
    def all_joined(self) -> None:
        """Everybody is back. Any thread."""
    def put_notice(self, text: bytes) -> None:
        """Write on this process's notice board, in place of what was there."""
    def notice(self, local_rank: int) -> bytes:
        """What stands on a process's notice board, or nothing. Any thread."""
    def group_gpus(self, group_size: int, roots: list[int]) -> None:
        """Which GPUs reduce together: so many local ranks at a time; and to which of a group, by
        turns (none: each copies a part).
        """
    @property
    def collects(self) -> bool:
        """Whether this process's GPU may be needed by the others."""
    @property
    def deserted(self) -> bool:
        """Whether a neighbour has left in good order."""
    def abi(self) -> Any:
        """A capsule for the core, valid as long as this object."""
    def close(self) -> None:
        """Unmap everything. Idempotent."""

class QuietEndpoint:
    """An endpoint without peers.

    The contract is :class:`bpsx.transports.base.Endpoint`'s, without connections.
    """

    address: str
    @property
    def wake_descriptor(self) -> int:
        """What :meth:`wake` writes to."""
    def abi(self) -> Any:
        """The data plane: a capsule, valid as long as this object."""
    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""
    def close(self) -> None:
        """Nothing to do."""
