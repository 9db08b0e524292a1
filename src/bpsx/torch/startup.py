"""Check in an exchange's first step: names and initial weights must agree on all workers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from bpsx.errors import MismatchError
from bpsx.plugin import adapter
from bpsx.plugin.startup import COLUMNS, PREFIX, Subject, meaning_of
from bpsx.system.tracebacks import warn
from bpsx.torch._gradients import Managed
from bpsx.torch.exchange_round import ended
from bpsx.torch.framework import TORCH
from bpsx.torch.names import ExchangeOwner
from bpsx.torch.ops import Handle
from bpsx.torch.submit import submit

_CALL = "broadcast_parameters(model.state_dict(), root_rank=0)"
#: Types whose elements are this worker's own copy of a whole parameter; not so for sharded ones.
_WHOLE = (torch.nn.Parameter, torch.Tensor)
_alive: weakref.WeakSet[StartupCheck] = weakref.WeakSet()


class StartupCheck:
    """Startup check, which runs once in each session, and when workers have joined the job.

    It costs one small push_pull.

    The next :meth:`run` resumes an interrupted wait. Not thread-safe.
    """

    def __init__(self, owner: ExchangeOwner, managed: list[Managed]) -> None:
        self._owner, self._managed = owner, managed
        # Session in which it has run or is running, and how often workers had joined.
        self._since: tuple[object, int] = (None, 0)
        self._rows: torch.Tensor | None = None
        self._handle: Handle | None = None  # sum in flight
        self._asks = False  # the sum in flight is the second one, which asks for swapped optimizers
        self._found: list[Exception] = []
        self._fatal = (  # permanent error: the workers' names differ, or mean different things
            ""
        )
        self._weights = 0  # digest of the weights when the check ran
        _alive.add(self)

    @property
    def under_way(self) -> bool:
        """Whether an interrupted wait has left a sum in flight."""
        return self._handle is not None

    def run(self) -> None:
        """Compare with the other workers, unless that has been done with these.

        :meth:`take` returns the problems.

        Raises :class:`MismatchError` on all workers, now and on every later call, if the workers'
        names or their order differ. Then later exchanges would not match either.
        """
        self.begin()
        session = adapter.session()
        while self._handle is not None:
            failure = ended(self._handle)
            self._handle = None
            if failure is not None:
                self._found.append(failure)
            elif self._asks:
                self._judge_swapped()
            else:
                self._judge(session)
        self._asks = False
        if self._fatal:
            raise MismatchError(self._fatal)

    def begin(self) -> None:
        """Start the comparison, unless that has been done with these workers. Does not wait."""
        session = adapter.session()
        if self._since == (session, session.entries) or not self._managed:
            return
        self._since, self._fatal = (session, session.entries), ""
        self._owner.session = session
        self._begin(session)

    def take(self) -> list[Exception]:
        """Return the errors found since the last call."""
        found, self._found = self._found, []
        return found

    @property
    def _name(self) -> str:
        return PREFIX + min(m.name for m in self._managed)

    def _begin(self, session: Any) -> None:
        try:
            self._weights = (
                _weights_of(self._managed) if session.config.check_weights != "off" else 0
            )
            # Ranks change when a worker is lost, which the others notice at different moments.
            rows = torch.zeros(session.config.places, COLUMNS, dtype=torch.int64, device="cpu")
            rows[session.number, 0] = meaning_of(m.name for m in self._managed)
            rows[session.number, 1] = self._weights
            self._submit(rows, self._name)
        except Exception as e:
            self._found.append(e)

    def _submit(self, rows: torch.Tensor, name: str) -> None:
        self._rows = rows
        self._handle = submit(rows, rows, name, average=False, priority=1)

    def _judge(self, session: Any) -> None:
        """Evaluate the rows. All workers see the same rows and so act alike."""
        assert self._rows is not None
        rows, first = self._rows.tolist(), self._managed[0]
        shape = _shape(first.parameter)
        here = f"{len(self._managed)} parameters, the first {first.name!r} of shape {shape}"
        self._fatal, problem = Subject(f"the {self._owner.what}", here, _CALL).judge(rows)
        if not problem:
            return
        if self._owner.ordinal is not None:
            self._asks = True
            theirs = {row[1] for row in rows if row[1]} - {self._weights}
            mine = any(check is not self and check.weights() in theirs for check in list(_alive))
            try:
                self._submit(
                    torch.tensor([int(mine), 1], dtype=torch.int32, device="cpu"),
                    f"{self._name}, in another order",
                )
            except Exception as e:
                self._found.append(e)
        self._tell(problem, session.config.check_weights)

    def weights(self) -> int:
        """Return the digest of the weights with which training began or is about to begin.

        Returns 0 if there are none, or if the parameters were given names.
        """
        if self._owner.ordinal is None or self._owner.replaced_by:
            return 0
        return self._weights or _weights_of(self._managed)

    def _judge_swapped(self) -> None:
        assert self._rows is not None
        swapped, all_workers = self._rows.tolist()
        if swapped == all_workers:
            self._fatal = (
                f"the {self._owner.what} has generated names, and its weights are those of another"
                " optimizer on other workers, so the workers have created their optimizers in"
                " different orders. Give named_parameters with names that no two optimizers share,"
                " or create the optimizers in the same order"
            )

    def _tell(self, problem: str, how: str) -> None:
        if how == "error":
            self._found.append(MismatchError(problem))
        else:
            warn(problem)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return () if torch.nn.parameter.is_lazy(parameter) else tuple(parameter.shape)


def _weights_of(managed: Sequence[Managed]) -> int:
    """Return a digest of the trained parameters: the bits of a few elements of each.

    Parameters are told apart by their place, since two optimizers without names are compared, too.
    Returns 0 if there are no trained parameters.
    """
    return TORCH.digest_of(
        {
            f"{place}": m.parameter
            for place, m in enumerate(managed)
            if m.parameter.requires_grad
            and type(m.parameter) in _WHOLE
            and m.parameter.layout is torch.strided
            and not m.parameter.is_meta
        }
    )
