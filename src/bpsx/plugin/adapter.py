"""Interface between a framework plugin and bpsx: how tensors are handed over and results returned.

A plugin turns its tensor into a :class:`TensorView`, calls
:meth:`bpsx.session.session.Session.push_pull` or ``broadcast``, and waits on the
:class:`bpsx.Handle` that the call returns. A plugin never sees partitions, keys or sockets.
"""

from __future__ import annotations

from typing import NamedTuple

from bpsx import secret
from bpsx.api.arguments import (
    as_integer,
    check_flag,
    check_handle,
    check_name,
    check_priority,
    check_unmasked,
    checked_passes,
    checked_root,
)
from bpsx.api.lifecycle import add_engine, finish, initialised, session
from bpsx.api.torchrun import FRAMEWORK, Store, init, resume
from bpsx.compression.spec import NONE as NOT_COMPRESSED
from bpsx.compression.spec import CompressionSpec, compression
from bpsx.config import LaunchedPlace, child_environment, is_set, launched, own_store
from bpsx.core._handle import Handle, Item
from bpsx.core._tensor import CommitGroup
from bpsx.local.devices import Streams
from bpsx.session.limits import padded_length
from bpsx.session.session import Session
from bpsx.system import host
from bpsx.system._exit_status import set_exit_status
from bpsx.system.logs import log_from_import

__all__ = [
    "FRAMEWORK",
    "NOT_COMPRESSED",
    "CommitGroup",
    "CompressionSpec",
    "Handle",
    "Item",
    "LaunchedPlace",
    "Session",
    "Store",
    "Streams",
    "TensorView",
    "add_engine",
    "as_integer",
    "check_flag",
    "check_handle",
    "check_name",
    "check_priority",
    "check_unmasked",
    "checked_passes",
    "checked_root",
    "child_environment",
    "compression",
    "finish",
    "init",
    "initialised",
    "is_set",
    "launched",
    "log_from_import",
    "own_host",
    "padded_length",
    "proof",
    "resume",
    "session",
    "set_exit_status",
    "store_is_ours",
]


def own_host() -> str:
    """Address at which the other processes of the job reach this one."""
    config = session().config
    return host.own_host(config) if config.distributed else "127.0.0.1"


def store_is_ours() -> bool:
    """Whether bpsx-run, and not the user, chose MASTER_ADDR and MASTER_PORT."""
    return own_store(child_environment())


class TensorView(NamedTuple):
    """C-contiguous memory that holds one tensor.

    ``address`` points to ``nbytes`` bytes, which hold elements of ``dtype`` (a name in
    ``bpsx.dtypes``) in ``shape``. bpsx keeps ``owner`` alive for as long as it uses the memory.
    """

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    owner: object
    #: CUDA's index of the GPU that holds the memory, or -1 for host memory. With a GPU, ``streams``
    #: gives the stream on which the calling thread works.
    gpu: int = -1
    streams: Streams | None = None


def proof(purpose: str, *parts: bytes | str | int) -> bytes | None:
    """Return a 32-byte proof over ``parts``, or None if the job has no secret.

    Only a process that knows the job secret can compute it. A connection proves the secret once;
    unless it is encrypted, later bytes can be changed on the way. A receiver that trusts bytes with
    more than their values must therefore compare this proof. Raises
    :class:`~bpsx.errors.NotInitializedError`, :class:`~bpsx.errors.ConfigError`.
    """
    known = session().config.secret_bytes
    return secret.derive(known, purpose, *parts) if known else None
