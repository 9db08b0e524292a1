"""The processes of one machine; see ``_machine.pyx``."""

from typing import Any

def head_bytes(size: int) -> int:
    """Return the bytes before the shares in a segment of a machine with ``size`` processes."""

class Machine:
    """This process's shared memory, and its neighbours'.

    Created before the core, closed after it.
    """

    def __init__(
        self, *, size: int, me: int, first_rank: int, alone: bool, name: str, room: int
    ) -> None:
        """Create this process's segment.

        ``room``: bytes of address space for shares. Raises :class:`~bpsx.errors.ConfigError`,
        :class:`OSError`.
        """
    @property
    def descriptor(self) -> int:
        """File descriptor of this process's segment."""
    def meet(self, local_rank: int, descriptor: int, wake: int) -> None:
        """Map a neighbour's segment; takes ownership of ``wake``.

        Raises :class:`~bpsx.errors.ConfigError`.
        """
    def load(self, dtype: int) -> None:
        """Ensure that the kernels of a dtype code are loaded.

        Raises :class:`KeyError` for an unknown code.
        """
    def left(self, local_rank: int) -> None:
        """Mark a neighbour as having left the job in good order. Any thread."""
    def joined(self, local_rank: int) -> None:
        """Mark a process as having called join(): rounds close without it. Any thread."""
    def rest(self, on: bool) -> None:
        """Mark this process as having called join(), or as taking part again. Any thread."""
    def all_joined(self) -> None:
        """Clear the marks of join(): all processes take part again. Any thread."""
    def put_notice(self, text: bytes) -> None:
        """Replace the text on this process's notice board."""
    def notice(self, local_rank: int) -> bytes:
        """Return the text on a process's notice board; empty if there is none. Any thread."""
    def group_gpus(self, group_size: int, roots: list[int]) -> None:
        """Set the groups of GPUs that reduce together.

        ``group_size``: local ranks per group. ``roots``: members to which a group reduces, in turn;
        empty: each copies a part.
        """
    @property
    def collects(self) -> bool:
        """Whether the other processes may need this process's GPU."""
    @property
    def deserted(self) -> bool:
        """Whether a neighbour has left in good order."""
    def abi(self) -> Any:
        """Return a capsule for the core, valid as long as this object."""
    def close(self) -> None:
        """Unmap everything. Idempotent."""

class QuietEndpoint:
    """An endpoint without peers.

    Its interface is that of :class:`bpsx.transports.base.Endpoint`, without connections.
    """

    address: str
    @property
    def wake_descriptor(self) -> int:
        """The descriptor that :meth:`wake` writes to."""
    def abi(self) -> Any:
        """Return the data plane as a capsule, valid as long as this object."""
    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""
    def close(self) -> None:
        """Do nothing."""
