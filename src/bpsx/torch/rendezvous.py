"""Connects the rendezvous of PyTorch with that of bpsx.

Under ``bpsx-run``, worker 0 opens PyTorch's store and sends its address through bpsx. Elsewhere
there is no scheduler yet. The workers then meet at torchrun's store, or at that of PyTorch's
process group, and start what is missing (:mod:`bpsx.api.torchrun`).
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

from bpsx.errors import BpsxError, ConfigError, RendezvousError
from bpsx.plugin import adapter
from bpsx.plugin.objects import broadcast_bytes
from bpsx.system.tracebacks import public

_Triple = tuple[Any, int, int]
_Handler = Callable[..., Iterator[_Triple]]
#: Kept once it is open: where torchrun has no store of its own, this object is worker 0's store.
_store: Any = None
#: Longest pause between two polls of the store, in seconds, so that thousands of workers do not
#: overload it.
_PAUSE = 0.25
#: Stands for an entry that a store does not have; no entry of ours has this value.
_ABSENT = "(absent)"


class _TorchStore:
    """PyTorch's store as :class:`bpsx.plugin.adapter.Store`.

    Raises :class:`RendezvousError` if it does not reply.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, name: str, text: str) -> None:
        """Write an entry."""
        with _reached():
            self._store.set(name, text)

    def get(self, names: Sequence[str], timeout: float) -> list[str | None]:
        """Return the entries of ``names``; None for entries missing after ``timeout`` seconds."""
        end, pause = time.monotonic() + timeout, 0.01
        with _reached():
            # The store's own wait blocks Ctrl-C, and logs a warning at its timeout.
            while not self._has(names):
                left = end - time.monotonic()
                if left <= 0:
                    return [self._read(name) if self._has([name]) else None for name in names]
                time.sleep(min(pause, left))
                pause = min(2 * pause, _PAUSE)
            return [self._read(name) for name in names]

    def _has(self, names: Sequence[str]) -> bool:
        """Return whether all ``names`` have an entry, without waiting."""
        if hasattr(self._store, "check"):
            return bool(self._store.check(list(names)))
        # PyTorch 2.1's stores have no check(). compare_set() with an expected value that no entry
        # has leaves existing entries unchanged and creates none.
        return all(self._store.compare_set(n, _ABSENT, _ABSENT).decode() != _ABSENT for n in names)

    def _read(self, name: str) -> str:
        return str(self._store.get(name).decode())


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Context for calls of the store. Raises :class:`RendezvousError`."""
    try:
        yield
    except BpsxError:  # BpsxError is a RuntimeError too
        raise
    except RuntimeError as e:
        raise RendezvousError(f"cannot reach the store (MASTER_ADDR, MASTER_PORT): {e}") from e


@public
def init(lazy: bool = True) -> None:
    """Join the job that the environment describes: bpsx's own variables, or ``torchrun``'s.

    Does nothing if this process is in a job already. ``lazy`` is accepted for BytePS and ignored.

    Under torchrun, worker 0 starts a scheduler. With several machines, the first process of each
    starts a server too. ``DMLC_PS_ROOT_URI`` names a scheduler of the user's instead. These
    processes end with the job. The same applies under other launchers that set rank and size, and
    after an ``init_process_group`` with rank and size.

    Blocks until all workers and servers have joined. Raises :class:`~bpsx.errors.ConfigError` (a
    missing or malformed variable), :class:`~bpsx.errors.RendezvousError` (a process is missing at
    the deadline), :class:`~bpsx.errors.TransportError`. Thread-safe.
    """
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() == 1
        or (store := _default_store()) is None
    ):
        adapter.init(_open_store)
    else:
        init_as(store, dist.get_rank(), dist.get_world_size())


def init_as(store: Any, rank: int, size: int) -> None:
    """Same as :func:`init`, as worker ``rank`` of ``size`` that meet at PyTorch's ``store``.

    If the environment describes the job already, the environment is used. Raises as :func:`init`.
    """
    told = _given_place(store, rank, size)
    adapter.init(_opener(store) if told else _open_store, told)


@public
def resume(
    num_workers: int, num_servers: int, global_rank: int | None = None, context: object = None
) -> None:
    """Join another job after :func:`bpsx.torch.suspend`; see :func:`bpsx.resume`.

    The job has ``num_workers`` machines and ``num_servers`` servers. Under torchrun it has the same
    workers, which the numbers must fit. A new scheduler and servers are started as by :func:`init`;
    ``num_servers=0`` starts as many as there. ``context`` is accepted for BytePS and ignored.
    Raises as :func:`bpsx.resume`. Thread-safe.
    """
    adapter.resume(_open_store, num_workers, num_servers, global_rank)


def _open_store(place: adapter.LaunchedPlace, timeout: float) -> _TorchStore:
    """Return the store that the environment names, for the entries of this run."""
    global _store
    if not dist.is_available():
        raise ConfigError(
            "bpsx.torch.init under torchrun needs a PyTorch with torch.distributed; alternatively"
            " start the script with bpsx-run"
        )
    if _store is None:
        host = (
            f"[{place.master_addr.strip('[]')}]" if ":" in place.master_addr else place.master_addr
        )
        url = f"tcp://{host}:{place.master_port}?rank={place.rank}&world_size={place.size}"
        with _reached():
            _store, _, _ = next(dist.rendezvous(url, timeout=timedelta(seconds=timeout)))
    return _prefixed(_store, place)


def _prefixed(store: Any, place: adapter.LaunchedPlace) -> _TorchStore:
    return _TorchStore(dist.PrefixStore(f"bpsx/{place.run}/", store))


def _opener(store: Any) -> Callable[[adapter.LaunchedPlace, float], _TorchStore]:
    return lambda place, _: _prefixed(store, place)


def _default_store() -> Any:
    """Return the store of PyTorch's default process group; None if PyTorch does not expose it."""
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    return found() if callable(found) else None


def _given_place(store: Any, rank: int, size: int) -> adapter.LaunchedPlace | None:
    """Return the place of worker ``rank`` of ``size`` that meet at ``store``.

    Returns None if bpsx's own variables, or those of a launcher with a store, say so.
    """
    if adapter.is_set("DMLC_WORKER_ID") or adapter.is_set("BYTEPS_LOCAL_RANK"):
        return None
    known = adapter.launched()
    same = known is not None and (known.rank, known.size) == (rank, size)
    if known is not None and same and known.master_addr and known.master_port:
        return None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = (store.host, int(store.port)) if isinstance(store, dist.TCPStore) else ("", 0)
    local = (known.local_rank, known.local_size) if known is not None and same else (None, None)
    return adapter.LaunchedPlace(
        rank, size, *local, host, port, launcher=adapter.FRAMEWORK, told="init_process_group"
    )


def register() -> None:
    """Register ``bpsx://`` as an ``init_method``, and extend ``env://``, the default.

    ``env://`` does the same as ``bpsx://`` where bpsx has its variables and PyTorch lacks its own,
    or has bpsx-run's. Called once, at the import of bpsx.torch. PyTorch has no public way to extend
    a handler. If its table is not found, only ``bpsx://`` is available.
    """
    dist.register_rendezvous_handler("bpsx", _rendezvous)
    table = getattr(
        importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", None
    )
    if isinstance(table, dict) and callable(table.get("env")):
        table["env"] = _extended(table["env"])


def _extended(original: _Handler) -> _Handler:
    @functools.wraps(original)
    def handler(url: str, **options: Any) -> Iterator[_Triple]:
        query, is_set = parse_qs(urlparse(url).query), adapter.is_set
        complete = (
            is_set("MASTER_ADDR")
            and is_set("MASTER_PORT")
            and ("rank" in query or is_set("RANK"))
            and ("world_size" in query or is_set("WORLD_SIZE"))
            and not adapter.store_is_ours()
        )
        if not complete and (is_set("DMLC_ROLE") or adapter.initialised() or adapter.launched()):
            return _rendezvous(url, **options)
        return original(url, **options)

    return handler


def _rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[_Triple]:
    """Yield a store that worker 0 opens, this worker's rank, and the job's size.

    For ``init_process_group``. Initialises bpsx if necessary.

    Raises :class:`ConfigError` for a rank or a size that is not bpsx's, :class:`RendezvousError`,
    and as :func:`init`.
    """
    init()
    ours = adapter.session()
    query = parse_qs(urlparse(url).query)
    for name, is_so in (("rank", ours.rank), ("world_size", ours.size)):
        given = query.get(name, [""])[0]
        if given not in ("", "-1", str(is_so)):
            raise ConfigError(
                f"init_process_group: {name}={given}, but bpsx has {is_so}; omit {name}"
            )
    yield _shared_store(ours, timeout), ours.rank, ours.size
    raise RuntimeError(
        "bpsx cannot rendezvous twice for one init_process_group; call destroy_process_group, then"
        " init_process_group"
    )


def _shared_store(ours: Any, timeout: timedelta) -> Any:
    """Open a store on worker 0 and connect all workers to it."""
    text, failure, store = b"", None, None
    if ours.rank == 0:
        try:
            listener = _listener(adapter.own_host())
            host, port = listener.getsockname()[:2]
        except (OSError, BpsxError) as e:  # the other workers wait for a reply: send the error
            failure = RendezvousError(
                f"init_process_group: worker 0 cannot open PyTorch's store: {e}"
            )
            text = json.dumps({"error": str(failure)}).encode()
        else:
            text = json.dumps({"host": host, "port": port}).encode()
    told = json.loads(broadcast_bytes(text, 0, "torch.store"))
    if "error" in told:
        raise failure or RendezvousError(told["error"])
    host, port = str(told["host"]), int(told["port"])
    try:
        if ours.rank == 0:
            store = dist.TCPStore(
                host, port, ours.size, True, timeout, master_listen_fd=listener.detach()
            )
        else:
            store = dist.TCPStore(host, port, ours.size, False, timeout)
    except RuntimeError as e:
        raise RendezvousError(
            f"worker {ours.rank}: cannot connect to PyTorch's store of worker 0 at"
            f" {host}:{port}: {e}"
        ) from e
    return store


def _listener(host: str) -> socket.socket:
    """Return a listening socket at this address, on a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host.strip("[]"), 0))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
