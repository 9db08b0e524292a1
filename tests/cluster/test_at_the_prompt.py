"""Names, attributes and commands that users find at Python's prompt."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import bpsx
from bpsx.errors import MismatchError, PeerLeftError, PeerLostError
from bpsx.telemetry.throughput import Speedometer
from support.jobs import Job, run


@pytest.mark.parametrize("module", ["bpsx", "bpsx.torch"])
def test_dir_lists_the_public_names(module: str) -> None:
    loaded = importlib.import_module(module)
    public = {name for name in dir(loaded) if not name.startswith("_")}
    assert public == set(loaded.__all__) and all(hasattr(loaded, name) for name in public)
    assert {"__doc__", "__name__"} <= set(dir(loaded))


def test_python_m_bpsx_is_the_launcher() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bpsx", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "--workers" in done.stdout


def test_errors_have_the_process_in_attributes() -> None:
    with Job("""
        import bpsx, numpy as np, os, signal
        bpsx.init()
        bpsx.push_pull(np.ones(1), "x")
        if bpsx.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            bpsx.push_pull(np.ones(1), "x")
        except bpsx.PeerLostError as e:
            report([e.role, e.rank, e.address, e.reason == str(e)])
    """) as job:
        assert job.workers[0].wait() == 0, job.workers[0].text()
        assert job.workers[0].reports() == [["worker", 1, "127.0.0.1", True]]


def test_a_mismatch_says_which_tensor() -> None:
    assert (
        run("""
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.push_pull(np.ones(3 + bpsx.rank()), "layer 1's weight")
        except bpsx.MismatchError as e:
            report(e.tensor)
    """)
        == [["layer 1's weight"]] * 2
    )


def test_error_attributes_come_from_the_text_and_are_none_without_a_process() -> None:
    lost = PeerLostError("the scheduler at 10.0.0.1:9000 is gone: its connection broke")
    assert (lost.role, lost.rank, lost.address) == ("scheduler", None, "10.0.0.1:9000")
    lost = PeerLostError("server 3 (fd00::1, pid 7) has failed")
    assert (lost.role, lost.rank, lost.address) == ("server", 3, "fd00::1")
    left = PeerLeftError("tensor 'x': worker 2 has left the job")
    assert (left.role, left.rank, left.address) == ("worker", 2, None)
    nobody = PeerLostError("a peer was lost")
    assert (nobody.role, nobody.rank, nobody.address, nobody.reason) == (
        None,
        None,
        None,
        "a peer was lost",
    )
    assert MismatchError("they disagree").tensor is None and bpsx.MismatchError is MismatchError


def test_repeated_queries_of_the_speed_return_the_same() -> None:
    meter = Speedometer()
    counters = {
        "tensor_bytes": 4_000_000,
        "bytes_sent": 2_000_000,
        "bytes_received": 1_000_000,
        "busy_ns": 1_000_000_000,
    }
    first, second = meter.read(counters), meter.read(counters)
    assert first[1] == second[1] == 4.0 and (second.sent, second.received) == (2.0, 1.0)
    later = meter.read({**counters, "tensor_bytes": 10_000_000, "busy_ns": 2_000_000_000})
    assert later[1] == 6.0 and Speedometer().read(dict.fromkeys(counters, 0))[1] == 0.0


def test_type_checkers_know_the_attributes_of_a_distributed_optimizer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nimport bpsx.torch as bps\n"
        "o = bps.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], 0.1))\n"
        "o.synchronize()\nwith o.skip_synchronize():\n    o.step()\no.no_such_method()\n"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--cache-dir",
            str(tmp_path / "cache"),
            "--follow-imports=silent",
            str(script),
        ],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.count("error:") == 1 and "no_such_method" in done.stdout, done.stdout
