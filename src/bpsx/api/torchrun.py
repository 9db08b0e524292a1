"""A job that another launcher has started, as ``torchrun``: what machines there are, and who starts
scheduler and servers.

The workers meet at a store, which a framework hands in, and agree there on the rest: nobody has to
configure anything.
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

from bpsx.api import verbs
from bpsx.api.resizing import check_size
from bpsx.config import ALONE, Config, Place, launched
from bpsx.errors import ConfigError, RendezvousError
from bpsx.secret import make
from bpsx.system import spawned
from bpsx.system.address import (
    interface_address,
    is_here,
    is_ipv6,
    is_loopback,
    join_host_port,
    own_address_towards,
    resolve,
)
from bpsx.system.host import machine
from bpsx.system.role_process import Companions

log = logging.getLogger("bpsx.api.torchrun")
_lock = threading.Lock()
_companions = Companions()
#: The launcher of a place that a framework's own process group has given.
FRAMEWORK = "PyTorch"
#: How this process joined its last job here, for resume().
_last: tuple[Place, Callable[[Place, float], Store]] | None = None
#: How often a worker that waits for its job looks whether worker 0 has been replaced, in seconds.
_LOOK = 0.2


@dataclass(frozen=True)
class Machines:
    """``count`` machines of ``local_size`` worker processes each.

    ``uneven``: the launcher's have different sizes, so each process is one.
    """

    count: int
    local_size: int
    uneven: bool


def machines(local: Sequence[tuple[int, int]]) -> Machines:
    """The machines of a job whose process of rank r has (local rank, local size) ``local[r]``.

    bpsx counts ranks machine by machine, with as many processes on each. If the launcher's numbers
    are not of that kind, every process becomes a machine of its own, whose rank is the launcher's.
    """
    size, each = len(local), local[0][1]
    if size % each == 0 and all(here == (rank % each, each) for rank, here in enumerate(local)):
        return Machines(size // each, each, False)
    return Machines(size, 1, True)


def local_places(places: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(Local rank, local size) of each process, by rank: as its launcher says, else by the machine
    on which it runs.
    """
    beside: dict[str, list[int]] = {}
    for rank, p in enumerate(places):
        beside.setdefault(p["machine"], []).append(rank)
    found = []
    for rank, p in enumerate(places):
        same = beside[p["machine"]]
        local_rank = same.index(rank) if p["local_rank"] is None else p["local_rank"]
        found.append((local_rank, p["local_size"] or len(same)))
    return found


class Store(Protocol):
    """A store of PyTorch's: texts by name, for all processes of the job."""

    def set(self, name: str, text: str) -> None:
        """Write an entry."""

    def get(self, names: Sequence[str], timeout: float) -> list[str | None]:
        """The entries of those names; None for those that are not there after ``timeout``
        seconds.
        """


#: Opens the store at which a process with that place meets the others, within so many seconds.
OpenStore = Callable[[Place, float], Store]


def init(open_store: OpenStore, told: Place | None = None) -> None:
    """:func:`bpsx.init`, also under torchrun and its kin; see docs/train/pytorch.md.

    Does nothing if that was done already.

    ``told``: the place that a framework has given this process, where that is not what the
    environment says. Raises as :func:`bpsx.init`. Thread-safe.
    """
    global _last
    with _lock:
        if verbs.initialised():
            return
        ours = told or launched()
        if ours is None and _last is not None:
            ours, open_store = _last
        if ours is None or not _meets_at_store(ours):
            verbs.init()
        else:
            _join(ours, open_store)
            _last = (ours, open_store)


def _meets_at_store(ours: Place) -> bool:
    """Whether the workers agree at a store, rather than join a scheduler of the user's at once.

    Raises :class:`~bpsx.errors.ConfigError` if they have neither.
    """
    if ours.size == 1 or ours.launcher == FRAMEWORK or (ours.master_addr and ours.master_port):
        return True
    if Config(role="worker").root_uri is not None:
        return False
    missing = [
        name
        for name, value in (("MASTER_ADDR", ours.master_addr), ("MASTER_PORT", ours.master_port))
        if not value
    ]
    raise ConfigError(
        f"the environment says that this process is one of {ours.size} ({ours.told}), but not where"
        f" they meet: set {' and '.join(missing)}, the same for all processes, to the address of"
        " the first process's machine and a free port there; or start the script with bpsx-run;"
        f" {ALONE}"
    )


def resume(
    open_store: OpenStore, num_workers: int, num_servers: int, global_rank: int | None = None
) -> None:
    """:func:`bpsx.resume`, also under torchrun: there the workers are torchrun's, and scheduler and
    servers are started as by :func:`init`.

    Raises as :func:`bpsx.resume`; :class:`~bpsx.errors.ConfigError` also for numbers that are not
    torchrun's. Thread-safe.
    """
    with _lock:
        ours, open_store = _last or (launched(), open_store)
        if ours is None or verbs.initialised() or not _meets_at_store(ours):
            verbs.resume(num_workers, num_servers, global_rank)
            return
        check_size(num_workers, num_servers)
        if global_rank not in (None, ours.rank):
            raise ConfigError(
                f"resume: global_rank={global_rank!r}, but for {ours.launcher} this is worker"
                f" {ours.rank}: leave it out"
            )
        _join(ours, open_store, (num_workers, num_servers))


def _join(ours: Place, open_store: OpenStore, resumed: tuple[int, int] | None = None) -> None:
    """Join the job of a launcher's workers; going on after suspend if ``resumed``, which are
    resume's numbers of workers and servers.

    The lock is held.
    """
    _companions.release()  # of an earlier job
    config = Config(role="worker")
    agreement = None
    try:
        if ours.size == 1 and not (config.force_distributed or config.asynchronous):
            _check_resumed(resumed, 1, ours.launcher)
            fields = {"num_worker": 1, "local_size": 1, "worker_id": 0, "local_rank": 0}
        else:
            spawned.check(ours.rank)
            agreement = _Agreement(
                ours, config, open_store(ours, config.rendezvous_timeout), resumed
            )
            fields = agreement.fields()
        verbs.begin(again=resumed is not None, **fields)
    except BaseException:
        _companions.release()
        raise
    if agreement is not None and agreement.uneven:
        log.warning(
            "the machines have different numbers of processes, or ranks that do not go machine by"
            " machine: each process counts as a machine of its own, whose local_rank() is 0"
        )


def _check_resumed(resumed: Sequence[int] | None, count: int, launcher: str) -> None:
    """Whether resume's numbers, if they are given, fit ``count`` machines.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    if resumed is not None and resumed[0] != count:
        raise ConfigError(
            f"resume: num_workers={resumed[0]}, but {launcher}'s machines are {count}; "
            f"only {launcher} itself, by a restart, changes that"
        )


class Meeting:
    """How the workers of a job find each other in a store that may still hold what earlier ones
    have left there, under the same names.

    Nothing that torchrun says belongs to one attempt alone: its agents count restarts each for
    itself, and a change of membership not at all. So worker 0 invents a name, the call. The others
    answer under that name, and there they hear what the job is. A call for which there is a job
    before the worker has answered is over, and one that has been replaced will not have a job any
    more: then the worker waits for the next.
    """

    def __init__(self, ours: Place, store: Store, timeout: float) -> None:
        self._rank, self._size, self._store, self._timeout = ours.rank, ours.size, store, timeout
        self._where = f"{ours.launcher}'s store"
        if ours.master_addr:
            self._where += f" at {join_host_port(ours.master_addr, ours.master_port)}"
        self._call = secrets.token_hex(8)  # worker 0's

    def gather(self, answer: str) -> list[str]:
        """Worker 0: call; ``answer`` and the others' answers, by rank.

        Raises :class:`~bpsx.errors.RendezvousError` with who is missing.
        """
        self._store.set("call", self._call)
        self._store.set(f"{self._call}/0", answer)
        answers = self._store.get(
            [f"{self._call}/{rank}" for rank in range(self._size)], self._timeout
        )
        missing = [rank for rank, text in enumerate(answers) if text is None]
        if missing:
            few = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            raise RendezvousError(
                f"the job has not come together after {self._timeout:g} s; missing in"
                f" {self._where}: worker {few}"
            )
        return [text for text in answers if text is not None]

    def tell(self, job: str) -> None:
        """Worker 0: say what the job is."""
        self._store.set(f"{self._call}/job", job)

    def hear(self, answer: str) -> str:
        """The other workers: give ``answer`` and hear what the job is.

        Raises :class:`~bpsx.errors.RendezvousError` if nobody says it.
        """
        # worker 0, if it is there, knows better who is missing
        end, answered = time.monotonic() + self._timeout + 1, ""
        while (left := end - time.monotonic()) > 0:
            (call,) = self._store.get(["call"], left)
            if call is None:
                break
            (told,) = self._store.get([f"{call}/job"], _LOOK if call == answered else 0)
            if call == answered and told is not None:
                return told
            if told is not None:
                time.sleep(_LOOK)  # of an earlier job
            elif call != answered:
                self._store.set(f"{call}/{self._rank}", answer)
                answered = call
        raise RendezvousError(
            f"worker {self._rank}: the job has not come together after {self._timeout:g} s; "
            + ("worker 0 still waits for others" if answered else "no answer from worker 0")
            + f" in {self._where}"
        )


class _Agreement:
    """How the workers of a job of torchrun's agree on what it is."""

    def __init__(
        self, ours: Place, config: Config, store: Store, resumed: tuple[int, int] | None = None
    ) -> None:
        self._place, self._config, self._resumed = ours, config, resumed
        self._meeting = Meeting(ours, store, config.rendezvous_timeout)
        self.uneven = False  # worker 0 knows

    def fields(self) -> dict[str, Any]:
        """The fields of :class:`~bpsx.config.Config` for this worker; scheduler and servers have
        been started by then.

        Raises :class:`~bpsx.errors.RendezvousError`, :class:`~bpsx.errors.ConfigError`.
        """
        ours = self._place
        answer = json.dumps(
            {
                **asdict(ours),
                "address": self._master(),
                "machine": machine(),
                "resumed": self._resumed,
            }
        )
        if ours.rank == 0:
            try:
                job = self._begin([json.loads(text) for text in self._meeting.gather(answer)])
            except Exception as e:  # the others wait for an answer: they get this one
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
        """The store's address, as seen from here; "" if it has none."""
        if not self._place.master_addr:
            return ""
        try:
            return resolve(self._place.master_addr, self._place.master_port)
        except OSError as e:
            raise RendezvousError(
                f"MASTER_ADDR={self._place.master_addr!r}: cannot resolve it: {e}"
            ) from e

    def _begin(self, places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Worker 0, which knows all ``places``: start a scheduler unless the user has one.

        What all have to know, by fields of Config, and how many ``servers`` they are to start.
        """
        found = machines(local_places(places))
        self.uneven = found.uneven
        config = self._config
        for p in places:
            _check_resumed(p["resumed"], found.count, self._place.launcher)
        wished = self._resumed[1] if self._resumed else config.num_server
        job: dict[str, Any] = {"num_worker": found.count, "local_size": found.local_size}
        if config.root_uri is not None:
            if config.num_worker not in (1, found.count):
                raise ConfigError(
                    f"DMLC_NUM_WORKER={config.num_worker}, but {self._place.launcher} has"
                    f" {found.count} machines; leave it out for the workers"
                )
            return {**job, **({"num_server": wished} if self._resumed else {}), "servers": 0}
        needed = (
            found.count > 1
            or not Config(role="worker", **job).shares_machine
            or config.force_distributed
        )
        servers = (wished or found.count) if needed else 0
        secret = {} if config.secret_bytes else {"secret": make()}
        job |= {"num_server": servers, "root_uri": self._own_address(places, found), **secret}
        job["root_port"] = _companions.start_scheduler(
            job["root_uri"], _environment(job), config.rendezvous_timeout
        )
        return {**job, "servers": servers}

    def _own_address(self, places: Sequence[Mapping[str, Any]], found: Machines) -> str:
        """Where the scheduler shall listen: torchrun's store is on this machine, and where the
        others find that they find the scheduler.
        """
        if self._config.node_host:
            return str(self._config.node_host)
        if found.count == 1 or len({p["machine"] for p in places}) == 1:
            return "127.0.0.1"
        # Many systems know their own name as a loopback address, which is of no use to others.
        far = [str(p["address"]) for p in places if p["address"] and not is_loopback(p["address"])]
        address = far[0] if far else str(places[0]["address"])
        return self._own_address_beside(address)

    def _own_address_beside(self, store: str) -> str:
        """Our address where the store's is ``store`` for the others: that very one, unless the
        store is elsewhere.
        """
        port = self._place.master_port
        try:
            if self._config.interface:
                return interface_address(self._config.interface, is_ipv6(store))
            if store:
                return (
                    store
                    if is_here(join_host_port(store, port))
                    else own_address_towards(store, port)
                )
        except OSError as e:
            raise ConfigError(
                f"cannot tell the own address (DMLC_INTERFACE={self._config.interface!r}, store"
                f" {store}): {e}; set DMLC_NODE_HOST"
            ) from e
        raise ConfigError(
            "the workers are on several machines and meet at a store without an address: set"
            " DMLC_NODE_HOST to an address at which the others reach worker 0's machine"
        )


def _environment(job: Mapping[str, Any]) -> dict[str, str]:
    """The variables for a scheduler or a server of ``job``."""
    names = {
        "num_worker": "DMLC_NUM_WORKER",
        "num_server": "DMLC_NUM_SERVER",
        "local_size": "BYTEPS_LOCAL_SIZE",
        "root_uri": "DMLC_PS_ROOT_URI",
        "root_port": "DMLC_PS_ROOT_PORT",
        "secret": "BPSX_SECRET",
    }
    return {names[field]: str(value) for field, value in job.items() if field in names}
