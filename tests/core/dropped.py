"""As :mod:`core.relayed`, and workers are lost, too: the others go on without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bpsx.core._tensor import CommitGroup
from core.relayed import AVERAGE, BROADCAST, MISMATCH, SUM, Round, Script, Worker


class Shrinking(Script):
    """A run that loses ``drops`` of its workers at random moments, besides lanes."""

    def __init__(self, seed: int, workers: int, drops: int = 1, **options: Any) -> None:
        self.core_options = {"shrinks": True, "senders": workers}
        self.senders, self.drops = workers, drops
        self.lost: list[Worker] = []  # in this order
        self.lingering: list[Worker] = []  # of them: those that go on, as nobody has told them
        super().__init__(seed, workers, shrinks=True, **options)

    def _plan(self) -> None:
        before = len(self.rounds)
        super()._plan()
        for round_ in self.rounds[before:]:
            if round_.kind == SUM and self.rng.random() < 0.5:
                round_.kind = AVERAGE

    def drop(self, worker: Worker, dead: bool) -> None:
        """Lose a worker; if it is not ``dead``, it goes on, and its messages still arrive."""
        self.workers.remove(worker)
        self.lost.append(worker)
        if dead:
            for (i, _), queue in self.up.queues.items():
                if i == worker.rank:  # some of what it has sent has not left its machine
                    for _ in range(self.rng.randrange(len(queue) + 1)):
                        queue.pop()
        else:
            self.lingering.append(worker)
        self.term += 1
        for one in self.workers:
            tell = {"term": self.term, "moves": [], "living": len(self.workers)}
            one.mail.append(lambda to=one, tell=tell: to.core.begin_term(**tell))
        for lane in self.living | self.zombies:
            at, term = self.lanes[lane], self.term
            self.lane_mail[lane].append(lambda at=at, term=term: at.drop(worker.rank, term))
        self.in_join.discard(worker.rank)
        if not self.uncleared:
            self._look_for_joins()

    def _choices(self) -> list[Callable[[], Any]]:
        found = super()._choices()
        for worker in self.lingering:
            if worker.todo and not worker.joined:
                found.append(worker.begin)
        return found

    def _lose_some(self) -> None:
        super()._lose_some()
        likely = 0.1 if self.uncleared else 0.02
        if self.drops and len(self.workers) > 1 and self.rng.random() < likely:
            self._drop_one()

    def _drop_one(self) -> None:
        self.drops -= 1
        self.drop(self.rng.choice(self.workers), dead=self.rng.random() < 0.7)

    # ---- what is right

    def _wrong(self, round_: Round) -> str:
        """What is wrong with the outcomes of the survivors; "" if nothing is."""
        alive = {w.rank for w in self.workers}
        outcomes = [round_.got[i] for i in round_.inputs if i in alive]
        if not outcomes:
            return ""
        if round_.kind == MISMATCH and (round_.root not in alive or len(outcomes) < 2):
            # Whose operation differs is lost: an error that all have got, or a sum without it.
            if all(str(outcome).startswith("MismatchError") for outcome in outcomes):
                return ""
            round_.kind = SUM if round_.root not in alive else AVERAGE
        if round_.kind == BROADCAST and isinstance(outcomes[0], str) and round_.root not in alive:
            lost = all(str(outcome).startswith("PeerLostError") for outcome in outcomes)
            return "" if lost else f"{outcomes}"
        if round_.kind in (BROADCAST, MISMATCH):
            rest = {i: round_.inputs[i] for i in round_.inputs if i in {*alive, round_.root}}
            one = Round(round_.kind, rest, round_.root)
            one.got = {i: round_.got[i] if i in alive else outcomes[0] for i in rest}
            return one.wrong()
        if any(isinstance(o, str) for o in outcomes):
            return f"{outcomes}"
        if any(o.tobytes() != outcomes[0].tobytes() for o in outcomes):
            return "survivors have different results"
        if self.fitting(round_, outcomes[0]):
            return ""
        return f"{round_.kind} of {sorted(round_.inputs)}, living {sorted(alive)}: no allowed sum"

    def fitting(self, round_: Round, outcome: np.ndarray) -> set[int]:
        """Numbers n for which ``outcome`` is the result without the first n that were lost."""
        found = set()
        for n in range(len(self.lost) + 1):
            gone = {worker.rank for worker in self.lost[:n]}
            parts = [a for i, a in round_.inputs.items() if i not in gone]
            total = np.sum(parts, axis=0, dtype=np.float64) if parts else np.nan
            exact = total / (self.senders - n) if round_.kind == AVERAGE else total
            if np.allclose(outcome, exact, 1e-4, 1e-4):
                found.add(n)
        return found

    def close(self) -> None:
        for worker in self.lost:
            worker.core.close()
        super().close()


class Stepping(Shrinking):
    """Such a run whose tensors are a group: each worker pushes all of them in each step."""

    steps = 3

    def __init__(self, seed: int, workers: int, **options: Any) -> None:
        self.step_of: dict[int, int] = {}  # round's id -> step
        self.now: dict[int, tuple[int, bool]] = {}  # rank -> step, whether it is sealed
        super().__init__(seed, workers, **options)
        self.groups = {}
        for worker in self.workers:
            group = self.groups[worker.rank] = CommitGroup(worker.core)
            worker.core.groups.update({tensor.name: group for tensor in worker.tensors})

    def _plan(self) -> None:
        base = len(self.step_of)
        for step in range(self.steps):
            for at, size in enumerate(self.sizes):
                inputs = {
                    w.rank: self.numbers.standard_normal(size // 4, np.float32)
                    for w in self.workers
                }
                self.rounds.append(Round(SUM, inputs, self.workers[0].rank))
                self.step_of[id(self.rounds[-1])] = base + step
                for worker in self.workers:
                    worker.todo.append((at, self.rounds[-1]))
        for worker in self.workers:
            self.rng.shuffle(worker.todo)
            worker.todo.sort(key=lambda item: self.step_of[id(item[1])])
            self.now.setdefault(worker.rank, (base, False))

    def _choices(self) -> list[Callable[[], Any]]:
        found = super()._choices()
        for worker in (*self.workers, *self.lingering):
            step, sealed = self.now[worker.rank]
            following = self.step_of[id(worker.todo[0][1])] if worker.todo else None
            if following == step:
                continue
            if not sealed and self._may_seal(worker):
                found.append(lambda of=worker.rank, step=step: self._seal(of, step))
            elif sealed and not worker.begun and following is not None:
                self.now[worker.rank] = (following, False)
                continue
            found = [call for call in found if call != worker.begin]
        return found

    def _may_seal(self, worker: Worker) -> bool:
        """Whether the worker's script can end its step."""
        return True

    def _seal(self, rank: int, step: int) -> None:
        self.now[rank] = (step, True)
        worker = next(w for w in (*self.workers, *self.lost) if w.rank == rank)
        self.groups[rank].seal()
        worker.core.notify()

    def check(self) -> None:
        """As before; and each step has the same workers in all tensors."""
        super().check()
        alive = [w.rank for w in self.workers]
        steps: dict[int, set[int]] = {}
        for round_ in self.rounds:
            if got := [round_.got[rank] for rank in alive if rank in round_.inputs]:
                step = self.step_of[id(round_)]
                everything = set(range(len(self.lost) + 1))
                steps[step] = steps.get(step, everything) & self.fitting(round_, got[0])
        assert all(steps.values()), steps
