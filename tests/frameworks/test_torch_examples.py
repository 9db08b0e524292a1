"""Every example of examples/pytorch, at small sizes, with the command that its page gives.

The example digits.py has its own module, test_torch_demo.py.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.running import launch, train

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "pytorch"
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "models.py")
GPT = [
    "--steps",
    "12",
    "--width",
    "16",
    "--layers",
    "1",
    "--sequence",
    "16",
    "--sample",
    "20",
    "--batch-size",
    "8",
]
SMALL = ["--quick", "--batch-size", "2", "--num-iters", "2"]


def example(name: str, *arguments: str, by_bpsx_run: bool = True) -> str:
    """Run the example on two workers and return their output."""
    script = [str(EXAMPLES / name), *arguments]
    if by_bpsx_run:
        status, output = launch([sys.executable, *script], workers=2, servers=1)
    else:
        status, output = train(script, workers=2, servers=1)
    assert status == 0, output[-3000:]
    assert "[worker 0] 2 workers, " in output and "the same" in output, output
    assert not re.search("warning|Error|DIFFER", output), output
    return output


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]


# ---- all examples


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "usage: " + name in text
    if name != "digits.py":
        assert f"bpsx-run --local --workers 2 --servers 1 python examples/pytorch/{name}" in text


def test_the_page_lists_all() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    assert sorted(set(re.findall(r"\]\(pytorch/(\w+\.py)\)", text))) == sorted(
        [*SCRIPTS, "models.py"]
    )


def test_models_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the numbers of parameters."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    models = __import__("models")
    published = {
        "resnet18": 11_689_512,
        "resnet34": 21_797_672,
        "resnet50": 25_557_032,
        "resnet101": 44_549_160,
        "vgg16": 138_357_544,
        "gpt2": 124_439_808,
    }
    with torch.device("meta"):
        assert {name: models.parameters_of(models.build(name)) for name in published} == published
        for name, kind in models.MODELS.items():
            given = (
                torch.zeros(2, 5, dtype=torch.int64)
                if kind.sequence
                else torch.zeros(2, 3, kind.image, kind.image)
            )
            out = models.build(name, 7)(given)
            assert out.shape == ((2, 5, 7) if kind.sequence else (2, 7)), name


# ---- single examples


def test_ddp_hook() -> None:
    """The losses are the same under torchrun with the hook and under bpsx-run without it.

    test_torch_migrating.py runs the hook under bpsx-run.
    """
    arguments = ["--epochs", "3", "--points", "600"]
    plain = example("ddp_hook.py", *arguments, "--plain")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "PS_"))}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(EXAMPLES / "ddp_hook.py"),
            *arguments,
        ],
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        done.stdout.startswith("2 workers") and "weights are the same on all workers" in done.stdout
    )
    assert "gradients through bpsx" in done.stdout and "gradients through gloo" in plain
    assert len(losses(plain)) == 3 and losses(plain)[-1] < losses(plain)[0]
    assert losses(done.stdout) == pytest.approx(losses(plain), abs=1e-3)


def test_cross_barrier() -> None:
    output = example("cross_barrier.py", "--steps", "30", "--width", "32", "--batch-size", "16")
    assert "weights are the same, bit for bit, with both and on all workers" in output
    found = losses(output)
    assert (
        len(found) == 8 and found[:3] == found[3:6] and found[2] < found[0] and found[6] == found[7]
    ), output


def test_gpt_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """Training continues as if it had never stopped; without a launcher it learns the same."""
    straight = example("gpt.py", *GPT)
    found = losses(straight)
    assert len(found) == 12 and found[-1] < found[0] and "a sample:" in straight
    state = tmp_path / "state"
    saving = ["--steps", "7", "--save-every", "3", "--checkpoint", str(state)]
    begun = example("gpt.py", *GPT, *saving, by_bpsx_run=False)
    assert "starts from step 0" in begun and losses(begun) == found[:7]
    ended = example("gpt.py", *GPT, "--checkpoint", str(state), by_bpsx_run=False)
    assert f"resumes from step 7 of {state}" in ended and losses(ended) == found[7:]
    weights, sample = (
        re.compile(text, re.S) for text in (r"weights (\w{16}) are the same", r"a sample:\n(.*)--")
    )
    for wanted in (weights, sample):
        assert wanted.findall(straight) == wanted.findall(ended) and wanted.findall(straight)
    alone = subprocess.run(
        [sys.executable, str(EXAMPLES / "gpt.py"), *GPT],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert alone.returncode == 0 and alone.stdout.startswith("1 worker, "), alone.stderr
    assert losses(alone.stdout) == pytest.approx(found, abs=2e-3)


def test_gpt_refuses_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    """Only worker 0 reads the file; both workers exit at once."""
    state = tmp_path / "state"
    state.write_text("nothing of the kind")
    script = [str(EXAMPLES / "gpt.py"), *GPT, "--checkpoint", str(state)]
    status, output = train(script, workers=2, servers=1)
    assert (
        status == 2 and f"gpt.py: {state} cannot be used" in output and "Traceback" not in output
    ), output


@pytest.mark.parametrize(
    "arguments",
    [
        [*SMALL, "--model", "resnet18", "--cross-barrier", "--fp16-pushpull"],
        [*SMALL, "--model", "mlp", "--framework", "ddp-hook"],
    ],
    ids=["bpsx", "ddp-hook"],
)
def test_synthetic_benchmark(arguments: list[str]) -> None:
    output = example("synthetic_benchmark.py", *arguments, by_bpsx_run="resnet18" in arguments)
    assert (
        "11,689,512 parameters" if "resnet18" in arguments else "10,510,346 parameters"
    ) in output
    assert "iteration  2/2: " in output
    mine = re.search(r"images/s per worker: (\S+) \+- (\S+)\n", output)
    total = re.search(r"total images/s on 2 workers: (\S+) \+- (\S+)\n", output)
    assert mine is not None and total is not None
    figures = [float(text.replace(",", "")) for text in (*mine.groups(), *total.groups())]
    assert figures[2] > figures[0] > 0 and min(figures[1], figures[3]) >= 0
