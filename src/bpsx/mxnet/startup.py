"""First-step comparison of names and weights among workers.

All workers must mean the same by a name. They must also begin with the same weights, which is
compared where nothing has made the weights equal.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from bpsx.errors import MismatchError
from bpsx.mxnet.names import created_before, name_of
from bpsx.mxnet.ops import HOST
from bpsx.plugin import adapter
from bpsx.plugin.startup_check import (
    PREFIX,
    digest,
    meaning_of,
    meaning_problem,
    rows_of_all,
    sample_of,
    weights_problem,
)
from bpsx.system.tracebacks import warn

_CALL = "broadcast_parameters() of what module.get_params() gives, and module.set_params(),"


def refusal_of(parameters: Sequence[Any]) -> str:
    """Return the error if workers mean different Parameters by a trainer's names; empty if not.

    Waits for all workers, and all get the same result. Raises as :func:`bpsx.push_pull`.
    """
    session = adapter.session()
    if not session.config.distributed or not parameters:
        return ""
    names = [name_of(p) for p in parameters]
    first, what = names[0], f"DistributedTrainer: Parameters from {names[0]!r} on"
    # Processes of an earlier job may have named other Parameters before.
    known = [0 if session.continued else created_before(p) for p in parameters]
    meaning = meaning_of(f"{name}, of its name the {n}th" for name, n in zip(names, known))
    rows = rows_of_all(PREFIX + min(names), [meaning, 0])
    here = f"{len(names)} Parameters, the first {first!r} of shape {parameters[0].shape}"
    order = "Parameters of one name are made and given to trainers"
    return meaning_problem(rows, what, here, "Parameters", order)


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
            samples = [_sample(w) if self._checks != "off" else b"" for w in weights]
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
        parts = [part for label in labels for part in (label.encode(), self._met[label])]
        weights = digest(parts) if any(self._met.values()) else 0
        name = f"{PREFIX}gradients of DistributedOptimizer{self._suffix}"
        rows = rows_of_all(name, [meaning_of(labels), weights])
        what = f"DistributedOptimizer: {len(labels)} gradients, the first {labels[0]!r}"
        error = meaning_problem(rows, what, what, order="DistributedOptimizers are made")
        problem = "" if error else weights_problem(rows, what, _CALL)
        if error or problem and self._checks == "error":
            raise MismatchError(error or problem)
        if problem:
            warn(problem)


def _sample(array: Any) -> bytes:
    """Wait for ``array``, and return the bytes of some elements; empty if it is sparse or empty."""
    if array.stype != "default" or not array.size:
        return b""
    here = array if array.context.device_type in HOST else array.as_in_context(mx.cpu())
    here.wait_to_read()
    where = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(here.handle, ctypes.byref(where)))
    size = np.dtype(here.dtype).itemsize
    memory = (ctypes.c_char * (size * here.size)).from_address(where.value or 0)
    return sample_of(np.frombuffer(memory, f"V{size}"))
