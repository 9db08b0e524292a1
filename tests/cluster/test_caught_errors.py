"""Scripts that catch errors and continue: they get right sums, or all workers get the error that
the job has to end.

Each worker writes the step's number into its own element of the pushed tensor. So a sum shows the
step of every worker's part, and a test detects pushes of different steps that meet.
"""

from __future__ import annotations

import random
import textwrap

import pytest

from support import optional
from support.jobs import Job, run

FAST = {"BPSX_DEADLOCK_SECONDS": "1.2", "BPSX_STALL_WARN_SECONDS": "0.2"}

_PROGRAM = """
    import signal, bpsx, numpy as np

    bpsx.init()
    rank, size = bpsx.rank(), bpsx.size()


    class Struck(Exception):
        pass


    def strike(number, frame):
        raise Struck


    signal.signal(signal.SIGALRM, strike)


    def mine(step, length=0):
        found = np.zeros(length or size, np.float32)
        found[rank % len(found)] = step + 1
        return found


    def begin(step, op):
        kind, name = op[0], op[1]
        if kind == "refuse":
            return bpsx.push_pull_async(np.array(["text"]), name)
        if kind == "broadcast":
            bpsx.broadcast(np.float32([step + 1.0 if rank == op[2] else -1]), op[2], name)
        if kind == "length":
            return bpsx.push_pull_async(mine(step, op[2]), name, average=False)
        return bpsx.push_pull_async(mine(step), name, average=kind == "average")


    joined = None
    for step, ops in enumerate(PROGRAM):
        handles = []
        try:
            for op in ops[rank]:
                if op[0] == "pause":
                    import time

                    time.sleep(op[1])
                elif op[0] == "join":
                    bpsx.join()
                elif op[0] == "strike":
                    signal.setitimer(signal.ITIMER_REAL, op[1])
                elif op[0] == "broadcast":
                    root = op[2]
                    got = bpsx.broadcast(
                        np.float32([step + 1.0 if rank == root else -1]), root, op[1]
                    )
                    report([step, op[1], got.tolist(), True])
                elif op[0] == "wait":
                    for name, handle in handles:
                        report([step, name, bpsx.synchronize(handle).tolist(), op[1:] or False])
                    handles = []
                else:
                    handles.append((op[1], begin(step, op)))
        except (bpsx.BpsxError, TypeError, Struck) as e:
            report([step, type(e).__name__, "the job has to end" in str(e), str(e)])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
"""


#: The same with PyTorch's tensors.
_WITH_TORCH = """
    import torch, bpsx.torch as bps


    def begin(step, op):
        kind, name = op[0], op[1]
        if kind == "refuse":
            wrong = [
                torch.ones(3, dtype=torch.bool),
                torch.ones(3, device="meta"),
                torch.ones(3).to_sparse(),
                "text",
            ]
            return bps.push_pull_async(wrong[step % 4], name=name)
        value = torch.from_numpy(mine(step, op[2] if kind == "length" else 0))
        return bps.push_pull_async_inplace(value, name=name, average=kind == "average")
"""


def program(seed: int, workers: int, steps: int = 9) -> list[list[list[list]]]:
    """Return the operations by step and worker. All but faulty steps are the same on all."""
    rng = random.Random(seed)
    names, fresh = ["a", "b", "c"], iter(range(1000))
    found = []
    for step in range(steps):
        fault = rng.choice(
            [
                "none",
                "none",
                "stall",
                "stall new",
                "mismatch",
                "operation",
                "strike",
                "refused by all",
                "join",
            ]
        )
        fault = "none" if step in (0, steps - 1, steps - 2) and rng.random() < 0.7 else fault
        common = [["push", name] for name in rng.sample(names, rng.randint(1, 3))]
        if rng.random() < 0.3:
            common.append(["broadcast", "root", rng.randrange(workers)])
        common = [
            op
            for one in common
            for op in ([one, ["wait"]] if rng.random() < 0.5 and one[0] == "push" else [one])
        ] + [["wait"]]
        each = [list(common) for _ in range(workers)]
        who = rng.randrange(workers)
        if fault.startswith("stall"):
            first, second = (
                ("a", "b") if fault == "stall" else (f"new {next(fresh)}", f"new {next(fresh)}")
            )
            each = [
                [
                    ["push", first if r == who else second],
                    *([["push", "c"]] if step % 2 else []),
                    ["wait"],
                ]
                for r in range(workers)
            ]
        elif fault == "mismatch":
            name = rng.choice(["a", f"new {next(fresh)}"])
            each = [[["length", name, 5 + (r == who)], ["wait"]] for r in range(workers)]
        elif fault == "operation":
            each = [[["average" if r == who else "push", "a"], ["wait"]] for r in range(workers)]
        elif fault == "strike":  # one worker is struck while it waits for another, which comes late
            late = (who + 1) % workers
            each = [
                [
                    *([["pause", 0.6]] if r == late else []),
                    ["push", "a"],
                    *([["strike", 0.3]] if r == who else []),
                    ["wait"],
                ]
                for r in range(workers)
            ]
        elif fault == "refused by all":
            each = [[["refuse", "b"], ["wait"]] for _ in range(workers)]
        elif fault == "join":
            each = [
                [["join"]] if r == who else [["push", "a"], ["wait", who], ["join"]]
                for r in range(workers)
            ]
        found.append(each)
    return found


def assert_sums_are_whole(reports: list[list], workers: int) -> bool:
    """Assert that every sum has all workers' parts of the same step.

    Returns whether a worker got the error that the job has to end.
    """
    ended = False
    for report in reports:
        step, what, found, extra = report
        if isinstance(found, bool):
            ended = ended or found
            continue
        assert not ended, f"a sum after the end: {report}"
        joiner = extra[0] if isinstance(extra, list) and extra else -1
        if extra is True:
            assert found == [step + 1.0], report
        else:
            assert found == [0.0 if r == joiner else step + 1.0 for r in range(workers)], report
    return ended


CASES = [
    (seed, workers, servers, processes)
    for seed, (workers, servers, processes) in enumerate(
        [(2, 1, 1), (3, 1, 1), (2, 0, 2), (3, 2, 1), (4, 1, 2), (2, 2, 1)]
    )
]


@pytest.mark.parametrize(("seed", "workers", "servers", "processes"), CASES)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_after_any_caught_error_sums_are_right(seed, workers, servers, processes, framework):
    """Programs in which all workers are at the same point when a call fails."""
    made = program(seed, workers)
    source = f"    PROGRAM = {made!r}\n" + _PROGRAM.replace(
        "    joined = None\n", _WITH_TORCH if framework == "torch" else ""
    )
    with Job(source, workers, servers, processes=processes, env=FAST) as job:
        found = job.results()
    for reports in found:
        assert not assert_sums_are_whole(reports, workers)
    assert all(reports and reports[-1][0] == len(made) - 1 for reports in found)


def test_after_a_stall_at_the_first_use_of_a_name_no_worker_is_a_step_behind():
    found = run(
        """
        import bpsx, numpy as np
        bpsx.init()
        rank, got = bpsx.rank(), []
        def step(i, name):
            try:
                got.append(float(bpsx.push_pull(np.float32([i]), name, average=False)[0]))
            except bpsx.StallError as e:
                got.append("stall")
        step(1, "ab"[rank])
        for i in (2, 3):
            step(i, "a")
        step(4, "ba"[rank])         # once more: the name still works
        for i in (5, 6):
            step(i, "a"), step(i, "b")
        report(got)
    """,
        env=FAST,
    )
    assert found == [[["stall", 4.0, 6.0, "stall", 10.0, 10.0, 12.0, 12.0]]] * 2


def test_no_sum_without_a_worker_that_catches_an_error_and_joins_overtakes_the_error():
    """The last worker's thread that handles the error is slow: a sum would come first."""
    found = run(
        """
        import bpsx, time, numpy as np
        from bpsx.session.liveness import Liveness

        def slowly(self, *failed):
            end = time.monotonic() + 1
            while not (begun and bpsx.poll(begun[0])) and time.monotonic() < end:
                time.sleep(0.01)
            fail(self, *failed)

        bpsx.init()
        rank, fail, begun = bpsx.rank(), Liveness._fail_declaration, []
        if rank == 2:
            Liveness._fail_declaration = slowly
        begun.append(bpsx.push_pull_async(np.ones(5 + (rank == 1), np.float32), "x"))
        try:
            report(bpsx.synchronize(begun[0]).tolist())
        except bpsx.MismatchError:
            report("mismatch")
        if rank != 1:
            report(bpsx.push_pull(np.ones(1, np.float32), "y", average=False).tolist())
        bpsx.join()
    """,
        workers=3,
        env=FAST,
    )
    assert found == [["mismatch", [2.0]], ["mismatch"], ["mismatch", [2.0]]]


_CAUGHT = """
import bpsx, time, numpy as np

bpsx.init()
rank, told = bpsx.rank(), []


def caught(act):
    try:
        found = act()
    except (bpsx.BpsxError, TypeError) as e:
        told.append(str(e))
        return str(e)
    assert found[0] in (2.0, 4.0, 6.0, 8.0) and not any("has to end" in text for text in told), (
        told,
        found,
    )
    return ""
"""

OUT_OF_STEP = {
    "one is refused": (
        """
        for step in range(4):
            value = np.array(["text"]) if rank == step == 0 else np.full(1, step + 1, np.float32)
            caught(lambda: bpsx.push_pull(value, "x", average=False))
    """
    ),
    "one is struck while it waits in vain": (
        """
        import signal
        class Struck(bpsx.BpsxError): pass
        def strike(number, frame): raise Struck
        signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, 0.5 if rank == 0 else 0)
        caught(lambda: bpsx.push_pull(np.ones(1, np.float32), "xy"[rank], average=False))
        for step in range(4):
            caught(lambda: bpsx.push_pull(np.full(1, step + 1, np.float32), "z", average=False))
    """
    ),
    "a mismatch of what is used twice": (
        """
        handles = [
            bpsx.push_pull_async(np.ones(4 + rank, np.float32), "x", average=False)
            for _ in range(2 - rank)
        ]
        for handle in handles:
            caught(lambda: bpsx.synchronize(handle))
        for step in range(4):
            caught(lambda: bpsx.push_pull(np.full(1, step + 1, np.float32), "x", average=False))
    """
    ),
    "a mismatch of what is used again before anybody has asked for the error": (
        """
        handles = [bpsx.push_pull_async(np.ones(4 + rank, np.float32), "x", average=False)]
        if rank == 0:
            while not bpsx.poll(handles[0]):
                time.sleep(0.01)
            handles.append(bpsx.push_pull_async(np.ones(4, np.float32), "x", average=False))
        for handle in handles:
            caught(lambda: bpsx.synchronize(handle))
        for step in range(4):
            caught(lambda: bpsx.push_pull(np.full(1, step + 1, np.float32), "x", average=False))
    """
    ),
    "another thread goes on": (
        """
        import threading, time


        def aside():
            for step in range(2000):
                if (
                    "the job has to end"
                    in caught(
                        lambda: bpsx.push_pull(np.ones(1, np.float32), "aside", average=False)
                    )
                    or over
                ):
                    break
                time.sleep(0.05)


        over = []
        thread = threading.Thread(target=aside)
        thread.start()
        caught(lambda: bpsx.push_pull(np.ones(1, np.float32), "xy"[rank], average=False))
        for step in range(4):
            caught(lambda: bpsx.push_pull(np.full(1, step + 1, np.float32), "z", average=False))
        over.append(1)
        thread.join()
        # The other thread may have recorded its earlier error last.
        caught(lambda: bpsx.push_pull(np.full(1, 2, np.float32), "z", average=False))
    """
    ),
    "one only polls, and the workers' own threads are slow": (
        """
        from bpsx.session.liveness import Liveness


        def slowly(act):
            return lambda *args: (time.sleep(0.5), act(*args))


        Liveness._doubt, Liveness._peer_lost = slowly(Liveness._doubt), slowly(Liveness._peer_lost)
        handle = bpsx.push_pull_async(np.ones(1, np.float32), "xy"[rank])
        while rank == 1 and not bpsx.poll(handle):
            time.sleep(0.01)
        caught(lambda: bpsx.synchronize(handle))
        assert caught(lambda: bpsx.push_pull(np.ones(1, np.float32), "z", average=False))
    """
    ),
    "one has begun more": (
        """
        if rank == 0:
            handles = [
                bpsx.push_pull_async(np.ones(1, np.float32), f"only here {i}") for i in range(300)
            ]
            caught(lambda: bpsx.synchronize(handles[0]))
        for step in range(4):
            caught(lambda: bpsx.push_pull(np.full(1, step + 1, np.float32), "x", average=False))
    """
    ),
}


#: Framework -> its imports, and by refused call: that call, which worker 0 makes in step 0 instead
#: of {good}, and {good}.
REFUSED = {
    "torch": (
        "import torch, bpsx.torch as bps",
        {
            "a dtype": (
                "bps.push_pull(torch.ones(1).bool(), average=False, name='x')",
                "bps.push_pull(one, average=False, name='x')",
            ),
            "a device": (
                "bps.push_pull(torch.ones(1, device='meta'), average=False, name='x')",
                "bps.push_pull(one, average=False, name='x')",
            ),
            "without a name": (
                "bps.push_pull(torch.ones(1).bool(), average=False)",
                "bps.push_pull(one, average=False)",
            ),
            "an argument": (
                "bps.push_pull(one, average=False, name='x', priority='high')",
                "bps.push_pull(one, average=False, name='x')",
            ),
            "a compressor": (
                "bps.push_pull(one, average=False, name='x', compression=5)",
                "bps.push_pull(one, average=False, name='x')",
            ),
            "shared elements": (
                "bps.push_pull_inplace(torch.ones(1).expand(3), average=False, name='x')",
                "bps.push_pull_inplace(one.repeat(3), average=False, name='x')",
            ),
            "rows": (
                "bps.all_gather(torch.tensor(1.0), name='x')",
                "bps.all_gather(one, name='x').sum(0, keepdim=True)",
            ),
            "Horovod's": (
                "hvd.allreduce(torch.ones(1).bool(), op=hvd.Sum, name='x')",
                "hvd.allreduce(one, op=hvd.Sum, name='x')",
            ),
            "one of a group": (
                "hvd.grouped_allreduce([one, torch.ones(1).bool(), one], op=hvd.Sum)[2]",
                "hvd.grouped_allreduce([one, one, one], op=hvd.Sum)[2]",
            ),
            "parameters": ("bps.broadcast_parameters([('x', 5)], 1)", "spread(one)"),
            "a gradient": ("gradient(torch.ones(1, device='meta'))", "gradient(one)"),
        },
    ),
    "tensorflow": (
        "import tensorflow as tf, bpsx.tensorflow as bps",
        {
            "a dtype": (
                "bps.push_pull(tf.constant(['text']), average=False, name='x')",
                "bps.push_pull(one, average=False, name='x')",
            ),
            "with a scope": (
                "bps.push_pull(tf.constant(['text']), 's/', average=False, name='x')",
                "bps.push_pull(one, 's/', average=False, name='x')",
            ),
            "a gradient of a tape": ("gradient(one, Odd)", "gradient(one, bps.Compression.none)"),
            "a gradient in Keras": ("applied(one, Odd)", "applied(one, bps.Compression.none)"),
            "variables": ("spread(one, 'text')", "spread(one)"),
            "Horovod's": (
                "hvd.allreduce(tf.constant(['text']), op=hvd.Sum, name='x')",
                "hvd.allreduce(one, op=hvd.Sum, name='x')",
            ),
            "one of a group": (
                "hvd.grouped_allreduce([one, tf.constant('text')], op=hvd.Sum, name='x')[0]",
                "hvd.grouped_allreduce([one, one], op=hvd.Sum, name='x')[0]",
            ),
            "Horovod's rows": (
                "hvd.allgather(tf.constant(1.0), name='x')",
                "tf.reduce_sum(hvd.allgather(one, name='x'), 0, keepdims=True)",
            ),
            "an object": (
                "hvd.broadcast_object(2 * one, 5, name='x')",
                "hvd.broadcast_object(2 * one, 1, name='x')",
            ),
        },
    ),
    "mxnet": (
        "import bpsx.mxnet as bps, mxnet as mx",
        {
            "a dtype": (
                "bps.byteps_push_pull(one.astype('bool'), name='x', is_average=False)",
                "summed(one)",
            ),
            "a gradient": ("updated(one, 'row_sparse')", "updated(one)"),
            "a Trainer's gradients": ("trained(one, 'text')", "trained(one)"),
            "parameters": ("spread(one, mx.nd.ones((1,)).tostype('row_sparse'))", "spread(one)"),
        },
    ),
}
_HELPERS = {
    "torch": (
        """
import bpsx.torch.horovod as hvd
from bpsx.torch.bucket import GradientInfo, push
def of(value): return torch.full((1,), value)
def spread(one):
    one = one * 2
    bps.broadcast_parameters([("x", one)], 1)
    return one
def gradient(one): return push(one, GradientInfo("Gradient.x", "gradient of 'x'", 0), False).wait()
"""
    ),
    "tensorflow": (
        """
import keras, bpsx.tensorflow.horovod as hvd


class Odd(bps.Compression.none):
    @staticmethod
    def compress(tensor):
        raise ValueError("no")


def of(value):
    return tf.fill([1], value)


variable, seen = tf.Variable([1.0], name="x"), keras.Variable([1.0], name="y")


def gradient(one, compression):
    with tf.GradientTape() as tape:
        loss = one * variable
    return bps.DistributedGradientTape(tape, op=bps.Sum, compression=compression).gradient(
        loss, variable
    )


def applied(one, compression):
    seen.assign([0.0])
    bps.DistributedOptimizer(keras.optimizers.SGD(-1.0), op=bps.Sum, compression=compression).apply(
        [one], [seen]
    )
    return seen.numpy()


def spread(one, *more):
    values = [tf.Variable(one * 2), *more]
    bps.broadcast_variables(values, 1)
    return values[0]
"""
    ),
    "mxnet": (
        """
def of(value): return mx.nd.full((1,), value)
def summed(one):
    bps.byteps_push_pull(one, name="x", is_average=False)
    return one.asnumpy()
weight = mx.gluon.Parameter("w", shape=(1,))
weight.initialize(mx.init.Zero())
optimizer = bps.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=-2.0))
trainer = bps.DistributedTrainer([weight], "sgd", {"learning_rate": -2.0})
def updated(one, stype="default"):
    x = mx.nd.zeros((1,))
    optimizer.update(0, x, one.tostype(stype), None)
    return x.asnumpy()
def trained(one, scale=1.0):
    weight.set_data(mx.nd.zeros((1,)))
    with mx.autograd.record():
        loss = weight.data() * one
    loss.backward()
    trainer._scale = scale
    trainer.step(1)
    return weight.data().asnumpy()
def spread(one, *more):
    one = one * 2
    bps.broadcast_parameters({"x": one, **{"z": z for z in more}}, 1)
    return one.asnumpy()
"""
    ),
}


@pytest.mark.parametrize(
    ("framework", "what"), [(f, what) for f, (_, cases) in REFUSED.items() for what in cases]
)
def test_an_argument_refused_on_one_worker_does_not_shift_later_calls(framework, what):
    if framework in optional.OPTIONAL and (why := optional.why_missing(framework)):
        pytest.skip(why)
    head, cases = REFUSED[framework]
    bad, good = cases[what]
    caught = _CAUGHT.replace("except (bpsx.BpsxError, TypeError)", "except Exception").replace(
        "found[0] in (2.0, 4.0, 6.0, 8.0)", "float(found[0]) == 2.0 * (step + 1)"
    )
    steps = f"""
for step in range(4):
    one = of(step + 1.0)
    caught((lambda: {bad}) if rank == step == 0 else lambda: {good})
report(any("has to end" in text or "no worker can continue" in text for text in told))
"""
    with Job(
        f"{caught}{head}\n{_HELPERS[framework]}\n{steps}",
        env={**FAST, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    ) as job:
        for worker in job.workers:
            worker.wait()
        assert [w.reports() for w in job.workers] == [[True], [True]], "\n".join(
            w.text() for w in job.workers
        )


@pytest.mark.parametrize("how", OUT_OF_STEP)
def test_workers_out_of_step_get_an_error_that_the_job_has_to_end(how):
    with Job(
        _CAUGHT + textwrap.dedent(OUT_OF_STEP[how]) + "report('the job has to end' in told[-1])",
        env=FAST,
    ) as job:
        for worker in job.workers:
            worker.wait()
        assert [w.reports() for w in job.workers] == [[True], [True]], job.workers[0].text()
