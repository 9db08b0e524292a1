"""Every option of bpsx, declared once: name, environment variable, type, default, help. The only reader of the environment.

The reference page ``docs/options.md`` is generated from :data:`OPTIONS`. A malformed value is a :class:`~bpsx.errors.ConfigError` that names
the variable, the value and what is allowed; an unknown ``BYTEPS_*`` or ``BPSX_*`` name gets a warning with the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpsx import secret
from bpsx.errors import ConfigError
from bpsx.unused import NOT_USED
from bpsx.values import FLAG, blacklist, choice, cpu_lists, flag, host_port, integer, modules, number, ranks, zero_or


@dataclass(frozen=True)
class Option:
    """One option. ``parse`` turns the variable's text into the value or raises :class:`ValueError` saying what is allowed."""

    field: str
    env: str
    parse: Callable[[str], Any]
    default: Any
    allowed: str
    help: str
    group: str


def _path(text: str) -> str:
    """``~`` is the home folder also where no shell has seen it, as in a file of variables."""
    return os.path.expanduser(text)


_ROLES = ("worker", "server", "scheduler")
_HASHES = ("balanced", "naive", "built_in", "djb2", "sdbm")
_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
#: Values of DMLC_ENABLE_RDMA -> name of the transport.
TRANSPORT_NAMES = {"0": "zeromq", "zmq": "zeromq", "zeromq": "zeromq", "tcp": "tcp", "1": "rdma", "ibverbs": "rdma", "rdma": "rdma"}
NO_ENCRYPTION = "BPSX_ENCRYPT=1: plain sockets and RDMA (DMLC_ENABLE_RDMA=tcp, 1) do not encrypt; ZeroMQ does: DMLC_ENABLE_RDMA=0"
#: Worker processes in a job: a server keeps a record of each for every partition.
MOST_WORKERS = 65535


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _default_lanes() -> int:
    """Threads pay while there are cores for them; a worker or two share the machine in the colocated case."""
    return max(1, min(4, _cores() // 4))


def _default_compressors() -> int:
    return max(1, min(4, _cores() // 2))


_JOB, _TUNE, _FAIL, _LOG, _SEE, _TRUST = "Job", "Tuning", "Failure", "Logging and files", "Seeing", "Security"
_LAUNCH, _GPU = "Launcher", "GPUs"

OPTIONS: tuple[Option, ...] = (
    Option("role", "DMLC_ROLE", choice(*_ROLES), None, " | ".join(_ROLES), "What this process is.", _JOB),
    Option("root_uri", "DMLC_PS_ROOT_URI", str, None, "address or host name", "Where the scheduler listens.", _JOB),
    Option("root_port", "DMLC_PS_ROOT_PORT", integer(0, 65535), None, "0..65535",
           "The scheduler's port. With 0 the scheduler takes a free one and prints it.", _JOB),
    Option("num_worker", "DMLC_NUM_WORKER", integer(1, 65535), 1, "1..65535", "Number of worker machines.", _JOB),
    Option("num_server", "DMLC_NUM_SERVER", integer(0, 65535), None, "0..65535",
           "Number of server processes; required unless a single worker runs without servers.", _JOB),
    Option("worker_id", "DMLC_WORKER_ID", integer(0, 65534), None, "0..DMLC_NUM_WORKER-1", "Which worker machine this is.", _JOB),
    Option("local_rank", "BYTEPS_LOCAL_RANK", integer(0, 65534), 0, "0..BYTEPS_LOCAL_SIZE-1",
           "Index of this process on its machine.", _JOB),
    Option("local_size", "BYTEPS_LOCAL_SIZE", integer(1, 65535), 1, "1..65535",
           "Worker processes per machine, the same on all; rank = worker id * local size + local rank.", _JOB),
    Option("local_reduce", "BPSX_LOCAL_REDUCE", flag, True, FLAG,
           "With BYTEPS_LOCAL_SIZE > 1: the processes of a machine sum in shared memory first, and one of them speaks to the servers. "
           "0: each speaks for itself.", _JOB),
    Option("force_distributed", "BYTEPS_FORCE_DISTRIBUTED", flag, False, FLAG,
           "Use servers even with a single worker, which otherwise needs neither servers nor scheduler.", _JOB),
    Option("asynchronous", "BYTEPS_ENABLE_ASYNC", flag, False, FLAG,
           "Asynchronous training: servers hold values and add what is pushed, no worker waits for another. The same on all workers and "
           "servers. See docs/async.md.", _JOB),
    Option("node_host", "DMLC_NODE_HOST", str, "", "address", "Own address to listen on and advertise. Default: the one from which the "
           "scheduler is reached.", _JOB),
    Option("interface", "DMLC_INTERFACE", str, "", "interface name", "Take the own address from this interface; DMLC_NODE_HOST wins.", _JOB),
    Option("transport", "DMLC_ENABLE_RDMA", choice(*TRANSPORT_NAMES), "0", " | ".join(TRANSPORT_NAMES),
           "Transport between workers and servers: 0 and zmq are TCP through ZeroMQ, tcp is TCP through plain sockets, 1, ibverbs and rdma are RDMA. "
           "See docs/rdma.md.", _JOB),
    Option("ipc", "BYTEPS_ENABLE_IPC", flag, True, FLAG,
           "Workers and servers of one machine, user and job exchange partitions through shared memory, and the transport carries the rest.", _JOB),
    Option("rdma_device", "BPSX_RDMA_DEVICE", str, "", "name of an adapter, and :number of a port",
           "RDMA adapter, as in mlx5_0 or mlx5_0:1. Default: the one that has a GID of the own address.", _JOB),
    Option("rdma_gid_index", "BPSX_RDMA_GID_INDEX", integer(0, 4095), None, "0..4095",
           "Number of the GID in the adapter's table. Default: that of the own address, RoCE v2 if there is one.", _JOB),
    Option("partition_bytes", "BYTEPS_PARTITION_BYTES", integer(4096), 2 << 20, "a whole number of bytes, at least 4096",
           "Tensors are cut into partitions of at most this size (in whole pages), compressed ones of twice that. The same on all workers.", _TUNE),
    Option("key_hash_fn", "BYTEPS_KEY_HASH_FN", choice(*_HASHES), "balanced", " | ".join(_HASHES),
           "How partitions are spread over servers: by bytes (balanced) or by one of BytePS' hashes. The same on all workers.", _TUNE),
    Option("mixed_mode", "BYTEPS_ENABLE_MIXED_MODE", flag, False, FLAG,
           "Servers on workers' machines get fewer bytes than others, so that all network cards carry the same. The same on all workers.", _TUNE),
    Option("server_weight", "BPSX_SERVER_WEIGHT", integer(1, 1000), 1, "1..1000",
           "Of a server: how many bytes it gets, compared to the others; in mixed mode how fast its machine's card is.", _TUNE),
    Option("hash_coefficient", "BYTEPS_BUILT_IN_HASH_COEF", integer(1, 2**31), 1, "1..2147483648", "Multiplier of the built_in hash.", _TUNE),
    Option("scheduling_credit", "BYTEPS_SCHEDULING_CREDIT", integer(0), 4, "partitions; 0: no bound",
           "How much a worker hands to the transport per connection before it has been written out, in partitions; half of it on its own machine. "
           "A small credit lets urgent tensors overtake; 0 switches priorities off in effect.", _TUNE),
    Option("rdma_rx_depth", "BYTEPS_RDMA_RX_DEPTH", integer(16, 32768), 512, "16..32768",
           "RDMA: messages of a connection that may be on their way to this process.", _TUNE),
    Option("rdma_start_depth", "BYTEPS_RDMA_START_DEPTH", integer(16, 32768), 128, "16..32768",
           "RDMA: messages of a connection that the adapter may have to send.", _TUNE),
    Option("rdma_inbox", "BPSX_RDMA_INBOX_MB", integer(4, 65536), 64, "MiB, 4..65536",
           "RDMA: registered memory of a server's lane for what one worker pushes; a worker has a quarter of it for a lane's answers. "
           "At least 8 partitions.", _TUNE),
    Option("send_ahead_ms", "BPSX_SEND_AHEAD_MS", number(0), 10.0, "milliseconds; 0: no bound",
           "How long what a worker has handed to the transport for a server may take the slowest server's link, if it is more than a partition: "
           "what shares a link is complete at once, and late. BYTEPS_SCHEDULING_CREDIT bounds it, too, and with 0 nothing does.", _TUNE),
    Option("engine_threads", "BYTEPS_SERVER_ENGINE_THREAD", integer(1, 256), _default_lanes, "1..256",
           "Lanes of a server: each is a thread, a port and one connection per worker. Default: a quarter of the cores, 1 to 4.", _TUNE),
    Option("server_schedule", "BYTEPS_SERVER_ENABLE_SCHEDULE", flag, False, FLAG,
           "A server takes waiting pushes by priority instead of by arrival.", _TUNE),
    Option("zmq_threads", "BYTEPS_ZMQ_NTHREADS", integer(1, 256), _default_lanes, "1..256",
           "ZeroMQ I/O threads of a process. Default: a quarter of the cores, 1 to 4.", _TUNE),
    Option("send_buffer", "BPSX_SEND_BUFFER_KB", zero_or(64, 2**20), None, "64..1048576 KiB; 0: the system's own tuning",
           "Send buffer of each data connection. Default: 448 on loopback, for the caches; else 224, lest what comes later shares a link with what "
           "goes now. Far networks (a ms there and back, or more): 0, or megabytes. Less than 64 makes what stays in a machine wait for TCP.", _TUNE),
    Option("spin_us", "BPSX_SPIN_US", number(0), 50.0, "microseconds",
           "How long a thread without work yields the core before it sleeps. Waking it costs more than this on most machines.", _TUNE),
    Option("fixed_order", "BPSX_FIXED_ORDER", flag, False, FLAG,
           "Servers add the workers' pushes by rank, so that float sums of three and more workers are the same bits in every run. "
           "(All workers get the same bits in any case.)", _TUNE),
    Option("min_compress_bytes", "BYTEPS_MIN_COMPRESS_BYTES", integer(0), 65536, "bytes",
           "Tensors smaller than this are not compressed. The same on all workers.", _TUNE),
    Option("compress_threads", "BYTEPS_THREADPOOL_SIZE", integer(1, 64), _default_compressors, "1..64",
           "Threads of a worker that compress. Default: half of the cores, 1 to 4.", _TUNE),
    Option("compressors", "BPSX_COMPRESSORS", modules, "", "names of Python modules, comma separated",
           "Compressors from outside the package: workers and servers import these when they start. The same on all. See CONTRIBUTING.md.",
           _TUNE),
    Option("reduce_roots", "BYTEPS_REDUCE_ROOTS", ranks, None, "local ranks, comma separated",
           "GPUs of a machine to which NCCL reduces, by turns, and which copy to the host. Default: each copies a part of every tensor. The same on "
           "all processes of a machine; not with BYTEPS_PCIE_SWITCH_SIZE.", _GPU),
    Option("switch_size", "BYTEPS_PCIE_SWITCH_SIZE", integer(1, 65535), None, "1..BYTEPS_LOCAL_SIZE, of which it is a divisor",
           "GPUs of a machine that reduce among themselves, by neighbouring local ranks; the CPU adds their sums. Default: by topology, all if "
           "NVLink joins them. The same on all processes of a machine.", _GPU),
    Option("nccl_group", "BYTEPS_NCCL_GROUP_SIZE", integer(1, 256), None, "1..256",
           "NCCL's collectives that are due together and are queued at once, at most. Default: 64 without servers; else 4, since "
           "the first's copy waits for the last.", _GPU),
    Option("nccl_rings", "BYTEPS_NCCL_NUM_RINGS", integer(0, 64), 0, "0..64; 0: NCCL decides",
           "Channels of NCCL's communicator at least: each takes a multiprocessor of the GPU.", _GPU),
    Option("keep_memory", "BPSX_KEEP_MEMORY_MB", integer(0, 2**20), 256, "MiB; 0: leave malloc alone",
           "Let malloc keep this much freed memory instead of returning it: fresh pages for every message cost a fifth of the rate.", _TUNE),
    Option("rendezvous_timeout", "BPSX_RENDEZVOUS_TIMEOUT", number(0.1), 300.0, "seconds",
           "How long the job may take to come together before everybody gives up, naming who is missing.", _FAIL),
    Option("gather_grace", "BPSX_GATHER_GRACE", number(0), 3.0, "seconds",
           "While the job is coming together: how long one who had come and whose connection broke (a process that died, the scheduler), or who "
           "was refused for its options, may take to come back before everybody gives up, naming it.", _FAIL),
    Option("heartbeat_interval", "PS_HEARTBEAT_INTERVAL", number(0), 5.0, "seconds; 0: off",
           "How often connections are probed.", _FAIL),
    Option("heartbeat_timeout", "PS_HEARTBEAT_TIMEOUT", number(0), 30.0, "seconds",
           "Silence after which a peer counts as dead. A killed process is noticed at once.", _FAIL),
    Option("stall_warn", "BPSX_STALL_WARN_SECONDS", number(0.1), 30.0, "seconds",
           "A push_pull older than this is reported: tensor, round, who has not pushed.", _FAIL),
    Option("deadlock_after", "BPSX_DEADLOCK_SECONDS", number(0.5), 60.0, "seconds",
           "When all workers have waited this long for tensors that another one has not pushed, those push_pulls fail.", _FAIL),
    Option("shutdown_timeout", "BPSX_SHUTDOWN_TIMEOUT", number(0.1), 5.0, "seconds",
           "How long shutdown waits for push_pulls under way and for the scheduler's goodbye.", _FAIL),
    Option("log_level", "BYTEPS_LOG_LEVEL", choice(*_LEVELS), "warning", " | ".join(_LEVELS), "What is logged, to standard error.", _LOG),
    Option("log_hide_time", "BYTEPS_LOG_HIDE_TIME", flag, False, FLAG, "Log without the time.", _LOG),
    Option("verbose", "PS_VERBOSE", integer(0, 2), 0, "0 | 1 | 2",
           "1: tell of connections made and lost; 2: also of every message (kind, key, round, bytes, peer), from workers and servers.", _SEE),
    Option("key_log", "PS_KEY_LOG", flag, False, FLAG,
           "A server tells of each key at first sight: tensor name, type, bytes. A worker does at BYTEPS_LOG_LEVEL=debug.", _SEE),
    Option("sample_tensor", "BYTEPS_DEBUG_SAMPLE_TENSOR", integer(-1, 2**64 - 1), None, "a key; -1: all",
           "A worker prints this key's first and last element at each stage of each push_pull.", _SEE),
    Option("server_debug", "BYTEPS_SERVER_DEBUG", flag, False, FLAG,
           "A server prints first and last element as they are received, summed and sent.", _SEE),
    Option("server_debug_key", "BYTEPS_SERVER_DEBUG_KEY", integer(-1, 2**64 - 1), -1, "a key; -1: all", "... of this key.", _SEE),
    Option("telemetry", "BYTEPS_TELEMETRY_ON", flag, True, FLAG,
           "Count the bytes of tensors that come home; without it get_pushpull_speed() returns (0.0, 0.0).", _SEE),
    Option("trace_on", "BYTEPS_TRACE_ON", flag, False, FLAG, "Record a timeline of the steps below, on workers and servers.", _SEE),
    Option("trace_start", "BYTEPS_TRACE_START_STEP", integer(1, 2**31), 10, "1 or more",
           "First step recorded. A tensor's step is its own count of push_pulls, from 1.", _SEE),
    Option("trace_end", "BYTEPS_TRACE_END_STEP", integer(2, 2**31), 20, "more than BYTEPS_TRACE_START_STEP", "Last step recorded.", _SEE),
    Option("trace_dir", "BYTEPS_TRACE_DIR", _path, "./traces", "folder",
           "Timelines go to LOCAL_RANK/comm.json and server-RANK/comm.json in it.", _SEE),
    Option("metrics_port", "BPSX_METRICS_PORT", host_port, None, "PORT or HOST:PORT; PORT 0: a free one, logged",
           "The scheduler serves the job's metrics to Prometheus here; on loopback unless a host is given. Off by default.", _SEE),
    Option("cache_dir", "BPSX_CACHE_DIR", _path, "", "folder", "Where compiled kernels are kept. Default: bpsx in the user's cache folder.", _LOG),
    Option("socket_path", "BYTEPS_SOCKET_PATH", _path, "", "folder",
           "Where processes of one machine meet: a folder of this user's below it. Default: the user's runtime folder, else the temporary "
           "folder.", _LOG),
    Option("port_file", "BPSX_PORT_FILE", _path, "", "path",
           "The scheduler writes its port here once it listens; the launcher reads it.", _LOG),
    Option("secret", "BPSX_SECRET", str, "", "text of 16 to 4096 bytes",
           "The job secret, the same for all processes of a job: who does not know it is kept out (docs/security.md). Wins over BPSX_SECRET_FILE.",
           _TRUST),
    Option("secret_file", "BPSX_SECRET_FILE", _path, "", "path", "File that holds the job secret; readable by its owner only.", _TRUST),
    Option("insecure", "BPSX_INSECURE", flag, False, FLAG, "Run without a secret although others than this machine can reach the job.", _TRUST),
    Option("encrypt", "BPSX_ENCRYPT", flag, False, FLAG,
           "Encrypt gradients between workers and servers, too. The same on all processes; control messages are always encrypted.", _TRUST),
    Option("state_fd", "BPSX_STATE_FD", integer(-1, 2**20), -1, "a file descriptor; -1: none",
           "The scheduler writes lines there: waiting, then running, then who has failed the job, if anybody has. The launcher reads it.", _LAUNCH),
    Option("lifeline_fd", "BPSX_LIFELINE_FD", integer(-1, 2**20), -1, "a file descriptor; -1: none",
           "The scheduler or server ends when the other end of this socket closes before the job has begun: who started it is gone. The scheduler "
           "writes its port there once it listens.", _LAUNCH),
    Option("visible_devices", "NVIDIA_VISIBLE_DEVICES", str, "", "all | none | void | names, comma separated",
           "bpsx-run starts one worker process per entry; with all one per GPU. Unset, empty, none or void: BYTEPS_LOCAL_SIZE processes.", _LAUNCH),
    Option("numa_on", "BYTEPS_NUMA_ON", flag, True, FLAG,
           "bpsx-run binds the worker processes of a machine to cores when there are several, or when one of the next four options is set.", _LAUNCH),
    Option("numa_default_quota", "BYTEPS_NUMA_DEFAULT_QUOTA", integer(0, 65535), 0, "0..65535; 0: cores / processes",
           "Physical cores of each worker process but the root.", _LAUNCH),
    Option("numa_root_quota", "BYTEPS_NUMA_ROOT_QUOTA", integer(0, 65535), 0, "0..65535; 0: what is left",
           "Physical cores of the root, the process with the largest local rank.", _LAUNCH),
    Option("visible_cpu_cores", "BYTEPS_VISIBLE_CPU_CORES", cpu_lists, "", "lists of logical CPUs as 0-3,8, with a colon between local ranks",
           "Exactly the CPUs of each worker process; quotas and blacklist do not count then.", _LAUNCH),
    Option("cpu_blacklist", "BYTEPS_CPU_BLACKLIST", blacklist, "-1", "logical CPUs as 0-3,8; -1: none",
           "CPUs that no worker process is bound to.", _LAUNCH),
    Option("multithreaded_cpu", "BYTEPS_MULTITHREADED_CPU", flag, True, FLAG,
           "A process gets all hardware threads of its cores; 0: the first of each.", _LAUNCH),
    Option("enable_gdb", "BYTEPS_ENABLE_GDB", flag, False, FLAG,
           "bpsx-run runs workers and servers under gdb, which prints all threads' backtraces after a crash.", _LAUNCH),
)

_TORCHRUN = "torchrun"
#: What ``torchrun`` tells the processes that it starts. Texts: other programs use some of these names for other things.
TORCHRUN_OPTIONS: tuple[Option, ...] = (
    Option("rank", "RANK", str, "", "0..WORLD_SIZE-1", "rank() of this process.", _TORCHRUN),
    Option("size", "WORLD_SIZE", str, "", "1..65535", "size() of the job.", _TORCHRUN),
    Option("local_rank", "LOCAL_RANK", str, "", "0..LOCAL_WORLD_SIZE-1", "BYTEPS_LOCAL_RANK.", _TORCHRUN),
    Option("local_size", "LOCAL_WORLD_SIZE", str, "", "1..65535",
           "BYTEPS_LOCAL_SIZE. Where it differs between machines, each process counts as a machine of its own.", _TORCHRUN),
    Option("group_rank", "GROUP_RANK", str, "", "0..65534", "Not needed: the machine is RANK / LOCAL_WORLD_SIZE, which is the same.", _TORCHRUN),
    Option("master_addr", "MASTER_ADDR", str, "", "address or host name",
           "Where torchrun's store is, on the machine of rank 0, which starts the scheduler unless DMLC_PS_ROOT_URI is set.", _TORCHRUN),
    Option("master_port", "MASTER_PORT", str, "", "1..65535", "The store's port.", _TORCHRUN),
    Option("run_id", "TORCHELASTIC_RUN_ID", str, "", "text", "Keeps this run's entries in the store apart from others'.", _TORCHRUN),
)

class Config:
    """The values of all options, as attributes named by :attr:`Option.field`. Immutable after construction.

    ``environ`` defaults to the process's environment; ``given`` overrides single fields. Raises :class:`~bpsx.errors.ConfigError`.
    Thread-safe once made.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, **given: Any) -> None:
        source = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for option in OPTIONS:
            if option.field in given:
                values[option.field] = given.pop(option.field)
            else:
                values[option.field] = _read(option, source)
        if given:
            raise ConfigError(f"no such option: {', '.join(sorted(given))}")
        self.__dict__.update(values)
        self.unknown = tuple(_complain(source))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no option is called {name!r}")

    @property
    def size(self) -> int:
        """Workers in the job: machines times processes per machine."""
        return int(self.num_worker * self.local_size)

    @property
    def rank(self) -> int:
        """This worker's rank, 0 to size-1."""
        return int((self.worker_id or 0) * self.local_size + self.local_rank)

    @property
    def distributed(self) -> bool:
        """Whether servers and a scheduler take part."""
        return bool(self.size > 1 or self.force_distributed or self.asynchronous)

    @property
    def shares_machine(self) -> bool:
        """Whether the worker processes of a machine sum among themselves first."""
        return bool(self.local_size > 1 and self.local_reduce and not self.asynchronous)

    @property
    def servers(self) -> int:
        """Servers that take part: none on a single machine whose processes sum among themselves, as with BytePS."""
        if self.role == "worker" and self.num_worker == 1 and self.shares_machine and not self.force_distributed:
            return 0
        return int(self.num_server or 0)

    @property
    def secret_bytes(self) -> bytes:
        """The job secret; empty if there is none. Reads the file anew. Raises :class:`~bpsx.errors.ConfigError` naming what is wrong with it."""
        if self.secret:
            return secret.accept(self.secret, "BPSX_SECRET")
        return secret.read(self.secret_file) if self.secret_file else b""

    def _missing(self, *fields: str) -> Iterable[str]:
        missing = [o for o in OPTIONS if o.field in fields and getattr(self, o.field) is None]
        if missing:
            yield "not set: " + "; ".join(f"{o.env} ({o.help.rstrip('.')}; {o.allowed})" for o in missing)

    def _server_faults(self) -> Iterable[str]:
        """Whether there are as many as are needed."""
        if self.role == "worker" and self.num_worker == 1 and self.shares_machine and not self.force_distributed:
            return
        yield from self._missing("num_server")
        # A scheduler cannot know how many processes its one machine has.
        if self.num_server == 0 and not (self.role == "scheduler" and self.num_worker == 1):
            yield "DMLC_NUM_SERVER=0: at least one server is needed, except on a single machine"

    def _worker_faults(self) -> Iterable[str]:
        if self.size > MOST_WORKERS:
            yield f"DMLC_NUM_WORKER x BYTEPS_LOCAL_SIZE = {self.size} workers: at most {MOST_WORKERS} are possible"
        if (self.worker_id or 0) >= self.num_worker:
            yield f"DMLC_WORKER_ID={self.worker_id}: allowed are 0..{self.num_worker - 1} (DMLC_NUM_WORKER={self.num_worker})"
        yield from self._gpu_faults()
        if self.local_rank >= self.local_size:
            yield f"BYTEPS_LOCAL_RANK={self.local_rank}: allowed are 0..{self.local_size - 1} (BYTEPS_LOCAL_SIZE)"

    def _gpu_faults(self) -> Iterable[str]:
        if self.reduce_roots and self.switch_size is not None:
            yield "BYTEPS_REDUCE_ROOTS and BYTEPS_PCIE_SWITCH_SIZE are two ways to do one thing: set one of them"
        for root in self.reduce_roots or ():
            if root >= self.local_size:
                yield f"BYTEPS_REDUCE_ROOTS: there is no local rank {root}; allowed are 0..{self.local_size - 1} (BYTEPS_LOCAL_SIZE)"
        if self.switch_size is not None and self.local_size % self.switch_size:
            yield f"BYTEPS_PCIE_SWITCH_SIZE={self.switch_size}: must be a divisor of BYTEPS_LOCAL_SIZE={self.local_size}"

    def faults(self) -> Iterable[str]:
        """What does not fit together for this role, one text each. Without a role: what fits none."""
        yield from self._missing("role")
        try:
            _ = self.secret_bytes       # what is wrong with it shall be told first
        except ConfigError as error:
            yield str(error)
        if self.trace_end <= self.trace_start:
            yield f"BYTEPS_TRACE_END_STEP={self.trace_end}: must be more than BYTEPS_TRACE_START_STEP={self.trace_start}"
        if self.role in ("scheduler", "server") or (self.role == "worker" and self.distributed):
            yield from self._missing("root_uri", "root_port")
            yield from self._server_faults()
        if self.role == "worker" and self.num_worker > 1:
            yield from self._missing("worker_id")
        if self.encrypt and TRANSPORT_NAMES[self.transport] != "zeromq":
            yield NO_ENCRYPTION
        if self.mixed_mode and self.key_hash_fn != "balanced":
            yield f"BYTEPS_KEY_HASH_FN={self.key_hash_fn}: with BYTEPS_ENABLE_MIXED_MODE=1 bytes decide; allowed is balanced"
        if self.role in ("worker", None):
            yield from self._worker_faults()

    def check(self) -> None:
        """Whether the values fit together for this role. Raises :class:`~bpsx.errors.ConfigError` for the first of :meth:`faults`."""
        for fault in self.faults():
            raise ConfigError(fault)


def faults(environ: Mapping[str, str] | None = None) -> list[str]:
    """All that is wrong with the variables, where :class:`Config` and :meth:`Config.check` raise for the first. A role need not be named."""
    good = dict(os.environ if environ is None else environ)
    found: dict[str, str] = {}
    for option in OPTIONS:
        try:
            _read(option, good)
        except ConfigError as error:
            found[option.env] = str(error)
            del good[option.env]
    # What only follows from the lack of those says nothing new.
    more = [f for f in Config(good).faults() if not f.startswith("not set: DMLC_ROLE") and not any(env in f for env in found)]
    return [*found.values(), *more]


def torchrun_variables() -> dict[str, str]:
    """What torchrun has told this process, by field of :data:`TORCHRUN_OPTIONS`. Empty if ``DMLC_WORKER_ID`` or ``BYTEPS_LOCAL_RANK`` says its
    place: these win."""
    return {} if is_set("DMLC_WORKER_ID") or is_set("BYTEPS_LOCAL_RANK") else {o.field: os.environ.get(o.env, "").strip() for o in TORCHRUN_OPTIONS}


def _read(option: Option, source: Mapping[str, str]) -> Any:
    text = source.get(option.env)
    if text is None or (text == "" and option.parse not in (str, _path)):
        return option.default() if callable(option.default) else option.default
    try:
        return option.parse(text.strip())
    except ValueError:
        raise ConfigError(f"{option.env}={text!r}: allowed is {option.allowed}") from None


def _complain(source: Mapping[str, str]) -> Iterable[str]:
    """Warnings about variables that will not do what their name promises."""
    known = {o.env for o in OPTIONS}
    for name in source:
        if name in NOT_USED:
            yield f"{name} is a BytePS variable that has no effect in this version of bpsx"
        elif name.startswith(("BYTEPS_", "BPSX_")) and name not in known:
            near = difflib.get_close_matches(name, known - {"BPSX_INSECURE"}, n=1)     # nobody shall switch that on by a guess
            yield f"{name} is not a known option" + (f"; did you mean {near[0]}?" if near else "")


def _cache_places(source: Mapping[str, str]) -> Iterator[Path]:
    """Where compiled kernels may be, best first."""
    if named := _path(source.get("BPSX_CACHE_DIR", "")):
        yield Path(named)
        return
    yield Path(source.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")) / "bpsx"
    # Looked up only if need be: that makes a file for a moment, which stays if we are killed in it.
    yield Path(tempfile.gettempdir()) / f"bpsx-{os.getuid()}"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """A folder for compiled kernels that this user may write to: made if need be, private to the user."""
    tried = []
    for folder in _cache_places(os.environ if environ is None else environ):
        tried.append(str(folder))
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        found = folder.stat()
        # Who may write there decides what code runs here.
        if os.access(folder, os.W_OK) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    raise ConfigError("BPSX_CACHE_DIR: no folder that this user and nobody else may write to for compiled kernels; tried " + ", ".join(tried))


def runtime_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder for sockets and records of running jobs: ``bpsx-<user id>``, mode 0700, this user's; made if need be.

    Raises :class:`~bpsx.errors.ConfigError` if somebody else owns it or others may enter it: its content could not be trusted.
    """
    source = os.environ if environ is None else environ
    above = _path(source.get("BYTEPS_SOCKET_PATH", "")) or source.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(above) / f"bpsx-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as e:
        raise ConfigError(f"BYTEPS_SOCKET_PATH: cannot make {folder}: {e.strerror}") from e
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"BYTEPS_SOCKET_PATH: {folder} must be a folder of user {os.getuid()}'s with mode 0700; "
                          f"it belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}")
    return folder


def is_set(name: str) -> bool:
    """Whether environment variable ``name`` is there and not empty."""
    return bool(os.environ.get(name, "").strip())


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a process that the launcher starts: ours with ``changes``."""
    return {**os.environ, **changes}


def frame_bound(config: Config | int) -> int:
    """Bytes that one message on a data connection may have, by the options (or the value of BYTEPS_PARTITION_BYTES) of who receives it.

    Without a bound a stranger could make a lane keep whatever he sends until his handshake is over time."""
    nbytes = config if isinstance(config, int) else config.partition_bytes
    return max(64 << 20, 4 * int(nbytes))   # what is compressed has partitions twice as large, and topk that keeps all makes twice that


def reference() -> str:
    """The page ``docs/options.md``."""
    lines = ["# Options", "", "Generated from `src/bpsx/config.py` by `make docs`. All options are environment variables.", ""]
    options = (*OPTIONS, *TORCHRUN_OPTIONS)
    for group in dict.fromkeys(o.group for o in options):
        lines += [f"## {group}", ""]
        if group == _TORCHRUN:
            lines += ["They count unless `DMLC_WORKER_ID` or `BYTEPS_LOCAL_RANK` is set ([pytorch.md](pytorch.md)).", ""]
        lines += ["| variable | allowed | default | meaning |", "|---|---|---|---|"]
        for o in (o for o in options if o.group == group):
            default = "by cores" if callable(o.default) else "required or unset" if o.default is None and group == _JOB else _plain(o.default)
            allowed = o.allowed.replace("|", "\\|")
            lines.append(f"| `{o.env}` | {allowed} | {default} | {o.help} |")
        lines.append("")
    lines += ["## Known from BytePS, without effect in this version", "", "Setting one of these gets a warning.", ""]
    lines += [", ".join(f"`{n}`" for n in sorted(NOT_USED)), ""]
    return "\n".join(lines)


def _plain(default: Any) -> str:
    return "unset" if default in (None, "") else str(int(default)) if isinstance(default, bool) else str(default)
