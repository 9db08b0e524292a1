"""Workers that get SIGTERM leave at a boundary, with status 0; the others go on without them."""

from __future__ import annotations

import random
import signal
import time

import pytest

from support.jobs import TRANSPORTS, Job

#: Each step adds 1 to each weight if all that count divide by the same number. A worker reports how
#: often each of its steps was summed, from a sum that nothing divides. All end in the same step, 20
#: steps after the test has told them to.
TRAINING = """
    import bpsx, time, zlib, numpy as np

    bpsx.init()
    {begin}

    @bpsx.elastic.run
    def train(state):
        report(["train", bpsx.rank(), bpsx.size(), state.step])
        while not state.last or state.step < state.last:
            state.weights += bpsx.push_pull(np.ones(1000), name="g", average=True)
            mine = np.array([1.0, told_to_end()])
            counted, told = bpsx.push_pull(mine, name="n", average=False).tolist()
            state.counted += counted
            state.step += 1
            state.last = state.last or (state.step + 20 if told else 0)
            {middle}
            report(["step", state.step, bpsx.size()])
            time.sleep(0.005)
            state.commit()

    state = bpsx.State(step=0, last=0, weights=np.zeros(1000), counted=0.0)
    state.register_departure_callbacks([
        {callback}
        lambda: report(["left", bpsx.rank(), bpsx.size(), state.step, state.counted])
    ])
    train(state)
    report(["end", bpsx.rank(), bpsx.size(), state.step, float(state.weights.sum()), state.counted])
    bpsx.shutdown()
"""
SHRINK = {"BPSX_ELASTIC": "shrink"}


class Departing(Job):
    """A job that runs :data:`TRAINING`."""

    def __init__(
        self, workers: int = 3, env=None, begin="", middle="", callback="", **more
    ) -> None:
        """``begin``, ``middle``, ``callback``: lines for its beginning, its steps and its list."""
        source = TRAINING.format(begin=begin, middle=middle, callback=callback)
        super().__init__(source, workers=workers, env={**SHRINK, **(env or {})}, **more)

    def ask(self, worker: int, step: int = 10) -> None:
        """Send SIGTERM to a worker after a step."""
        self.workers[worker].wait_for_line(f'["step", {step},')
        self.workers[worker].signal(signal.SIGTERM)

    def left(self, worker: int) -> list:
        """Await the good end of a worker that leaves; returns what its callback has reported."""
        assert self.workers[worker].wait() == 0, self.everything()
        return self.workers[worker].reports()[-1]

    def enters(self, newcomer: int) -> bool:
        """Await a newcomer's first step; returns False if it ends before."""
        try:
            self.workers[newcomer].wait_for_line('["step"')
        except AssertionError:
            if not self.workers[newcomer].silent:
                raise
            self.workers[newcomer].wait()  # its output ends before it does
            return False
        return True

    def end(self, *stayed: int) -> int:
        """End the training. No step is lost; returns how many these workers have made."""
        self.tell_to_end()
        workers = [self.workers[i] for i in stayed]
        assert [w.wait() for w in workers] == [0] * len(workers), self.everything()
        steps = int(workers[0].reports()[-1][3])
        expected = [len(workers), steps, 1000.0 * steps]
        assert [w.reports()[-1][2:5] for w in workers] == [expected] * len(workers)
        return steps

    def end_well(self, *left: int) -> None:
        """End the training when these have left: each worker's steps count until it has left."""
        last = [self.left(i) for i in left]
        assert {r[0] for r in last} <= {"left"}, last
        steps = self.end(*(i for i in range(len(self.workers)) if i not in left))
        stayed = [w for i, w in enumerate(self.workers) if i not in left]
        counted = len(stayed) * steps + sum(r[3] for r in last)
        assert [w.reports()[-1][5] for w in stayed] == [float(counted)] * len(stayed)
        assert sorted(w.reports()[-1][1] for w in stayed) == list(range(len(stayed)))
        assert self.scheduler.wait() == 0, self.everything()
        assert [s.wait() for s in self.servers] == [0] * len(self.servers), self.everything()

    def everything(self) -> str:
        return "\n".join(p.text()[-3000:] for p in self.processes)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_worker_leaves(transport, servers, leaver):
    env = {**TRANSPORTS[transport], "PS_HEARTBEAT_TIMEOUT": "1000"}
    with Departing(env=env, servers=servers) as job:
        job.ask(leaver)
        assert job.left(leaver)[:3] == ["left", leaver, 3]
        job.end_well(leaver)
        log = job.scheduler.text()
        assert f"worker {leaver} (127.0.0.1, pid" in log and "leaves the job: SIGTERM" in log
        (line,) = [x for x in job.scheduler.errors if "which has left in good order" in x]
        assert "push 0 bytes again" in line
        assert float(line.split("again, ")[1].split(" s ")[0]) < 1.0


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_workers_leave_one_after_the_other(transport):
    """The last one ends the job, and calls its callbacks as the others do."""
    with Departing(env=TRANSPORTS[transport], servers=2) as job:
        for worker, step in ((1, 5), (0, 20), (2, 40)):
            job.ask(worker, step)
            assert job.left(worker)[0] == "left"
        assert [job.left(i)[1:3] for i in range(3)] == [[0, 2], [1, 3], [0, 1]]
        assert job.scheduler.wait() == 0, job.everything()
        assert [s.wait() for s in job.servers] == [0, 0], job.everything()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_two_workers_leave_at_once(transport):
    with Departing(4, env=TRANSPORTS[transport], servers=2) as job:
        job.workers[0].wait_for_line('["step", 10,')
        leavers = random.sample(range(4), 2)
        for worker in leavers:
            job.workers[worker].signal(signal.SIGTERM)
        job.end_well(*leavers)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_all_workers_leave_at_once(transport):
    """As on a pool of spot machines that is taken away: the job ends well."""
    with Departing(env=TRANSPORTS[transport], servers=2) as job:
        for worker in job.workers:
            worker.wait_for_line('["step", 10,')
        for worker in job.workers:
            worker.signal(signal.SIGTERM)
        last = [job.left(i) for i in range(3)]
        assert {r[0] for r in last} == {"left"}
        # Whoever leaves last has made all steps that were made.
        assert sum(r[3] for r in last) == max(r[4] for r in last)
        assert job.scheduler.wait() == 0, job.everything()
        assert [s.wait() for s in job.servers] == [0, 0], job.everything()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_worker_and_a_server_leave_at_once(transport):
    with Departing(env=TRANSPORTS[transport], servers=2) as job:
        job.workers[1].wait_for_line('["step", 10,')
        for process in random.sample([job.servers[0], job.workers[1]], 2):
            process.signal(signal.SIGTERM)
        assert job.servers[0].wait() == 0
        assert "other servers take the keys over" in job.servers[0].text()
        job.end_well(1)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_worker_is_killed_before_it_comes_to_its_boundary(transport):
    with Departing(3, env=TRANSPORTS[transport], servers=2) as job:
        job.workers[2].wait_for_line('["step", 10,')
        job.workers[2].signal(signal.SIGSTOP)
        job.workers[2].signal(signal.SIGTERM)
        job.workers[2].signal(signal.SIGKILL)
        job.end(0, 1)
        assert "leaves the job" not in job.scheduler.text()


def test_a_worker_is_killed_at_any_moment_after_sigterm():
    for _ in range(6):
        with Departing(3) as job:
            job.ask(2)
            time.sleep(random.random() * 0.02)
            job.workers[2].signal(signal.SIGKILL)
            job.end(0, 1)


@pytest.mark.parametrize("moment", ["before", "while", "after"])
def test_the_scheduler_dies(moment):
    with Departing(3, servers=2) as job:
        job.workers[0].wait_for_line('["step", 10,')
        port = int(job.port)
        if moment != "before":
            job.workers[1].signal(signal.SIGTERM)
        if moment == "while":
            time.sleep(random.random() * 0.015)
        if moment == "after":
            job.left(1)
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        if moment == "before":
            job.workers[1].signal(signal.SIGTERM)
            job.workers[1].wait_for_line("got SIGTERM")
        job.start_scheduler(port)
        job.end_well(1)


def test_another_takes_the_place_in_the_same_meeting():
    with Departing(3, servers=2) as job:
        job.workers[1].wait_for_line('["step", 10,')
        job.start_worker(1)
        job.scheduler.wait_for_line("wants to join the job while it runs")
        job.workers[1].signal(signal.SIGTERM)
        job.left(1)
        job.end(0, 2, 3)
        sizes = {r[2] for r in job.workers[0].reports() if r[0] == "step"}
        assert sizes == {3}, "no step was made without it"


def test_the_oldest_worker_leaves_while_another_joins():
    """It alone has the model until the other one has made a step."""
    with Departing(2, servers=2) as job:
        job.workers[0].wait_for_line('["step", 10,')
        job.workers[1].signal(signal.SIGKILL)
        job.scheduler.wait_for_line("workers go on without")
        job.start_worker(1)
        job.scheduler.wait_for_line("wants to join the job while it runs")
        job.workers[0].signal(signal.SIGTERM)
        assert job.left(0)[0] == "left"
        job.end(2)
        assert job.workers[2].reports()[-1][1] == 0


def test_with_replace_the_others_wait():
    env = {"BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "60"}
    with Departing(3, env=env, servers=2) as job:
        job.ask(1)
        job.left(1)
        job.scheduler.wait_for_line("all workers have stopped, and wait for another in the place")
        job.start_worker(1)
        job.end(0, 2, 3)
        assert {r[2] for r in job.workers[0].reports() if r[0] == "step"} == {3}


def test_with_replace_all_that_wait_leave_and_the_job_ends_well():
    env = {"BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "60"}
    with Departing(2, env=env) as job:
        job.ask(1)
        job.left(1)
        job.scheduler.wait_for_line("all workers have stopped, and wait for another in the place")
        job.workers[0].signal(signal.SIGTERM)
        assert job.left(0)[:3] == ["left", 0, 2]
        assert job.scheduler.wait() == 0, job.everything()


COMPRESSED = """
    import bpsx, zlib, time, numpy as np
    from bpsx.api.lifecycle import session
    from bpsx.compression.spec import compression

    bpsx.init()
    spec = {{"compressor": {codec!r}, "k": 600, "ef": "vanilla", "seed": 3}}
    if {codec!r} == "onebit":
        spec = {{"compressor": "onebit", "scaling": True, "ef": "vanilla"}}
    session().declare("g", compression(spec))
    draw = np.random.default_rng(session().number)

    @bpsx.elastic.run
    def train(state):
        while not state.last or state.step < state.last:
            gradient = draw.standard_normal(60_000).astype(np.float32)
            state.weights += bpsx.push_pull(gradient, name="g", average=True)
            told = bpsx.push_pull(np.full(1, told_to_end(), np.float32), name="told")
            state.step += 1
            state.last = state.last or (state.step + 20 if told[0] else 0)
            report(["step", state.step, zlib.crc32(state.weights.tobytes())])
            time.sleep(0.003)
            state.commit()

    train(bpsx.State(step=0, last=0, weights=np.zeros(60_000, np.float32)))
    bpsx.shutdown()
"""


@pytest.mark.parametrize("codec", ["onebit", "topk", "randomk"])
def test_a_worker_leaves_and_a_server_dies_with_compression(codec):
    env = {**SHRINK, "BYTEPS_MIN_COMPRESS_BYTES": "0", "BYTEPS_PARTITION_BYTES": "65536"}
    with Job(COMPRESSED.format(codec=codec), workers=3, servers=2, env=env) as job:
        job.workers[1].wait_for_line('["step", 30')
        job.workers[1].signal(signal.SIGTERM)
        assert job.workers[1].wait() == 0, job.workers[1].text()[-2000:]
        job.servers[0].signal(signal.SIGKILL)
        job.tell_to_end()
        everything = "\n".join(p.text()[-1500:] for p in job.processes)
        assert [job.workers[i].wait() for i in (0, 2)] == [0, 0], everything
        first, left, second = (w.reports() for w in job.workers)
        assert first == second and len(first) == first[-1][1] >= len(left)
        assert left == first[: len(left)], "weights differ in some step"
        assert "starts from zero" not in job.servers[1].text()


# ---- the signal


def stuck(env: dict[str, str] | None = None, then: str = "pass", **more: str) -> Departing:
    """A job whose worker 1 stays in a step until it hears a line. ``then``: what it does next."""
    first = "if state.step == 10 and os.environ['DMLC_WORKER_ID'] == '1': report('stuck'); hear();"
    first += then
    return Departing(2, env=env, middle=first, **more)


def go_on(job: Departing) -> None:
    """Send SIGTERM to the worker that is stuck, and let it go on."""
    job.workers[1].wait_for_line('"stuck"')
    job.workers[1].signal(signal.SIGTERM)
    job.workers[1].wait_for_line("got SIGTERM: it leaves the job at its next commit()")
    job.workers[1].say("")


def test_a_worker_leaves_at_its_first_boundary():
    hold = "if state.step == 1 and os.environ['DMLC_WORKER_ID'] == '1': report('stuck'); hear()"
    with Departing(2, middle=hold) as job:
        go_on(job)
        assert job.left(1)[3] in (1, 2), "the other one may be at its second boundary"
        job.end_well(1)


RAW = """
    import bpsx, numpy as np
    from bpsx.api.lifecycle import session

    bpsx.init()
    for step in range(1, 61):
        counted = bpsx.push_pull(np.ones(3), name="g", average=False)[0]
        if step == 10 and bpsx.rank() == 1 and bpsx.size() == 3:
            session().leave("because")
        change = session().pass_boundary()
        report([step, counted, list(change.leaving), list(change.lost), change.left])
        if change.left:
            break
    bpsx.shutdown()
"""


def test_a_script_with_boundaries_of_its_own_makes_one_more_step():
    with Job(RAW, workers=3, env=SHRINK) as job:
        first, left, second = job.results()
    assert first == second and len(first) == 60
    (announced,) = [r[0] for r in first if r[2]]
    assert first[announced - 1][2] == [1] and first[announced][3] == [1]
    assert left == [*first[:announced], [announced + 1, 3.0, [], [], True]]
    assert [r[1] for r in first] == [3.0] * (announced + 1) + [2.0] * (60 - announced - 1)


def test_two_signals_within_a_second_are_one():
    """Batch systems send it to all processes, and bpsx-run passes it on."""
    with stuck() as job:
        job.workers[1].wait_for_line('"stuck"')
        for _ in range(3):
            job.workers[1].signal(signal.SIGTERM)
            time.sleep(0.1)
        job.workers[1].say("")
        job.end_well(1)


@pytest.mark.parametrize("way", ["second", "grace"])
def test_a_worker_that_does_not_come_to_a_boundary_ends(way):
    """With a second signal, or when its time is over; it is a death."""
    with stuck({"BPSX_TERM_GRACE": "0.7" if way == "grace" else "60"}) as job:
        job.workers[1].wait_for_line('"stuck"')
        job.workers[1].signal(signal.SIGTERM)
        job.workers[1].wait_for_line("got SIGTERM: it leaves the job at its next commit()")
        if way == "second":
            time.sleep(1.1)
            job.workers[1].signal(signal.SIGTERM)
        assert job.workers[1].wait() == -signal.SIGTERM
        job.end(0)
        assert "leaves the job: SIGTERM" not in job.scheduler.text()


def test_a_worker_that_handles_no_signals_any_more_ends():
    """Its main thread hangs in code that is not Python's."""
    begin = (
        "import ctypes; lock, mutex = ctypes.CDLL(None).pthread_mutex_lock,"
        " ctypes.create_string_buffer(64)"
    )
    with stuck({"BPSX_TERM_GRACE": "5"}, then="lock(mutex); lock(mutex)", begin=begin) as job:
        go_on(job)
        assert job.workers[1].wait() == 128 + signal.SIGTERM
        job.end(0)


def test_the_time_is_over_only_for_one_that_has_not_left():
    """A callback may take longer, as to save a checkpoint."""
    with stuck({"BPSX_TERM_GRACE": "5"}, callback="lambda: time.sleep(5.5),") as job:
        go_on(job)
        job.end_well(1)


def test_a_handler_of_the_script_stays():
    begin = "import signal; signal.signal(signal.SIGTERM, lambda *_: report('own'))"
    with stuck(begin=begin) as job:
        job.workers[1].wait_for_line('"stuck"')
        job.workers[1].signal(signal.SIGTERM)
        job.workers[1].wait_for_line('"own"')
        job.workers[1].say("")
        job.end_well()


@pytest.mark.parametrize("thread", [False, True])
def test_a_script_asks_by_itself(thread):
    """In a handler of its own, or in any thread."""
    call = (
        "threading.Thread(target=bpsx.elastic.leave).start()" if thread else "bpsx.elastic.leave()"
    )
    begin = f"import signal, threading; signal.signal(signal.SIGTERM, lambda *_: {call})"
    with stuck(begin=begin) as job:
        job.workers[1].wait_for_line('"stuck"')
        job.workers[1].signal(signal.SIGTERM)
        job.scheduler.wait_for_line("wants to leave the job: its script has asked for it")
        job.workers[1].say("")
        job.end_well(1)


AFTER = """
    import signal

    def after():
        report(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        for call in (lambda: bpsx.push_pull(np.ones(3), name="g"), bpsx.join, bpsx.barrier):
            try:
                call()
            except bpsx.errors.JoinedError as e:
                report(str(e))
        try:
            bpsx.elastic.leave()
        except bpsx.ConfigError as e:
            report(str(e))
"""


def test_nothing_can_be_exchanged_after_that_and_the_handler_is_put_back():
    with stuck(begin=AFTER.lstrip(), callback="after,") as job:
        go_on(job)
        job.end_well(1)
        restored, *halted, asks, _ = job.workers[1].reports()[-6:]
        assert restored is True
        assert all("this worker has left the job" in text for text in halted), halted
        assert "the job does not go on without this worker, as it has ended" in asks


def test_sigterm_before_the_training_begins_is_a_death():
    with Departing(2, middle="if state.step == 30: hear()") as job:
        for worker in job.workers:
            worker.wait_for_line('["step", 29,')
        job.start_worker(1)
        job.scheduler.wait_for_line("wants to join the job while it runs")
        job.workers[2].signal(signal.SIGTERM)
        assert job.workers[2].wait() == -signal.SIGTERM
        job.scheduler.wait_for_line("does not join the running job")
        for worker in job.workers[:2]:
            worker.say("")
        job.end(0, 1)


@pytest.mark.parametrize("elastic", ["servers", "shrink"])
def test_a_worker_alone_leaves_too(elastic):
    with Departing(1, env={"BPSX_ELASTIC": elastic}, alone=True, servers=0) as job:
        job.ask(0)
        if elastic == "servers":
            assert job.workers[0].wait() == -signal.SIGTERM, "as without elastic training"
        else:
            assert job.left(0)[:3] == ["left", 0, 1]


def test_timelines_are_written_all_the_same(tmp_path):
    """A second signal is for the handler that was there before."""
    env = {
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_DIR": str(tmp_path),
        "BYTEPS_TRACE_END_STEP": "999",
    }
    with stuck(env) as job:
        job.workers[1].wait_for_line('"stuck"')
        job.workers[1].signal(signal.SIGTERM)
        job.workers[1].wait_for_line("got SIGTERM")
        time.sleep(1.1)
        job.workers[1].signal(signal.SIGTERM)
        assert job.workers[1].wait() == -signal.SIGTERM
        job.end(0)
    assert len(list(tmp_path.rglob("*.json"))) >= 2, sorted(tmp_path.rglob("*"))


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("turn", range(3))
def test_workers_leave_die_and_come_at_random(transport, turn):
    """Perhaps the scheduler dies, too. Who was asked to leave does; no step is lost."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Departing(4, env=TRANSPORTS[transport], servers=2) as job:
        job.workers[0].wait_for_line('["step", 10,')
        leavers = rng.sample(range(4), rng.choice([1, 2]))
        killed = rng.sample([w for w in range(4) if w not in leavers], rng.choice([0, 1]))
        acts = [(job.workers[w].signal, signal.SIGTERM) for w in leavers]
        acts += [(job.workers[w].signal, signal.SIGKILL) for w in killed]
        acts += [(job.start_worker, w) for w in leavers + killed if rng.random() < 0.6]
        rng.shuffle(acts)
        for act, about in acts:
            time.sleep(rng.choice([0, rng.random() * 0.03, rng.random() * 0.3]))
            act(about)
        if turn == 2:
            time.sleep(0.3)  # what too few workers have heard of would end the job
            job.scheduler.signal(signal.SIGKILL)
            job.scheduler.wait()
            job.start_scheduler(int(job.port))
            for i in set(range(4)) - {*leavers, *killed}:
                job.workers[i].wait_for_line("is back")
        for i in leavers:
            job.left(i)
        refused = [i for i in range(4, len(job.workers)) if not job.enters(i)]
        for i in refused:  # a newcomer that the dead scheduler had not let in yet
            assert turn == 2 and job.workers[i].wait() != 0, job.everything()
            assert "RendezvousError" in job.workers[i].text(), job.everything()
        gone = leavers + killed + refused
        job.end(*(i for i in range(len(job.workers)) if i not in gone))
