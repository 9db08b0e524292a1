"""Errors of bpsx.tensorflow when a process dies or calls are left unfinished."""

from __future__ import annotations

import signal

import pytest

from support.jobs import Job
from support.tensorflow_job import QUIET

_START = """
    import tensorflow as tf
    import bpsx.tensorflow as bps
    bps.init()
"""
_LOOP = (
    _START
    + """
    variables = [tf.Variable(tf.ones(1000), name=f"v{i}") for i in range(20)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v * x) for v in variables)
        for v, g in zip(variables, bps.DistributedGradientTape(tape).gradient(loss, variables)):
            v.assign_sub(g)
        return loss

    def eager(x):
        return step.python_function(x)

    run = step if os.environ["WAY"] == "traced" else eager
    run(tf.constant(1.0))
    report("running")
    try:
        while True:
            run(tf.constant(1.0))
    except tf.errors.OpError as e:
        report([type(e).__name__, e.message])
    try:
        run(tf.constant(1.0))
    except tf.errors.OpError as e:
        report(type(e).__name__)
    sys.exit(5)
"""
)
_FIT = (
    _START
    + """
    import keras
    import numpy as np
    import bpsx.keras


    class Say(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                report("running")


    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(
        bpsx.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)),
        "mse",
        jit_compile=os.environ["WAY"] == "compiled",
    )
    try:
        model.fit(np.ones((32, 4)), np.ones((32, 2)), epochs=10**6, verbose=0, callbacks=[Say()])
    except tf.errors.OpError as e:
        report([type(e).__name__, e.message])
    sys.exit(5)
"""
)
_LEFT = (
    _START
    + """
    import threading, time
    from bpsx.api.verbs import session

    def call():
        try:
            bps.push_pull(tf.ones(3), name="alone")
        except tf.errors.AbortedError as e:
            told.append(e.message)

    told = []
    thread = threading.Thread(target=call, daemon=True)
    bps.push_pull(tf.ones(3), name="together")
    if bps.rank() == 0:
        before = session().counters()["messages_sent"]
        thread.start()
        while session().counters()["messages_sent"] == before:
            time.sleep(0.001)
    report("under way")
    if bps.rank() == 0 and os.environ["WAY"] == "shutdown":
        bps.shutdown()
        thread.join()
        report(told)
    elif bps.rank() == 1:
        hear()
"""
)


@pytest.mark.parametrize("way", ["traced", "eager"])
@pytest.mark.parametrize("victim", ["server", "worker"])
def test_a_death_ends_the_training_loop_with_its_name(victim, way):
    env = {**QUIET, "WAY": way, "PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "5"}
    with Job(_LOOP, workers=2, servers=1, env=env) as job:
        for worker in job.workers:
            worker.wait_for_line("running")
        dead = job.servers[0] if victim == "server" else job.workers[1]
        dead.signal(signal.SIGKILL)
        for worker in [w for w in job.workers if w is not dead]:
            assert worker.wait() == 5, worker.text()
            _, (kind, text), again = worker.reports()
            assert kind == again == "AbortedError" and "PeerLostError" in text, text
            assert (
                f"{'server 0' if victim == 'server' else 'worker 1'} (127.0.0.1, pid"
                f" {dead.popen.pid})" in text
            )


@pytest.mark.parametrize("way", ["traced", "compiled"])
def test_a_dead_server_ends_fit_with_its_name(way):
    with Job(_FIT, workers=2, servers=1, env={**QUIET, "WAY": way}) as job:
        for worker in job.workers:
            worker.wait_for_line("running")
        dead = job.servers[0]
        dead.signal(signal.SIGKILL)
        for worker in job.workers:
            assert worker.wait() == 5, worker.text()
            kind, text = worker.reports()[-1]
            assert (
                kind == "AbortedError" and f"server 0 (127.0.0.1, pid {dead.popen.pid})" in text
            ), text


@pytest.mark.parametrize("way", ["shutdown", "exit"])
def test_a_call_under_way_does_not_keep_a_process_from_ending(way):
    with Job(
        _LEFT, workers=2, servers=1, env={**QUIET, "WAY": way, "BPSX_SHUTDOWN_TIMEOUT": "1"}
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("under way")
        job.workers[0].wait(60)
        if way == "shutdown":  # otherwise the calling thread ends during the interpreter's exit
            assert (
                "ShutdownError: bpsx was shut down while this operation was under way"
                in job.workers[0].reports()[-1][0]
            )
        job.workers[1].say("go")
        job.workers[1].wait(60)


_RESUMED = """
    import tensorflow as tf
    import bpsx.tensorflow as bps
    bps.init()
    v = tf.Variable([0.0, 0.0], name="v")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * x)
        gradient = bps.DistributedGradientTape(tape).gradient(loss, v)
        v.assign_sub(gradient)
        return gradient

    def run():
        return float(step(tf.constant(bps.rank() + 1.0))[0])

    if ELASTIC:
        report([run(), run()])
        bps.suspend()
        try:
            step(tf.constant(1.0))
        except tf.errors.FailedPreconditionError as e:
            report("suspended" if "NotInitializedError" in e.message else e.message)
        hear()
        bps.resume(3, 1, global_rank=RANK)
    bps.broadcast_variables([v], root_rank=0)
    report([run(), run(), v.numpy().tolist(), step.experimental_get_tracing_count()])
"""


def test_a_traced_function_works_in_a_job_of_another_size():
    def source(rank: int, elastic: bool) -> str:
        return _RESUMED.replace("ELASTIC", str(elastic)).replace("RANK", str(rank))

    with Job(
        "", workers=0, servers=1, env={**QUIET, "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
    ) as job:
        for rank in range(2):
            job.start_worker(rank, source(rank, True))
        for worker in job.workers:
            worker.wait_for_line("suspended")
        job.servers_anew(3)
        job.start_worker(2, source(2, False))
        for worker in job.workers[:2]:
            worker.say("go")
        for rank, worker in enumerate(job.workers):
            assert worker.wait() == 0, worker.text()
            assert worker.reports()[-1] == [2.0, 2.0, [-7.0, -7.0], 1]
            assert rank == 2 or worker.reports()[0] == [1.5, 1.5]


_INTERRUPTED = (
    _START
    + """
    import signal, threading
    import numpy as np
    from bpsx.tensorflow import op_library

    given, names = [tf.fill([64], 5.0) for _ in range(100)], [f"n{i}" for i in range(100)]
    stop, found = threading.Event(), {"well": 0, "interrupted": 0, "wrong": 0}

    def interrupt():
        while not stop.wait(0.003):
            os.kill(os.getpid(), signal.SIGINT)

    def raised(*_):
        global armed
        if armed:
            armed = False       # not again in the handler
            raise KeyboardInterrupt

    def call():
        global armed
        try:
            armed = True
            got = op_library.push_pull(given, -1.0, names, [0] * 100, False)
            armed = False
            found["well" if all((g.numpy() == 5.0).all() for g in got) else "wrong"] += 1
        except KeyboardInterrupt:
            found["interrupted"] += 1

    armed = False
    signal.signal(signal.SIGINT, raised)
    call()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    while found["interrupted"] < 100 or found["well"] < 100:
        call()
    stop.set()
    thread.join()
    report(found)
"""
)


def test_an_interrupted_call_never_returns_a_wrong_value():
    with Job(_INTERRUPTED, workers=1, servers=0, alone=True, env=QUIET) as job:
        ((found,),) = job.results()
        assert found["wrong"] == 0


_FORKED = (
    _START
    + """
    import warnings

    warnings.simplefilter("ignore")  # Python warns about forks with threads
    told = []
    for i in range(5):
        # no operation may run during the fork: TensorFlow does not survive that
        bps.push_pull(tf.ones(3), name="parent's")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                bps.push_pull(tf.ones(3), name="child's")
                os.write(write, b"went well")
            except BaseException as e:
                os.write(write, getattr(e, "message", str(e)).encode())
            os._exit(0)
        os.close(write)
        told.append(os.read(read, 4096).decode())
        os.close(read)
        os.waitpid(child, 0)
    report(["call init() in the child" in text for text in told])
"""
)


def test_calls_in_a_forked_child_raise():
    """The thread that starts calls exists only in the parent."""
    with Job(_FORKED, workers=1, servers=0, alone=True, env=QUIET) as job:
        assert job.results() == [[[True] * 5]]
