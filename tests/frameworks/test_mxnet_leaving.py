"""The end of a job or process, and forks: exchanges queued in MXNet's engine are finished, and
errors are reported.
"""

from __future__ import annotations

import re
import signal
import sys

import pytest

from frameworks.mxnet_scripts import HEAD, run
from support.jobs import Job
from support.running import launch

pytestmark = pytest.mark.timeout(180)
LATE = """
bps.init()
x = mx.nd.ones((1500, 1500))
if bps.rank() == 1:
    for _ in range(4):
        x = mx.nd.dot(x, x) / 1500
"""


@pytest.mark.parametrize(
    "end", ["bps.shutdown()", "bps.suspend()", ""], ids=["shutdown", "suspend", "the script's end"]
)
def test_queued_exchanges_are_finished_before_the_end(end: str) -> None:
    """Worker 0's script ends with an exchange still queued; worker 1 waits for its result."""
    status, told, output = run(
        LATE
        + """
bps.byteps_push_pull(x, name="late", is_average=False)
if bps.rank() == 0:
    print(x.asnumpy().mean())
"""
        + end
    )
    assert status == 0 and "Error" not in output and told[0] == ["2.0"], output[-2000:]


def test_join_first_finishes_queued_exchanges() -> None:
    status, told, output = run(
        LATE
        + """
y = mx.nd.ones((1,))
for _ in range(3 - bps.rank()):
    bps.byteps_push_pull(x, name="late")
    bps.byteps_push_pull(y, name="early", is_average=False)
last = bps.join()
print(x[0, 0].asscalar(), y.asscalar(), last)
bps.broadcast_parameters({"y": y}, root_rank=last)
print(y.asscalar())
"""
    )
    # With both workers: 1, 2, 4. Then worker 0 continues alone: half for the average, and its own
    # value for the sum.
    assert status == 0 and told == {0: ["0.5 4.0 0", "4.0"], 1: ["1.0 4.0 0", "4.0"]}, output[
        -2000:
    ]


def test_an_operation_without_its_peer_does_not_delay_the_end() -> None:
    _, _, output = run(
        """
bps.init()
x = mx.nd.ones((3,))
rank = bps.rank()
if rank == 0:
    bps.byteps_push_pull(x, name="alone")
bps.shutdown()
if rank == 0:
    try:
        x.asnumpy()
    except mx.MXNetError as e:
        print("told:", str(e).splitlines()[0])
""",
        BPSX_SHUTDOWN_TIMEOUT="5",
    )
    assert "told: " in output and "PeerLeftError" in output, output[-2000:]


UNHEARD = r"exit status 1, because an exchange has failed.*: MismatchError: .*'x'"


@pytest.mark.parametrize(
    "later",
    ["", "bps.shutdown()\nalone()", "bps.shutdown()\nalone()\nbps.shutdown()"],
    ids=["at the end", "in the job before", "two jobs"],
)
def test_an_error_of_each_job_is_reported_once(later: str) -> None:
    """Also if init() was called before bpsx.mxnet was imported."""
    status, output = launch(
        [
            sys.executable,
            "-c",
            """
import os
import bpsx

bpsx.init()
import bpsx.mxnet as bps, mxnet as mx


def alone():
    for key in list(os.environ):
        # no variable names the other workers
        if key.startswith(("DMLC_", "BYTEPS_")) or key in ("RANK", "WORLD_SIZE"):
            del os.environ[key]
    bps.init()
    x = mx.nd.ones((3,))
    bps.byteps_push_pull(x, name="x")
    print("alone", x.asnumpy().tolist())


bps.byteps_push_pull(mx.nd.ones((3 + bps.rank(),)), name="x")
"""
            + later,
        ],
        2,
        1,
        # A busy machine may need long to import MXNet in the other worker.
        BPSX_SHUTDOWN_TIMEOUT="60",
    )
    assert status == 1 and len(re.findall(UNHEARD, output)) == 2, output[-2000:]
    assert output.count("alone [1.0, 1.0, 1.0]") == (2 if later else 0), output[-2000:]


def test_an_error_is_reported_after_one_of_an_earlier_job_was() -> None:
    with Job(
        HEAD
        + """
bps.init()
bps.barrier()
x = mx.nd.ones((3,))
try:
    while True:
        bps.byteps_push_pull(x, name="x")
        x.wait_to_read()
        report("going")
except (bpsx.BpsxError, mx.MXNetError):
    pass
try:
    while True:
        bps.byteps_push_pull(mx.nd.ones((3,)), name="y")
except bpsx.PeerLostError:
    bps.shutdown()
for key in list(os.environ):
    if key.startswith(("DMLC_", "BYTEPS_")):
        del os.environ[key]
bps.init()
bps.byteps_declare_tensor("z", compressor="topk", k=1, ef="corrected")
bps.byteps_push_pull(mx.nd.ones((1 << 20,)), name="z")      # without a learning rate
""",
        workers=1,
        servers=1,
        env={"BYTEPS_FORCE_DISTRIBUTED": "1"},
    ) as job:
        job.workers[0].wait_for_line("going")
        job.servers[0].signal(signal.SIGKILL)
        assert job.workers[0].wait() == 1
        assert re.search(
            r"exit status 1, because an exchange has failed.*: ConfigError: 'z'",
            job.workers[0].text(),
        )


def test_ctrl_c_while_a_fork_waits_is_raised_after_it() -> None:
    """Python only prints an exception that is raised in a before-fork hook, and continues."""
    with Job(
        HEAD
        + """
from bpsx.api import lifecycle
bps.init()
bps.barrier()
x = mx.nd.ones((3,))
if bps.rank() == 1:
    hear()
    bps.byteps_push_pull(x, name="x")
else:
    bps.byteps_push_pull(x, name="x")
    wait = lifecycle._engines[0]
    def waits(seconds):
        report("waits")
        return wait(seconds)
    lifecycle._engines[0] = waits
    parent = os.getpid()
    try:
        os.fork()
    except KeyboardInterrupt:
        report("raised")
    if os.getpid() != parent:
        os._exit(0)
    lifecycle._engines[0] = wait
""",
        workers=2,
        servers=1,
    ) as job:
        forks, other = job.workers
        forks.wait_for_line("waits")
        forks.signal(signal.SIGINT)
        other.say("go")
        assert forks.wait() == 0 and forks.reports()[-1] == "raised", forks.text()
        assert "ignored" not in forks.text()


def test_an_error_without_a_wait_is_not_status_0() -> None:
    status, _, output = run("""
bps.init()
bps.byteps_push_pull(mx.nd.ones((3 + bps.rank(),)), name="x")
bps.barrier()
""")
    assert status == 1 and re.search(UNHEARD, output), output[-2000:]


def test_the_scripts_own_exit_status_is_kept() -> None:
    status, _, output = run("""
bps.init()
bps.byteps_push_pull(mx.nd.ones((3 + bps.rank(),)), name="x")
bps.barrier()
sys.exit(3)
""")
    assert status == 3 and re.search(UNHEARD, output), output[-2000:]


def test_ctrl_c_while_the_end_waits_for_the_engine() -> None:
    """The other workers learn of it, and no process exits with status 0."""
    with Job(
        HEAD
        + """
import threading
from bpsx.api import lifecycle
bps.init()
bps.barrier()
if bps.rank() == 1:
    hear()
else:
    bps.byteps_push_pull(mx.nd.ones((3,)), name="alone")
    wait = lifecycle._engines[0]
    def waits(seconds):
        report("waits")
        return wait(seconds)
    lifecycle._engines[0] = waits
""",
        workers=2,
        servers=1,
    ) as job:
        ends, other = job.workers
        ends.wait_for_line("waits")
        ends.signal(signal.SIGINT)
        assert ends.wait() == 130 and "exit status" not in ends.text()
        other.say("go")
        assert other.wait() == 1 and "KeyboardInterrupt" in other.text()


def test_a_caught_error_has_no_later_effect() -> None:
    status, told, output = run("""
bps.init()
x = mx.nd.ones((3 + bps.rank(),))
bps.byteps_push_pull(x, name="x")
try:
    x.asnumpy()
except mx.MXNetError:
    print("caught")
""")
    assert status == 0 and told == {0: ["caught"], 1: ["caught"]}, output[-2000:]
