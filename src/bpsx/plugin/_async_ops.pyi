"""Calls of frameworks' engines, to the core and back; see ``_async_ops.pyx``."""

from collections.abc import Mapping, Sequence

class Kept:
    """What the transport may still be sending; it is freed when nobody refers to this any more."""

class Plan:
    """What a call asks for.

    ``names`` and ``priorities`` (larger is more urgent) of its tensors; ``root``: of a broadcast,
    or -1 for a sum, or with ``average`` an average. ``dtypes``: the element types that are summed
    (names in :mod:`bpsx.dtypes`), by the caller's numbers for them.
    """

    def __init__(
        self,
        names: Sequence[str],
        priorities: Sequence[int],
        average: bool,
        root: int,
        dtypes: Mapping[int, str],
    ) -> None: ...
