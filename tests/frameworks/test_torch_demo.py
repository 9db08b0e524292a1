"""The demo's output is correct, with bpsx and with gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from support.torch_job import launch

SCRIPT = str(Path(__file__).parents[2] / "examples" / "pytorch" / "digits.py")


def assert_learned(output: str, figures: Path) -> None:
    found = json.loads(figures.read_text())
    assert (
        found["identical"]
        and found["accuracy"] > 0.8
        and found["steps"] == len(found["step_ms"]) > 60
    )
    assert found["images_per_second"] > 0 and found["step_ms_median"] > 0
    for line in (
        "epoch  3/3: loss",
        "images per second (all workers)",
        "weights are bit-identical on all 2 workers",
    ):
        assert line in output


def test_bpsx(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    status, output = launch(
        [sys.executable, SCRIPT, "--epochs", "3", "--hidden", "128", "--json", str(figures)], 2, 1
    )
    assert status == 0, output[-3000:]
    assert_learned(output, figures)
    assert "push_pull speed" in output


def test_weights_that_differ_are_detected(tmp_path: Path) -> None:
    """Run the demo with a model that worker 1 changes without the optimizer."""
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(
        f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r})\nimport digits, torch\n"
        "def identical(job, model, real=digits.identical):\n"
        "    with torch.no_grad(): model[0].bias[0] += job.rank * 1e-6\n"
        "    return real(job, model)\n"
        "digits.identical = identical\nsys.exit(digits.main())\n"
    )
    status, output = launch([sys.executable, str(spoiled), "--epochs", "1", "--hidden", "32"], 2, 1)
    assert status == 1 and "weights DIFFER between workers" in output, output[-3000:]


def test_gloo(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        SCRIPT,
        "--backend",
        "gloo",
        "--epochs",
        "3",
        "--hidden",
        "128",
        "--json",
        str(figures),
    ]
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**place, "RANK": str(r)},
        )
        for r in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=120)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0], outputs
    assert_learned(outputs[0], figures)
