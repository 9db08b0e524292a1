"""Importing the plugin with an incompatible TensorFlow reports what is missing and has no other
effect.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from frameworks import hiding
from support.tensorflow_job import QUIET

_IMPORTS = """
try:
    import bpsx.tensorflow
except ImportError as e:
    print(f"refused: {e}")
import tensorflow as tf
print("goes on:", float(tf.reduce_sum(tf.ones(3))))
"""
_COMPILES = """
import tensorflow as tf
import bpsx.tensorflow as bps
from bpsx.tensorflow.xla import UnsupportedCompilation
bps.init()

def call():
    return bps.push_pull(tf.constant(3.0), name="x")

print(float(tf.function(call)()))
try:
    tf.function(call, jit_compile=True)()
except UnsupportedCompilation as e:
    print(e)
"""

_PACKAGES = """
import bpsx.tensorflow as bps
print(bps.distribute.MirroredStrategy.__name__)
print(bps.keras.callbacks.MetricAverageCallback.__name__)
try:
    bps.kerass
except AttributeError as e:
    print(str(e)[-21:])
"""

_HEADERS = """
import sys
from pathlib import Path
import tensorflow as tf
from bpsx.tensorflow import op_library

tf.sysconfig.get_include = lambda: sys.argv[1]
header = Path(sys.argv[1], "tensorflow", "core", "framework", "op_kernel.h")
for text in (
    None,
    "  typedef std::function<void()> DoneCallback;",
    "using DoneCallback = std::function<void()>;",
    "  using DoneCallback = absl::AnyInvocable<void() &&>;",
):
    if text is not None:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
    try:
        op_library.check_header()
        print("accepted")
    except ImportError as e:
        print(e)
"""


@pytest.fixture(scope="module")
def hides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hiding.made(tmp_path_factory.mktemp("hides"))


@pytest.mark.parametrize(
    "function",
    ["TF_NewOpDefinitionBuilder", "TF_ForwardInputOrAllocateOutput", "TF_DeleteStatus", "nothing"],
)
def test_a_function_that_is_missing_is_named(hides: Path, function: str) -> None:
    *told, last = hiding.run(hides, function, _IMPORTS, **QUIET)
    text = (
        f"refused: bpsx.tensorflow: the loaded TensorFlow does not have {function}, which bpsx"
        " needs"
    )
    assert last == "goes on: 3.0" and told == ([] if function == "nothing" else [text])


def test_without_xlas_foreign_functions_all_but_compiled_code_works(hides: Path) -> None:
    assert hiding.run(hides, "_ZN3xla3ffi12GetXlaFfiApiEv", _COMPILES, **QUIET) == [
        "3.0",
        (
            f"jit_compile=True: the XLA of TensorFlow {version('tensorflow-cpu')} cannot call bpsx;"
            " omit jit_compile"
        ),
    ]


def test_other_callbacks_are_noticed_in_the_header(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HEADERS, str(tmp_path)],
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    none, function, alias, other = done.stdout.splitlines()
    assert (none, function, alias) == ("accepted", "accepted", "accepted")
    assert "DoneCallback that is a std::function" in other


def test_its_subpackages_need_no_separate_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PACKAGES],
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.splitlines() == [
        "MirroredStrategy",
        "MetricAverageCallback",
        "no attribute 'kerass'",
    ], done.stderr
