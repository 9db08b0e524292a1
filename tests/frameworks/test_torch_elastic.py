"""Training with bpsx.torch.elastic: workers are lost and join, and all end with equal weights."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from bpsx.errors import ConfigError, PeerLeftError, PeerLostError, Status, explain
from bpsx.plugin import elastic as plugin
from bpsx.session.boundaries import Change
from bpsx.torch import elastic
from bpsx.torch import horovod as hvd
from support.boundaries import scripted_boundaries
from support.jobs import TRANSPORTS, Job
from support.worker_deaths import begun_anew, lose_sender, replace_one

ROOT_LOST = explain(Status.PEER_LOST, "elastic", 0, 0, broadcast=True)
TRAINING = """
    import torch, time, zlib
    import bpsx.torch as bps

    bps.init()
    torch.manual_seed(bps.rank())  # so that only the sync makes weights equal
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    )
    optimizer = {optimizer}
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    made = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(600, 8, generator=made))
    sampler = bps.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)

    @bps.elastic.run
    def train(state):
        report(["train", bps.rank(), bps.size(), state.epoch, state.step, len(sampler)])
        while state.epoch < 3:
            for i, (x,) in enumerate(loader):
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
                optimizer.step()
                sampler.record_batch(i, 4)
                state.step += 1
                report(["step", state.step])
                time.sleep(0.003)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    state = bps.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, note="a")
    state.register_reset_callbacks([lambda: report(["reset", bps.rank(), bps.size()])])
    train(state)
    weights = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    moments = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    moments = zlib.crc32(b"".join(t.numpy().tobytes() for t in moments))
    report(["end", bps.rank(), bps.size(), state.step, weights, moments])
    bps.shutdown()
"""
SGD = "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)"
ADAM = "torch.optim.Adam(model.parameters(), lr=0.001)"


def training(optimizer: str = SGD, **more) -> Job:
    return Job(TRAINING.format(optimizer=optimizer), **more)


@pytest.mark.parametrize(
    ("transport", "optimizer"), [("zmq", SGD), ("tcp", ADAM), ("shm", SGD)], ids=str
)
def test_a_worker_is_lost_and_another_joins(transport, optimizer):
    env = {**TRANSPORTS[transport], "BPSX_ELASTIC": "shrink", "BPSX_CHECK_WEIGHTS": "error"}
    with training(optimizer, workers=3, servers=2, env=env) as job:
        job.workers[0].wait_for_line('["step", 10]')
        first, *others = replace_one(job)
        assert sorted(r[1] for r in (first, *others)) == [0, 1, 2] and first[2] == 3
        assert all(r[3:] == first[3:] for r in others)
        # All have begun anew at the same step, and divide what was left of the epoch.
        survivor, new = begun_anew(job)
        assert new[2:] == survivor[2:]
        steps = [r[1] for r in job.workers[0].reports() if r[0] == "step"]
        assert steps == list(range(1, len(steps) + 1)), "a survivor has discarded a step"


PROCESSED = """
    import torch, time
    import bpsx.torch as bps

    bps.init()
    model = torch.nn.Linear(1, 1)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters()
    )
    data = torch.arange(240.0).reshape(-1, 1)
    sampler = bps.elastic.ElasticSampler(data)

    @bps.elastic.run
    def train(state):
        batch = {batch}
        loader = torch.utils.data.DataLoader(data, batch_size=batch, sampler=sampler)
        for i, x in enumerate(loader):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            sampler.record_batch(i, batch)
            state.step += 1
            report([state.step, *x.flatten().tolist()])
            time.sleep(0.01)
            state.commit()

    train(bps.elastic.TorchState(model, optimizer, sampler=sampler, step=0))
    report("end")
    bps.shutdown()
"""


@pytest.mark.parametrize("leaver", [0, 1])
def test_what_a_worker_has_processed_is_not_processed_again_when_it_has_left(leaver):
    """Each sample is processed once, except those that a sampler repeats to fill a round."""
    source = PROCESSED.format(batch=2)
    with Job(source, workers=3, servers=2, env={"BPSX_ELASTIC": "shrink"}) as job:
        job.workers[leaver].wait_for_line("[", count=12)
        job.workers[leaver].signal(signal.SIGTERM)
        everything = "\n".join(p.text()[-2000:] for p in job.processes)
        assert [w.wait() for w in job.workers] == [0] * 3, everything
        reports = [r for w in job.workers for r in w.reports()]
        assert reports.count("end") == 2
        seen = Counter(x for r in reports if r != "end" for x in r[1:])
        assert set(seen) == set(range(240))
        assert sum(seen.values()) - 240 <= 2 * 3, [x for x in seen if seen[x] > 1]


def test_the_others_take_over_the_batches_of_a_lost_worker():
    """With batches of 12 // size() each step of the job has 12 samples, whoever is there."""
    source = PROCESSED.format(batch="12 // bps.size()").replace(
        "time.sleep(0.01)", "hear() if bps.rank() == 1 and state.step == 6 else time.sleep(0.01)"
    )
    with Job(source, workers=3, servers=2, env={"BPSX_ELASTIC": "shrink"}) as job:
        job.workers[1].wait_for_line("[", count=6)
        job.workers[1].signal(signal.SIGKILL)
        others = [job.workers[i] for i in (0, 2)]
        assert [w.wait() for w in others] == [0, 0], "\n".join(w.text()[-2000:] for w in others)
        reports = [r for w in others for r in w.reports() if r != "end"]
        steps = {r[0] for r in reports}
        assert steps == set(range(1, len(steps) + 1))
        sizes = [sum(len(r) - 1 for r in reports if r[0] == step) for step in sorted(steps)]
        lost = sizes.index(12)  # the first step whose loader knows of the loss
        *full, last = sizes
        assert 6 <= lost <= 10 and full == [8] * lost + [12] * (len(full) - lost) and last <= 12
        late = Counter(x for r in reports if r[0] > lost for x in r[1:])
        assert set(late) >= set(range(240)) - {x for r in reports for x in r[1:] if r[0] <= lost}
        assert {x for r in reports for x in r[1:]} == set(range(240))


def test_rank_0_is_lost_while_it_sends_the_model():
    """Whoever has the model then goes on, and sends it."""
    source = TRAINING.format(optimizer=SGD).replace(
        "train(state)\n",
        """if bps.rank() == 0:
        sent = bps.elastic.TorchState.sync
        def sync(self):
            if state.step:  # not the first
                report(["sends"])
                time.sleep(60)
            sent(self)
        bps.elastic.TorchState.sync = sync
    train(state)
""",
        1,
    )
    with Job(source, workers=3, servers=2, env={"BPSX_ELASTIC": "shrink"}) as job:
        first, second = lose_sender(job, 10)
        assert first[2:] == second[2:] and first[2] == 2


def test_rank_0_dies_while_all_agree_on_a_departure():
    """All others go back to the last commit, and one of them still leaves in good order."""
    source = PROCESSED.format(batch=2).replace(
        "    @bps.elastic.run\n",
        """    if bps.rank() == 0:
        bps.elastic.TorchState.regroup = lambda self: os.kill(os.getpid(), 9)

    @bps.elastic.run
""",
        1,
    )
    with Job(source, workers=4, servers=2, env={"BPSX_ELASTIC": "shrink"}) as job:
        job.workers[2].wait_for_line("[", count=12)
        job.workers[2].signal(signal.SIGTERM)
        everything = "\n".join(p.text()[-2000:] for p in job.processes)
        assert [w.wait() for w in job.workers] == [-9, 0, 0, 0], everything
        assert [w.reports()[-1] == "end" for w in job.workers] == [False, True, False, True]
        seen = {x for w in job.workers[1:] for r in w.reports() if r != "end" for x in r[1:]}
        assert len(seen) >= 240 - 2 * 30  # without what only the dead one has processed
        assert "worker 2 (127.0.0.1, pid" in job.scheduler.text()
        assert "leaves the job: SIGTERM; the job goes on" in job.scheduler.text()


# ---- without a job


@pytest.fixture
def changes(monkeypatch) -> list[Change]:
    """The list from which each boundary takes the change that it reports."""
    return scripted_boundaries(monkeypatch)


class Local(plugin.State):
    """A state whose rank 0 is this process."""

    def _broadcast(self, values):
        self.syncs = getattr(self, "syncs", 0) + 1
        return values


def test_run_begins_anew_when_workers_have_joined(changes):
    changes += [Change(entered=(1,)), Change(lost=(2,))]
    state, calls = Local(step=0), []
    state.register_reset_callbacks([lambda: calls.append("reset")])

    @plugin.run
    def train(state, most, by=1):
        calls.append(state.step)
        while state.step < most:
            state.step += by
            state.commit()
        return "done"

    assert train(state, 4) == "done"
    assert calls == [0, "reset", 1, "reset", 2] and state.syncs == 2
    assert train.__name__ == "train"


def test_run_goes_back_to_the_last_commit_after_a_broadcast_has_failed(changes):
    state, tries = Local(values=[1]), []

    @plugin.run
    def train(state):
        tries.append(list(state.values))
        if len(tries) == 1:
            state.commit()
            state.values.append(2)
            raise PeerLostError(ROOT_LOST)

    train(state)
    assert tries == [[1], [1]]


class Failing(Local):
    """A state of which one method fails once, as a worker dies."""

    fails = ""

    def _fail(self, method):
        if self.fails == method:
            self.fails, self.step = "", -1  # a value that has come from another worker
            raise PeerLostError(ROOT_LOST)

    def sync(self):
        self._fail("sync")
        super().sync()

    def regroup(self):
        self._fail("regroup")


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("sync", Change(entered=(1,))),
        ("regroup", Change(lost=(2,))),
        ("regroup", Change(leaving=(2,))),
    ],
)
def test_no_step_is_lost_if_a_worker_dies_while_the_others_agree(changes, method, change):
    changes.append(change)
    state, calls = Failing(step=0), []

    @plugin.run
    def train(state):
        calls.append(state.step)
        while state.step < 4:
            state.step += 1
            if state.step == 2:
                state.fails = method
                state.check_host_updates()

    train(state)
    assert calls == [0, 2] and not state.fails and state.step == 4


class Foreign(Exception):
    """An error of a framework, in whose text is one of bpsx."""


class Framed(Local):
    _FOREIGN = (Foreign,)


def test_run_knows_a_lost_sender_in_a_frameworks_error(changes):
    lost = Foreign(f"{{{{node x}}}} PeerLostError: {ROOT_LOST} [Op:BpsxBroadcast]")
    others = [Foreign("MismatchError: other shapes"), ValueError(f"not by the framework: {lost}")]
    for error in (lost, *others):
        state, tries = Framed(step=1), []

        @plugin.run
        def train(state, error=error, tries=tries):
            tries.append(state.step)
            if len(tries) == 1:
                state.step = 5
                raise error

        with nullcontext() if error is lost else pytest.raises(type(error), match="."):
            train(state)
        assert tries == ([1, 1] if error is lost else [1])


@pytest.mark.parametrize("error", [PeerLostError(ROOT_LOST), Foreign(ROOT_LOST)])
def test_run_raises_the_end_of_the_job(changes, error):
    plugin.session().failure = "no server is left"

    @plugin.run
    def train(state):
        raise error

    with pytest.raises(type(error), match="its root"):
        train(Framed(step=1))


@pytest.mark.parametrize(
    "error",
    [
        PeerLeftError("tensor 'g': worker 1 has left the job without pushing it"),
        PeerLostError("gathering objects needs all 3 workers, of which 2 are left"),
        Foreign("PeerLostError: allgather needs all 3 workers, of which 2 are left"),
    ],
)
def test_run_raises_what_another_broadcast_does_not_make_good(changes, error):
    @plugin.run
    def train(state):
        raise error

    with pytest.raises(type(error), match="worker"):
        train(Framed(step=1))


def test_all_agree_before_one_leaves_and_begin_anew_after_that(changes):
    changes += [Change(leaving=(2,)), Change(lost=(2,)), Change(leaving=(1,)), Change()]
    state, calls = Local(step=0), []
    state.regroup = lambda: calls.append("regroup")

    @plugin.run
    def train(state):
        calls.append(state.step)
        while state.step < 4:
            state.step += 1
            state.commit()

    train(state)
    # The second departure was called off: all begin anew, too.
    assert calls == [0, "regroup", "regroup", 1, "regroup", "regroup", 2]


def test_a_worker_that_leaves_calls_its_callbacks_and_exits(changes, monkeypatch):
    changes += [Change(leaving=(0,)), Change(left=True)]
    state, calls = Local(step=3), []
    state.register_departure_callbacks([lambda: calls.append(state.step)])
    monkeypatch.setattr(plugin, "shutdown", lambda: calls.append("shutdown"))
    with pytest.raises(elastic.Departed) as e:
        plugin.run(lambda state: state.commit())(state)
    assert e.value.code == 0 and calls == [3, "shutdown"]


def test_leave_says_why_it_cannot(changes):
    with pytest.raises(ConfigError, match="does not go on without this worker"):
        elastic.leave()


def test_run_needs_a_state(changes):
    with pytest.raises(ConfigError, match=r"argument of nothing\(\) is int; expected a State"):
        nothing(3)


@plugin.run
def nothing(state):
    return None


def test_names_that_state_has_itself_are_refused():
    with pytest.raises(ConfigError, match="'commit' cannot be the name of a value"):
        elastic.State(commit=3)
    with pytest.raises(ConfigError, match="model is int; expected a Module"):
        elastic.TorchState(model=3)
    with pytest.raises(ConfigError, match="optimizer is str; expected an Optimizer"):
        elastic.TorchState(optimizer="sgd")
    with pytest.raises(ConfigError, match="net is Linear, which your script uses .* a TorchState"):
        elastic.State(net=torch.nn.Linear(1, 1))


def test_restore_goes_back_to_what_was_saved():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = elastic.TorchState(model, optimizer, scheduler=scheduler, step=1, seen=[1])
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    state.step = 5
    state.seen.append(2)
    state.restore()
    assert torch.equal(model.weight, before) and not optimizer.state
    assert (state.step, state.seen, optimizer.param_groups[0]["lr"]) == (1, [1], 0.5)
    assert state.scheduler is scheduler and scheduler.optimizer is optimizer
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (0, [0.5])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n", [0, 1, 7, 100])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_sampler_gives_each_worker_its_part(monkeypatch, n, workers, shuffle):
    samplers = []
    for worker in range(workers):
        monkeypatch.setattr(elastic, "initialised", lambda: True)
        monkeypatch.setattr(elastic, "rank", lambda worker=worker: worker)
        monkeypatch.setattr(elastic, "size", lambda: workers)
        sampler = elastic.ElasticSampler(range(n), shuffle=shuffle)
        sampler.set_epoch(2)
        samplers.append(sampler)
    parts = [list(s) for s in samplers]
    assert {i for part in parts for i in part} == set(range(n))
    assert len({len(part) for part in parts}) == 1 and sum(map(len, parts)) < n + workers
    # What has been processed is not given again.
    for sampler in samplers:
        sampler.record_batch(0, 2)
    done = {i for s in samplers for i in s.processed_indices}
    assert samplers[0].get_indices(0, 2) == parts[0][:2]
    for worker, sampler in enumerate(samplers):
        monkeypatch.setattr(elastic, "rank", lambda worker=worker: worker)
        sampler.load_state_dict({"epoch": 2, "processed_indices": sorted(done)})
    assert {i for s in samplers for i in s} == set(range(n)) - done


def test_horovods_names():
    assert hvd.elastic is elastic
    assert {"TorchState", "State", "ElasticSampler", "run"} <= set(hvd.elastic.__all__)
