"""MXNet 1.9.1 with current NumPy and Python, and the messages where something that bpsx needs is
missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frameworks import hiding
from support.optional import OLD_NUMPY, why_left_out

pytestmark = pytest.mark.timeout(120)
WORKS = """
import logging, sys

logging.basicConfig(
    level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout
)
import numpy

before = set(vars(numpy))
import bpsx.mxnet
import mxnet as mx
from mxnet import autograd, gluon

added = [name for name in set(vars(numpy)) - before if "numpy." + name not in sys.modules]
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(2, 3), gluon.nn.BatchNorm(), gluon.nn.Dense(2))
net.initialize()
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=None)
for _ in range(2):
    with autograd.record():
        loss = net(mx.nd.ones((2, 1, 5, 5))).sum()
    loss.backward()
    trainer.step(2)
assert (
    mx.nd.array([1, 2], dtype=numpy.float16).dtype == numpy.float16
    and mx.np.sum(mx.np.ones((2, 3))).asnumpy() == 6
)
metric = mx.metric.Accuracy()
metric.update([mx.nd.array([1])], [mx.nd.array([[0.0, 1.0]])])
print(
    numpy.__version__,
    added,
    numpy.isfinite(loss.asscalar()),
    metric.get()[1],
    [name for name in sys.modules if name.startswith("distutils")],
)
"""

TRIES = """
try:
    import bpsx.mxnet
except ImportError as e:
    print(e)
import mxnet
print("goes on")
"""


def script(text: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *options, "-c", text],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("which", ["the one that is there", "one below 2"])
def test_mxnet_works_with_numpy(which: str) -> None:
    """Warnings of Python and NumPy count as errors here. NumPy itself must not gain names."""
    path = os.environ.get("PYTHONPATH", "")
    if which == "one below 2":
        if not (OLD_NUMPY / "numpy").is_dir():
            pytest.skip(f"NumPy below 2 {why_left_out('numpy1')}")
        path = f"{OLD_NUMPY}{os.pathsep}{path}"
    done = script(WORKS, "-W", "error", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
    told, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    version = last.split()[0]
    assert told.startswith(
        "INFO bpsx.mxnet MXNet's modules, and no others, get a distutils.version and these names"
        f" that NumPy {version} no longer has: "
    )
    assert " int, " in told and (
        version.startswith("1.") if which == "one below 2" else version == np.__version__
    )
    assert last == f"{version} [] True 1.0 []"


def test_without_mxnet() -> None:
    done = script("import sys\nsys.modules['mxnet'] = None\nimport bpsx.mxnet")
    assert (
        done.returncode == 1
        and "ImportError: bpsx.mxnet needs MXNet 1.9.1: pip install mxnet==1.9.1" in done.stderr
    )


def test_another_version(tmp_path: Path) -> None:
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("__version__ = '1.5.0'")
    done = script(
        "import bpsx.mxnet", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    assert (
        done.returncode == 1
        and "needs MXNet 1.9.1, the last release, but this is 1.5.0" in done.stderr
    )


@pytest.mark.parametrize(
    "function",
    [
        "MXEnginePushAsyncND",
        "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv",
        "_ZNSt13runtime_errorC1EPKc",
    ],
)
def test_a_function_that_is_missing_is_named(tmp_path: Path, function: str) -> None:
    told = hiding.run(hiding.made(tmp_path), function, TRIES)
    assert told == [
        f"bpsx.mxnet: this build of MXNet 1.9.1 does not have {function}, which bpsx needs",
        "goes on",
    ]
