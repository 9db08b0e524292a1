"""A job that ``torchrun`` has started: where this process's place is, what machines there are, and who starts scheduler and servers.

The workers meet at torchrun's store, which a framework hands in, and agree there on the rest: nobody has to configure anything.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from bpsx import api
from bpsx.companions import Companions
from bpsx.config import MOST_WORKERS, TORCHRUN_OPTIONS, Config, torchrun_variables
from bpsx.errors import ConfigError, RendezvousError
from bpsx.secret import make
from bpsx.transports.address import is_loopback, resolve

log = logging.getLogger("bpsx.torchrun")
_lock = threading.Lock()
_companions = Companions()
#: How often this process has joined a job under torchrun: the same on all workers, so that nobody reads an earlier job's entries.
_cycle = 0

_NUMBERS = {"rank": (0, MOST_WORKERS - 1), "size": (1, MOST_WORKERS), "local_rank": (0, MOST_WORKERS - 1), "local_size": (1, MOST_WORKERS),
            "master_port": (1, 65535)}


@dataclass(frozen=True)
class Place:
    """Where torchrun has put a process, the address of its store, and a text that is this attempt's own."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    attempt: str


@dataclass(frozen=True)
class Machines:
    """``count`` machines of ``local_size`` worker processes each. ``uneven``: torchrun's have different sizes, so each process is one."""

    count: int
    local_size: int
    uneven: bool


def place(variables: Mapping[str, str]) -> Place | None:
    """The place that :func:`bpsx.config.torchrun_variables` tell; None if they are not all there.

    Raises :class:`~bpsx.errors.ConfigError` for values that cannot be.
    """
    if not all(variables.get(field) for field in (*_NUMBERS, "master_addr")):
        return None
    numbers = {}
    for option in TORCHRUN_OPTIONS:
        if option.field in _NUMBERS:
            low, high = _NUMBERS[option.field]
            text = variables[option.field]
            if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
                raise ConfigError(f"{option.env}={text!r}: allowed is {option.allowed}")
            numbers[option.field] = int(text)
    for name, one, few, most in (("RANK", "rank", "size", "WORLD_SIZE"), ("LOCAL_RANK", "local_rank", "local_size", "LOCAL_WORLD_SIZE")):
        if numbers[one] >= numbers[few]:
            raise ConfigError(f"{name}={numbers[one]}: allowed are 0..{numbers[few] - 1} ({most}={numbers[few]})")
    attempt = f"{variables.get('run_id') or 'none'}/{variables.get('restart') or '0'}"
    return Place(**numbers, master_addr=variables["master_addr"], attempt=attempt)


def machines(local: Sequence[tuple[int, int]]) -> Machines:
    """The machines of a job whose process of rank r has (local rank, local size) ``local[r]``.

    bpsx counts ranks machine by machine, with as many processes on each. If torchrun's numbers are not of that kind, every process becomes a
    machine of its own, whose rank is torchrun's.
    """
    size, each = len(local), local[0][1]
    if size % each == 0 and all(here == (rank % each, each) for rank, here in enumerate(local)):
        return Machines(size // each, each, False)
    return Machines(size, 1, True)


class Store(Protocol):
    """torchrun's store: texts by name, for all processes of the job."""

    def set(self, name: str, text: str) -> None:
        """Write an entry."""

    def get(self, names: Sequence[str], timeout: float) -> list[str | None]:
        """The entries of those names; None for those that are not there after ``timeout`` seconds."""


def init(open_store: Callable[[str, float], Store]) -> None:
    """:func:`bpsx.init`, also under torchrun; see docs/pytorch.md. Does nothing if that was done already.

    ``open_store`` gives the store whose entries begin with the text and that is there within the seconds it is given. Raises as
    :func:`bpsx.init`. Thread-safe.
    """
    with _lock:
        if api.initialised():
            return
        ours = place(torchrun_variables())
        if ours is None:
            api.init()
            return
        global _cycle
        _cycle += 1
        _companions.release()       # of an earlier job
        config = Config(role="worker")
        try:
            if ours.size == 1 and not (config.force_distributed or config.asynchronous):
                api.begin(num_worker=1, local_size=1, worker_id=0, local_rank=0)
            else:
                store = open_store(f"bpsx/{ours.attempt}/{_cycle}/", config.rendezvous_timeout)
                agreement = _Agreement(ours, config, store)
                api.begin(**agreement.fields())
                if agreement.uneven:
                    log.warning("torchrun's machines have different numbers of processes: each process counts as a machine of its own, whose "
                                "local_rank() is 0")
        except BaseException:
            _companions.release()
            raise


class _Agreement:
    """How the workers of a job of torchrun's agree on what it is."""

    def __init__(self, ours: Place, config: Config, store: Store) -> None:
        self._place, self._config, self._store = ours, config, store
        self.uneven = False     # worker 0 knows

    def fields(self) -> dict[str, Any]:
        """The fields of :class:`~bpsx.config.Config` for this worker; scheduler and servers have been started by then.

        Raises :class:`~bpsx.errors.RendezvousError`, :class:`~bpsx.errors.ConfigError`.
        """
        ours = self._place
        self._store.set(f"place/{ours.rank}", json.dumps({**asdict(ours), "address": self._master()}))
        if ours.rank == 0:
            try:
                job = self._begin()
            except Exception as e:      # the others wait for an answer: they get this one
                self._store.set("job", json.dumps({"error": f"worker 0: {e}"}))
                raise
            self._store.set("job", json.dumps(job))
        else:
            job = self._hear()
        servers = job.pop("servers")
        each = job["local_size"]
        fields = {**job, "worker_id": ours.rank // each, "local_rank": ours.rank % each}
        for index in range(servers):
            if ours.rank % each == 0 and index % job["num_worker"] == fields["worker_id"]:
                _companions.start_server(_environment(job))
        return fields

    def _master(self) -> str:
        """The store's address, as seen from here."""
        try:
            return resolve(self._place.master_addr, self._place.master_port)
        except OSError as e:
            raise RendezvousError(f"MASTER_ADDR={self._place.master_addr!r}: cannot resolve it: {e}") from e

    def _hear(self) -> dict[str, Any]:
        """What worker 0 says."""
        timeout = self._config.rendezvous_timeout
        text, = self._store.get(["job"], timeout)
        if text is None:
            raise RendezvousError(f"worker {self._place.rank}: the job has not come together after {timeout:g} s; no answer from worker 0 in "
                                  f"torchrun's store at {self._place.master_addr}:{self._place.master_port}")
        job: dict[str, Any] = json.loads(text)
        if "error" in job:
            raise RendezvousError(f"worker {self._place.rank}: {job['error']}")
        return job

    def _begin(self) -> dict[str, Any]:
        """Worker 0: see who is there, and start a scheduler unless the user has one. What all have to know, by fields of Config, and how many
        ``servers`` they are to start."""
        places = self._everybody()
        found = machines([(p["local_rank"], p["local_size"]) for p in places])
        self.uneven = found.uneven
        config = self._config
        job: dict[str, Any] = {"num_worker": found.count, "local_size": found.local_size}
        if config.root_uri is not None:
            if config.num_worker not in (1, found.count):
                raise ConfigError(f"DMLC_NUM_WORKER={config.num_worker}, but torchrun has {found.count} machines; leave it out for the workers")
            return {**job, "servers": 0}
        needed = found.count > 1 or not Config(role="worker", **job).shares_machine or config.force_distributed
        servers = (config.num_server or found.count) if needed else 0
        secret = {} if config.secret_bytes else {"secret": make()}
        job |= {"num_server": servers, "root_uri": self._own_address(places), **secret}
        job["root_port"] = _companions.start_scheduler(job["root_uri"], _environment(job), config.rendezvous_timeout)
        return {**job, "servers": servers}

    def _everybody(self) -> list[dict[str, Any]]:
        timeout = self._config.rendezvous_timeout
        texts = self._store.get([f"place/{rank}" for rank in range(self._place.size)], timeout)
        missing = [rank for rank, text in enumerate(texts) if text is None]
        if missing:
            few = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            raise RendezvousError(f"the job has not come together after {timeout:g} s; missing in torchrun's store: worker {few}")
        return [json.loads(text) for text in texts if text is not None]

    def _own_address(self, places: Sequence[Mapping[str, Any]]) -> str:
        """Where the scheduler shall listen: torchrun's store is on this machine, and where the others find that they find the scheduler."""
        if self._config.node_host:
            return str(self._config.node_host)
        # Many systems know their own name as a loopback address, which is of no use to others.
        far = [str(p["address"]) for p in places if not is_loopback(p["address"])]
        return far[0] if far else str(places[0]["address"])


def _environment(job: Mapping[str, Any]) -> dict[str, str]:
    """The variables for a scheduler or a server of ``job``."""
    names = {"num_worker": "DMLC_NUM_WORKER", "num_server": "DMLC_NUM_SERVER", "local_size": "BYTEPS_LOCAL_SIZE", "root_uri": "DMLC_PS_ROOT_URI",
             "root_port": "DMLC_PS_ROOT_PORT", "secret": "BPSX_SECRET"}
    return {names[field]: str(value) for field, value in job.items() if field in names}
