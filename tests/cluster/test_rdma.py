"""Whole jobs over RDMA, with an adapter and without one.

tests/machine has an emulated machine with an adapter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from bpsx.errors import TransportError
from bpsx.transports.rdma import gid
from cluster.test_failures import _STEPPING, caught, started
from cluster.test_sums import SUMS
from support.jobs import Job, run


def why_not() -> str:
    """Return why RDMA cannot be used here; empty if it can."""
    if importlib.util.find_spec("bpsx.transports.rdma.endpoint") is None:
        return "bpsx was built without libibverbs' headers"
    try:
        gid.ports()
    except TransportError as e:
        return str(e)
    return ""


WHY_NOT = why_not()
with_rdma = pytest.mark.skipif(bool(WHY_NOT), reason=f"no RDMA here: {WHY_NOT}")
RDMA = {"DMLC_ENABLE_RDMA": "1", "BPSX_RDMA_INBOX_MB": "8"}

# Two layers in plain NumPy that push what a framework's plugin would push.
TRAINING = """
import bpsx, hashlib, numpy as np

bpsx.init()
rng = np.random.default_rng(bpsx.rank())
weights = {
    "w1": np.random.default_rng(7).normal(size=(300, 200)),
    "w2": np.random.default_rng(8).normal(size=(200, 10)),
}
weights = {name: (w / np.sqrt(w.shape[0])).astype(np.float32) for name, w in weights.items()}
teacher = np.random.default_rng(9).normal(size=(300, 10)).astype(np.float32) / 17
losses = []
for step in range(20):
    x = rng.normal(size=(64, 300)).astype(np.float32)
    hidden = np.maximum(x @ weights["w1"], 0)
    error = hidden @ weights["w2"] - x @ teacher
    losses.append(float((error**2).mean()))
    back = error @ weights["w2"].T * (hidden > 0)
    gradients = {"w2": hidden.T @ error, "w1": x.T @ back}
    handles = {
        name: bpsx.push_pull_async(g / 64, name=name, average=True) for name, g in gradients.items()
    }
    for name, handle in handles.items():
        weights[name] -= np.float32(0.03) * handle.wait()
report([losses[0], losses[-1]])
report(hashlib.sha256(b"".join(w.tobytes() for w in weights.values())).hexdigest())
"""


@with_rdma
@pytest.mark.parametrize("lanes", [1, 2])
def test_sums_of_all_sizes(lanes: int) -> None:
    """The last size exceeds one message per partition; with two lanes partitions are one page."""
    cases = [(dtype, n, n % 2) for dtype in ("float32", "float16") for n in (0, 1, 1023, 20_000)]
    # 8 MiB is the maximum of a software adapter.
    cases += [("float64", 1_100_000, 1)] if lanes == 1 else []
    found = run(
        SUMS,
        2,
        1,
        env={
            **RDMA,
            "CASES": json.dumps(cases),
            "BYTEPS_SERVER_ENGINE_THREAD": str(lanes),
            "BYTEPS_PARTITION_BYTES": str(16 << 20 if lanes == 1 else 4096),
        },
    )
    assert found[0] == found[1] and len(found[0]) == len(cases)


@with_rdma
def test_training_ends_in_the_same_weights_as_over_tcp() -> None:
    (one, other), (by_tcp, _) = (
        run(TRAINING, env=RDMA),
        run(TRAINING, env={"DMLC_ENABLE_RDMA": "tcp"}),
    )
    assert one[0][1] < 0.8 * one[0][0] and one[1] == other[1] == by_tcp[1]


# Reports the bytes that the transport copies in rounds of one partition: plain, compressed (40 KB),
# or summed in memory shared with another process.
COPIES = """
import bpsx, hashlib, numpy as np
from bpsx.api.verbs import session
bpsx.init()

def rounds(name, compression=None):
    rng = np.random.default_rng(bpsx.rank())
    if compression:
        bpsx.declare(name, compression=compression)
    before = getattr(session()._endpoint, "copied", 0)
    for step in range(4):
        got = bpsx.push_pull(rng.random(320_000, np.float32) - np.float32(0.5), name, average=False)
    report(hashlib.sha256(got.tobytes()).hexdigest())
    report(getattr(session()._endpoint, "copied", 0) - before)
"""


@with_rdma
def test_sums_in_memory_shared_by_a_machines_processes_are_not_copied() -> None:
    """The sums equal those over TCP bit for bit.

    Two processes of a machine sum in their shared memory, and the second communicates for both.
    """
    found, by_tcp = (
        run(COPIES + "rounds('g')", 4, 1, processes=2, env=env)
        for env in (RDMA, {"DMLC_ENABLE_RDMA": "tcp"})
    )
    assert len({sums for sums, _ in found + by_tcp}) == 1
    assert all(copied == 0 for _, copied in found), found


@with_rdma
def test_compressed_bytes_are_copied_only_if_memory_cannot_be_registered_with_a_warning() -> None:
    source = (
        COPIES
        + """
import resource
rounds("g", {"compressor": "onebit", "ef": "vanilla"})
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
rounds("h", {"compressor": "onebit", "ef": "vanilla"})
"""
    )
    with _Unprivileged(
        source, workers=1, servers=1, env={**RDMA, "BYTEPS_FORCE_DISTRIBUTED": "1"}
    ) as job:
        ((sums, copied, same, then),) = job.results()
        assert copied == 0 and then > 0 and sums == same
        said = [
            line
            for line in job.workers[0].errors
            if "that keeps its address, so messages from there are copied" in line
        ]
        assert len(said) == 1 and "ulimit -l" in said[0], job.workers[0].text()


@with_rdma
@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_death_is_named(who: str) -> None:
    with Job(_STEPPING, workers=2, servers=2, env=RDMA) as job:
        started(job)
        victim = job.workers[1] if who == "worker" else job.servers[0]
        victim.signal(signal.SIGKILL)
        for worker in job.workers[: 1 if who == "worker" else 2]:
            assert worker.wait() == 7
            kind, text = caught(worker)
            assert kind == "PeerLostError" and who in text and f"pid {victim.popen.pid}" in text, (
                text
            )


@with_rdma
def test_forked_children_leave_the_adapter_alone() -> None:
    """One child ends normally, one is killed; their parent continues over the same connections."""
    run(
        """
        import bpsx, gc, numpy as np, os, signal

        bpsx.init()
        for turn in range(4):
            got = bpsx.push_pull(
                np.full(100_000, bpsx.rank() + turn, np.float32), "x", average=False
            )
            assert (got == 1 + 2 * turn).all()
            child = os.fork()
            if child == 0:
                if turn % 2:
                    signal.pause()
                gc.collect()
                sys.exit(0)
            if turn % 2:
                os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == (signal.SIGKILL if turn % 2 else 0)
    """,
        env=RDMA,
    )


@with_rdma
def test_too_small_a_limit_of_locked_memory_is_reported_with_the_limit() -> None:
    """A worker reports it. The user must not have the right to lock more, which root has."""
    source = """
        import bpsx, resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        try:
            bpsx.init()
        except bpsx.TransportError as e:
            report(str(e))
            sys.exit(7)
    """
    with _Unprivileged(
        source, workers=1, servers=1, env={**RDMA, "BYTEPS_FORCE_DISTRIBUTED": "1"}
    ) as job:
        assert job.workers[0].wait() == 7
        said = job.workers[0].reports()[-1]
        assert re.search(
            r"KiB of memory: .*lock 1024 KiB of memory \(ulimit -l\): raise"
            r" .*BPSX_RDMA_INBOX_MB",
            said,
        ), said


#: For workers' source: gives the right to lock any amount of memory up.
_GIVE_UP = """
import ctypes

header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capget(header, sets) == 0
for i in range(3):
    sets[i] &= ~(1 << 14)  # CAP_IPC_LOCK, of three sets
assert ctypes.CDLL(None).capset(header, sets) == 0
"""


class _Unprivileged(Job):
    """A job whose workers may lock no more memory than their limit says."""

    def __init__(self, source: str, **more: Any) -> None:
        super().__init__(_GIVE_UP + textwrap.dedent(source), **more)


@with_rdma
def test_a_missing_adapter_is_named_with_the_existing_ones() -> None:
    done = _alone(BPSX_RDMA_DEVICE="mlx5_9")
    assert (
        done.returncode == 1
        and "BPSX_RDMA_DEVICE=mlx5_9: no active port has that name; active ports: " in done.stderr
    ), done.stderr


def _alone(**more: str) -> subprocess.CompletedProcess[str]:
    """Start a scheduler, and a server that is configured for RDMA."""
    job = Job("", workers=1, servers=1)
    try:
        job.start_scheduler()
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_", "PS_"))
        }
        env = {
            **clean,
            "DMLC_ROLE": "server",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": job.port,
            "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "1",
            "DMLC_ENABLE_RDMA": "1",
            "BYTEPS_FORCE_DISTRIBUTED": "1",
            **more,
        }
        return subprocess.run(
            [sys.executable, "-m", "bpsx.server"],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        job.__exit__()


@pytest.mark.skipif(not WHY_NOT, reason="there is RDMA here")
def test_a_missing_adapter_is_reported() -> None:
    done = _alone()
    assert done.returncode == 1 and re.search(
        "this machine has no RDMA adapter|bpsx was built without RDMA", done.stderr
    ), done.stderr
    assert "Traceback" not in done.stderr


_ABSENT = """
import sys


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "bpsx.transports.rdma.endpoint":
            raise ERROR


sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "error, said",
    [
        (
            'ModuleNotFoundError("no such module", name=name)',
            r"built without RDMA, because .*: install libibverbs-dev .* and reinstall bpsx",
        ),
        (
            'ImportError("libibverbs.so.1: cannot open")',
            (
                r"libibverbs\.so\.1: cannot open\. RDMA needs .*: install libibverbs1 and"
                r" ibverbs-providers"
            ),
        ),
    ],
    ids=["without headers", "without the library"],
)
def test_without_libibverbs_the_error_says_what_to_install(
    error: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_ABSENT.replace("ERROR", error))
    done = _alone(PYTHONPATH=str(tmp_path))
    assert (
        done.returncode == 1 and re.search(said, done.stderr) and "Traceback" not in done.stderr
    ), done.stderr
