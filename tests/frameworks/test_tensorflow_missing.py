"""Importing the plugin with an incompatible TensorFlow reports what is missing and has no other
effect.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from frameworks import hiding
from support.running import alone
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
from pathlib import Path
import tensorflow as tf
from bpsx.tensorflow import op_library

tf.sysconfig.get_include = lambda: {place!r}
header = Path({place!r}, "tensorflow", "core", "framework", "op_kernel.h")
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


def test_functions_that_are_missing_are_named(tmp_path: Path) -> None:
    """Without XLA's foreign functions all but compiled code works."""
    functions = [
        "TF_NewOpDefinitionBuilder",
        "TF_ForwardInputOrAllocateOutput",
        "TF_DeleteStatus",
        "nothing",
    ]
    scripts = [(function, _IMPORTS) for function in functions]
    scripts.append(("_ZN3xla3ffi12GetXlaFfiApiEv", _COMPILES))
    library = hiding.made(tmp_path)
    *imported, compiled = hiding.run_all(library, "import tensorflow", scripts, **QUIET)
    for function, (*told, last) in zip(functions, imported, strict=True):
        text = (
            f"refused: bpsx.tensorflow: the loaded TensorFlow does not have {function}, which bpsx"
            " needs"
        )
        assert last == "goes on: 3.0" and told == ([] if function == "nothing" else [text])
    assert compiled == [
        "3.0",
        (
            f"jit_compile=True: the XLA of TensorFlow {version('tensorflow-cpu')} cannot call bpsx;"
            " omit jit_compile"
        ),
    ]


def test_other_callbacks_are_noticed_in_the_header(tmp_path: Path) -> None:
    status, text, errors = alone(["-c", _HEADERS.format(place=str(tmp_path))], **QUIET)
    assert status == 0, errors
    none, function, alias, other = text.splitlines()
    assert (none, function, alias) == ("accepted", "accepted", "accepted")
    assert "DoneCallback that is a std::function" in other


def test_its_subpackages_need_no_separate_import() -> None:
    status, text, errors = alone(["-c", _PACKAGES], **QUIET)
    assert status == 0 and text.splitlines() == [
        "MirroredStrategy",
        "MetricAverageCallback",
        "no attribute 'kerass'",
    ], errors
