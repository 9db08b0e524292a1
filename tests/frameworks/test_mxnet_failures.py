"""bpsx.mxnet when a process dies, an exchange fails, or training is suspended."""

from __future__ import annotations

import re
import signal

import pytest

from frameworks.mxnet_scripts import HEAD, run
from support.jobs import Job
from support.running import alone

pytestmark = pytest.mark.timeout(180)
TRAINS = (
    HEAD
    + """
bps.init()
mx.random.seed(0)
net = gluon.nn.Dense(4, in_units=3)
net.initialize()
trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
step = 0
try:
    while True:
        with autograd.record():
            loss = net(mx.nd.ones((2, 3))).sum()
        loss.backward()
        trainer.step(2)
        loss.asnumpy()
        step += 1
        if step == 5:
            report("going")
except Exception as e:
    report(f"{type(e).__name__}: {e}")
    bps.shutdown()
    sys.exit(3)
"""
)


@pytest.mark.parametrize("who", ["server", "worker"])
def test_a_death_is_raised_in_the_training_loop(who: str) -> None:
    with Job(TRAINS, workers=2, servers=1) as job:
        for worker in job.workers:
            worker.wait_for_line("going")
        (job.servers[0] if who == "server" else job.workers[1]).signal(signal.SIGKILL)
        survivor = job.workers[0]
        assert survivor.wait() == 3
        told = survivor.reports()[-1]
        assert re.search(
            r"(MXNetError|PeerLostError): .*"
            + ("server 0" if who == "server" else "worker 1")
            + ".* is gone",
            told,
            re.DOTALL,
        ), told


RESUMES = (
    HEAD
    + """
bps.init()
net = gluon.nn.Dense(400, in_units=3, use_bias=False)
net.initialize(mx.init.One())
params = {"compressor": "topk", "k": 1, "ef": "vanilla"}
trainer = bps.DistributedTrainer(
    net.collect_params(), "sgd", {"learning_rate": 1.0}, compression_params=params
)


def step():
    with autograd.record():
        loss = net(mx.nd.ones((1, 3)) * (bps.rank() + 1)).sum()
    loss.backward()
    trainer.step(1)
    return float(net.weight.data().asnumpy().sum())


first = step()
bps.suspend()
report("suspended")
hear()
bps.resume(int(os.environ["SIZE"]), 1)
report([first, step()])
bps.shutdown()
"""
)


@pytest.mark.parametrize("size", [1, 2])
def test_suspend_and_resume(size: int) -> None:
    """Resume with the same and with another size: gradients are divided by the new size, and
    compression keeps its state.
    """
    with Job(
        RESUMES, workers=2, servers=1, env={"BYTEPS_MIN_COMPRESS_BYTES": "0", "SIZE": str(size)}
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("suspended")
        job.servers_anew(size)
        if size == 1:
            job.workers.pop().end()
        job.workers[0].say("go")
        if size == 2:
            job.workers[1].say("go")
        for _, (first, second) in job.results():
            # One element of 1200 travels. In the first step it is 1 and 2 on the workers, halved.
            # The second step sends another element, twice as large because it has not been sent
            # yet. A single worker sends all elements.
            assert first == 1200 - 1.5 and second == (first - 3.0 if size == 2 else first - 1200), (
                first,
                second,
            )


BREAKS = """
class Breaks(mx.operator.CustomOp):
    def forward(self, **_):
        raise ValueError("broken")

@mx.operator.register("bpsx_breaks")
class Prop(mx.operator.CustomOpProp):
    def create_operator(self, *_):
        return Breaks()

bps.init()
def step(number, hear=True):
    x = mx.nd.ones((3,)) * number
    if bps.rank() == 0 and number == 1:
        x = x + mx.nd.Custom(x, op_type="bpsx_breaks")
    bps.byteps_push_pull(x, name="x", is_average=False)
    return x.asnumpy() if hear else None
"""


def test_an_exchange_skipped_by_the_engine_ends_this_workers_exchanges() -> None:
    """A script that catches an error of its computation and continues would be one step behind."""
    status, told, output = run(
        BREAKS
        + """
for number in range(3):
    try:
        print(number, step(number))
    except Exception as e:
        print(number, type(e).__name__, str(e).splitlines()[-1])
        if bps.rank() == 1 or number == 2:
            sys.exit(3)
"""
    )
    first, second = (
        [line for line in told[rank] if line[:2] in ("0 ", "1 ", "2 ")] for rank in (0, 1)
    )
    assert first[0] == second[0] == "0 [0. 0. 0.]" and first[1].startswith("1 MXNetError"), output[
        -2000:
    ]
    assert first[2].startswith("2 BpsxError MXNet's engine has skipped an earlier exchange"), (
        output[-2000:]
    )
    assert "an MXNetError said why" in first[2], first
    assert len(second) == 2 and not second[1].startswith("1 ["), output[-2000:]
    assert status == 3


def test_the_cause_of_a_skipped_exchange_is_named_if_the_script_has_not_waited() -> None:
    status, told, output = run(
        BREAKS
        + """
from bpsx.mxnet import _pushes, ops

turn = ops._turn
def late(name):                 # the engine skips the exchange in the middle of the next one's call
    while not _pushes.left_out():
        pass
    return turn(name)

step(0)
if bps.rank() == 0:
    step(1, hear=False)
    ops._turn = late
    for _ in range(2):
        try:
            step(2, hear=False)
        except bpsx.BpsxError as e:
            print(e)
    bps.shutdown()
    sys.exit(3)
"""
    )
    first, second = (
        line
        for line in told[0]
        if line.startswith("MXNet's engine has skipped an earlier exchange")
    )
    assert (
        status == 3 and first == second and "Check failed" in first and "CustomOpForward" in first
    ), output[-2000:]


@pytest.mark.parametrize("why", ["left out", "refused"])
def test_exchanges_after_one_that_did_not_begin_are_not_added_to_other_steps(why: str) -> None:
    """The script has queued later exchanges in the engine before it learns of the failure.

    Each step uses a new array under the same name.
    """
    _, told, output = run(
        BREAKS
        + """
from bpsx.mxnet import ops

refused = os.environ["WHY"] == "refused"
bps.byteps_declare_tensor("m", compressor="topk", k=1, ef="corrected")
late = mx.nd.ones((1500, 1500))
for _ in range(4):
    late = mx.nd.dot(late, late) / 1500
got = []
for number in range(6):
    x, rate = mx.nd.ones((1,)) * number, 0.1
    if bps.rank() == 0 and number == 2:
        if refused:
            rate = -1.0
        else:
            # after all others have been queued
            x = mx.nd.Custom(x + 0 * late[0, 0], op_type="bpsx_breaks")
    try:
        ops.submit(x, "m", average=True, rate=rate)
    except bpsx.BpsxError as e:  # one may be refused before the next is queued
        if not refused:
            raise
        break
    got.append(x)
bps.shutdown()
for number, x in enumerate(got):
    try:
        print(number, x.asscalar())
    except mx.MXNetError as e:
        print(number, type(e).__name__, str(e).splitlines()[0])
""",
        WHY=why,
        BYTEPS_MIN_COMPRESS_BYTES="0",
        BPSX_SHUTDOWN_TIMEOUT="60",
    )  # products of large matrices take their time
    for rank in (0, 1):
        lines = [line for line in told[rank] if re.match(r"[0-5] ", line)]
        assert lines[:2] == ["0 0.0", "1 1.0"] and len(lines) > (2, 5)[rank], output[-2000:]
        assert all("Error" in line for line in lines[2:]), output[-2000:]
        if rank == 0:
            assert all(
                "an earlier exchange under this name failed to start" in line for line in lines[3:]
            ), output[-2000:]


def test_weights_keep_their_values_after_a_failure_of_asynchronous_training() -> None:
    """The script must see the old weights, not the changes on their way to the servers."""
    with Job(
        HEAD
        + """
bps.init()
net = gluon.nn.Dense(2, in_units=2, use_bias=False)
net.initialize(mx.init.Constant(100.0))
trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
failed = 0
while failed < 2:
    try:
        with autograd.record():
            loss = net(mx.nd.ones((1, 2))).sum()
        loss.backward()
        trainer.step(1)
        loss.asnumpy()
        report("going")
    except (bpsx.BpsxError, mx.MXNetError):
        failed += 1
try:
    net.weight.data().asnumpy()     # raises errors that the engine still holds
except mx.MXNetError:
    pass
report(net.weight.data().asnumpy().tolist())
os._exit(0)
""",
        workers=1,
        servers=1,
        env={"BYTEPS_ENABLE_ASYNC": "1", "BYTEPS_FORCE_DISTRIBUTED": "1"},
    ) as job:
        job.workers[0].wait_for_line("going")
        job.servers[0].signal(signal.SIGKILL)
        assert job.workers[0].wait() == 0
        found = job.workers[0].reports()[-1]
        assert all(50 < value <= 100 for row in found for value in row), found


def test_weights_keep_their_values_if_an_error_is_raised_before_all_is_over() -> None:
    """MXNet forgets an error when it raises it, also for operations that still wait for a thread.

    In asynchronous training such an operation copied a change that was never computed.
    """
    finished = run(
        """
from bpsx.mxnet import async_training, ops

def submit(array, *given, **more):
    ops.submit(array, *given, **more)
    try:
        array.wait_to_read()
    except mx.MXNetError:
        print("raised")

bps.init()
net = gluon.nn.Dense(2, in_units=2, use_bias=False)
net.initialize(mx.init.Constant(100.0))
trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
for fails in (False, True):
    with autograd.record():
        loss = net(mx.nd.ones((1, 2))).sum()
    loss.backward()
    if fails:
        async_training.submit = submit
        net.weight.data()[:] = mx.nd.random.normal(0, -1, (2, 2))   # no such distribution
    trainer.step(1)
print(bool((np.abs(net.weight.data().asnumpy() - 99.9999) < 1e-3).all()))
""",
        1,
        BYTEPS_ENABLE_ASYNC="1",
        BYTEPS_FORCE_DISTRIBUTED="1",
    )
    assert finished[:2] == (0, {0: ["raised", "True"]}), finished[2]


GROWS = (
    HEAD
    + """
bps.init()
rank, old = bps.rank(), os.environ.get("NEW") is None
net = gluon.nn.Dense(2, in_units=3, use_bias=False, prefix="grows_")
net.initialize(mx.init.Constant(rank + 1))
trainer = bps.DistributedTrainer(
    net.collect_params(), "sgd", {"learning_rate": 1.0, "momentum": 0.5}
)


def step():
    with autograd.record():
        loss = net(mx.nd.ones((1, 3))).sum()
    loss.backward()
    if os.environ.get("PARTS"):
        trainer.allreduce_grads()
        trainer.update(1)
    else:
        trainer.step(1)
    return float(net.weight.data().asnumpy().sum())


if old:
    step()
    bps.suspend()
    report("suspended")
    hear()
    bps.resume(3, 1)
report(step())
bps.shutdown()
"""
)


@pytest.mark.parametrize("parts", ["", "1"], ids=["step", "parts"])
def test_a_late_worker_gets_weights_and_momentum(parts: str) -> None:
    with Job(GROWS, workers=2, servers=1, env={"PARTS": parts}) as job:
        for worker in job.workers:
            worker.wait_for_line("suspended")
        job.servers_anew(3)
        job.start_worker(2, "import os\nos.environ['NEW'] = '1'\n" + GROWS)
        for worker in job.workers[:2]:
            worker.say("go")
        assert [reports[-1] for reports in job.results()] == [6 - 6 * (1 + 1.5)] * 3


def test_memory_stays_flat() -> None:
    status, told, output = run("""
bps.init()
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(4, 3, in_channels=1), gluon.nn.Dense(3))
net.initialize()
net.hybridize()
trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
for step in range(4000):
    with autograd.record():
        loss = net(mx.nd.ones((1, 1, 6, 6))).sum()
    loss.backward()
    trainer.step(1)
    if step % 20 == 0:
        loss.asnumpy()
    if step == 1000:
        mx.nd.waitall()
        before = resident()
mx.nd.waitall()
print(resident() - before)
bps.shutdown()
""")
    assert status == 0, output[-2000:]
    for rank in (0, 1):
        assert int(told[rank][-1]) < 8 << 20, told


def test_alone_and_without_a_job() -> None:
    """One process without a launcher gets back what it pushed."""
    script = (
        HEAD
        + """
bps.init()
x = mx.nd.ones((3,))
bps.byteps_push_pull(x, name="x", is_average=False)
print(x.asnumpy().sum(), bps.size())
"""
    )
    status, text, errors = alone(["-c", script])
    assert status == 0 and text.split() == ["3.0", "1"], errors


TWO_TRAINERS = (
    HEAD
    + """
import bpsx

bps.init()
weight = gluon.Parameter("shared", shape=(8,), init=mx.init.Zero())
weight.initialize()
params = {"compressor": "onebit", "ef": "vanilla"}
for given in ((None, None), (None, params), (params, params)):
    first, second = (
        bps.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0}, compression_params=p)
        for p in given
    )
    refusals = []
    for i, trainer in enumerate((first, second, second, first)):
        factor = mx.nd.ones((1200, 1200))
        # The exchange before the refusal begins before it on one worker, and later on the other.
        for _ in range(4 if i == 2 and bps.rank() == 0 else 0):
            factor = mx.nd.dot(factor, factor) / 1200
        if i == 3 and bps.rank() == 1:
            weight.data().wait_to_read()
        with autograd.record():
            loss = (weight.data() * factor[0, :8]).sum()
        loss.backward()
        try:
            trainer.step(1)
        except bpsx.ConfigError as e:
            refusals.append(str(e))
    report(refusals)
bps.shutdown()
"""
)


def test_trainers_of_one_parameter_do_not_share_the_state_of_compression() -> None:
    """The later one takes over; without compression they may take turns."""
    with Job(TWO_TRAINERS, workers=2, servers=1) as job:
        for without, one, both in job.results():
            assert without == [] and len(one) == len(both) == 1
            assert "the DistributedTrainer made at" in one[0] and "has taken over" in both[0]
