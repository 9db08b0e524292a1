"""RDMA adapters; see ``adapter.pyx``.

What they do is for other extension modules: ``endpoint.pyx``.
"""

import struct

#: What a queue pair says of itself.
PAIR: struct.Struct

def explain_refusal(code: int) -> str:
    """Why memory could not be registered, of an errno: with the limit, and what to do."""

class Memory:
    """Memory of our own that the adapter can use."""

class Pair:
    """A queue pair, and its completion queue."""

    def describe(self) -> bytes:
        """What the other end has to know."""
    def meet(self, other: bytes) -> None:
        """Be connected to the pair that said so of itself.

        Raises :class:`~bpsx.errors.TransportError`.
        """

class Adapter:
    """One port of an adapter, open."""

    name: str
    forks: bool
    """Whether memory that forked children inherit may be registered."""

    def __init__(self, name: str, port: int, gid_index: int, gid: str, ethernet: bool) -> None:
        """Raises :class:`~bpsx.errors.TransportError` if it cannot be opened."""
