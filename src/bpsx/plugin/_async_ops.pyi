"""Asynchronous operations of a framework's engine, executed by the core; see ``_async_ops.pyx``."""

from collections.abc import Mapping, Sequence

class Kept:
    """Owns memory that the transport may still be sending, and frees it with the last reference."""

class CallPlan:
    """Describes the exchange that a call asks for.

    ``names`` and ``priorities`` (larger is more urgent): one of each per tensor. ``root``: rank of
    a broadcast's root, or -1 for a sum, or with ``average`` an average. ``dtypes``: the element
    types that can be summed (names in :mod:`bpsx.dtypes`), by the caller's numbers for them.
    """

    def __init__(
        self,
        names: Sequence[str],
        priorities: Sequence[int],
        average: bool,
        root: int,
        dtypes: Mapping[int, str],
    ) -> None: ...
