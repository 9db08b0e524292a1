"""A job that ``torchrun`` has started: where this process's place is, what machines there are, and who starts scheduler and servers.

The workers meet at torchrun's store, which a framework hands in, and agree there on the rest: nobody has to configure anything.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from bpsx import api, spawned
from bpsx.companions import Companions
from bpsx.config import MOST_WORKERS, TORCHRUN_OPTIONS, Config, torchrun_variables
from bpsx.errors import ConfigError, RendezvousError
from bpsx.secret import make
from bpsx.transports.address import is_loopback, join_host_port, resolve

log = logging.getLogger("bpsx.torchrun")
_lock = threading.Lock()
_companions = Companions()
#: How often a worker that waits for its job looks whether worker 0 has been replaced, in seconds.
_LOOK = 0.2

_NUMBERS = {"rank": (0, MOST_WORKERS - 1), "size": (1, MOST_WORKERS), "local_rank": (0, MOST_WORKERS - 1), "local_size": (1, MOST_WORKERS),
            "master_port": (1, 65535)}


@dataclass(frozen=True)
class Place:
    """Where torchrun has put a process, the address of its store, and the name of the run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    run: str


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
    return Place(**numbers, master_addr=variables["master_addr"], run=variables.get("run_id") or "none")


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
        else:
            _join(ours, open_store)


def resume(
    open_store: Callable[[str, float], Store], num_workers: int, num_servers: int, global_rank: int | None = None,
) -> None:
    """:func:`bpsx.resume`, also under torchrun: there the workers are torchrun's, and scheduler and servers are started as by :func:`init`.

    Raises as :func:`bpsx.resume`; :class:`~bpsx.errors.ConfigError` also for numbers that are not torchrun's. Thread-safe.
    """
    with _lock:
        ours = place(torchrun_variables())
        if ours is None or api.initialised():
            api.resume(num_workers, num_servers, global_rank)
            return
        api.check_size(num_workers, num_servers)
        if global_rank not in (None, ours.rank):
            raise ConfigError(f"resume: global_rank={global_rank!r}, but for torchrun this is worker {ours.rank}: leave it out")
        _join(ours, open_store, (num_workers, num_servers))


def _join(ours: Place, open_store: Callable[[str, float], Store], resumed: tuple[int, int] | None = None) -> None:
    """Join the job of torchrun's workers; going on after suspend if ``resumed``, which are resume's numbers of workers and servers. The lock is
    held."""
    _companions.release()       # of an earlier job
    config = Config(role="worker")
    agreement = None
    try:
        if ours.size == 1 and not (config.force_distributed or config.asynchronous):
            _check_resumed(resumed, 1)
            fields = {"num_worker": 1, "local_size": 1, "worker_id": 0, "local_rank": 0}
        else:
            spawned.check(ours.rank)
            store = open_store(f"bpsx/{ours.run}/", config.rendezvous_timeout)
            agreement = _Agreement(ours, config, store, resumed)
            fields = agreement.fields()
        api.begin(again=resumed is not None, **fields)
    except BaseException:
        _companions.release()
        raise
    if agreement is not None and agreement.uneven:
        log.warning("torchrun's machines have different numbers of processes: each process counts as a machine of its own, whose "
                    "local_rank() is 0")


def _check_resumed(resumed: Sequence[int] | None, count: int) -> None:
    """Whether resume's numbers, if they are given, fit ``count`` machines. Raises :class:`~bpsx.errors.ConfigError`."""
    if resumed is not None and resumed[0] != count:
        raise ConfigError(f"resume: num_workers={resumed[0]}, but torchrun's machines are {count}; only torchrun itself, by a restart, changes that")


class Meeting:
    """How the workers of a job find each other in a store that may still hold what earlier ones have left there, under the same names.

    Nothing that torchrun says belongs to one attempt alone: its agents count restarts each for itself, and a change of membership not at all.
    So worker 0 invents a name, the call. The others answer under that name, and there they hear what the job is. A call for which there is a job
    before the worker has answered is over, and one that has been replaced will not have a job any more: then the worker waits for the next.
    """

    def __init__(self, ours: Place, store: Store, timeout: float) -> None:
        self._rank, self._size, self._store, self._timeout = ours.rank, ours.size, store, timeout
        self._where = f"torchrun's store at {join_host_port(ours.master_addr, ours.master_port)}"
        self._call = secrets.token_hex(8)       # worker 0's

    def gather(self, answer: str) -> list[str]:
        """Worker 0: call; ``answer`` and the others' answers, by rank. Raises :class:`~bpsx.errors.RendezvousError` with who is missing."""
        self._store.set("call", self._call)
        self._store.set(f"{self._call}/0", answer)
        answers = self._store.get([f"{self._call}/{rank}" for rank in range(self._size)], self._timeout)
        missing = [rank for rank, text in enumerate(answers) if text is None]
        if missing:
            few = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            raise RendezvousError(f"the job has not come together after {self._timeout:g} s; missing in {self._where}: worker {few}")
        return [text for text in answers if text is not None]

    def tell(self, job: str) -> None:
        """Worker 0: say what the job is."""
        self._store.set(f"{self._call}/job", job)

    def hear(self, answer: str) -> str:
        """The other workers: give ``answer`` and hear what the job is. Raises :class:`~bpsx.errors.RendezvousError` if nobody says it."""
        end, answered = time.monotonic() + self._timeout + 1, ""        # worker 0, if it is there, knows better who is missing
        while (left := end - time.monotonic()) > 0:
            call, = self._store.get(["call"], left)
            if call is None:
                break
            told, = self._store.get([f"{call}/job"], _LOOK if call == answered else 0)
            if call == answered and told is not None:
                return told
            if told is not None:
                time.sleep(_LOOK)       # of an earlier job
            elif call != answered:
                self._store.set(f"{call}/{self._rank}", answer)
                answered = call
        raise RendezvousError(f"worker {self._rank}: the job has not come together after {self._timeout:g} s; "
                              + ("worker 0 still waits for others" if answered else "no answer from worker 0") + f" in {self._where}")


class _Agreement:
    """How the workers of a job of torchrun's agree on what it is."""

    def __init__(self, ours: Place, config: Config, store: Store, resumed: tuple[int, int] | None = None) -> None:
        self._place, self._config, self._resumed = ours, config, resumed
        self._meeting = Meeting(ours, store, config.rendezvous_timeout)
        self.uneven = False     # worker 0 knows

    def fields(self) -> dict[str, Any]:
        """The fields of :class:`~bpsx.config.Config` for this worker; scheduler and servers have been started by then.

        Raises :class:`~bpsx.errors.RendezvousError`, :class:`~bpsx.errors.ConfigError`.
        """
        ours = self._place
        answer = json.dumps({**asdict(ours), "address": self._master(), "resumed": self._resumed})
        if ours.rank == 0:
            try:
                job = self._begin([json.loads(text) for text in self._meeting.gather(answer)])
            except Exception as e:      # the others wait for an answer: they get this one
                self._meeting.tell(json.dumps({"error": f"worker 0: {e}"}))
                raise
            self._meeting.tell(json.dumps(job))
        else:
            job = json.loads(self._meeting.hear(answer))
            if "error" in job:
                raise RendezvousError(f"worker {ours.rank}: {job['error']}")
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

    def _begin(self, places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Worker 0, which knows all ``places``: start a scheduler unless the user has one. What all have to know, by fields of Config, and how many
        ``servers`` they are to start."""
        found = machines([(p["local_rank"], p["local_size"]) for p in places])
        self.uneven = found.uneven
        config = self._config
        for p in places:
            _check_resumed(p["resumed"], found.count)
        wished = self._resumed[1] if self._resumed else config.num_server
        job: dict[str, Any] = {"num_worker": found.count, "local_size": found.local_size}
        if config.root_uri is not None:
            if config.num_worker not in (1, found.count):
                raise ConfigError(f"DMLC_NUM_WORKER={config.num_worker}, but torchrun has {found.count} machines; leave it out for the workers")
            return {**job, **({"num_server": wished} if self._resumed else {}), "servers": 0}
        needed = found.count > 1 or not Config(role="worker", **job).shares_machine or config.force_distributed
        servers = (wished or found.count) if needed else 0
        secret = {} if config.secret_bytes else {"secret": make()}
        job |= {"num_server": servers, "root_uri": self._own_address(places, found), **secret}
        job["root_port"] = _companions.start_scheduler(job["root_uri"], _environment(job), config.rendezvous_timeout)
        return {**job, "servers": servers}

    def _own_address(self, places: Sequence[Mapping[str, Any]], found: Machines) -> str:
        """Where the scheduler shall listen: torchrun's store is on this machine, and where the others find that they find the scheduler."""
        if self._config.node_host:
            return str(self._config.node_host)
        if found.count == 1:
            return "127.0.0.1"
        # Many systems know their own name as a loopback address, which is of no use to others.
        far = [str(p["address"]) for p in places if not is_loopback(p["address"])]
        return far[0] if far else str(places[0]["address"])


def _environment(job: Mapping[str, Any]) -> dict[str, str]:
    """The variables for a scheduler or a server of ``job``."""
    names = {"num_worker": "DMLC_NUM_WORKER", "num_server": "DMLC_NUM_SERVER", "local_size": "BYTEPS_LOCAL_SIZE", "root_uri": "DMLC_PS_ROOT_URI",
             "root_port": "DMLC_PS_ROOT_PORT", "secret": "BPSX_SECRET"}
    return {names[field]: str(value) for field, value in job.items() if field in names}
