"""bpsx for MXNet: ``import bpsx.mxnet as bps``.

Import it before MXNet, which then works with current releases of NumPy. Names and arguments are
BytePS's: a script for ``byteps.mxnet`` runs with the import changed.
"""

from __future__ import annotations

from bpsx.mxnet import compat as _compat

_compat.prepare()
try:
    import mxnet as _mx  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "mxnet":
        raise
    raise ImportError(
        "bpsx.mxnet needs MXNet 1.9.1: pip install mxnet==1.9.1", name="mxnet"
    ) from None

from bpsx.mxnet import op_library as _op_library  # noqa: E402
from bpsx.mxnet import shutdown as _shutdown  # noqa: E402

_op_library.load()
_shutdown.prepare()

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
from bpsx.mxnet.broadcast import broadcast_parameters  # noqa: E402
from bpsx.mxnet.compression import Compression  # noqa: E402
from bpsx.mxnet.ops import byteps_declare_tensor, byteps_push_pull  # noqa: E402
from bpsx.mxnet.optimizer import DistributedOptimizer  # noqa: E402
from bpsx.mxnet.trainer import DistributedTrainer, broadcast_optimizer_state  # noqa: E402
from bpsx.plugin.framework import UnsupportedTensor  # noqa: E402

from bpsx.mxnet import elastic  # noqa: E402  isort: skip

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "UnsupportedTensor",
    "barrier",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_declare_tensor",
    "byteps_push_pull",
    "elastic",
    "get_pushpull_speed",
    "init",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
]


def __dir__() -> list[str]:
    """Public names only: BytePS's, and those that bpsx adds."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
