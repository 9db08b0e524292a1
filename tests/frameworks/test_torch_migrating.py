"""Scripts for BytePS, Horovod and DDP before and after migration: docs/start/migrating.md shows the
difference, and they train.

``PYTHONPATH=tests python tests/frameworks/test_torch_migrating.py`` writes the differences into the
page.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bpsx
import bpsx.torch as bps
import bpsx.torch.cross_barrier
import bpsx.torch.horovod as hvd
import bpsx.torch.parallel
from support.torch_job import launch

pytestmark = pytest.mark.timeout(300)
SCRIPTS = Path(__file__).parent / "migrating"
PAGE = Path(__file__).parents[2] / "docs" / "start" / "migrating.md"
#: A marker <!-- BEFORE AFTER --> in the page, and the difference that follows it.
SHOWN = re.compile(r"<!-- (\S+) (\S+) -->\n(?:\n```diff\n.*?```\n)?", re.S)
#: Names importable from byteps.torch.
BYTEPS = [
    "Compression",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]


def difference(before: str, after: str) -> str:
    lines = [(SCRIPTS / name).read_text().splitlines() for name in (before, after)]
    return "\n".join(difflib.unified_diff(*lines, before, after, n=1, lineterm="")) + "\n"


def written(text: str) -> str:
    """Return the page with up-to-date differences."""
    return SHOWN.sub(
        lambda m: f"<!-- {m[1]} {m[2]} -->\n\n```diff\n{difference(m[1], m[2])}```\n", text
    )


# ---- the page


def test_the_page_shows_the_differences() -> None:
    text = PAGE.read_text()
    assert text == written(text), f"run: python {Path(__file__).name}"
    assert {m[2] for m in SHOWN.finditer(text)} == {p.name for p in SCRIPTS.glob("*_after*.py")}


def test_the_page_names_all_functions() -> None:
    text = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.S)
    named = {
        (module, name)
        for module, name in re.findall(r"\b(bps|bpsx|dist|hvd)\.([a-zA-Z_]\w*)", text)
    } - {("hvd", "elastic")}
    named -= {("bpsx", package) for package in ("torch", "tensorflow", "keras")}
    places = {"bps": bps, "bpsx": bpsx, "dist": torch.distributed, "hvd": hvd}
    assert len(named) > 50
    words = set(re.findall(r"\w+", text[text.index("## From Horovod") :]))
    assert [name for name in hvd.__all__ if name not in words] == [], (
        "all of Horovod's names are in its table"
    )
    assert [n for n in named if not hasattr(places[n[0]], n[1])] == []
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (PAGE.parent / link).exists(), link


def test_only_imports_differ_from_byteps() -> None:
    before, after = ((SCRIPTS / f"byteps_{which}.py").read_text() for which in ("before", "after"))
    assert after == before.replace("byteps.torch", "bpsx.torch")
    changed = [
        line
        for line in difference("byteps_before.py", "byteps_after.py").splitlines()[2:]
        if line.startswith("+")
    ]
    assert len(changed) == 3 and all("import" in line for line in changed)
    assert len(BYTEPS) == 18 and not [name for name in BYTEPS if not hasattr(bps, name)]


def test_only_the_import_differs_from_horovod() -> None:
    before, after = ((SCRIPTS / f"horovod_{which}.py").read_text() for which in ("before", "after"))
    assert (
        after == before.replace("import horovod.torch as hvd", "import bpsx.torch.horovod as hvd")
        and after != before
    )


def test_a_wrong_value_of_average_is_refused() -> None:
    for wrong in (None, "loss", torch.distributed.ReduceOp.SUM):
        for verb in (
            bps.push_pull,
            bps.push_pull_inplace,
            bps.push_pull_async,
            bps.push_pull_async_inplace,
        ):
            with pytest.raises(bpsx.ConfigError, match="average must be True or False"):
                verb(torch.ones(2), wrong)
    with pytest.raises(bpsx.ConfigError, match="average must be True or False"):
        bps.push_pull(torch.ones(2).to_sparse(), None)


# ---- the scripts


def losses(output: str, epochs: int = 3) -> list[float]:
    """Return the loss before and after each epoch.

    Asserts that the loss has fallen and that the workers end with the same weights.
    """
    found = [float(text) for text in re.findall(r"epoch \d: loss (\S+),", output)]
    weights = dict(re.findall(r"worker (\d): weights add up to (\S+)", output))
    assert len(found) == epochs + 1 and found[-1] < 0.7 * found[0], output
    assert sorted(weights) == ["0", "1"] and weights["0"] == weights["1"], output
    return found


#: Runs several scripts in one process, each as ``__main__``, because importing PyTorch takes longer
#: than they do.
RUN = """
import gc, runpy, sys

models = []
for line in sys.argv[1:]:
    print("script", line, flush=True)
    sys.argv = line.split()
    found = runpy.run_path(sys.argv[0], run_name="__main__")
    # Freeing the model frees its group. Gloo's thread (PyTorch 2.13) may still have to release the
    # last tensor, which takes the GIL,
    if "dist" in found:
        # but the thread that frees the group holds the GIL and waits for gloo's thread for ever.
        models.append(found["model"])
    del found
    gc.collect()
"""
# Every ten seconds the scheduler reports which workers have not come yet. On a busy machine one
# worker may import torch for that much longer than the other.
WAITS = re.compile(r"\[scheduler\] \S+ \S+ bpsx scheduler WARNING: waiting for worker \d .*")
AFTER = [
    "byteps_after.py --way cross-barrier",
    "byteps_after.py --way module",
    "byteps_after.py --fp16-pushpull",
    "ddp_after_backend.py",
    "ddp_after_hook.py",
    "horovod_after.py --fp16-allreduce --gradient-predivide-factor 2",
]


def trained() -> dict[str, list[float]]:
    """Return the losses of all scripts, with two workers."""
    status, output = launch(
        [sys.executable, "-c", RUN, *(f"{SCRIPTS}/{line}" for line in AFTER)], workers=2, servers=1
    )
    assert status == 0, output[-3000:]
    told: dict[str, dict[str, str]] = {line: {"0": "", "1": ""} for line in AFTER}
    script = {"0": "", "1": ""}
    for line in output.splitlines():
        if WAITS.fullmatch(line):
            continue
        match = re.fullmatch(r"\[worker (\d)\] (script \S*/(.*)|(epoch \d|worker \d): .*)", line)
        assert match, output  # no other output, also at exit
        if match[3]:
            script[match[1]] = match[3]
        else:
            told[script[match[1]]][match[1]] += line + "\n"
    return {script: losses(by["0"] + by["1"]) for script, by in told.items()}


def trained_with_gloo() -> list[float]:
    """Return the losses of the original DDP script."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    place = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "ddp_before.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**place, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        output = "".join(p.communicate(timeout=120)[0] for p in ranks)
    finally:
        for p in ranks:
            p.kill()
    # Under load, a rank without bpsx has crashed in PyTorch's C++ code at its exit, so only its
    # output counts.
    return losses(output)


def test_the_scripts_train() -> None:
    """Scripts for the same task have the same losses, whatever API they use."""
    found, gloo = trained(), trained_with_gloo()
    module = found["byteps_after.py --way module"]
    assert found["byteps_after.py --way cross-barrier"] == module
    assert found["byteps_after.py --fp16-pushpull"] == pytest.approx(module, abs=0.02)
    for script in ("ddp_after_backend.py", "ddp_after_hook.py"):
        assert found[script] == pytest.approx(gloo, abs=1e-3)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
