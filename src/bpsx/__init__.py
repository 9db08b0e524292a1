"""bpsx: gradient communication for distributed training. Importing does no work; :func:`init` starts it."""

from bpsx._core import Handle
from bpsx.api import (
    barrier,
    broadcast,
    declare,
    get_pushpull_speed,
    init,
    local_rank,
    local_size,
    poll,
    push_pull,
    push_pull_async,
    rank,
    shutdown,
    size,
    synchronize,
)
from bpsx.errors import (
    BpsxError,
    ConfigError,
    MismatchError,
    NotInitializedError,
    PeerLeftError,
    PeerLostError,
    RendezvousError,
    StallError,
    TransportError,
)

__version__ = "0.1.0"

__all__ = [
    "BpsxError", "ConfigError", "Handle", "MismatchError", "NotInitializedError", "PeerLeftError", "PeerLostError", "RendezvousError",
    "StallError", "TransportError", "barrier", "broadcast", "declare", "get_pushpull_speed", "init", "local_rank", "local_size", "poll",
    "push_pull", "push_pull_async", "rank", "shutdown", "size", "synchronize",
]
