"""First-step comparison of names and weights among workers.

All workers must mean the same by a name. They must also begin with the same weights, which is
compared where nothing has made the weights equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from bpsx.errors import MismatchError
from bpsx.mxnet.framework import MXNET
from bpsx.mxnet.names import meaning_of_all, name_of
from bpsx.plugin import adapter
from bpsx.plugin.startup import Subject, digest_of, meaning_of, tell

_CALL = "broadcast_parameters() of what module.get_params() gives, and module.set_params(),"


def refusal_of(parameters: Sequence[Any]) -> str:
    """Return the error if workers mean different Parameters by a trainer's names; empty if not.

    Waits for all workers, and all get the same result. Raises as :func:`bpsx.push_pull`.
    """
    session = adapter.session()
    if not session.config.distributed or not parameters:
        return ""
    names = [name_of(p) for p in parameters]
    subject = Subject(
        f"DistributedTrainer: Parameters from {names[0]!r} on",
        f"{len(names)} Parameters, the first {names[0]!r} of shape {parameters[0].shape}",
        things="Parameters",
        order="Parameters of one name are made and given to trainers",
    )
    continued = bool(session.continued or session.entries)
    refusal, _ = subject.compare(min(names), meaning_of_all(parameters, continued), 0)
    return refusal


class FirstStep:
    """Gradients that an optimizer meets in the first step of a job, with their weights.

    The optimizer meets one or a few at a time. Not thread-safe.
    """

    def __init__(self, suffix: str, names: Mapping[int, str]) -> None:
        session = adapter.session()
        self._session = weakref.ref(session)
        self._suffix, self._names = suffix, dict(names)
        self._checks = session.config.check_weights
        self._met: dict[str, bytes] = {}
        self.is_over = not session.config.distributed or session.config.asynchronous

    @property
    def is_of_this_job(self) -> bool:
        """Whether this object belongs to the job that this process is in."""
        return self._session() is adapter.session()

    def meet(self, indices: Sequence[Any], weights: Sequence[Any]) -> None:
        """Sample weights that are about to be updated.

        An index that was met before begins the second step: then the first step had no other
        gradients, and is compared.
        """
        if not self.is_over and any(self._label(i) in self._met for i in indices):
            self._compare()
        elif not self.is_over:
            samples = [MXNET.sample(w) if self._checks != "off" else b"" for w in weights]
            self._met.update(zip(map(self._label, indices), samples))

    def end_if_complete(self) -> None:
        """Compare if no gradient is left to meet in the first step."""
        if not self.is_over and self._names and len(self._met) == len(self._names):
            self._compare()

    def _label(self, index: Any) -> str:
        return f"{index} {self._names.get(index, '')}".rstrip()

    def _compare(self) -> None:
        """Compare with all workers the gradients that were met.

        Raises :class:`MismatchError`, on all workers, if names differ, and with
        ``BPSX_CHECK_WEIGHTS=error`` if weights differ.
        """
        self.is_over = True
        labels = sorted(self._met)
        what = f"DistributedOptimizer: {len(labels)} gradients, the first {labels[0]!r}"
        refusal, problem = Subject(
            what, what, _CALL, order="DistributedOptimizers are made"
        ).compare(
            f"gradients of DistributedOptimizer{self._suffix}",
            meaning_of(labels),
            digest_of(self._met),
        )
        if refusal:
            raise MismatchError(refusal)
        tell(problem)
