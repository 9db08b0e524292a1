"""The two factors of a tensor that is exchanged with PowerSGD: their sizes and their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bpsx.compression.spec import CompressionSpec, mix, stream
from bpsx.dtypes import BY_CODE, BY_NAME
from bpsx.kernels.low_rank import Steps, load_steps, scratch_bytes, wide_of
from bpsx.planning.partitioner import whole_pages


class MadeMatrix(NamedTuple):
    """A tensor's factors, in the form that the core takes (core/codec/low_rank.pxd)."""

    steps: Steps
    rows: int
    columns: int
    rank: int
    nbytes: int
    wide_itemsize: int
    scratch: int
    feedback: bool
    seed: int
    q_offset: int
    n_first: int
    threads: int
    #: Makes what queues the steps on a GPU. Raises :class:`~bpsx.errors.DeviceError`.
    on_gpu: Callable[[Any], Any] | None = None


def is_factored(used: CompressionSpec | None) -> bool:
    """Whether a tensor with this compression is exchanged as two factors."""
    return used is not None and used.compressor == "powersgd"


def wide_code(dtype: int) -> int:
    """Return the code of the factors' type for a tensor of type ``dtype``, a code, too."""
    return BY_NAME[wide_of(BY_CODE[dtype].name)].code


def factor_bytes(used: CompressionSpec | None, dtype: int, shape: Sequence[int]) -> list[int]:
    """Return the bytes of P and Q of a tensor that is exchanged as factors; else an empty list."""
    if used is None or not is_factored(used):
        return []
    rank = int(dict(used.options)["rank"])
    itemsize = BY_CODE[wide_code(dtype)].itemsize
    return [size * rank * itemsize for size in (shape[0], math.prod(shape[1:]))]


def saves_bytes(used: CompressionSpec, dtype: int, shape: Sequence[int]) -> bool:
    """Whether the factors of a tensor have fewer bytes than the tensor."""
    nbytes = math.prod(shape) * BY_CODE[dtype].itemsize
    return len(shape) > 1 and sum(factor_bytes(used, dtype, shape)) < nbytes


def make_matrix(
    used: CompressionSpec,
    name: str,
    dtype: int,
    shape: Sequence[int],
    lengths: Sequence[int],
    threads: int,
) -> MadeMatrix:
    """Return what the core needs for a tensor's factors; loads their kernels.

    ``lengths``: bytes of the partitions of P, then of Q. ``threads``: most that work on it.
    """
    kind, rank = BY_CODE[dtype].name, int(dict(used.options)["rank"])
    p_bytes, _ = factor_bytes(used, dtype, shape)
    n_first, begin = 0, 0
    while begin < p_bytes:
        begin += lengths[n_first]
        n_first += 1
    seed = mix(used.seed, stream(name.encode(), 0))
    return MadeMatrix(
        load_steps(kind),
        shape[0],
        math.prod(shape[1:]),
        rank,
        math.prod(shape) * BY_CODE[dtype].itemsize,
        BY_NAME[wide_of(kind)].itemsize,
        scratch_bytes(kind, rank),
        bool(used.ef),
        seed - 2**64 if seed >= 2**63 else seed,
        whole_pages(p_bytes),
        n_first,
        threads,
    )
