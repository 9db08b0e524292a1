"""bpsx for TensorFlow: ``import bpsx.tensorflow as bps``.

Names and arguments are BytePS's: a script for ``byteps.tensorflow`` runs with the import changed.
"""

from __future__ import annotations

try:
    import tensorflow as _tf
except ModuleNotFoundError as _error:
    if _error.name != "tensorflow":
        raise
    raise ImportError(
        "bpsx.tensorflow needs TensorFlow 2.21 or newer: pip install tensorflow", name="tensorflow"
    ) from None
if tuple(int(part) for part in _tf.__version__.split(".")[:2]) < (2, 21):
    raise ImportError(
        f"bpsx.tensorflow needs TensorFlow 2.21 or newer, this is {_tf.__version__}: pip install"
        " --upgrade tensorflow",
        name="tensorflow",
    )

from importlib import import_module as _import_module  # noqa: E402
from typing import Any as _Any  # noqa: E402

from bpsx.api.verbs import (  # noqa: E402
    barrier,
    get_pushpull_speed,
    init,
    join,
    local_rank,
    local_size,
    rank,
    resume,
    shutdown,
    size,
    suspend,
)
from bpsx.plugin.framework import UnsupportedTensor  # noqa: E402
from bpsx.tensorflow.checkpoint import CompressionState  # noqa: E402
from bpsx.tensorflow.compression import Compression  # noqa: E402
from bpsx.tensorflow.interrupted import show_interrupts as _show_interrupts  # noqa: E402
from bpsx.tensorflow.ops import broadcast, push_pull  # noqa: E402
from bpsx.tensorflow.optimizer import DistributedOptimizer  # noqa: E402
from bpsx.tensorflow.reductions import (
    Adasum,
    Average,
    ReduceOps,
    Sum,
    handle_average_backwards_compatibility,
)  # noqa: E402
from bpsx.tensorflow.tape import DistributedGradientTape  # noqa: E402
from bpsx.tensorflow.variables import (
    BroadcastGlobalVariablesHook,
    broadcast_global_variables,
    broadcast_variables,
)  # noqa: E402

from bpsx.tensorflow import elastic  # noqa: E402  isort: skip

_show_interrupts()

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "CompressionState",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ReduceOps",
    "Sum",
    "UnsupportedTensor",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "elastic",
    "get_pushpull_speed",
    "handle_average_backwards_compatibility",
    "init",
    "join",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
]


def __dir__() -> list[str]:
    """Public names only: BytePS's, and those that bpsx adds."""
    return sorted(
        {*__all__, "distribute", "keras", *(name for name in globals() if name.startswith("__"))}
    )


def __getattr__(name: str) -> _Any:
    """Load a subpackage at its first use: Keras takes seconds to import."""
    if name not in ("distribute", "keras"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f"{__name__}.{name}")
