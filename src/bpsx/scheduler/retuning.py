"""Changes of the partitions' size while the job runs: the scheduler's part. Pure.

docs/internals/retuning.md has the protocol, :mod:`bpsx.scheduler.resizing` the decisions.
"""

from __future__ import annotations

from typing import Any

from bpsx.planning.link_rate import PROBE
from bpsx.scheduler.gathering import Output
from bpsx.scheduler.growing import Growing
from bpsx.scheduler.registry import Registry
from bpsx.scheduler.resizing import Key, Resizing, is_cut_otherwise, successor_of
from bpsx.scheduler.states import JobState, Presence
from bpsx.scheduler.tuning import PartitionTuning

#: Most partitions of all successors in one change: CHANGE names their places.
_MOST_PLACES = 1 << 19


class Retuning(Growing):
    """A job whose partitions may get another size."""

    registry: Registry | None
    epoch: int

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        #: Choices made for the job, as texts; the hub logs them and clears this list.
        self.choices: list[str] = []
        # None: the size of partitions is not chosen, and does not change.
        self._tuning: PartitionTuning | None = None
        self._resizing: Resizing | None = None
        # Of the present change: the tensors that would end, the generations of their successors,
        # and the bytes of their partitions.
        self._ending: dict[Key, int] = {}
        self._sizes: list[list[int]] = []

    @property
    def _may_resize(self) -> bool:
        """Whether the job's partitions may get another size at all."""
        fixed = not self._survives_workers and self.processes == 1
        return self._tuning is not None and self._tuning.decided and fixed

    def hear_size(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle what workers say about the size of partitions: RATE, PEAK, COUNTS or TAKEN."""
        if m["type"] == "COUNTS":
            return self.counts(ident, m)
        if m["type"] == "TAKEN":
            return self.taken(ident, m)
        if m["type"] == "PEAK":
            self.peak(ident, m)
        else:
            self.rate(ident, m)
        return []

    def rate(self, ident: bytes, m: dict[str, Any]) -> None:
        """Handle RATE: a worker has measured its links. ``m``: rate, round_trip."""
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or self._tuning is None:
            return
        self._note_choice(self._tuning.add(node.rank, m["rate"], m["round_trip"] * 1e-6))

    def _note_choice(self, text: str) -> None:
        if text:
            self.choices.append(text)

    def peak(self, ident: bytes, m: dict[str, Any]) -> None:
        """Handle PEAK: what a worker's link carries. ``m``: rate."""
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or node.left or not self._may_resize:
            return
        if self._resizing is None:
            assert self._tuning is not None
            self._resizing = self._tuning.resizing(self._now)
        self._resizing.note_peak(node.rank, m["rate"])

    def settle(self, now: float) -> list[Output]:
        """See :class:`~bpsx.scheduler.surviving.Surviving`. Begins a change when it is time."""
        return super().settle(now) + self._begin_change(now)

    def _begin_change(self, now: float) -> list[Output]:
        resizing, live = self._resizing, self._roster.live
        if resizing is None or not resizing.news or self.state is not JobState.RUNNING:
            return []
        if self._unsettled():
            return []
        size = resizing.find(live, now)
        if not size:
            return []
        resizing.begin(size, [w.ident for w in live.values()], now)
        return self._to_all({"type": "COUNT", "number": resizing.number})

    def _unsettled(self) -> bool:
        """Whether something else goes on, in which workers may not all take part."""
        return bool(
            self._joins.joined
            or self._arrivals
            or self._keys_move()
            or self._roster.unheard
            or any(w.presence is not Presence.LIVE for w in self._roster.live.values())
        )

    def counts(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle COUNTS: push_pulls that a worker has begun. ``m``: number, epoch, items."""
        resizing = self._resizing
        if resizing is None or m["number"] != resizing.number or m["epoch"] != self.epoch:
            return []
        told = {(name, generation): count for name, generation, count in m["items"]}
        if not resizing.count(ident, told):
            return []
        items = self._succeed(resizing)
        if not items:
            resizing.drop_useless()
            return []
        resizing.close([w.ident for w in self._roster.live.values()])
        return self._to_all({"type": "CHANGE", "number": resizing.number, "items": items})

    def _succeed(self, resizing: Resizing) -> list[list[Any]]:
        """Place the successors of all tensors that would be cut otherwise."""
        last = {key: n for key, n in resizing.last_counts().items() if self._is_cut(key)}
        assert self.registry is not None and self._tuning is not None
        self._ending = dict.fromkeys(last, 0)
        slots = [self._slots_of(key) for key in last]
        self._sizes = [self._tuning.placement.retire(some) for some in slots]
        self._tuning.set_size(resizing.wanted)
        items: list[list[Any]] = []
        parts = 0
        for (name, generation), count in last.items():
            successor = successor_of(generation, resizing.number)
            self._ending[name, generation] = successor
            places = self.registry.succeed(name, generation, successor)
            parts += len(places)
            items.append([name, generation, count, successor, [list(p) for p in places]])
        self._tuning.set_size(resizing.size)
        if parts > _MOST_PLACES:
            self._take_back()
            return []
        return items

    def _take_back(self) -> None:
        """Leave the successors of a change that is off out of the servers' shares."""
        assert self.registry is not None and self._tuning is not None
        placement = self._tuning.placement
        for (key, successor), sizes in zip(self._ending.items(), self._sizes, strict=True):
            placement.retire(self._slots_of((key[0], successor)))
            placement.resize(zip(self._slots_of(key), sizes, strict=True))
            self.registry.drop(key[0], successor)
        self._ending, self._sizes = {}, []

    def _slots_of(self, key: Key) -> list[tuple[int, int]]:
        """Lane and slot of each of a tensor's partitions, where they are now."""
        assert self.registry is not None and self.terms is not None
        return [self.terms.resolve(p.lane, p.slot) for p in self.registry.places(*key)]

    def _is_cut(self, key: Key) -> bool:
        """Whether all workers have declared a tensor that the change would cut otherwise."""
        assert self.registry is not None and self._resizing is not None
        tensor = self.registry.tensor(*key)
        return (
            tensor is not None
            and not tensor.codec
            and not key[0].startswith(PROBE)
            and is_cut_otherwise(tensor.nbytes, (self._resizing.size, self._resizing.wanted))
            and all(rank in tensor.ranks for rank in self._roster.live)
        )

    def taken(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle TAKEN: a worker has noted the last counts. ``m``: number, fits."""
        resizing = self._resizing
        if resizing is None or m["number"] != resizing.number:
            return []
        if not m["fits"]:
            return self._call_off_change()
        if not resizing.take(ident):
            return []
        assert self._tuning is not None
        self._tuning.set_size(resizing.size)
        self._ending, self._sizes = {}, []
        self.choices.append(
            f"from now on {self._tuning.choice}, as links carry"
            f" {'less' if resizing.shrank else 'more'} than before (BPSX_AUTOTUNE)"
        )
        return self._to_all({"type": "HOLD", "number": resizing.number, "size": resizing.size})

    def bye(self, ident: bytes, m: dict[str, Any], now: float = 0.0) -> list[Output]:
        """See :class:`~bpsx.scheduler.membership.Membership`. The job is about to end."""
        node = self.nodes.get(ident)
        leaves = node is not None and node.role == "worker" and not node.left
        return (self._call_off_change() if leaves else []) + super().bye(ident, m, now)

    def _call_off_change(self) -> list[Output]:
        """Give a change up that does not hold yet, if there is one."""
        if self._resizing is None or not self._resizing.call_off():
            return []
        self._take_back()
        return self._to_all({"type": "DROP", "number": self._resizing.number})
