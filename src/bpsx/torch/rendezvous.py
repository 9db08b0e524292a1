"""How PyTorch's and bpsx's ways of coming together find each other.

Under ``bpsx-run`` PyTorch lacks the address of a store: worker 0 opens one and tells the others through bpsx. Under ``torchrun`` bpsx lacks
a scheduler: the workers meet at torchrun's store and start what is missing (:mod:`bpsx.torchrun`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from bpsx import _adapter
from bpsx.errors import BpsxError, ConfigError, RendezvousError
from bpsx.torch.broadcast import broadcast_bytes

_Triple = tuple[Any, int, int]
_Handler = Callable[..., Iterator[_Triple]]
#: Kept once it is there: where torchrun has no store of its own, worker 0's is in this object.
_store: Any = None
#: Seconds between two looks at the store, at most: enough not to burden it with thousands of workers.
_PAUSE = 0.25


class _TorchStore:
    """PyTorch's store as :class:`bpsx._adapter.Store`. Raises :class:`RendezvousError` if it does not answer."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, name: str, text: str) -> None:
        """Write an entry."""
        with _reached():
            self._store.set(name, text)

    def get(self, names: Sequence[str], timeout: float) -> list[str | None]:
        """The entries of those names; None for those that are not there after ``timeout`` seconds."""
        end, pause = time.monotonic() + timeout, 0.01
        with _reached():
            # The store's own wait lets no Ctrl-C through, and logs a warning when its time is over.
            while not self._store.check(list(names)):
                left = end - time.monotonic()
                if left <= 0:
                    return [self._store.get(name).decode() if self._store.check([name]) else None for name in names]
                time.sleep(min(pause, left))
                pause = min(2 * pause, _PAUSE)
            return [self._store.get(name).decode() for name in names]


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Around what asks torchrun's store. Raises :class:`RendezvousError`."""
    try:
        yield
    except BpsxError:       # a RuntimeError, too
        raise
    except RuntimeError as e:
        raise RendezvousError(f"cannot reach torchrun's store (MASTER_ADDR, MASTER_PORT): {e}") from e


def init(lazy: bool = True) -> None:
    """Join the job that the environment describes: bpsx's own variables, or ``torchrun``'s. Does nothing if that was done already. ``lazy`` is
    upstream's and ignored.

    Under torchrun, worker 0 starts a scheduler, and with several machines the first process of each a server, unless
    ``DMLC_PS_ROOT_URI`` names the user's; they end with the job.

    Blocks until all workers and servers are there. Raises :class:`~bpsx.errors.ConfigError` (a missing or malformed variable),
    :class:`~bpsx.errors.RendezvousError` (somebody is missing at the deadline), :class:`~bpsx.errors.TransportError`. Thread-safe.
    """
    _adapter.init(_open_store)


def resume(num_workers: int, num_servers: int, global_rank: int | None = None, context: object = None) -> None:
    """Join another job, after :func:`bpsx.torch.suspend`: of ``num_workers`` machines and ``num_servers`` servers; see :func:`bpsx.resume`.

    Under torchrun it is a job of the same workers, to which the numbers have to fit; a new scheduler and servers are started as by
    :func:`init`, with ``num_servers=0`` as many as there. ``context`` is upstream's and ignored. Raises as :func:`bpsx.resume`. Thread-safe.
    """
    _adapter.resume(_open_store, num_workers, num_servers, global_rank)


def _open_store(prefix: str, timeout: float) -> _TorchStore:
    global _store
    if _store is None:
        if not dist.is_available():
            raise ConfigError("bpsx.torch.init under torchrun needs a PyTorch with torch.distributed; or start the script with bpsx-run")
        with _reached():
            _store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return _TorchStore(dist.PrefixStore(prefix, _store))


def register() -> None:
    """Make ``bpsx://`` an ``init_method``, and let ``env://``, the default, do the same where there are bpsx's variables but not PyTorch's.

    For the import of bpsx.torch, once. PyTorch has no public way to extend a handler: where its table is not found, ``bpsx://`` is what is left.
    """
    dist.register_rendezvous_handler("bpsx", _rendezvous)
    table = getattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", None)
    if isinstance(table, dict) and callable(table.get("env")):
        table["env"] = _extended(table["env"])


def _extended(original: _Handler) -> _Handler:
    @functools.wraps(original)
    def handler(url: str, **options: Any) -> Iterator[_Triple]:
        query, is_set = parse_qs(urlparse(url).query), _adapter.is_set
        complete = (is_set("MASTER_ADDR") and is_set("MASTER_PORT") and ("rank" in query or is_set("RANK"))
                    and ("world_size" in query or is_set("WORLD_SIZE")))
        if not complete and (is_set("DMLC_ROLE") or _adapter.initialised()):
            return _rendezvous(url, **options)
        return original(url, **options)

    return handler


def _rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[_Triple]:
    """A store that worker 0 opens, this worker's rank, and the size of the job; for ``init_process_group``. Initialises bpsx if need be.

    Raises :class:`ConfigError` for a rank or a size that is not bpsx's, :class:`RendezvousError`, and as :func:`init`.
    """
    init()
    ours = _adapter.session()
    query = parse_qs(urlparse(url).query)
    for name, is_so in (("rank", ours.rank), ("world_size", ours.size)):
        given = query.get(name, [""])[0]
        if given not in ("", "-1", str(is_so)):
            raise ConfigError(f"init_process_group: {name}={given}, but for bpsx it is {is_so}; leave it out")
    yield _shared_store(ours, timeout), ours.rank, ours.size
    raise RuntimeError("bpsx has no second rendezvous of one init_process_group; call destroy_process_group and init_process_group")


def _shared_store(ours: Any, timeout: timedelta) -> Any:
    """A store on worker 0, to which all are connected."""
    text, failure, store = b"", None, None
    if ours.rank == 0:
        try:
            listener = _listener(_adapter.own_host())
            host, port = listener.getsockname()[:2]
        except (OSError, BpsxError) as e:     # the others wait for an answer: they get this one
            failure = RendezvousError(f"init_process_group: worker 0 cannot open PyTorch's store: {e}")
            text = json.dumps({"error": str(failure)}).encode()
        else:
            text = json.dumps({"host": host, "port": port}).encode()
    told = json.loads(broadcast_bytes(text, 0, "torch.store"))
    if "error" in told:
        raise failure or RendezvousError(told["error"])
    host, port = str(told["host"]), int(told["port"])
    try:
        if ours.rank == 0:
            store = dist.TCPStore(host, port, ours.size, True, timeout, master_listen_fd=listener.detach())
        else:
            store = dist.TCPStore(host, port, ours.size, False, timeout)
    except RuntimeError as e:
        raise RendezvousError(f"worker {ours.rank}: cannot connect to PyTorch's store of worker 0 at {host}:{port}: {e}") from e
    return store


def _listener(host: str) -> socket.socket:
    """A socket that listens on a port of the system's choice, at this address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host.strip("[]"), 0))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
