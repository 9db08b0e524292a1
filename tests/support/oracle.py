"""Expected compressed sums: every step of a push and pull, computed with the kernels' reference
implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bpsx.compression.spec import CompressionSpec, mix, stream
from bpsx.kernels import reference, reference_dithering
from bpsx.kernels.reference import Reference


def oracle(given: CompressionSpec, which: int, sender: int | None, n: int, wide: str) -> Reference:
    """Return a partition's reference encoder on a worker; with ``sender`` None, on the server."""
    options = dict(given.options)
    if given.compressor == "onebit":
        return Reference(
            lambda p, _: reference.onebit_encode(p, options["scaling"]),
            lambda w, n: reference.onebit_decode(w, n, wide),
            n,
            wide,
        )
    if given.compressor == "half":
        return Reference(
            lambda p, _: p.astype(np.float16).tobytes(),
            lambda w, _: np.frombuffer(w, np.float16).astype(wide),
            n,
            wide,
        )
    seed = mix(
        given.seed,
        which,
        *([0 if sender is None else sender + 1] if given.compressor == "dithering" else []),
    )
    seed -= 2**64 if seed >= 2**63 else 0
    if given.compressor == "topk":
        k = options["k"]
        return Reference(
            lambda p, _: reference.topk_encode(p, k),
            lambda w, n: reference.topk_decode(w, n, k, wide),
            n,
            wide,
        )
    if given.compressor == "randomk":
        k = options["k"]
        return Reference(
            lambda p, c: reference.randomk_encode(p, c, seed, k, bool(given.ef)),
            lambda w, n: reference.randomk_decode(w, n, seed, k, wide),
            n,
            wide,
        )
    natural, l2, k = options["partition"] == "natural", options["normalize"] == "l2", options["k"]
    return Reference(
        lambda p, c: reference_dithering.encode(p, k, natural, l2, seed, c),
        lambda w, n: reference_dithering.decode(w, n, k, natural, wide),
        n,
        wide,
    )


def _places(given: CompressionSpec, name: str, part: int, server: Reference) -> list[int] | None:
    """Return the elements whose residual the server adds and clears in the next round.

    None means all elements. All workers push the same elements.
    """
    if given.ef != "sparse":
        return None
    n = len(server.residual)
    count = reference.amount(n, dict(given.options)["k"])
    return reference.randomk_places(
        mix(given.seed, stream(name.encode(), part)), server.counter + 1, n, count
    )


def as_wide(values: np.ndarray) -> np.ndarray:
    return values if values.dtype == np.float64 else values.astype(np.float32)


class Sums:
    """Expected sums of one name with ``n`` elements of ``kind``, round by round.

    ``machines``: number of machines that push. ``partition``: bytes of a partition.
    """

    def __init__(
        self, name: str, given: CompressionSpec, n: int, kind: Any, machines: int, partition: int
    ) -> None:
        self._name, self._kind = name, np.dtype(kind)
        self._given = given if given.compressor else CompressionSpec("half")
        self._wide = "float64" if self._kind == np.float64 else "float32"
        step = partition // self._kind.itemsize
        self._spans = [slice(begin, min(begin + step, n)) for begin in range(0, n, step)]
        self._ours = [
            [self._encoder(i, s, m) for i, s in enumerate(self._spans)] for m in range(machines)
        ]
        self._theirs = [self._encoder(i, s, None) for i, s in enumerate(self._spans)]

    def _encoder(self, part: int, span: slice, sender: int | None) -> Reference:
        return oracle(
            self._given,
            stream(self._name.encode(), part),
            sender,
            span.stop - span.start,
            self._wide,
        )

    def round(self, pushed: Sequence[np.ndarray], divisor: int, factor: float) -> np.ndarray:
        """Return the sum that the workers receive for the machines' pushes, flattened.

        ``factor``: the last step's learning rate divided by this step's.
        """
        given, factor = self._given, factor if self._given.ef == "corrected" else 1.0
        feeds, adds = bool(given.ef), bool(given.momentum)
        out = np.empty(len(pushed[0]), self._kind)
        for i, span in enumerate(self._spans):
            n = span.stop - span.start
            total = np.zeros(n, self._wide)
            for push, coders in zip(pushed, self._ours, strict=True):
                total = total + coders[i].decode(
                    coders[i].encode(
                        push[span], residual=feeds, momentum=adds, mu=given.mu, factor=factor
                    ),
                    n,
                )
            if divisor > 1:
                total /= total.dtype.type(divisor)
            theirs = self._theirs[i]
            out[span] = theirs.decode(
                theirs.encode(
                    total, residual=feeds, factor=factor, only=_places(given, self._name, i, theirs)
                ),
                n,
            )
        return out
