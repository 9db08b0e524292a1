"""Tensors exchanged as factors: their steps, errors of a factor, ends while threads work."""

from __future__ import annotations

import ctypes as C
import threading

import numpy as np
import pytest

from bpsx.core._tensor import CommitGroup, Tensor
from bpsx.errors import BpsxError, StallError
from bpsx.kernels.low_rank import STEPS, Steps
from bpsx.kernels.reference_low_rank import LowRank
from core.cores import Rig, push_pull
from support import wire as w

N, M, RANK = 40, 60, 2
E_STALL = -4


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((N, M)).astype(np.float32)


def echo(r: Rig, pushes: list[w.Record]) -> None:
    """Answer with the pushes' own bodies: this worker is alone."""
    for push in pushes:
        r.answer(push, push.body)


def take_step(r: Rig, tensor: Tensor, g: np.ndarray) -> np.ndarray:
    out = np.empty_like(g)
    handle = push_pull(r.core, tensor, g, out)
    echo(r, r.pushes(2))
    echo(r, r.pushes(1))
    handle.wait(20)
    return out


def test_steps_push_p_then_q_and_their_results_are_the_oracles(rig):
    r = rig()
    tensor = r.matrix("x", N, M, RANK)
    state = np.frombuffer(tensor.state()[0], np.float32)
    oracle = LowRank(1, N, M, RANK, 0)
    oracle.q = state[4 : 4 + RANK * M].reshape(RANK, M).T.astype(np.float64)
    for step in range(3):
        g = gradient(step)
        assert np.abs(take_step(r, tensor, g) - oracle.step([g])).max() < 1e-4
    state = np.frombuffer(tensor.state()[0], np.float32)
    assert np.abs(state[4 + RANK * M :] - oracle.residuals[0].ravel()).max() < 1e-4
    assert r.core.counters()["push_pulls"] == 3
    assert r.core.counters()["tensor_bytes"] == 3 * 4 * N * M
    assert tensor.rounds == 3


def test_later_steps_wait_for_earlier_ones(rig):
    r = rig()
    tensor = r.matrix("x", N, M, RANK)
    outs = [np.empty((N, M), np.float32) for _ in range(2)]
    handles = [push_pull(r.core, tensor, gradient(i), out) for i, out in enumerate(outs)]
    for handle in handles:
        for count in (2, 1):
            pushes = r.pushes(count)
            assert not any(other.done() for other in handles[handles.index(handle) :])
            echo(r, pushes)
        handle.wait(20)


@pytest.mark.parametrize("factor", ["P", "Q"])
def test_an_error_of_a_factor_ends_the_step_and_changes_no_state(rig, factor):
    r = rig()
    tensor = r.matrix("x", N, M, RANK)
    take_step(r, tensor, gradient(0))
    before = tensor.state()
    handle = push_pull(r.core, tensor, gradient(1), np.empty((N, M), np.float32))
    first = r.pushes(2)
    if factor == "P":
        r.answer(first[0], b"", kind=w.ERROR, divisor=-E_STALL)
        echo(r, first[1:])
    else:
        echo(r, first)
        r.answer(r.pushes(1)[0], b"", kind=w.ERROR, divisor=-E_STALL)
    with pytest.raises(StallError, match="x"):
        handle.wait(20)
    assert tensor.state() == before
    rounds = [push.round for push in _pushes_of_step(r, tensor)]
    assert rounds == ([2, 2, 1] if factor == "P" else [2, 2, 2])


def _pushes_of_step(r: Rig, tensor: Tensor) -> list[w.Record]:
    handle = push_pull(r.core, tensor, gradient(2), np.empty((N, M), np.float32))
    first = r.pushes(2)
    echo(r, first)
    second = r.pushes(1)
    echo(r, second)
    handle.wait(20)
    return sorted(first, key=lambda push: push.key) + second


class Held:
    """Steps of which one is held until the test lets it go; none computes anything."""

    def __init__(self, which: str) -> None:
        self.entered, self.go, self.left = (threading.Event() for _ in range(3))
        sizes = {"project": 11, "project_back": 11, "restore": 14, "orthogonalise": 3, "refresh": 6}
        made = {
            step: C.CFUNCTYPE(C.c_int64, *[C.c_int64] * sizes[step])(
                self._hold if step == which else lambda *given: 0
            )
            for step in STEPS
        }
        addresses = {step: C.cast(function, C.c_void_p).value for step, function in made.items()}
        self.armed = False
        self.steps = Steps(**addresses, owners=tuple(made.values()))

    def _hold(self, *given: int) -> int:
        if self.armed:
            self.entered.set()
            assert self.go.wait(60)
            self.left.set()
        return 0


@pytest.mark.parametrize("end", ["tensor", "core", "close"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_ends_while_a_thread_works_waits_for_the_thread(rig, step, end):
    r = rig()
    held = Held(step)
    tensor = r.matrix("x", N, M, RANK, held.steps)
    held.armed = True
    handle = push_pull(r.core, tensor, gradient(0), np.empty((N, M), np.float32))
    if step != "project":
        echo(r, r.pushes(2))
    if step in ("refresh", "restore"):
        echo(r, r.pushes(1))
    assert held.entered.wait(20)
    if end == "tensor":
        r.core.fail_tensor(tensor, E_STALL, "x has failed")
    elif end == "core":
        r.core.fail(E_STALL, "all has failed")
    closing = threading.Thread(target=r.core.close)
    if end == "close":
        closing.start()
    with pytest.raises(TimeoutError):
        handle.wait(0.3)
    assert not handle.done()
    held.go.set()
    with pytest.raises(BpsxError, match="failed|shut down"):
        handle.wait(20)
    assert held.left.is_set()
    if end == "close":
        closing.join(20)
        assert not closing.is_alive()


def test_a_state_of_another_size_is_refused_and_one_without_steps_has_the_first_q(rig):
    r = rig()
    tensor = r.matrix("x", N, M, RANK)
    first = tensor.state()
    take_step(r, tensor, gradient(0))
    with pytest.raises(ValueError, match="has 7 bytes; expected"):
        tensor.state([bytes(7)])
    assert tensor.state() != first
    assert tensor.state([bytes(len(first[0]))]) == first
    assert tensor.common_bytes == 16 + 4 * RANK * M
    assert tensor.server_bytes == 0


def _all_of(r: Rig, *counts: tuple[int, int]) -> dict[int, list[w.Record]]:
    """Return the next records of each kind, sorted by key; ``counts``: (kind, number)."""
    found: dict[int, list[w.Record]] = {kind: [] for kind, _ in counts}
    while any(len(found[kind]) < number for kind, number in counts):
        for record in r.take():
            if record.kind in found:
                found[record.kind].append(record)
    assert all(len(found[kind]) == number for kind, number in counts)
    return {kind: sorted(records, key=lambda one: one.key) for kind, records in found.items()}


def test_p_is_committed_by_itself_and_q_with_its_group_when_a_worker_is_lost(rig):
    r = rig(shrinks=True)
    group = CommitGroup(r.core)
    r.core.groups["x"] = group
    tensor = r.matrix("x", N, M, RANK)
    g, out = gradient(0), np.empty((N, M), np.float32)
    handle = push_pull(r.core, tensor, g, out, divisor=3)
    echo(r, r.pushes(2))
    (q,) = r.pushes(1)  # though the group is not sealed
    echo(r, [q])
    with pytest.raises(TimeoutError, match="did not finish in time"):
        handle.wait(0.2)
    r.core.begin_term(1, [], living=2)
    found = _all_of(r, (w.HAVE, 3), (w.PUSH, 1))
    assert [(have.round, bool(have.flags & w.WAITS)) for have in found[w.HAVE]] == [
        (1, False),
        (1, False),
        (0, True),
    ]
    (again,) = found[w.PUSH]
    assert (again.key, again.body, again.round) == (q.key, q.body, q.round)
    assert (q.divisor, again.divisor, again.term) == (3, 2, 1)
    r.answer(again, again.body, term=1)
    group.seal()
    r.core.notify()
    handle.wait(20)
    assert np.isfinite(out).all()


def test_a_p_that_is_not_whole_is_pushed_again_when_a_worker_is_lost(rig):
    r = rig(shrinks=True)
    tensor = r.matrix("x", N, M, RANK)
    handle = push_pull(r.core, tensor, gradient(0), np.empty((N, M), np.float32))
    first, second = sorted(r.pushes(2), key=lambda push: push.key)
    echo(r, [first])
    while r.core.counters()["messages_received"] < 1:
        r.core.wait_for_progress(0.01)
    r.core.begin_term(1, [], living=2)
    found = _all_of(r, (w.HAVE, 2), (w.PUSH, 2))
    assert [have.round for have in found[w.HAVE]] == [0, 0]
    assert [push.body for push in found[w.PUSH]] == [first.body, second.body]
    echo(r, found[w.PUSH])
    echo(r, r.pushes(1))
    handle.wait(20)
