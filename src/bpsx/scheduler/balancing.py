"""The part of a job's membership that gives servers their share of the keys. Pure.

docs/internals/elastic-balance.md has the protocol. When a server has joined the running job, the
next term moves keys of the others to it, unless other keys move: then it waits for that.
"""

from __future__ import annotations

from typing import Any

from bpsx.scheduler.gathering import Output
from bpsx.scheduler.planned import Planned
from bpsx.scheduler.roster import names
from bpsx.scheduler.states import Handover, JobState

#: Seconds for which a server that has joined waits for others that are coming, so that keys move
#: once for all of them.
PATIENCE_SECONDS = 3.0


class Balancing(Planned):
    """The servers that lack keys. ``balances``: whether they get keys of living servers."""

    balances = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._uneven_since: float | None = None  # a server has joined then, and may lack keys

    def _admit(self, now: float) -> list[Output]:
        """See :class:`~bpsx.scheduler.arrivals.Arriving`."""
        coming = len(self._arrivals)
        out = super()._admit(now)
        if len(self._arrivals) < coming:
            self.look_for_uneven(now)
        return out + self._balance(now)

    def look_for_uneven(self, now: float) -> None:
        """Some server may lack keys: look as soon as keys may move."""
        self._uneven_since = now if self._uneven_since is None else self._uneven_since

    def _share_again(self, now: float) -> None:
        """Divide the bytes anew after workers were lost or have joined, in mixed mode."""
        worker = self._roster.a_worker()
        if self.terms is None or worker is None or not worker.config["BYTEPS_ENABLE_MIXED_MODE"]:
            return
        self.terms.share(self._shares(self._roster.usable_servers()))
        self.look_for_uneven(now)

    def moved(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """See :class:`~bpsx.scheduler.surviving.Surviving`. Keys may move again after the last."""
        return super().moved(ident, m, now) + self._balance(now)

    def _may_balance(self, now: float) -> bool:
        """Whether keys may move now: none do, and no worker leaves, which would have to wait."""
        since = self._uneven_since
        return (
            since is not None
            and self.balances
            and self.state is JobState.RUNNING
            and self.terms is not None
            and self.terms.state in (Handover.SETTLED, Handover.SETTLING)
            and self._sender_left is None
            and not self._roster.leaving
            and not self._fixed_servers()
            and (not self._arrivals or now - since >= PATIENCE_SECONDS)
        )

    def _balance(self, now: float) -> list[Output]:
        """Let living servers yield keys to those that lack some, if it is time."""
        if not self._may_balance(now) or self.terms is None:
            return []
        self._uneven_since = None
        workers = list(self._roster.live.values())
        senders = [w.ident for w in workers if self._speaks(w)]
        yields, nbytes = self.terms.balance()
        if not yields:
            return []
        lanes = {to for lane, _, targets in yields for to, _ in targets if to != lane}
        servers = self._roster.usable_servers()
        heirs = [str(s) for s in servers if lanes.intersection(self.terms.lanes_of(s.rank))]
        self.terms.give(yields, nbytes, names(heirs, 4), senders, now)
        self.terms.changes.moved(self.terms.number, names(heirs, 4), now)
        text = f"term {self.terms.number}: keys of the others move to {names(heirs, 4)}"
        self.notes.append(text)
        term = self._new_term([], text, yields=yields)
        return [(n.ident, term) for n in (*workers, *self._roster.live_servers.values())]
