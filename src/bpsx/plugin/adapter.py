"""The one contract between a framework plugin and bpsx: how a tensor is handed over, and what came
of it.

A plugin turns its tensor into a :class:`TensorView`, calls
:meth:`bpsx.session.session.Session.push_pull` or ``broadcast``, and waits on the
:class:`bpsx.Handle` that it gets. It never sees partitions, keys or sockets.
"""

from __future__ import annotations

from typing import NamedTuple

from bpsx import secret
from bpsx.api.arguments import (
    check_flag,
    check_handle,
    check_name,
    check_priority,
    check_unmasked,
    checked_passes,
    checked_root,
    integer,
)
from bpsx.api.torchrun import FRAMEWORK, Store, init, resume
from bpsx.api.verbs import add_engine, finish, initialised, session
from bpsx.compression.spec import NONE as NOT_COMPRESSED
from bpsx.compression.spec import Compression, compression
from bpsx.config import Place, child_environment, is_set, launched, own_store
from bpsx.core._handle import Handle, Item
from bpsx.local.devices import Streams
from bpsx.session.limits import capacity
from bpsx.session.session import Session
from bpsx.system import host
from bpsx.system._exit_status import set_exit_status
from bpsx.system.logs import early

__all__ = [
    "FRAMEWORK",
    "NOT_COMPRESSED",
    "Compression",
    "Handle",
    "Item",
    "Place",
    "Session",
    "Store",
    "Streams",
    "TensorView",
    "add_engine",
    "capacity",
    "check_flag",
    "check_handle",
    "check_name",
    "check_priority",
    "check_unmasked",
    "checked_passes",
    "checked_root",
    "compression",
    "early",
    "finish",
    "init",
    "initialised",
    "integer",
    "is_set",
    "launched",
    "own_host",
    "proof",
    "resume",
    "session",
    "set_exit_status",
    "store_is_ours",
]


def own_host() -> str:
    """The address at which the job's other processes reach this one."""
    config = session().config
    return host.own_host(config) if config.distributed else "127.0.0.1"


def store_is_ours() -> bool:
    """Whether MASTER_ADDR and MASTER_PORT are bpsx-run's choice, and not the user's."""
    return own_store(child_environment())


class TensorView(NamedTuple):
    """C-contiguous memory of ``nbytes`` bytes at ``address`` holding elements of ``dtype`` (a name
    in ``bpsx.dtypes``) in ``shape``.

    ``owner`` is kept alive for as long as the memory is in use.
    """

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    owner: object
    #: On which GPU it is, by CUDA's count; -1: none. Then ``streams`` gives the stream on which the
    #: calling thread works.
    gpu: int = -1
    streams: Streams | None = None


def proof(purpose: str, *parts: bytes | str | int) -> bytes | None:
    """32 bytes over ``parts`` that only who knows the job secret can make; None if the job has
    none.

    Connections prove the secret once, and what follows on them can still be changed on the way
    unless it is encrypted: whoever is about to trust bytes with more than their values compares
    this. Raises :class:`~bpsx.errors.NotInitializedError`, :class:`~bpsx.errors.ConfigError`.
    """
    known = session().config.secret_bytes
    return secret.derive(known, purpose, *parts) if known else None
