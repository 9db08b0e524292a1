"""RDMA adapters; see ``adapter.pyx``.

Another extension module, ``endpoint.pyx``, uses what these classes have besides.
"""

import struct

#: Description of a queue pair, which each end sends to the other.
PAIR: struct.Struct

def explain_refusal(code: int) -> str:
    """Explain from an errno why memory was not registered, with the limit and what to do."""

class Memory:
    """Memory that this module allocates and registers with the adapter."""

class Pair:
    """A queue pair and its completion queue."""

    def describe(self) -> bytes:
        """Return the description that the other end needs to connect."""
    def meet(self, other: bytes) -> None:
        """Connect to the queue pair with the description ``other``.

        Raises :class:`~bpsx.errors.TransportError`.
        """

class Adapter:
    """An open adapter, of which one port is used."""

    name: str
    forks: bool
    """Whether memory that forked children inherit may be registered."""

    def __init__(self, name: str, port: int, gid_index: int, gid: str, ethernet: bool) -> None:
        """Raises :class:`~bpsx.errors.TransportError` if the adapter cannot be opened."""
