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
    "TransportError",
    "barrier",
    "broadcast",
    "declare",
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
    value = globals()[name] = getattr(
        import_module("bpsx.core._handle" if name == "Handle" else "bpsx.api.verbs"), name
    )
    return value
