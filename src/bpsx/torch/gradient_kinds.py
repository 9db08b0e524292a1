"""Agreement of the workers on the kind of each gradient: sparse or dense."""

from __future__ import annotations

from enum import Enum

import torch

from bpsx.errors import MismatchError
from bpsx.plugin.exchange import KINDS
from bpsx.torch._gradients import Managed
from bpsx.torch.exchange_round import ended
from bpsx.torch.ops import Handle
from bpsx.torch.submit import submit


class GradientKind(Enum):
    """Form in which a parameter's gradient travels, the same on all workers."""

    DENSE = "dense"
    SPARSE = "sparse"


class KindAgreement:
    """Finds out on which workers gradients are sparse, where that is not known yet.

    It costs a small sum, for which the workers wait. The next :meth:`agree` resumes an interrupted
    wait. Not thread-safe.

    ``decides_early``: whether a parameter that no worker has used counts as dense from then on.
    """

    def __init__(self, managed: list[Managed], decides_early: bool) -> None:
        self._managed, self._decides_early = managed, decides_early
        # Ids of the parameters that all workers ask about until one of them has used it, or all
        # have frozen it: a worker that has frozen it alone takes part.
        self._open: set[int] = set()
        # Parameters, their kinds, and the sum of the kinds in flight.
        self._asking: tuple[list[Managed], torch.Tensor, Handle] | None = None

    @property
    def under_way(self) -> bool:
        """Whether an interrupted wait has left a sum in flight."""
        return self._asking is not None

    def forget(self) -> None:
        """Forget what was asked: the workers are others now."""
        self._open.clear()

    def agree(self) -> list[Exception]:
        """Set the kinds that are not known yet.

        Returns the errors. Even then, every worker pushes.
        """
        if self._asking is None:
            for m in self._managed:
                m.wanted = True
            unknown = [
                m
                for m in self._managed
                if m.kind is None and (m.parameter.requires_grad or id(m) in self._open)
            ]
            if not unknown:
                return []
            kinds, name = _kinds_here(unknown), f"{KINDS}{self._managed[0].name}"
            try:
                handle = submit(kinds, kinds, name, average=False, priority=1)
            except Exception as e:
                return [e]
            self._asking = unknown, kinds, handle
        unknown, kinds, handle = self._asking
        failure = ended(handle)
        self._asking = None
        return [failure] if failure is not None else self._decide(unknown, kinds)

    def _decide(self, unknown: list[Managed], kinds: torch.Tensor) -> list[Exception]:
        """Set each parameter's kind from the sum ``kinds`` over all workers.

        Returns an error for each parameter whose kind differs between workers.
        """
        found: list[Exception] = []
        for m, (dense, sparse, dims, trained) in zip(unknown, kinds.t().tolist(), strict=True):
            self._open.discard(id(m))
            # All workers complete it as a dense gradient, and then all raise the error.
            if sparse and dense:
                found.append(
                    MismatchError(
                        f"the gradient of {m.name!r} is sparse on {sparse} workers and dense on"
                        f" {dense}; it must be sparse or dense on all of them. To send it dense,"
                        " give sparse_as_dense=True"
                    )
                )
            elif sparse or dense:
                m.kind = GradientKind.SPARSE if sparse else GradientKind.DENSE
                m.sparse_dim = dims // sparse if sparse else 1
            else:
                m.wanted = False
                if self._decides_early:
                    m.kind = GradientKind.DENSE
                elif trained:
                    self._open.add(id(m))
        return found


def _kinds_here(unknown: list[Managed]) -> torch.Tensor:
    """Return the kinds of this worker's gradients, shape (4, parameters), int32.

    The rows are: workers with a dense gradient (here 0 or 1), workers with a sparse gradient, the
    sparse dimensions of the latter, and workers that train the parameter.
    """
    kinds = torch.zeros(4, len(unknown), dtype=torch.int32, device="cpu")
    for i, m in enumerate(unknown):
        kinds[3, i] = m.parameter.requires_grad
        pushed = m.is_pushed()
        if not pushed and m.is_sparse():
            assert m.parameter.grad is not None
            kinds[1, i], kinds[2, i] = 1, m.parameter.grad.sparse_dim()
        elif pushed or m.parameter.grad is not None:
            kinds[0, i] = 1
    return kinds
