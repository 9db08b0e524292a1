"""Ways of sending gradients that ``bpsx-run advise`` compares, and the bytes that each sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from bpsx.planning.step_model import Costs, Gradient, GradientTraffic

#: The method that changes no gradient; all others are compared with it.
PLAIN = "float32"
_RANK = 4
#: Name -> ``compression_params``. The order is that of what they change in gradients: least first.
METHODS: Mapping[str, dict[str, Any] | None] = {
    PLAIN: None,
    "bfloat16": {"fp16": True},  # float16 has as many bytes, and costs processors as much
    "powersgd": {"compressor": "powersgd", "rank": _RANK, "ef": "vanilla"},
    "topk": {"compressor": "topk", "k": 0.01, "ef": "vanilla"},
    "dithering": {"compressor": "dithering", "k": 4},
    "onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
    "randomk": {"compressor": "randomk", "k": 0.01, "ef": "sparse"},
}


class Measured(NamedTuple):
    """A method's costs on this machine, and the bytes on the wire per byte of gradient."""

    costs: Costs
    wire: float


def shown(name: str) -> str:
    """Return how a script chooses a method."""
    given = METHODS[name]
    if name == "bfloat16":
        return "compression= with a class that converts to bfloat16 (docs/train/compression.md)"
    return f"compression_params={given!r}" if given else "no compression"


def exchange(
    name: str, gradient: Gradient, measured: Mapping[str, Measured], least: int
) -> GradientTraffic:
    """Return how a gradient travels with the method ``name``.

    ``least``: smaller gradients are not compressed, in bytes.
    """
    plain = GradientTraffic((float(gradient.nbytes),), measured[PLAIN].costs)
    if name == PLAIN or (gradient.nbytes < least and name != "bfloat16"):
        return plain
    costs, wire = measured[name]
    if name != "powersgd":
        return GradientTraffic((gradient.nbytes * wire,), costs)
    if len(gradient.shape) < 2 or not math.prod(gradient.shape):
        return plain
    itemsize = max(4.0, gradient.nbytes / math.prod(gradient.shape))
    sides = gradient.shape[0], math.prod(gradient.shape[1:])
    factors = tuple(float(side * _RANK * itemsize) for side in sides)
    return GradientTraffic(factors, costs) if sum(factors) < gradient.nbytes else plain


def keeps_cuts(name: str) -> bool:
    """Whether tensors keep their partitions on any link, as state belongs to these."""
    return name not in (PLAIN, "bfloat16", "powersgd")


def used_now(compression: str) -> str:
    """Return the method that a tensor's ``compression`` (one line of JSON, or empty) is closest to.

    It is the one with the same compressor.
    """
    for name, given in METHODS.items():
        if given and f'"compressor": "{given.get("compressor")}"' in compression:
            return name
    return "bfloat16" if '"compressor": "half"' in compression else PLAIN
