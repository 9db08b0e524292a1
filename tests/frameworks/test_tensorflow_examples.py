"""Every example of examples/tensorflow, at small sizes; one with the command that its page gives.

Also BytePS and Horovod scripts with only their import changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import benches
from support.running import alone, launch, train
from support.tensorflow_job import QUIET

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "tensorflow"
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py"))
MIGRATING = Path(__file__).parent / "migrating"


def example(name: str, *arguments: str, by_bpsx_run: bool = True) -> str:
    """Run the example on two workers and return their output."""
    script = [str(EXAMPLES / name), *arguments]
    if by_bpsx_run:
        status, output = launch([sys.executable, *script], 2, 1, **QUIET)
    else:
        status, output = train(script, 2, 1, **QUIET)
    assert status == 0, output[-3000:]
    assert (
        "[worker 0] 2 workers, " in output
        and "the same on all workers" in output
        and "DIFFER" not in output
    ), output
    return output


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str) -> None:
    status, text, errors = alone([str(EXAMPLES / name), "--help"], **QUIET)
    assert status == 0, errors
    assert f"bpsx-run --local --workers 2 --servers 1 python examples/tensorflow/{name}" in text


def test_the_page_lists_all() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    assert sorted(set(re.findall(r"\]\(tensorflow/(\w+\.py)\)", text))) == SCRIPTS


@pytest.mark.parametrize(
    "arguments", [[], ["--jit"], ["--eager"]], ids=["function", "jit", "eager"]
)
def test_digits(arguments: list[str]) -> None:
    small = ["--epochs", "2", "--hidden", "64"]
    output = example("digits.py", *small, *arguments, by_bpsx_run=not arguments)
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_keras_fit(tmp_path: Path) -> None:
    output = example(
        "keras_fit.py",
        "--epochs",
        "3",
        "--save",
        str(tmp_path / "digits.keras"),
        "--compress",
        "topk",
        by_bpsx_run=False,
    )
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 3 and losses[-1] < losses[0] and (tmp_path / "digits.keras").exists()


def test_keras_fit_reports_before_training_that_it_cannot_save(tmp_path: Path) -> None:
    script = [str(EXAMPLES / "keras_fit.py"), "--save", str(tmp_path / "digits")]
    status, _, errors = alone(script, **QUIET)
    assert status == 2 and "must end in .keras" in errors


@pytest.mark.parametrize("model", ["MobileNet", "VGG16"])
def test_synthetic_benchmark(model: str) -> None:
    arguments = ["--model", model, "--quick", "--fp16-pushpull"]
    output = example("synthetic_benchmark.py", *arguments, by_bpsx_run=False)
    assert f"2 workers, {model} with " in output and "total images/s on 2 workers" in output


@pytest.mark.parametrize(
    ("name", "module", "ours"),
    [
        ("tensorflow", "byteps.tensorflow", "bpsx.tensorflow"),
        ("tensorflow_v1", "byteps.tensorflow", "bpsx.tensorflow"),
        ("keras", "byteps.keras", "bpsx.keras"),
        ("horovod_tensorflow", "horovod.tensorflow", "bpsx.tensorflow.horovod"),
        ("horovod_keras", "horovod.keras", "bpsx.keras.horovod"),
    ],
)
def test_scripts_train_with_the_import_changed(name: str, module: str, ours: str) -> None:
    before, after = (
        (MIGRATING / f"{name}_{which}.py").read_text() for which in ("before", "after")
    )
    assert after == before.replace(f"import {module} as", f"import {ours} as") and after != before
    status, output = train([str(MIGRATING / f"{name}_after.py")], 2, 1, **QUIET)
    assert status == 0, output[-3000:]
    losses = [float(text) for text in re.findall(r"epoch \d: loss (\S+),", output)]
    weights = dict(re.findall(r"worker (\d): weights add up to (\S+)", output))
    assert len(losses) > 3 and losses[-1] < 0.7 * losses[0], output
    assert sorted(weights) == ["0", "1"] and weights["0"] == weights["1"], output


def test_the_benchmark_runs_and_reports() -> None:
    cases = benches.cases("tensorflow", "--quick")
    assert list(cases) == [
        "overhead-function",
        "overhead-eager",
        "step",
        "step-keras",
        "step-alone",
    ]
    assert all(c["value"] > 0 and c["peer"] > 0 for c in cases.values())


def test_unknown_cases_of_the_benchmark_are_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "tensorflow", "--only", "nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "unknown: nothing" in done.stderr
