"""Real cores and real lanes whose messages a test passes on, one at a time, in any order.

A :class:`Script` also plays the scheduler: it loses lanes, lets others get keys while the job runs,
tells workers of terms, and lets workers join. All that it does is chosen by a seed. As cores and
lanes have threads of their own, a seed repeats a run only roughly.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from bpsx import errors
from bpsx._core import Core
from bpsx.core._handle import Request
from bpsx.core._tensor import Tensor
from bpsx.planning.placement import Placement
from bpsx.planning.stages import stages_for
from bpsx.server._engine import Lane
from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from support import wire as w

#: Bytes of tensors: barriers, inline without and with acknowledgement, and large.
SIZES = [0, 64, 8192, 40_000]
SUM, BROADCAST, MISMATCH, AVERAGE = "sum", "broadcast", "mismatch", "average"
#: Seconds without any progress after which a run counts as hung.
PATIENCE = 5.0
_Message = tuple[bytes, bytes | None]


class Relay:
    """One side's endpoints. Their messages wait in ``queues`` until the test passes them on."""

    def __init__(self, mine: int, others: int) -> None:
        self.ends = [LoopbackEndpoint() for _ in range(mine)]
        self.outboxes = [LoopbackEndpoint() for _ in range(mine)]
        for end, outbox in zip(self.ends, self.outboxes):
            for other in range(others):
                end.link(other, outbox, other)
        self.queues: dict[tuple[int, int], deque[_Message]] = {
            (i, j): deque() for i in range(mine) for j in range(others)
        }

    def collect(self) -> bool:
        """Take what has been sent; returns whether anything has."""
        found = False
        for i, outbox in enumerate(self.outboxes):
            while (message := outbox.sent()) is not None:
                peer, head, body = message
                self.queues[i, peer].append((head, body))
                found = True
        return found

    def close(self) -> None:
        for end in (*self.ends, *self.outboxes):
            end.close()


class Round:
    """One round of a tensor: the operation and what each worker has got."""

    def __init__(self, kind: str, inputs: dict[int, np.ndarray], root: int) -> None:
        self.kind, self.inputs, self.root = kind, inputs, root
        self.rate = -1.0
        self.got: dict[int, Any] = {}

    def wrong(self) -> str:
        """What is wrong with the outcomes; "" if nothing is. For when all have theirs."""
        outcomes = [self.got[i] for i in self.inputs]
        if self.kind == MISMATCH and len(self.inputs) > 1:
            # The error of the first partition that has failed, which may differ.
            failed = all(str(outcome).startswith("MismatchError") for outcome in outcomes)
            return "" if failed else f"{outcomes}"
        exact = (
            self.inputs[self.root]
            if self.kind == BROADCAST
            else np.sum(list(self.inputs.values()), axis=0, dtype=np.float64)
        )
        if any(isinstance(o, str) for o in outcomes):
            return f"{outcomes}"
        if any(o.tobytes() != outcomes[0].tobytes() for o in outcomes):
            return "workers have different results"
        wrong = np.flatnonzero(~np.isclose(outcomes[0], exact, rtol=1e-5, atol=1e-5))
        if not len(wrong):
            return ""
        first = wrong[0]
        return (
            f"{self.kind} of workers {sorted(self.inputs)}: {len(wrong)} of {len(exact)} elements,"
            f" from {first}: {outcomes[0][first]}, not {exact[first]}"
        )


class Worker:
    """What a worker does: rounds of tensors until it joins, again and again."""

    def __init__(self, rank: int, core: Core, tensors: list[Tensor], senders: int) -> None:
        self.rank, self.core, self.tensors, self.senders = rank, core, tensors, senders
        self.todo: list[tuple[int, Round]] = []  # of this generation
        self.begun: list[tuple[Round, Any, Any, Any]] = []
        self.joined = False
        self.terms: list[int] = []  # those whose keys have all been taken
        self.mail: deque[Callable[[], None]] = deque()  # from the scheduler, in order

    def begin(self) -> None:
        """Begin the next operation."""
        at, round_ = self.todo.pop(0)
        data, root = round_.inputs[self.rank], round_.root
        name, target, more = self.tensors[at].name, np.full_like(data, -7), {}
        if round_.kind == BROADCAST:
            more = {"broadcast": True, "divisor": root}
        elif round_.kind == AVERAGE:
            more = {"divisor": self.senders}
        elif round_.kind == MISMATCH:
            more = {"divisor": self.senders if self.rank == root else 1}
        source = None if round_.kind == BROADCAST and self.rank != root else data
        request = Request(name, source, target, priority=-at, rate=round_.rate, **more)
        handle = self.core.submit(self.tensors[at], request)
        self.begun.append((round_, handle, source, target))

    def resume(self) -> None:
        """Go on after a join."""
        self.core.all_joined()
        self.joined = False

    def moved(self) -> int:
        """The latest term whose keys have all been taken."""
        self.terms += [term for term, *_ in self.core.take_moved()]
        return self.terms[-1] if self.terms else 0

    def reap(self) -> bool:
        """Note the outcomes that have arrived; returns whether there are any."""
        ended = [item for item in self.begun if item[1].done()]
        for item in ended:
            round_, handle, _, target = item
            try:
                handle.wait(0)
                round_.got[self.rank] = target
            except errors.BpsxError as e:
                round_.got[self.rank] = f"{type(e).__name__}: {e}"
            self.begun.remove(item)
        return bool(ended)


class Script:
    """A run: ``generations`` times each worker does its rounds and joins, while lanes are lost."""

    core_options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        seed: int,
        workers: int,
        lanes: int = 4,
        tensors: int = 5,
        generations: int = 2,
        losses: int = 2,
        newcomers: int = 0,
        reorder: float = 0.0,
        **options: bool,
    ) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.up, self.down = Relay(workers, lanes), Relay(lanes, workers)
        self.lanes = [Lane(end, job=7, senders=workers, **options) for end in self.down.ends]
        self.threads = [threading.Thread(target=lane.run) for lane in self.lanes]
        for thread in self.threads:
            thread.start()
        self.placement, self.reorder = Placement([1] * (lanes - newcomers)), reorder
        for _ in range(newcomers):
            self.placement.reserve(1)
        self.newcomers, self.balances = list(range(lanes - newcomers, lanes)), 0
        self.living, self.dead, self.zombies = set(range(lanes)), set[int](), set[int]()
        self.term = 0
        self.losses, self.generations, self.generation = losses, generations, 0
        places = [self._cut(i) for i in range(tensors)]
        self.workers = [
            Worker(
                i,
                self._core(i, end, lanes),
                [self._tensor(k, p) for k, p in enumerate(places)],
                workers,
            )
            for i, end in enumerate(self.up.ends)
        ]
        self.sizes = [sum(length for *_, length in p) for p in places]
        self.lane_mail: list[deque[Callable[[], None]]] = [deque() for _ in range(lanes)]
        self.in_join: set[int] = set()  # ranks
        self.uncleared: set[int] = set()  # lanes that do not know yet that all have joined
        self.rounds: list[Round] = []
        self.kinds = Counter[int]()  # records that have been passed on
        self._plan()

    def _cut(self, number: int) -> list[tuple[int, int, int, int, int]]:
        """Places of a tensor of up to three partitions."""
        size = self.rng.choice(SIZES)
        cuts = sorted({0, size, *(self.rng.randrange(size + 1) // 8 * 8 for _ in range(2))})
        parts = []
        for i, (a, b) in enumerate(zip(cuts, cuts[1:]) if size else [(0, 0)]):
            place = self.placement._place_one((number << 20) + i, b - a)
            parts.append((place.key, place.lane, place.slot, a, b - a))
        return parts

    def _core(self, rank: int, end: LoopbackEndpoint, lanes: int) -> Core:
        core = Core(
            end,
            rank=rank,
            job=7,
            lanes=range(lanes),
            credit=50_000,
            spin_us=0,
            elastic=True,
            **self.core_options,
        )
        core.start()
        return core

    def _tensor(self, number: int, parts: list[tuple[int, int, int, int, int]]) -> Tensor:
        return Tensor(f"t{number}", 3, parts, stages_for("cpu"))

    # ---- what workers do

    def _plan(self) -> None:
        """Plan the rounds of the next generation: a worker may take part in fewer than others.

        A worker that takes part in fewer rounds of one tensor does so of all: it joins earlier.
        """
        by_rank = {worker.rank: worker for worker in self.workers}
        order = self.rng.sample(sorted(by_rank), len(by_rank))
        for at, size in enumerate(self.sizes):
            counts = sorted(self.rng.randrange(4) for _ in self.workers)
            for r in range(max(counts)):
                ranks = sorted(i for i, count in zip(order, counts) if count > r)
                inputs = {i: self.numbers.standard_normal(size // 4, np.float32) for i in ranks}
                root = self.rng.choice(ranks)
                kind = self.rng.choice([SUM, SUM, SUM, BROADCAST, MISMATCH])
                if kind == MISMATCH and len(ranks) == 1:
                    kind = SUM  # the divisor of its only push
                self.rounds.append(Round(kind, inputs, root))
                for i in ranks:
                    by_rank[i].todo.append((at, self.rounds[-1]))
        for worker in self.workers:
            self._shuffle(worker)

    def _shuffle(self, worker: Worker) -> None:
        """Put the worker's operations into an order of its own, the rounds of each tensor apart."""
        order = [at for at, _ in worker.todo]
        self.rng.shuffle(order)
        by_tensor = {k: deque(r for at, r in worker.todo if at == k) for k in set(order)}
        worker.todo = [(at, by_tensor[at].popleft()) for at in order]

    # ---- what the scheduler does

    def _join(self, worker: Worker) -> None:
        worker.joined = True
        self.in_join.add(worker.rank)
        for lane in self.living:
            self.lane_mail[lane].append(lambda at=lane: self.lanes[at].joined(worker.rank))
        self._look_for_joins()

    def _look_for_joins(self) -> None:
        """Clear the marks of lanes once all workers have joined."""
        if len(self.in_join) == len(self.workers):
            self.uncleared = set(self.living)
            for lane in self.living:
                self.lane_mail[lane].append(lambda at=lane: self._clear(at))

    def _clear(self, lane: int) -> None:
        self.lanes[lane].all_joined()
        self._cleared(lane)

    def _cleared(self, lane: int) -> None:
        if lane in self.uncleared:
            self.uncleared.remove(lane)
            if not self.uncleared:
                self._release()

    def _release(self) -> None:
        """Begin the next generation: all workers have joined, and all lanes know it."""
        self.in_join.clear()
        self.generation += 1
        if not self._over():
            self._plan()
        for worker in self.workers:
            worker.mail.append(worker.resume)

    def lose(self, lane: int, dead: bool) -> None:
        """Lose a lane; if it is not ``dead``, it goes on, and its messages still arrive."""
        self.living.remove(lane)
        if dead:
            self.lanes[lane].stop()
            self.threads[lane].join()
            self.down.collect()
            self.dead.add(lane)
            self.lane_mail[lane].clear()
        else:
            self.zombies.add(lane)
        self.term += 1
        moves = self.placement.lose(lane)
        for worker in self.workers:
            worker.mail.append(lambda one=worker, term=self.term: one.core.begin_term(term, moves))
        self._cleared(lane)

    def balance(self) -> None:
        """Let a newcomer get keys of the others."""
        newcomer = self.newcomers.pop(0)
        in_use = self.living - set(self.newcomers)
        self.placement.admit(newcomer, dict.fromkeys(in_use, 1 / len(in_use)))
        yields, _ = self.placement.balance()
        if not yields:
            return
        self.term += 1
        self.balances += 1
        for worker in self.workers:
            worker.mail.append(
                lambda one=worker, term=self.term: one.core.begin_term(term, [], False, yields)
            )

    def _settled(self) -> bool:
        """Whether all workers have said of all terms that their keys have been taken."""
        return all(worker.moved() == self.term for worker in self.workers)

    # ---- the run

    def _choices(self) -> list[Callable[[], Any]]:
        """All that can happen next. Messages of a worker to a dead lane are lost."""
        found: list[Callable[[], Any]] = []
        for (i, j), queue in self.up.queues.items():
            if queue and j in self.dead:
                queue.clear()
            elif queue:
                found.append(lambda i=i, j=j, q=queue: self._pass(q, self.down.ends[j], i))
        for (j, i), queue in self.down.queues.items():
            if queue:
                found.append(lambda i=i, j=j, q=queue: self._pass(q, self.up.ends[i], j))
        for worker in self.workers:
            if worker.mail:
                found.append(lambda one=worker: one.mail.popleft()())
            if worker.todo and not worker.joined:
                found.append(worker.begin)
            elif not worker.todo and not worker.begun and not worker.joined and not self._over():
                found.append(lambda one=worker: self._join(one))
        found += [lambda m=mail: m.popleft()() for mail in self.lane_mail if mail]
        return found

    def _over(self) -> bool:
        return self.generation >= self.generations

    def _lose_some(self) -> None:
        """Lose a lane now and then, more often while workers join or keys move.

        Newcomers get keys as often, but only while no other keys move.
        """
        moving = self.newcomers and self.rng.random() < 0.1 and not self._settled()
        likely = 0.2 if self.uncleared or moving else 0.02
        if self.losses and len(self._in_use()) > 1 and self.rng.random() < likely:
            self._lose_one()
        if self.newcomers and self.rng.random() < likely and self._settled():
            self.balance()

    def _in_use(self) -> list[int]:
        return sorted(self.living - set(self.newcomers))

    def _lose_one(self) -> None:
        self.losses -= 1
        self.lose(self.rng.choice(self._in_use()), dead=self.rng.random() < 0.6)

    def _pass(self, queue: deque[_Message], end: LoopbackEndpoint, peer: int) -> None:
        late = len(queue) > 1 and self.rng.random() < self.reorder
        head, body = queue[1] if late else queue[0]
        del queue[1 if late else 0]
        self.kinds.update(record.kind for record in w.unpack(head, body))
        end.inject(peer, head, body)

    def run(self) -> None:
        """Run to the end. Raises AssertionError if something is wrong."""
        idle = 0.0
        while idle < PATIENCE:
            moved = self.up.collect() | self.down.collect()
            for worker in self.workers:
                moved |= worker.reap()
            choices = self._choices()
            if choices:
                self.rng.choice(choices)()
                self._lose_some()
                idle = 0.0
            elif self._over() and not moved and idle > 0.02 and self._settled():
                break
            elif not moved:
                threading.Event().wait(0.001)
                idle += 0.001
        assert idle < PATIENCE, f"hung: {self._state()}"

    def _state(self) -> list[Any]:
        return [
            (w.rank, w.joined, len(w.todo), [(r.kind, h.name) for r, h, *_ in w.begun])
            for w in self.workers
        ]

    def _wrong(self, round_: Round) -> str:
        """What is wrong with the outcomes of a round; "" if nothing is."""
        return round_.wrong()

    def check(self) -> None:
        """Check all outcomes, that all terms have ended, and that no message was malformed."""
        wrong = [text for round_ in self.rounds if (text := self._wrong(round_))]
        assert not wrong, wrong[:3]
        for worker in self.workers:
            assert worker.moved() == self.term
            assert worker.terms == list(range(1, self.term + 1)), worker.terms
            assert worker.core.outstanding == 0
        counts = [part.counters() for part in (*(w.core for w in self.workers), *self.lanes)]
        assert all(count["malformed"] == 0 for count in counts), counts

    def close(self) -> None:
        for worker in self.workers:
            worker.core.close()
        for lane, thread in zip(self.lanes, self.threads):
            lane.stop()
            thread.join()
        self.up.close()
        self.down.close()


def run_some(kind: type[Script], options: dict[str, Any], runs: int = 20) -> None:
    """Make and check random runs of a kind; a failed one prints its seed."""
    for _ in range(runs):
        seed = random.randrange(2**32)
        script = kind(seed, **options)
        try:
            script.run()
            script.check()
        except BaseException:
            print(f"seed {seed}")
            raise
        finally:
            script.close()
