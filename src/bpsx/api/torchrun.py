"""Joins a job that another launcher such as ``torchrun`` has started.

The workers meet at a store that the framework provides. There they agree on the machines and on the
processes that start scheduler and servers. So nothing has to be configured.
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

from bpsx.api import lifecycle
from bpsx.api.resizing import check_size
from bpsx.config import ALONE, Config, LaunchedPlace, launched
from bpsx.errors import BpsxError, ConfigError, RendezvousError
from bpsx.scheduler.sockets import accepts_us
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
#: Launcher of a place that a framework's own process group has given.
FRAMEWORK = "PyTorch"
#: This process's place in its last job here, and the function that opens a store; for resume().
_last: tuple[LaunchedPlace, Callable[[LaunchedPlace, float], Store]] | None = None
#: Seconds between two checks of a waiting worker whether worker 0 has been replaced.
_LOOK = 0.2


@dataclass(frozen=True)
class Machines:
    """``count`` machines of ``local_size`` worker processes each.

    ``uneven``: the launcher's machines differ in size, so each process counts as a machine.
    """

    count: int
    local_size: int
    uneven: bool


def machines(local: Sequence[tuple[int, int]]) -> Machines:
    """Return the machines of a job, from the (local rank, local size) of each rank.

    bpsx counts ranks machine by machine, with the same number of processes on each. If the
    launcher's ranks do not follow that order, every process becomes a machine with the launcher's
    rank.
    """
    size, each = len(local), local[0][1]
    if size % each == 0 and all(here == (rank % each, each) for rank, here in enumerate(local)):
        return Machines(size // each, each, False)
    return Machines(size, 1, True)


def local_places(places: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the (local rank, local size) of each process, by rank.

    They are the launcher's if it gives them, otherwise those of the process's machine.
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
    """PyTorch's store: texts by name, for all processes of the job."""

    def set(self, name: str, text: str) -> None:
        """Write an entry."""

    def get(self, names: Sequence[str], timeout: float) -> list[str | None]:
        """Return the entries of ``names``; None for entries missing after ``timeout`` seconds."""


#: Opens the store at which a process with that place meets the others, within a limit in seconds.
OpenStore = Callable[[LaunchedPlace, float], Store]


def init(open_store: OpenStore, told: LaunchedPlace | None = None) -> None:
    """Same as :func:`bpsx.init`, also under torchrun and similar launchers.

    See docs/train/pytorch.md. Does nothing if this process is in a job already.

    ``told``: the place that a framework has given this process, if it differs from the
    environment's. Raises as :func:`bpsx.init`. Thread-safe.
    """
    global _last
    with _lock:
        if lifecycle.initialised():
            return
        ours = told or launched()
        if ours is None and _last is not None:
            ours, open_store = _last
        if ours is None or not _meets_at_store(ours):
            lifecycle.init()
        else:
            _join(ours, open_store)
            _last = (ours, open_store)


def _meets_at_store(ours: LaunchedPlace) -> bool:
    """Return whether the workers first agree at a store.

    Otherwise they join a scheduler of the user's at once.

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
        f"the environment says that this process is one of {ours.size} ({ours.told}), but not"
        f" where the processes meet. Set {' and '.join(missing)} to the address of the first"
        " process's machine and a free port there, the same for all processes; or start the script"
        f" with bpsx-run; {ALONE}"
    )


def resume(
    open_store: OpenStore, num_workers: int, num_servers: int, global_rank: int | None = None
) -> None:
    """Same as :func:`bpsx.resume`, also under torchrun.

    There the workers are torchrun's, and scheduler and servers are started as by :func:`init`.
    Raises as :func:`bpsx.resume`; :class:`~bpsx.errors.ConfigError` also for numbers that are not
    torchrun's. Thread-safe.
    """
    with _lock:
        ours, open_store = _last or (launched(), open_store)
        if ours is None or lifecycle.initialised() or not _meets_at_store(ours):
            lifecycle.resume(num_workers, num_servers, global_rank)
            return
        check_size(num_workers, num_servers)
        if global_rank not in (None, ours.rank):
            raise ConfigError(
                f"resume: global_rank={global_rank!r}, but {ours.launcher} made this process"
                f" worker {ours.rank}; omit global_rank"
            )
        _join(ours, open_store, (num_workers, num_servers))


def _join(
    ours: LaunchedPlace, open_store: OpenStore, resumed: tuple[int, int] | None = None
) -> None:
    """Join the job of a launcher's workers. The caller holds the lock.

    ``resumed``: resume's numbers of workers and servers, if the job continues after suspend.
    """
    _companions.release()  # companions of an earlier job
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
            if _last is None and config.may_lose_workers and _returned(agreement):
                return
            fields = agreement.fields()
        lifecycle.begin(again=resumed is not None, **fields)
    except BaseException:
        _companions.release()
        raise
    if agreement is not None and agreement.uneven:
        log.warning(
            "the machines have different numbers of processes, or their ranks are not consecutive:"
            " each process counts as a machine of its own and has local_rank() 0"
        )


def _returned(agreement: _Agreement) -> bool:
    """Take the place of a lost worker if its job still runs; return whether that has succeeded.

    Where torchrun's rendezvous is static, an agent starts its own workers again and leaves the
    other machines alone.
    """
    fields = agreement.running()
    if fields is None:
        return False
    try:
        lifecycle.begin(**fields)
    except BpsxError as e:  # torchrun may have started all workers again
        log.warning("cannot join the running job, so this worker waits for the next one: %s", e)
        return False
    return True


def _check_resumed(resumed: Sequence[int] | None, count: int, launcher: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` if resume's numbers do not fit ``count`` machines."""
    if resumed is not None and resumed[0] != count:
        raise ConfigError(
            f"resume: num_workers={resumed[0]}, but {launcher} has started {count} machines; to"
            f" change their number, restart with {launcher}"
        )


class Rendezvous:
    """Protocol by which the workers of a job meet in a store.

    The store may still hold entries of earlier attempts under the same names. Nothing that torchrun
    provides identifies an attempt: each agent counts restarts for itself, and a change of
    membership is not counted. So worker 0 publishes a random name, the call. The other workers
    reply under that name and read the job there. A call that has a job before the worker has
    replied is over, and the worker waits for the next call. A call that has been replaced never
    gets a job, and the worker goes on to the call that replaced it. But a call that worker 0 has
    refused concerns every worker that has replied, also one that reads only after worker 0 has
    published its next call.
    """

    def __init__(self, ours: LaunchedPlace, store: Store, timeout: float) -> None:
        self._rank, self._size, self._store, self._timeout = ours.rank, ours.size, store, timeout
        self._where = f"{ours.launcher}'s store"
        if ours.master_addr:
            self._where += f" at {join_host_port(ours.master_addr, ours.master_port)}"
        self._call = secrets.token_hex(8)  # worker 0's

    def told(self) -> str | None:
        """Return the job of the last call; None before that call has one. Does not wait."""
        (call,) = self._store.get(["call"], 0)
        return self._store.get([f"{call}/job"], 0)[0] if call is not None else None

    def gather(self, answer: str) -> list[str]:
        """On worker 0: publish the call; return the replies by rank, beginning with ``answer``.

        Raises :class:`~bpsx.errors.RendezvousError`, which names the missing workers.
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
        """On worker 0: publish the job."""
        self._store.set(f"{self._call}/job", job)

    def refuse(self, error: str) -> None:
        """On worker 0: publish that there will be no job; the others get ``error`` instead."""
        self._store.set(f"{self._call}/refused", error)
        self._store.set(f"{self._call}/job", error)

    def hear(self, answer: str) -> str:
        """On the other workers: reply with ``answer``; return the job, or why there is none.

        Raises :class:`~bpsx.errors.RendezvousError` if there is no job in time.
        """
        # One second longer: worker 0, if present, knows which workers are missing and reports
        # first.
        end, answered = time.monotonic() + self._timeout + 1, ""
        while (left := end - time.monotonic()) > 0:
            (call,) = self._store.get(["call"], left)
            if call is None:
                break
            if answered not in ("", call):
                (refused,) = self._store.get([f"{answered}/refused"], 0)
                if refused is not None:
                    return refused
            (told,) = self._store.get([f"{call}/job"], _LOOK if call == answered else 0)
            if call == answered and told is not None:
                return told
            if told is not None:
                time.sleep(_LOOK)  # the job is an earlier one
            elif call != answered:
                self._store.set(f"{call}/{self._rank}", answer)
                answered = call
        raise RendezvousError(
            f"worker {self._rank}: the job has not come together after {self._timeout:g} s; "
            + ("worker 0 still waits for other workers" if answered else "no answer from worker 0")
            + f" in {self._where}"
        )


class _Agreement:
    """Agreement of the workers of a torchrun job on the job's description."""

    def __init__(
        self,
        ours: LaunchedPlace,
        config: Config,
        store: Store,
        resumed: tuple[int, int] | None = None,
    ) -> None:
        self._place, self._config, self._resumed = ours, config, resumed
        self._rendezvous = Rendezvous(ours, store, config.rendezvous_timeout)
        self.uneven = False  # known to worker 0 only

    def fields(self) -> dict[str, Any]:
        """Return the fields of :class:`~bpsx.config.Config` for this worker.

        Scheduler and servers have been started by then. Raises
        :class:`~bpsx.errors.RendezvousError`, :class:`~bpsx.errors.ConfigError`.
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
                job = self._begin([json.loads(text) for text in self._rendezvous.gather(answer)])
            except Exception as e:  # the other workers wait for a reply: send the error
                self._rendezvous.refuse(json.dumps({"error": f"worker 0: {e}"}))
                raise
            self._rendezvous.tell(json.dumps(job))
        else:
            job = json.loads(self._rendezvous.hear(answer))
            if "error" in job:
                raise RendezvousError(f"worker {ours.rank}: {job['error']}")
        servers = job.pop("servers")
        fields = self._placed(job)
        for index in range(servers):
            if fields["local_rank"] == 0 and index % job["num_worker"] == fields["worker_id"]:
                _companions.start_server(_environment(job))
        return fields

    def running(self) -> dict[str, Any] | None:
        """Return the fields for the job of the last call; None if its scheduler is gone.

        They start no server: one that a lost worker has started goes on without it.
        """
        job = json.loads(self._rendezvous.told() or "{}")
        if "servers" not in job:  # none, or an error
            return None
        del job["servers"]
        fields = self._placed(job)
        return fields if accepts_us(Config(role="worker", **fields)) else None

    def _placed(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``job`` and those of this worker's place in it."""
        number, local_rank = divmod(self._place.rank, job["local_size"])
        return {**job, "worker_id": number, "local_rank": local_rank}

    def _master(self) -> str:
        """Return the store's address, as seen from here; "" if it has none."""
        if not self._place.master_addr:
            return ""
        try:
            return resolve(self._place.master_addr, self._place.master_port)
        except OSError as e:
            raise RendezvousError(
                f"MASTER_ADDR={self._place.master_addr!r}: cannot resolve it: {e}"
            ) from e

    def _begin(self, places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """On worker 0, which knows all ``places``: start a scheduler unless the user has one.

        Returns the fields of Config that all workers need, and ``servers``, the number of servers
        to start.
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
                    f" {found.count} machines; do not set it for the workers"
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
        """Return the address on which the scheduler shall listen.

        torchrun's store is on this machine, so the other workers reach the scheduler at the same
        address.
        """
        if self._config.node_host:
            return str(self._config.node_host)
        if found.count == 1 or len({p["machine"] for p in places}) == 1:
            return "127.0.0.1"
        # On many systems the machine's own name resolves to a loopback address, which other
        # machines cannot use.
        far = [str(p["address"]) for p in places if p["address"] and not is_loopback(p["address"])]
        address = far[0] if far else str(places[0]["address"])
        return self._own_address_beside(address)

    def _own_address_beside(self, store: str) -> str:
        """Return our address, where the other workers reach the store at ``store``.

        It is that very address, unless the store is on another machine.
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
                f"cannot find this machine's address (DMLC_INTERFACE={self._config.interface!r},"
                f" store {store}): {e}; set DMLC_NODE_HOST"
            ) from e
        raise ConfigError(
            "the workers are on several machines and meet at a store without an address; set"
            " DMLC_NODE_HOST to an address at which other machines reach worker 0"
        )


def _environment(job: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables for a scheduler or a server of ``job``."""
    names = {
        "num_worker": "DMLC_NUM_WORKER",
        "num_server": "DMLC_NUM_SERVER",
        "local_size": "BYTEPS_LOCAL_SIZE",
        "root_uri": "DMLC_PS_ROOT_URI",
        "root_port": "DMLC_PS_ROOT_PORT",
        "secret": "BPSX_SECRET",
    }
    return {names[field]: str(value) for field, value in job.items() if field in names}
