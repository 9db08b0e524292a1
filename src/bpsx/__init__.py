"""bpsx: gradient communication for distributed training.

Importing the package does no work; :func:`init` starts the communication.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bpsx.errors import (
    BpsxError,
    ConfigError,
    JobOverError,
    JoinedError,
    MismatchError,
    NotInitializedError,
    PeerLeftError,
    PeerLostError,
    RendezvousError,
    StallError,
    TransportError,
)

if TYPE_CHECKING:
    from bpsx.api.verbs import (
        barrier,
        broadcast,
        declare,
        get_pushpull_speed,
        init,
        join,
        local_rank,
        local_size,
        poll,
        push_pull,
        push_pull_async,
        rank,
        resume,
        seed,
        shutdown,
        size,
        suspend,
        synchronize,
        trace_start,
        trace_stop,
    )
    from bpsx.core._handle import Handle
    from bpsx.plugin import arrays_elastic as elastic
    from bpsx.plugin.arrays_elastic import State

__version__ = "0.1.0"

__all__ = [
    "BpsxError",
    "ConfigError",
    "Handle",
    "JobOverError",
    "JoinedError",
    "MismatchError",
    "NotInitializedError",
    "PeerLeftError",
    "PeerLostError",
    "RendezvousError",
    "StallError",
    "State",
    "TransportError",
    "barrier",
    "broadcast",
    "declare",
    "elastic",
    "get_pushpull_speed",
    "init",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "rank",
    "resume",
    "seed",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
    "trace_start",
    "trace_stop",
]


#: Modules of the names that are not in ``api.verbs``.
_ELSEWHERE = {
    "Handle": "bpsx.core._handle",
    "State": "bpsx.plugin.arrays_elastic",
    "elastic": "bpsx.plugin.arrays_elastic",
}


def __dir__() -> list[str]:
    """List the public names, including the verbs that are not loaded yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Load a verb on first use.

    The launcher and the scheduler import bpsx, and need neither NumPy nor the core.
    """
    if name not in __all__:
        raise AttributeError(
            f"module 'bpsx' has no attribute {name!r}; what belongs to a framework is in"
            " bpsx.torch, bpsx.tensorflow, bpsx.keras, bpsx.mxnet"
        )
    module = import_module(_ELSEWHERE.get(name, "bpsx.api.verbs"))
    value = globals()[name] = module if name == "elastic" else getattr(module, name)
    return value
