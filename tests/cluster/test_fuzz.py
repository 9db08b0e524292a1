"""A running job among mutated messages: sums stay right, no process dies, and memory does not grow.

``--fuzz N`` sends N messages; ``make fuzz`` sends ten million.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import zmq

from bpsx.config import Config
from bpsx.scheduler.sockets import open_socket
from support.jobs import Job

ROUNDS = 50
# Two workers check each of their sums; the third takes part and sends malformed messages.
_WORK = """
    sys.path.insert(0, {root!r})
    if os.environ["DMLC_WORKER_ID"] == "2":
        from bench.fuzz import attack
        report("joining")
        report(attack({messages}, {rounds}, {seed}))
    else:
        import bpsx, numpy as np
        bpsx.init()
        report("running")
        for i in range({rounds} + 1):
            ours = np.full(16, bpsx.rank() + i + 1, np.float32)
            out = bpsx.push_pull(ours, name="fuzzed", average=False)
            assert (out == 3 * (i + 1) + 3).all(), (i, out)
            if i in ({rounds} // 3, {rounds} - 1):
                report(i)
"""


def memory(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.timeout(600)
def test_mutated_messages_to_a_live_server(request):
    messages, seed = request.config.getoption("--fuzz"), random.randrange(2**32)
    print(f"seed {seed}")
    work = _WORK.format(
        root=str(Path(__file__).parents[2]), messages=messages, rounds=ROUNDS, seed=seed
    )
    env = {"BPSX_SECRET": "the fuzzer knows it, too", "BYTEPS_SERVER_ENGINE_THREAD": "1"}
    env["DMLC_ENABLE_RDMA"] = "zmq"  # the messages are sent through ZeroMQ
    with Job(work, workers=3, env=env) as job:
        job.workers[0].wait_for_line(str(ROUNDS // 3), 500)
        before = memory(job.servers[0].popen.pid)
        job.workers[0].wait_for_line(str(ROUNDS - 1), 500)
        after = memory(job.servers[0].popen.pid) if job.servers[0].popen.poll() is None else before
        (found,) = [r for r in job.results(120)[2] if isinstance(r, dict)]
        counted = sum(
            map(int, re.search(r"malformed (\d+), repeated (\d+)", job.servers[0].text()).groups())
        )
    print(f"{found['per_second']:,.0f} messages/s, grown by {after - before} bytes")
    assert found["sent"] == messages // ROUNDS * ROUNDS
    assert after - before < 24 << 20, f"the server has grown by {after - before} bytes; seed {seed}"
    assert counted == found["sent"] - found["uncounted"], f"seed {seed}"


def _nonsense(rng: random.Random) -> bytes:
    """Return a random control message with invalid fields."""
    message = {
        "type": rng.choice(["HELLO", "DECLARE", "WAITING", "BYE", "LOST", "", "END"]),
        "protocol": rng.choice([2, -1, 2**70, "x"]),
        "role": rng.choice(["worker", "server", "boss", 7]),
        "rank": rng.choice([0, 1, -5, 2**40, None]),
        "host": "h" * rng.choice([1, 9, 70_000]),
        "pid": rng.choice([1, "1"]),
        "lanes": rng.choice([[], ["x"] * 9, [[]], {}]),
        "config": rng.choice([{}, {"BPSX_ENCRYPT": []}, 5]),
        "name": rng.choice(["x", "", "n" * 5000, 7]),
        "generation": rng.choice([0, 2**33, -1]),
        "nbytes": rng.choice([4, 2**62, 1e9, "4"]),
        "dtype": rng.choice([3, 77, 300]),
        "shape": rng.choice([[1], [-1], [[1]], [2**61] * 64]),
        "failure": rng.choice(["", "x", 3]),
        "tensors": rng.choice([[], [["x", 0, 0, 1e300]], [[]] * 5000]),
        "more": rng.choice([True, 0]),
    }
    text = bytearray(json.dumps({k: v for k, v in message.items() if rng.random() < 0.9}).encode())
    for _ in range(rng.choice([0, 0, 1, 20])):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text[: rng.randrange(len(text))] if rng.random() < 0.2 else text)


def test_mutated_messages_to_a_live_scheduler():
    """The sender knows the secret, but is not a member of the job."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, env = random.Random(seed), {"BPSX_SECRET": "the fuzzer knows it, too"}
    work = """
        import bpsx, numpy as np

        bpsx.init()
        report("running")
        stop = 0.0
        while not stop:  # until the test has sent everything
            mine = (
                1.0
                if bpsx.rank() == 0
                and sys.stdin in __import__("select").select([sys.stdin], [], [], 0.01)[0]
                else 0.0
            )
            stop = float(bpsx.push_pull(np.full(1, mine), name="stop", average=False)[0])
            assert float(bpsx.push_pull(np.ones(1), name="x", average=False)[0]) == 2
        report("right")
    """
    with Job(work, env=env) as job:
        for worker in job.workers:
            worker.wait_for_line("running")
        context = zmq.Context()
        s = open_socket(context, zmq.DEALER, Config(env))
        s.setsockopt(zmq.RCVTIMEO, 60_000)
        s.connect(f"tcp://127.0.0.1:{job.port}")
        before = 0
        for i in range(10_000):
            s.send(_nonsense(rng))
            if i % 100 == 99:  # unread messages use memory, too
                s.send_json(
                    {
                        "type": "HELLO",
                        "protocol": 0,
                        "role": "worker",
                        "rank": i,
                        "host": "mark",
                        "pid": i,
                        "lanes": [],
                        "config": {},
                    }
                )
                while b"protocol version 0," not in s.recv():
                    pass
            if i == 5099:
                before = memory(job.scheduler.popen.pid)
        after = memory(job.scheduler.popen.pid)
        context.destroy(0)
        job.workers[0].say("stop")
        assert [r[-1] for r in job.results()] == ["right", "right"]
    assert after - before < 24 << 20, f"the scheduler has grown by {after - before} bytes"
