"""powersgd: two factors of low rank instead of the tensor (arXiv 1905.13727).

It has no codec: the factors are summed as any tensors. docs/internals/powersgd.md describes the
steps, :mod:`bpsx.kernels.cpu.low_rank` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsx.errors import ConfigError
from bpsx.kernels.codec import Compressor
from bpsx.kernels.codecs import checked_number, register

#: Largest rank. The work of a step grows with it, and that of two of its steps with its square.
MOST_RANK = 1024


class PowerSGD(Compressor):
    """Compressor ``powersgd``; see the module."""

    name = "powersgd"
    keys = ("rank",)
    feedback = ("vanilla",)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Require ``rank``, an integer."""
        rank = given.get("rank")
        number = checked_number(rank)
        if number is None or number != int(number) or not 1 <= number <= MOST_RANK:
            wrong = "rank is missing" if rank is None else f"rank={rank!r}"
            raise ConfigError(
                f"{wrong}: expected an integer from 1 to {MOST_RANK} (columns of the two factors)"
            )
        return {"rank": int(number)}


register(PowerSGD())
