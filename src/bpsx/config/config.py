"""Options from the environment. No other module reads the environment.

A malformed value raises a :class:`~bpsx.errors.ConfigError` that names the variable, the value and
what is allowed. An unknown ``BYTEPS_*`` or ``BPSX_*`` name causes a warning with the nearest known
one; so does a ``DMLC_*`` or ``PS_*`` name that resembles a known one.
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from bpsx import secret
from bpsx.config.ignored import NOT_USED
from bpsx.config.job_options import MOST_WORKERS, TRANSPORT_NAMES
from bpsx.config.launchers import LaunchedPlace, place
from bpsx.config.operation_options import NO_ENCRYPTION
from bpsx.config.option import Option
from bpsx.config.options import OPTIONS
from bpsx.config.parsers import AUTO, folder
from bpsx.config.tuning_options import lanes_by_cores
from bpsx.errors import ConfigError

_KNOWN = {option.env for option in OPTIONS}
#: Least similarity, from 0 to 1, of a DMLC_* or PS_* name to an option for a warning. Other
#: programs use these prefixes, too.
_RESEMBLES = 0.8


def environment(given: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Return ``given``, or the environment of this process."""
    return os.environ if given is None else given


class Config:
    """The values of all options, as attributes named by :attr:`Option.field`.

    ``environ`` defaults to the process's environment; ``given`` overrides single fields.

    Immutable after construction, and thread-safe from then on. Raises
    :class:`~bpsx.errors.ConfigError`.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, **given: Any) -> None:
        source = environment(environ)
        self.num_worker_set = "num_worker" in given or bool(
            source.get("DMLC_NUM_WORKER", "").strip()
        )
        values: dict[str, Any] = {}
        for option in OPTIONS:
            if option.field in given:
                values[option.field] = given.pop(option.field)
            else:
                values[option.field] = _read(option, source)
        if given:
            raise ConfigError(f"no such option: {', '.join(sorted(given))}")
        self.__dict__.update(values)
        self.misspelt = tuple(_misspelt(source))
        idle = self.idle_servers if self.num_worker_set and self.role == "worker" else ""
        self.unknown = (*_complain(source), *([idle] if idle else []))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no option {name!r}")

    @property
    def size(self) -> int:
        """Number of workers in the job: machines times processes per machine."""
        return int(self.num_worker * self.local_size)

    @property
    def machines(self) -> int:
        """Largest number of worker machines at a time."""
        return int(max(self.num_worker, self.max_workers))

    @property
    def places(self) -> int:
        """Largest number of workers at a time; their numbers are smaller."""
        return int(self.machines * self.local_size)

    @property
    def rank(self) -> int:
        """This worker's rank at the beginning of the job, 0 to size-1; its number later."""
        return int((self.worker_id or 0) * self.local_size + self.local_rank)

    @property
    def distributed(self) -> bool:
        """Whether a scheduler takes part, and servers unless :attr:`servers` is 0."""
        workers = self.machines * self.local_size
        return bool(workers > 1 or self.force_distributed or self.asynchronous)

    @property
    def shares_machine(self) -> bool:
        """Whether the worker processes of a machine sum among themselves first."""
        return bool(self.local_size > 1 and self.local_reduce and not self.asynchronous)

    @property
    def servers(self) -> int:
        """Number of servers that take part.

        As with BytePS, it is 0 on a single machine whose processes sum among themselves.
        """
        return 0 if self._sums_alone else int(self.num_server or 0)

    @property
    def _sums_alone(self) -> bool:
        """Whether this worker's machine is the job's only one, and its processes need no servers.

        Only workers know how many processes a machine has.
        """
        return bool(
            self.role == "worker"
            and self.machines == 1
            and self.shares_machine
            and not self.force_distributed
        )

    @property
    def transport_name(self) -> str:
        """The transport's name in the registry. "auto" is the fastest that may be used."""
        if self.transport != AUTO:
            return TRANSPORT_NAMES[self.transport]
        return "zeromq" if self.encrypt else "tcp"

    @property
    def lanes(self) -> int:
        """Number of lanes of a server.

        Eight sum and send about as much as a link of 100 Gbit/s carries. Over RDMA fewer do, and
        each registers memory for each worker.
        """
        if self.engine_threads != AUTO:
            return int(self.engine_threads)
        return lanes_by_cores(4 if self.transport_name == "rdma" else 8)

    @property
    def may_lose_servers(self) -> bool:
        """Whether the job may go on after the death of a server.

        The scheduler decides when all processes are known, and says so in WELCOME.
        """
        return bool(
            self.elastic != "off"
            and (self.servers > 1 or self.servers == 1 and self.elastic_wait > 0)
        )

    @property
    def may_lose_workers(self) -> bool:
        """Whether the job may go on after the death of a worker; as :attr:`may_lose_servers`."""
        return self.elastic in ("shrink", "replace") and not self.asynchronous

    @property
    def asks_for_number(self) -> bool:
        """Whether the scheduler gives this worker its number (DMLC_WORKER_ID), as it has none."""
        return bool(
            self.worker_id is None
            and self.machines > 1
            and self.local_size == 1
            and self.may_lose_workers
        )

    def numbered(self, number: int) -> Config:
        """Return the same options with another ``worker_id``."""
        other = copy.copy(self)
        other.__dict__["worker_id"] = number
        return other

    @property
    def secret_bytes(self) -> bytes:
        """The job secret; empty if there is none. Reads the file on each access.

        Raises :class:`~bpsx.errors.ConfigError` that says what is wrong with it.
        """
        if self.secret:
            return secret.accept(self.secret, "BPSX_SECRET")
        return secret.read(self.secret_file) if self.secret_file else b""

    @property
    def idle_servers(self) -> str:
        """Warning for a worker whose configured scheduler and servers will not be used; else ""."""
        if self.servers_used or self.root_uri is None or not self.num_server:
            return ""
        what = (
            f"DMLC_PS_ROOT_URI and DMLC_NUM_SERVER={self.num_server} name a scheduler and servers,"
            " but "
        )
        what += "a job of one worker" if self.size == 1 else "a job of one machine"
        now = (
            f"DMLC_NUM_WORKER={self.num_worker}"
            if self.num_worker_set
            else "DMLC_NUM_WORKER is not set"
        )
        return (
            f"{what} does not use them ({now}); set DMLC_NUM_WORKER to the number of worker"
            " machines, or BYTEPS_FORCE_DISTRIBUTED=1 to use them with one machine"
        )

    @property
    def servers_used(self) -> bool:
        """Whether a worker's gradients go through servers."""
        return self.distributed and not (
            self.machines == 1 and self.shares_machine and not self.force_distributed
        )

    def _missing(self, *fields: str) -> Iterable[str]:
        missing = [o for o in OPTIONS if o.field in fields and getattr(self, o.field) is None]
        if missing:
            yield "not set: " + "; ".join(
                f"{o.env} ({o.help.split('. ')[0].rstrip('.')}; {o.allowed})" for o in missing
            )

    def _server_faults(self) -> Iterable[str]:
        """Check that there are as many servers as needed."""
        if self._sums_alone:
            return
        yield from self._missing("num_server")
        # A scheduler cannot know the number of processes on its only machine.
        if self.num_server == 0 and not (self.role == "scheduler" and self.num_worker == 1):
            yield "DMLC_NUM_SERVER=0: at least one server is needed, except on a single machine"

    def _worker_faults(self) -> Iterable[str]:
        most = "BPSX_MAX_WORKERS" if self.max_workers else "DMLC_NUM_WORKER"
        if self.places > MOST_WORKERS:
            yield (
                f"{most} x BYTEPS_LOCAL_SIZE = {self.places} workers: at most"
                f" {MOST_WORKERS} are possible"
            )
        if (self.worker_id or 0) >= self.machines:
            yield (
                f"DMLC_WORKER_ID={self.worker_id}: expected 0..{self.machines - 1}"
                f" ({most}={self.machines})"
            )
        yield from self._gpu_faults()
        if self.local_rank >= self.local_size:
            yield (
                f"BYTEPS_LOCAL_RANK={self.local_rank}: expected 0..{self.local_size - 1}"
                " (BYTEPS_LOCAL_SIZE)"
            )

    def _gpu_faults(self) -> Iterable[str]:
        if self.reduce_roots and self.switch_size is not None:
            yield (
                "BYTEPS_REDUCE_ROOTS and BYTEPS_PCIE_SWITCH_SIZE exclude each other; set only one"
                " of them"
            )
        for root in self.reduce_roots or ():
            if root >= self.local_size:
                yield (
                    f"BYTEPS_REDUCE_ROOTS: there is no local rank {root}; expected"
                    f" 0..{self.local_size - 1} (BYTEPS_LOCAL_SIZE)"
                )
        if self.switch_size is not None and self.local_size % self.switch_size:
            yield (
                f"BYTEPS_PCIE_SWITCH_SIZE={self.switch_size}: must be a divisor of"
                f" BYTEPS_LOCAL_SIZE={self.local_size}"
            )

    def faults(self) -> Iterable[str]:
        """The contradictions between options for this role, one text each.

        Without a role: those that hold for every role.
        """
        yield from self._missing("role")
        try:
            _ = self.secret_bytes  # read first, to report its errors first
        except ConfigError as error:
            yield str(error)
        if self.trace_end <= self.trace_start:
            yield (
                f"BYTEPS_TRACE_END_STEP={self.trace_end}: must be more than"
                f" BYTEPS_TRACE_START_STEP={self.trace_start}"
            )
        if self.role in ("scheduler", "server") or (self.role == "worker" and self.distributed):
            yield from self._missing("root_uri", "root_port")
            yield from self._server_faults()
        if self.role == "worker" and self.machines > 1 and not self.asks_for_number:
            yield from self._missing("worker_id")
        if self.role == "worker" and not self.num_worker_set and self.idle_servers:
            yield "; ".join([self.idle_servers, *self.misspelt])
        if self.role == "scheduler" and self.metrics_port and not find_spec("prometheus_client"):
            yield (
                "BPSX_METRICS_PORT: the scheduler's metrics need the package prometheus-client: pip"
                " install 'bpsx[metrics]' (or prometheus-client), or unset BPSX_METRICS_PORT"
            )
        if self.elastic == "replace" and self.elastic_wait <= 0:
            yield (
                "BPSX_ELASTIC=replace: the job waits for BPSX_ELASTIC_WAIT seconds for a worker in"
                f" the place of a lost one, which is {self.elastic_wait:g}; expected more than 0"
            )
        yield from self._growth_faults()
        if self.encrypt and self.transport_name != "zeromq":
            yield NO_ENCRYPTION
        if self.mixed_mode is True and self.key_hash_fn != "balanced":
            yield (
                f"BYTEPS_KEY_HASH_FN={self.key_hash_fn}: BYTEPS_ENABLE_MIXED_MODE=1 assigns"
                " partitions by bytes; expected balanced"
            )
        if self.role in ("worker", None):
            yield from self._worker_faults()

    def _growth_faults(self) -> Iterable[str]:
        """Check that the number of workers can change, if it is to."""
        if 0 < self.max_workers < self.num_worker:
            yield (
                f"BPSX_MAX_WORKERS={self.max_workers}: the job begins with"
                f" DMLC_NUM_WORKER={self.num_worker}; expected at least as many"
            )
        if self.max_workers <= self.num_worker:
            return
        if self.elastic not in ("shrink", "replace"):
            why = f"it needs BPSX_ELASTIC=shrink or replace, which is {self.elastic}"
        elif self.asynchronous:
            why = "training is asynchronous (BYTEPS_ENABLE_ASYNC)"
        else:
            return
        yield f"BPSX_MAX_WORKERS={self.max_workers}: workers cannot join the running job: {why}"

    def check(self) -> None:
        """Check that the values fit together for this role.

        Raises :class:`~bpsx.errors.ConfigError` for the first of :meth:`faults`.
        """
        for fault in self.faults():
            raise ConfigError(fault)


def faults(environ: Mapping[str, str] | None = None) -> list[str]:
    """All errors in the variables; :class:`Config` and :meth:`Config.check` raise only the first.

    The role may be unset.
    """
    good = dict(environment(environ))
    found: dict[str, str] = {}
    for option in OPTIONS:
        try:
            _read(option, good)
        except ConfigError as error:
            found[option.env] = str(error)
            del good[option.env]
    # Leave out faults that only follow from the variables removed above.
    more = [
        f
        for f in Config(good).faults()
        if not f.startswith("not set: DMLC_ROLE") and not any(env in f for env in found)
    ]
    return [*found.values(), *more]


def launched() -> LaunchedPlace | None:
    """The place that a launcher other than bpsx-run has given this process; None without one.

    Raises :class:`~bpsx.errors.ConfigError` if only some of the launcher's variables are set.
    """
    return place(os.environ)


def is_set(name: str) -> bool:
    """Whether environment variable ``name`` is set and not empty."""
    return bool(os.environ.get(name, "").strip())


def full_tracebacks() -> bool:
    """The current value of BPSX_FULL_TRACEBACKS.

    A malformed value counts as true, since an error about it is about to be shown.
    """
    option = next(o for o in OPTIONS if o.field == "full_tracebacks")
    try:
        return bool(_read(option, os.environ))
    except ConfigError:
        return True


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a process that the launcher starts: this process's with ``changes``."""
    return {**os.environ, **changes}


def _read(option: Option, source: Mapping[str, str]) -> Any:
    text = source.get(option.env)
    is_text = option.parse in (str, folder) and option.default is not None
    if text is None or (not text.strip() and not is_text):
        return option.default() if callable(option.default) else option.default
    try:
        # Paths may be any bytes. All other values are sent to other processes, or compared, as
        # UTF-8.
        if option.parse is not folder:
            text.encode()
        return option.parse(text.strip())
    except UnicodeEncodeError:
        # The message leaves out the value, which may be secret.
        raise ConfigError(f"{option.env}: not valid UTF-8") from None
    except ValueError as e:
        why = f"{e}" if option.parse is folder else f"expected {option.allowed}"
        raise ConfigError(f"{option.env}={text!r}: {why}") from None


def _complain(source: Mapping[str, str]) -> Iterable[str]:
    """Warnings about variables that have no effect."""
    for name in source:
        if name in NOT_USED:
            yield f"{name} is a BytePS variable that has no effect in this version of bpsx"
        elif name.startswith(("BYTEPS_", "BPSX_")) and name not in _KNOWN:
            # BPSX_INSECURE must not be switched on because of a suggestion.
            near = difflib.get_close_matches(name, _KNOWN - {"BPSX_INSECURE"}, n=1)
            yield f"{name} is not a known option" + (f"; did you mean {near[0]}?" if near else "")
    yield from _misspelt(source)


def _misspelt(source: Mapping[str, str]) -> Iterable[str]:
    """Warnings about DMLC_* and PS_* names that resemble an option.

    Other programs use such names, too, so a name that resembles none causes no warning.
    """
    known = [name for name in _KNOWN if name.startswith(("DMLC_", "PS_"))]
    for name in source:
        if name.startswith(("DMLC_", "PS_")) and name not in _KNOWN and name not in NOT_USED:
            for near in difflib.get_close_matches(name, known, n=1, cutoff=_RESEMBLES):
                yield f"{name} is not a known option; did you mean {near}?"


def frame_bound(config: Config | int) -> int:
    """Largest message in bytes on a data connection, set by the receiver's options.

    ``config``: the receiver's options, or its value of BYTEPS_PARTITION_BYTES. The bound limits
    what an unauthenticated peer can make a lane buffer until its handshake times out.
    """
    nbytes = config if isinstance(config, int) else config.partition_bytes
    # Compressed tensors have partitions twice as large, and topk that keeps all elements doubles
    # that.
    return max(64 << 20, 4 * int(nbytes))
