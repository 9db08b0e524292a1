"""As :mod:`core.dropped`, with compressed tensors: results have the bits of simulated lanes that
have never seen the pushes of a lost worker which do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bpsx.compression.spec import CompressionSpec, compression, make, stream
from bpsx.core._tensor import Tensor
from bpsx.planning.stages import stages_for
from core.dropped import Shrinking, Stepping
from core.relayed import AVERAGE, BROADCAST, MISMATCH, SUM, Round, Script, Worker
from support.simulated import Partition, Sum, counted
from support.wire import LOAD

SPECS: dict[str, dict[str, Any]] = {
    "onebit": {"compressor": "onebit", "scaling": True},
    "onebit-ef": {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
    "onebit-corrected": {"compressor": "onebit", "scaling": True, "ef": "corrected"},
    "topk": {"compressor": "topk", "k": 0.3},
    "topk-ef": {"compressor": "topk", "k": 0.3, "ef": "vanilla", "momentum": "nesterov"},
    "topk-corrected": {"compressor": "topk", "k": 0.3, "ef": "corrected"},
    "randomk": {"compressor": "randomk", "k": 0.5},
    "randomk-ef": {"compressor": "randomk", "k": 0.5, "ef": "vanilla"},
    "randomk-sparse": {"compressor": "randomk", "k": 0.5, "ef": "sparse"},
    "dithering": {"compressor": "dithering", "k": 4},
    "dithering-ef": {"compressor": "dithering", "k": 4, "ef": "vanilla", "momentum": "nesterov"},
}


def _same(one: np.ndarray | str, other: np.ndarray | None) -> bool:
    """Whether results are the same; a str and None are errors."""
    if isinstance(one, str) or other is None:
        return isinstance(one, str) and other is None
    return one.tobytes() == other.tobytes()


class Compressing(Script):
    """What such runs share. The tensors take turns in ``specs``; "half": float16 on the way.

    ``patient``: a lane or worker is lost only while nothing is being taken over, but then soon. The
    second worker is lost while no worker has a sum that another one lacks.
    """

    lost: list[Any]
    senders: int
    drops: int

    def __init__(
        self, seed: int, workers: int, specs: Sequence[str], patient: bool = False, **options: Any
    ) -> None:
        self.specs = [
            CompressionSpec("half") if name == "half" else compression(SPECS[name])
            for name in specs
        ]
        # No lane is lost together with a worker.
        self.strict = patient or not options.get("losses", 2)
        self.patient = patient
        self.places: dict[str, list[tuple[int, int, int, int, int]]] = {}
        self.tensor_of: dict[int, int] = {}  # round's id -> index of its tensor
        super().__init__(
            seed, workers, tensors=len(specs), fixed_order=True, log_ratio=0.3, **options
        )
        for worker in self.workers:
            worker.core.open_pool(1)
            worker.tensors = [self._compressed(i, worker.rank) for i in range(len(worker.tensors))]

    def _cut(self, number: int) -> list[tuple[int, int, int, int, int]]:
        parts: list[tuple[int, int, int, int, int]] = []
        while not sum(length for *_, length in parts):
            parts = super()._cut(number)
        self.places[f"t{number}"] = parts
        return parts

    def _compressed(self, number: int, rank: int) -> Tensor:
        name, spec = f"t{number}", self.specs[number]
        made = [
            make(spec, "float32", length, stream(name.encode(), i), rank)
            for i, (*_, length) in enumerate(self.places[name])
        ]
        # Compiles the lanes' kernels here: the run takes a lane that compiles for one that hangs.
        make(spec, "float32", self.places[name][0][-1], 0, None)
        return Tensor(
            name, 3, self.places[name], stages_for("cpu", True), codec=spec.text(), made=made
        )

    def _plan(self) -> None:
        before = len(self.rounds)
        super()._plan()
        for i, round_ in enumerate(self.rounds[before:], before):
            round_.rate = 1 / (i + 1)
            if round_.kind == BROADCAST:
                round_.kind = SUM
        for worker in self.workers:
            self.tensor_of.update({id(round_): at for at, round_ in worker.todo})

    def _lose_some(self) -> None:
        if not self.patient:
            super()._lose_some()
        elif self._settled() and self.rng.random() < (0.2 if self.term else 0.02):
            if self.losses and len(self.living) > 1 and self.rng.random() < 0.5:
                self._lose_one()
            elif self.drops and len(self.workers) > 1 and not (self.lost and self._differ()):
                self._drop_one()

    def _differ(self) -> bool:
        """Whether a worker waits for a result that another has."""
        return any(round_.got for worker in self.workers for round_, *_ in worker.begun)

    # ---- what is right

    def _wrong(self, round_: Round) -> str:
        """What is wrong besides the values, which check() compares with simulated ones."""
        alive = {w.rank for w in self.workers}
        outcomes = [round_.got[i] for i in round_.inputs if i in alive]
        if round_.kind == MISMATCH and all(
            str(outcome).startswith("MismatchError") for outcome in outcomes
        ):
            return ""
        if any(isinstance(o, str) for o in outcomes):
            return f"{outcomes}"
        if any(o.tobytes() != outcomes[0].tobytes() for o in outcomes):
            return "survivors have different results"
        return ""

    @property
    def resets(self) -> int:
        """Residuals that were lost with a lane and a worker."""
        return sum(lane.counters()["reset"] for lane in self.lanes)

    def _sum(self, round_: Round, cut: slice) -> Sum:
        alive = {w.rank for w in self.workers}
        got = next((round_.got[of] for of in round_.inputs if of in alive), None)
        return Sum(
            {of: a[cut] for of, a in round_.inputs.items()},
            round_.kind == AVERAGE,
            round_.rate,
            None if got is None else partial(_same, got if isinstance(got, str) else got[cut]),
            round_.root if round_.kind == MISMATCH else -1,
        )

    def _of_partition(self, at: int, i: int) -> list[set[int]]:
        begin, n = (nbytes // 4 for nbytes in self.places[f"t{at}"][i][-2:])
        rounds = [r for r in self.rounds if self.tensor_of[id(r)] == at]
        return counted(
            Partition(self.specs[at], f"t{at}", i, n, "float32", self.senders),
            [self._sum(round_, slice(begin, begin + n)) for round_ in rounds],
            [worker.rank for worker in self.lost],
            bool(self.resets),
        )

    def counted(self, at: int) -> list[set[int]]:
        """For each round of a tensor: numbers n for which it may lack the first n lost workers."""
        of_parts = [self._of_partition(at, i) for i in range(len(self.places[f"t{at}"]))]
        alive = {w.rank for w in self.workers}
        rounds = [r for r in self.rounds if self.tensor_of[id(r)] == at]
        common = [set.intersection(*numbers) for numbers in zip(*of_parts)]
        assert all(n for n, round_ in zip(common, rounds) if alive & set(round_.inputs)), common
        return common

    def check(self) -> None:
        Script.check(self)
        if self.strict:
            assert self.resets == 0
        for at in range(len(self.specs)):
            self.counted(at)


class Compressed(Compressing, Shrinking):
    """Such a run, in which each push_pull is decided by itself."""


class CompressedSteps(Compressing, Stepping):
    """Such a run, in which each step is decided as a whole."""

    def check(self) -> None:
        super().check()
        steps: dict[int, set[int]] = {}
        for at in range(len(self.specs)):
            rounds = [r for r in self.rounds if self.tensor_of[id(r)] == at]
            for round_, numbers in zip(rounds, self.counted(at)):
                step = self.step_of[id(round_)]
                steps[step] = steps.get(step, numbers) & numbers
        assert all(steps.values()), steps


class InTurn(Compressing):
    """A run that loses lanes and workers in the order of :attr:`losing`. Each is lost after the
    takeovers of the loss before it have ended.
    """

    losing: list[Callable[[], None]]

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, losses=0, drops=0, **options)

    def lose_lane(self) -> None:
        self.lose(self.rng.choice(sorted(self.living)), dead=True)

    def lose_worker(self, rank: int) -> Callable[[], None]:
        """Return what loses a worker."""
        return lambda: self.drop(next(w for w in self.workers if w.rank == rank), dead=True)

    def check(self) -> None:
        super().check()
        assert not self.losing


class SlowStep(InTurn, CompressedSteps):
    """Worker 0 ends step ``slow`` only after all losses. Each comes when no message is on its way
    and the other workers are in the following step. So worker 0 repeats its step alone.
    """

    slow = 0

    def __init__(self, seed: int, **options: Any) -> None:
        self.quiet = 0  # times in a row that nothing could happen
        self.losing = self.losses_in_turn()
        super().__init__(seed, **options)

    def losses_in_turn(self) -> list[Callable[[], None]]:
        """Return what is lost."""
        return [self.lose_lane, self.lose_worker(1)]

    def _may_seal(self, worker: Worker) -> bool:
        return worker.rank != 0 or self.now[0][0] != self.slow or not self.losing

    def _choices(self) -> list[Callable[[], Any]]:
        found = super()._choices()
        self.quiet = 0 if found else self.quiet + 1
        ahead = all(self.now[w.rank][0] > self.slow for w in self.workers if w.rank)
        if self.quiet > 20 and ahead and self.losing and self._settled():
            found.append(self.losing.pop(0))
        return found


class SlowestStep(SlowStep):
    """Worker 2 is lost before the lane, and then worker 1. After its loss only worker 1 has a
    snapshot of the sum that worker 0 lacks; worker 0 may have an older one.
    """

    slow = 1

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.strict = False
        self.loaded = 0  # snapshots that a lane has got before the last loss

    def losses_in_turn(self) -> list[Callable[[], None]]:
        """Return what is lost."""
        return [self.lose_worker(2), self._lose_first, self._lose_last]

    def _lose_first(self) -> None:
        """Lose the lane of the first key, of which worker 0 holds snapshots."""
        self.lose(self.places["t0"][0][1], dead=True)

    def _lose_last(self) -> None:
        self.loaded = self.kinds[LOAD]
        self.lose_worker(1)()


class OneIsLeft(InTurn, Compressed):
    """Worker 0 takes part in no sum of the first generation. Worker 2, a lane and worker 1 are lost
    in turn. So no worker is left that would push its part of the latest sums again.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        self.losing = [self.lose_worker(2), self.lose_lane, self.lose_worker(1)]
        super().__init__(seed, workers=3, **options)

    def _plan(self) -> None:
        super()._plan()
        if self.generation:
            return
        first, *others = self.workers
        first.todo.clear()
        for round_ in self.rounds:
            one = next(iter(round_.inputs.values()))
            round_.kind, round_.root = SUM, 1
            round_.inputs = {w.rank: round_.inputs.get(w.rank, one) for w in others}
        for worker in others:
            worker.todo = [(self.tensor_of[id(round_)], round_) for round_ in self.rounds]
            self._shuffle(worker)

    def _lose_some(self) -> None:
        if self.losing and self._settled() and any({1, 2} <= {*r.got} for r in self.rounds):
            self.losing.pop(0)()
