"""Exchange in programs that XLA compiles (``jit_compile=True``): one call for all tensors.

XLA has no kernels for TensorFlow operations of other libraries. It can call a foreign function from
a piece of StableHLO, which ``XlaCallModule`` puts into the graph. Calls run one after the other, so
all tensors that are given together go in one call. On the host only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from bpsx.tensorflow import _xla
from bpsx.tensorflow.op_order import touches
from bpsx.tensorflow.tracing import UnsupportedCompilation, is_compiled

__all__ = ["UnsupportedCompilation", "call", "is_compiled"]

#: Format version of XlaCallModule.
_VERSION = 9
#: Element types in StableHLO.
_TYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "ui8",
    "uint16": "ui16",
    "uint32": "ui32",
    "uint64": "ui64",
    "bool": "i1",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
}
#: Attribute of a graph that holds the value that its latest call has given in addition to tensors.
_LATEST = "_bpsx_latest_in_xla"
_known = _xla.register()


def call(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    priorities: Sequence[int],
    rate: Any,
    average: bool,
    root: int,
) -> list[tf.Tensor]:
    """Return the sums or averages of ``tensors``, or with ``root`` from 0 on that worker's tensors.

    Raises :class:`UnsupportedCompilation`.
    """
    _check(tensors, names)
    if not tensors:
        return []
    types = [
        f"tensor<{''.join(f'{d}x' for d in t.shape)}{_TYPES[t.dtype.base_dtype.name]}>"
        for t in tensors
    ]
    graph = tf.compat.v1.get_default_graph()
    before = getattr(graph, _LATEST, None)
    if before is None:
        before = tf.constant(0, tf.int32)
    plan = json.dumps([list(names), list(priorities), average, root])
    module = _module(types, plan)
    touches(module, names)
    *found, after = gen_xla_ops.xla_call_module(
        [*tensors, tf.cast(-1.0 if rate is None else rate, tf.float64), before],
        version=_VERSION,
        module=module,
        platforms=["CPU"],
        Sout=[*(t.shape for t in tensors), []],
        Tout=[*(t.dtype.base_dtype for t in tensors), tf.int32],
        function_list=[],
        has_token_input_output=False,
        disabled_checks=[],
    )
    # The next call takes it, so calls have one order, the same on all workers.
    setattr(graph, _LATEST, after)
    return list(found)


def _module(types: list[str], plan: str) -> str:
    given, made = [*types, "tensor<f64>", "tensor<i32>"], [*types, "tensor<i32>"]
    arguments, n = ", ".join(f"%a{i}: {t}" for i, t in enumerate(given)), len(made)
    operands, results = (
        ", ".join(f"%a{i}" for i in range(len(given))),
        ", ".join(f"%r#{i}" for i in range(n)),
    )
    text = plan.replace("\\", "\\5C").replace('"', "\\22").replace("\n", "\\0A")
    return (
        f"module @bpsx {{ func.func public @main({arguments}) -> ({', '.join(made)}) {{\n"
        f'%r:{n} = "stablehlo.custom_call"({operands}) {{call_target_name = "bpsx_exchange",'
        " has_side_effect = true, "
        f'api_version = 4 : i32, backend_config = {{plan = "{text}"}}}} : ({", ".join(given)}) ->'
        f" ({', '.join(made)})\n"
        f"return {results} : {', '.join(made)}\n}} }}"
    )


def _check(tensors: Sequence[tf.Tensor], names: Sequence[str]) -> None:
    if not _known:
        raise UnsupportedCompilation(
            f"jit_compile=True: the XLA of TensorFlow {tf.__version__} cannot call bpsx; omit"
            " jit_compile"
        )
    if tf.config.list_logical_devices("GPU"):
        raise UnsupportedCompilation(
            "jit_compile=True: bpsx can exchange gradients only in functions that XLA compiles for"
            " the CPU, but here it compiles for a GPU. Omit jit_compile for the function that"
            " exchanges (Keras: compile(jit_compile=False)); functions that it calls may be"
            " compiled"
        )
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.shape.is_fully_defined():
            raise UnsupportedCompilation(
                f"jit_compile=True: {name!r} has the shape {tensor.shape}, but XLA needs known"
                " shapes when it compiles; give tensors of a fixed shape, or omit jit_compile"
            )
