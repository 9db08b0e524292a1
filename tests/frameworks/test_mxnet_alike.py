"""Workers keep equal weights with stateful optimizers, after join() and in half precision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.mxnet_job import each, run_job
from support.running import alone

pytestmark = pytest.mark.timeout(300)
WORK = str(Path(__file__).with_name("mxnet_alike_work.py"))


def test_after_join_all_continue_with_one_workers_optimizer_state(tmp_path: Path) -> None:
    finished = run_job(WORK, ["job_join"], tmp_path, BYTEPS_MIN_COMPRESS_BYTES="0")
    assert finished.status == 0, finished.output[-3000:]
    one, two = each(finished, "job_join")
    assert len(one) == 4
    for case, (last, before, after, updates) in one.items():
        assert last == 0 and updates == 8 and two[case][0] == 0 and two[case][3] == 8, case
        assert (
            np.array_equal(before, two[case][1])
            and np.array_equal(after, two[case][2])
            and not np.array_equal(before, after)
        ), case


def test_a_scaled_loss_keeps_small_gradients_in_half_precision(tmp_path: Path) -> None:
    finished = run_job(WORK, ["job_half"], tmp_path)
    assert finished.status == 0, finished.output[-3000:]
    for found in each(finished, "job_half"):
        for scale, (got, wanted) in found.items():
            assert np.allclose(got, wanted, rtol=1e-2, atol=0), (scale, got)


ALONE = """
import bpsx.mxnet as bps, mxnet as mx, numpy as np
from bpsx import errors
from mxnet import autograd, gluon

bps.init()
parameter = gluon.Parameter("ours", shape=(8,), init=mx.init.One())
parameter.initialize()
trainer = bps.DistributedTrainer(
    [parameter],
    "sgd",
    {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1},
    compression_params={"compressor": "onebit", "momentum": "nesterov"},
)
w, m, decay = np.ones(8), 0.0, 0.0
for step in range(4):
    with autograd.record():
        loss = (parameter.data() * mx.nd.arange(8)).sum()
    loss.backward()
    trainer.step(1)
    m, decay = 0.9 * m + np.arange(8), 0.9 * decay + 0.1 * w
    w = w - 0.1 * (np.arange(8) + 0.9 * m + 0.1 * w + 0.9 * decay)
print(np.allclose(parameter.data().asnumpy(), w))
new = gluon.Parameter("new", shape=(1,))
new.initialize()
bps.broadcast_optimizer_state(bps.DistributedTrainer([new], "adam"))
try:
    bps.broadcast_optimizer_state("a trainer")
except errors.ConfigError as e:
    print(e)
"""


def imports(script: str, **more: str) -> subprocess.CompletedProcess[str]:
    env: dict[str, Any] = {
        key: value for key, value in os.environ.items() if not key.startswith(("DMLC_", "BYTEPS_"))
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**env, **more},
    )


def test_a_single_worker_has_the_same_momentum_and_compresses_nothing() -> None:
    status, text, errors = alone(["-c", ALONE])
    assert status == 0, errors
    assert text.splitlines() == [
        "True",
        "broadcast_optimizer_state: trainer is a str; expected a DistributedTrainer",
    ], text


@pytest.mark.parametrize(("level", "said"), [("INFO", 1), ("WARNING", 0)])
def test_the_import_logs_its_changes_at_level_info(level: str, said: int) -> None:
    """The message appears after init() has set up logging, although the import came before."""
    done = imports(
        "import bpsx.mxnet as bps; bps.init(); bps.shutdown(); bps.init()", BYTEPS_LOG_LEVEL=level
    )
    assert (
        done.returncode == 0
        and done.stderr.count("MXNet's modules, and no others, get a distutils.version") == said
    ), done.stderr
