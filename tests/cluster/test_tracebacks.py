"""Tracebacks of bpsx errors and of Ctrl-C show the script's frames and not bpsx's own."""

from __future__ import annotations

import re
import signal
import textwrap

import pytest
from launching import PY, launching, local_words

from support import optional
from support.jobs import Job

#: By framework: the head of a script, a call that waits for a push_pull, and a rejected call.
VERBS = {
    "numpy": (
        "import numpy as np, bpsx as bps",
        "bps.push_pull(np.ones(4), name)",
        "bps.push_pull(np.array(['text']), 'x')",
    ),
    "torch": (
        "import torch, bpsx.torch as bps",
        "bps.push_pull(torch.ones(4), name=name)",
        "bps.push_pull(torch.ones(4, dtype=torch.bool))",
    ),
    "torch, a handle": (
        "import torch, bpsx.torch as bps",
        "bps.push_pull_async(torch.ones(4), name=name).wait()",
        "bps.push_pull_async(torch.ones(4, dtype=torch.bool))",
    ),
    "torch, Horovod": (
        "import torch, bpsx.torch.horovod as bps",
        "bps.allreduce(torch.ones(4), name=name)",
        "bps.allreduce(torch.ones(4, dtype=torch.bool))",
    ),
    "tensorflow": (
        "import tensorflow as tf, bpsx.tensorflow as bps",
        "bps.push_pull(tf.ones(4), name=name)",
        "bps.push_pull(tf.constant('text'))",
    ),
    "tensorflow, a graph": (
        "import tensorflow as tf, bpsx.tensorflow as bps",
        "tf.function(lambda x: bps.push_pull(x, name=name))(tf.ones(4))",
        "tf.function(lambda x: bps.push_pull(x))(tf.constant('text'))",
    ),
    "mxnet": (
        "import bpsx.mxnet as bps, mxnet as mx",
        "x = mx.nd.ones(4); bps.byteps_push_pull(x, name=name); x.wait_to_read()",
        "bps.byteps_push_pull(1)",
    ),
}
_PACKAGE = re.compile(r'File ".*[/"]bpsx/')
QUIET = {"BPSX_STALL_WARN_SECONDS": "0.5", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def needs(framework: str) -> None:
    module = framework.partition(",")[0]
    if module in optional.OPTIONAL and (why := optional.why_missing(module)):
        pytest.skip(why)


def interrupted(verbs: tuple[str, str, str], tmp_path, **environment: str) -> tuple[int, list[str]]:
    """Interrupt a job of two with Ctrl-C while worker 0 waits for worker 1.

    Returns its exit status, and its stderr lines from then on.
    """
    head, wait, _ = verbs
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        {head}
        bps.init()
        def waits(name):
            {wait}
        waits("together")
        if bps.rank() == 0:
            waits("alone")
        else:
            import time; time.sleep(1000)
    """)
    )
    with launching(tmp_path) as launcher:
        job = launcher.start(
            # TensorFlow removes its files only if it is not killed before.
            local_words("--workers", "2", "--servers", "1", "--grace", "60", PY, str(script)),
            # Otherwise TensorFlow would leave compiled files of a graph's functions in the
            # temporary folder.
            {**QUIET, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        )
        assert job.stderr is not None
        for line in job.stderr:
            if b"alone" in line and b"not pushed by worker 1" in line:
                break
        job.send_signal(signal.SIGINT)
        _, text = job.communicate()
    return job.returncode, text.decode().splitlines()


@pytest.mark.parametrize("framework", VERBS)
def test_ctrl_c_shows_where_each_script_was(framework, tmp_path):
    needs(framework)
    status, lines = interrupted(VERBS[framework], tmp_path)
    assert status == 130
    assert [line for line in lines if _PACKAGE.search(line) or "ERROR" in line] == [], "\n".join(
        lines
    )
    assert sum("Traceback" in line for line in lines) <= 2
    assert any("in waits" in line for line in lines) and any(
        "time.sleep(1000)" in line for line in lines
    ), lines
    assert len(lines) <= 22, "\n".join(lines)


def test_full_tracebacks_show_all_frames(tmp_path):
    _, lines = interrupted(VERBS["torch"], tmp_path, BPSX_FULL_TRACEBACKS="1")
    assert sum(bool(_PACKAGE.search(line)) for line in lines) > 3


_STEP = """
    import torch, bpsx.torch as bps

    bps.init()
    model = torch.nn.Linear(2, 2)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )


    def shown(act):
        try:
            act()
        except (bps.UnsupportedTensor, bps.GradientOrderError, KeyboardInterrupt) as e:
            import traceback

            frames = traceback.extract_tb(e.__traceback__)
            report(
                [
                    type(e).__name__,
                    [f.name for f in frames if "/bpsx/" in "/" + f.filename],
                    frames[-1].name,
                ]
            )


    def closure():
        raise KeyboardInterrupt


    def twice():
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()


    shown(lambda: optimizer.step(closure))
    shown(twice)
    shown(lambda: bps.broadcast_parameters([("x", 5)], 0))
"""


def test_frames_of_the_users_below_bpsx_stay():
    """Frames of a closure that an optimizer calls, and of a hook that autograd calls."""
    with Job(_STEP, 1, 0, env={"BYTEPS_FORCE_DISTRIBUTED": "1", "DMLC_NUM_SERVER": "1"}) as job:
        job.start_server(0)
        ((closure, twice, refused),) = job.results()
    assert closure == ["KeyboardInterrupt", [], "closure"]
    assert twice[0] == "GradientOrderError" and len(twice[1]) <= 1
    assert refused[:2] == ["UnsupportedTensor", []]


@pytest.mark.parametrize("framework", VERBS)
def test_a_refused_argument_shows_the_call(framework, tmp_path):
    needs(framework)
    head, _, refused = VERBS[framework]
    source = f"    {head}\n    bps.init()\n    def call():\n        {refused}\n    call()\n"
    with Job(source, 1, 0, alone=True, env=QUIET) as job:
        assert job.workers[0].wait() == 1
        lines = job.workers[0].errors
    assert any("in call" in line for line in lines)
    assert [line for line in lines if _PACKAGE.search(line)] == [], "\n".join(lines)
