"""Table of all options: name, environment variable, type, default, help."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bpsx.config.parsers import (
    FLAG,
    blacklist,
    choice,
    cpu_lists,
    flag,
    folder,
    host_port,
    integer,
    modules,
    number,
    port_range,
    ranks,
    zero_or,
)


@dataclass(frozen=True)
class Option:
    """One option.

    ``parse`` converts the variable's text to the value. It raises :class:`ValueError`, and
    ``allowed`` then says what is valid.
    """

    field: str
    env: str
    parse: Callable[[str], Any]
    default: Any
    allowed: str
    help: str
    group: str


_ROLES = ("worker", "server", "scheduler")
_HASHES = ("balanced", "naive", "built_in", "djb2", "sdbm")
_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
#: Values of DMLC_ENABLE_RDMA -> name of the transport.
TRANSPORT_NAMES = {
    "0": "zeromq",
    "zmq": "zeromq",
    "zeromq": "zeromq",
    "tcp": "tcp",
    "1": "rdma",
    "ibverbs": "rdma",
    "rdma": "rdma",
}
NO_ENCRYPTION = (
    "BPSX_ENCRYPT=1: plain sockets and RDMA (DMLC_ENABLE_RDMA=tcp, 1) do not encrypt; ZeroMQ does:"
    " DMLC_ENABLE_RDMA=0"
)
#: Most worker processes in a job. A server keeps a record of each for every partition.
MOST_WORKERS = 65535


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _default_lanes() -> int:
    """A quarter of the cores, 1 to 4.

    More threads help only while cores are free, and one or two workers may share the server's
    machine.
    """
    return max(1, min(4, _cores() // 4))


def _default_compressors() -> int:
    return max(1, min(4, _cores() // 2))


JOB, _TUNE, _FAIL, _LOG, _SEE, _TRUST = (
    "Job",
    "Tuning",
    "Failure",
    "Logging and files",
    "Seeing",
    "Security",
)
_LAUNCH, _GPU = "Launcher", "GPUs"

OPTIONS: tuple[Option, ...] = (
    Option(
        "role", "DMLC_ROLE", choice(*_ROLES), None, " | ".join(_ROLES), "What this process is.", JOB
    ),
    Option(
        "root_uri",
        "DMLC_PS_ROOT_URI",
        str,
        None,
        "address or host name",
        "Where the scheduler listens.",
        JOB,
    ),
    Option(
        "root_port",
        "DMLC_PS_ROOT_PORT",
        integer(0, 65535),
        None,
        "0..65535",
        "The scheduler's port. With 0 the scheduler takes a free one and prints it.",
        JOB,
    ),
    Option(
        "ports",
        "BPSX_PORTS",
        port_range,
        None,
        "LOW-HIGH, or one port",
        "The ports that this process may listen on, where no other option names one: servers'"
        " lanes, a scheduler with port 0, BPSX_METRICS_PORT=0. Default: any free one. See"
        " ports.md.",
        JOB,
    ),
    Option(
        "num_worker",
        "DMLC_NUM_WORKER",
        integer(1, 65535),
        1,
        "1..65535",
        "Number of worker machines.",
        JOB,
    ),
    Option(
        "num_server",
        "DMLC_NUM_SERVER",
        integer(0, 65535),
        None,
        "0..65535",
        "Number of server processes; required unless a single worker runs without servers.",
        JOB,
    ),
    Option(
        "worker_id",
        "DMLC_WORKER_ID",
        integer(0, 65534),
        None,
        "0..DMLC_NUM_WORKER-1",
        "Which worker machine this is.",
        JOB,
    ),
    Option(
        "local_rank",
        "BYTEPS_LOCAL_RANK",
        integer(0, 65534),
        0,
        "0..BYTEPS_LOCAL_SIZE-1",
        "Index of this process on its machine.",
        JOB,
    ),
    Option(
        "local_size",
        "BYTEPS_LOCAL_SIZE",
        integer(1, 65535),
        1,
        "1..65535",
        "Worker processes per machine, the same on all; rank = worker id * local size + local"
        " rank.",
        JOB,
    ),
    Option(
        "local_reduce",
        "BPSX_LOCAL_REDUCE",
        flag,
        True,
        FLAG,
        "With BYTEPS_LOCAL_SIZE > 1: the processes of a machine sum in shared memory first, and one"
        " of them speaks to the servers. 0: each speaks for itself.",
        JOB,
    ),
    Option(
        "force_distributed",
        "BYTEPS_FORCE_DISTRIBUTED",
        flag,
        False,
        FLAG,
        "Use servers even with a single worker, which otherwise needs neither servers nor"
        " scheduler.",
        JOB,
    ),
    Option(
        "asynchronous",
        "BYTEPS_ENABLE_ASYNC",
        flag,
        False,
        FLAG,
        "Asynchronous training: servers hold values and add what is pushed, no worker waits for"
        " another. The same on all workers and servers. See docs/train/async.md.",
        JOB,
    ),
    Option(
        "node_host",
        "DMLC_NODE_HOST",
        str,
        "",
        "address",
        "Own address to listen on and advertise. Default: the one from which the "
        "scheduler is reached.",
        JOB,
    ),
    Option(
        "interface",
        "DMLC_INTERFACE",
        str,
        "",
        "interface name",
        "Take the own address from this interface; DMLC_NODE_HOST wins.",
        JOB,
    ),
    Option(
        "transport",
        "DMLC_ENABLE_RDMA",
        choice(*TRANSPORT_NAMES),
        "0",
        " | ".join(TRANSPORT_NAMES),
        "Transport between workers and servers: 0 and zmq are TCP through ZeroMQ, tcp is TCP"
        " through plain sockets, 1, ibverbs and rdma are RDMA. See docs/run/rdma.md.",
        JOB,
    ),
    Option(
        "ipc",
        "BYTEPS_ENABLE_IPC",
        flag,
        True,
        FLAG,
        "Workers and servers of one machine, user and job exchange partitions through shared"
        " memory, and the transport carries the rest.",
        JOB,
    ),
    Option(
        "rdma_device",
        "BPSX_RDMA_DEVICE",
        str,
        "",
        "name of an adapter, and :number of a port",
        "RDMA adapter, as in mlx5_0 or mlx5_0:1. Default: the one that has a GID of the own"
        " address.",
        JOB,
    ),
    Option(
        "rdma_gid_index",
        "BPSX_RDMA_GID_INDEX",
        integer(0, 4095),
        None,
        "0..4095",
        "Number of the GID in the adapter's table. Default: that of the own address, RoCE v2 if"
        " there is one.",
        JOB,
    ),
    Option(
        "partition_bytes",
        "BYTEPS_PARTITION_BYTES",
        integer(4096),
        2 << 20,
        "a whole number of bytes, at least 4096",
        "Tensors are cut into partitions of at most this size (in whole pages), compressed ones of"
        " twice that. The same on all workers.",
        _TUNE,
    ),
    Option(
        "key_hash_fn",
        "BYTEPS_KEY_HASH_FN",
        choice(*_HASHES),
        "balanced",
        " | ".join(_HASHES),
        "How partitions are spread over servers: by bytes (balanced) or by one of BytePS' hashes."
        " The same on all workers.",
        _TUNE,
    ),
    Option(
        "mixed_mode",
        "BYTEPS_ENABLE_MIXED_MODE",
        flag,
        False,
        FLAG,
        "Servers on workers' machines get fewer bytes than others, so that all network cards carry"
        " the same. The same on all workers.",
        _TUNE,
    ),
    Option(
        "server_weight",
        "BPSX_SERVER_WEIGHT",
        integer(1, 1000),
        1,
        "1..1000",
        "Of a server: how many bytes it gets, compared to the others; in mixed mode how fast its"
        " machine's card is.",
        _TUNE,
    ),
    Option(
        "hash_coefficient",
        "BYTEPS_BUILT_IN_HASH_COEF",
        integer(1, 2**31),
        1,
        "1..2147483648",
        "Multiplier of the built_in hash.",
        _TUNE,
    ),
    Option(
        "scheduling_credit",
        "BYTEPS_SCHEDULING_CREDIT",
        integer(0),
        4,
        "partitions; 0: no bound",
        "How much a worker hands to the transport per connection before it has been written out, in"
        " partitions; half of it on its own machine. A small credit lets urgent tensors overtake; 0"
        " switches priorities off in effect.",
        _TUNE,
    ),
    Option(
        "rdma_rx_depth",
        "BYTEPS_RDMA_RX_DEPTH",
        integer(16, 32768),
        512,
        "16..32768",
        "RDMA: messages of a connection that may be on their way to this process.",
        _TUNE,
    ),
    Option(
        "rdma_start_depth",
        "BYTEPS_RDMA_START_DEPTH",
        integer(16, 32768),
        128,
        "16..32768",
        "RDMA: messages of a connection that the adapter may have to send.",
        _TUNE,
    ),
    Option(
        "rdma_inbox",
        "BPSX_RDMA_INBOX_MB",
        integer(4, 65536),
        64,
        "MiB, 4..65536",
        "RDMA: registered memory of a server's lane for what one worker pushes; a worker has a"
        " quarter of it for a lane's answers. At least 8 partitions.",
        _TUNE,
    ),
    Option(
        "send_ahead_ms",
        "BPSX_SEND_AHEAD_MS",
        number(0),
        10.0,
        "milliseconds; 0: no bound",
        "How long what a worker has handed to the transport for a server may take the slowest"
        " server's link, if it is more than a partition: what shares a link is complete at once,"
        " and late. BYTEPS_SCHEDULING_CREDIT bounds it, too, and with 0 nothing does.",
        _TUNE,
    ),
    Option(
        "engine_threads",
        "BYTEPS_SERVER_ENGINE_THREAD",
        integer(1, 256),
        _default_lanes,
        "1..256",
        "Lanes of a server: each is a thread, a port and one connection per worker. Default: a"
        " quarter of the cores, 1 to 4.",
        _TUNE,
    ),
    Option(
        "server_schedule",
        "BYTEPS_SERVER_ENABLE_SCHEDULE",
        flag,
        False,
        FLAG,
        "A server takes waiting pushes by priority instead of by arrival.",
        _TUNE,
    ),
    Option(
        "zmq_threads",
        "BYTEPS_ZMQ_NTHREADS",
        integer(1, 256),
        _default_lanes,
        "1..256",
        "ZeroMQ I/O threads of a process. Default: a quarter of the cores, 1 to 4.",
        _TUNE,
    ),
    Option(
        "send_buffer",
        "BPSX_SEND_BUFFER_KB",
        zero_or(64, 2**20),
        None,
        "64..1048576 KiB; 0: the system's own tuning",
        "Send buffer of each data connection. Default: 448 on loopback, for the caches; else 224,"
        " lest what comes later shares a link with what goes now. Far networks (a ms there and"
        " back, or more): 0, or megabytes. Less than 64 makes what stays in a machine wait for"
        " TCP.",
        _TUNE,
    ),
    Option(
        "spin_us",
        "BPSX_SPIN_US",
        number(0),
        50.0,
        "microseconds",
        "How long a thread without work yields the core before it sleeps. Waking it costs more than"
        " this on most machines.",
        _TUNE,
    ),
    Option(
        "fixed_order",
        "BPSX_FIXED_ORDER",
        flag,
        False,
        FLAG,
        "Servers add the workers' pushes by rank, so that float sums of three and more workers are"
        " the same bits in every run. (All workers get the same bits in any case.)",
        _TUNE,
    ),
    Option(
        "min_compress_bytes",
        "BYTEPS_MIN_COMPRESS_BYTES",
        integer(0),
        65536,
        "bytes",
        "Tensors smaller than this are not compressed. The same on all workers.",
        _TUNE,
    ),
    Option(
        "compress_threads",
        "BYTEPS_THREADPOOL_SIZE",
        integer(1, 64),
        _default_compressors,
        "1..64",
        "Threads of a worker that compress. Default: half of the cores, 1 to 4.",
        _TUNE,
    ),
    Option(
        "compressors",
        "BPSX_COMPRESSORS",
        modules,
        "",
        "names of Python modules, comma separated",
        "Compressors from outside the package: workers and servers import these when they start."
        " The same on all. See CONTRIBUTING.md.",
        _TUNE,
    ),
    Option(
        "reduce_roots",
        "BYTEPS_REDUCE_ROOTS",
        ranks,
        None,
        "local ranks, comma separated",
        "GPUs of a machine to which NCCL reduces, by turns, and which copy to the host. Default:"
        " each copies a part of every tensor. The same on all processes of a machine; not with"
        " BYTEPS_PCIE_SWITCH_SIZE.",
        _GPU,
    ),
    Option(
        "switch_size",
        "BYTEPS_PCIE_SWITCH_SIZE",
        integer(1, 65535),
        None,
        "1..BYTEPS_LOCAL_SIZE, of which it is a divisor",
        "GPUs of a machine that reduce among themselves, by neighbouring local ranks; the CPU adds"
        " their sums. Default: by topology, all if NVLink joins them. The same on all processes of"
        " a machine.",
        _GPU,
    ),
    Option(
        "nccl_group",
        "BYTEPS_NCCL_GROUP_SIZE",
        integer(1, 256),
        None,
        "1..256",
        "NCCL's collectives that are due together and are queued at once, at most. Default: 64"
        " without servers; else 4, since the first's copy waits for the last.",
        _GPU,
    ),
    Option(
        "nccl_rings",
        "BYTEPS_NCCL_NUM_RINGS",
        integer(0, 64),
        0,
        "0..64; 0: NCCL decides",
        "Channels of NCCL's communicator at least: each takes a multiprocessor of the GPU.",
        _GPU,
    ),
    Option(
        "keep_memory",
        "BPSX_KEEP_MEMORY_MB",
        integer(0, 2**20),
        256,
        "MiB; 0: leave malloc alone",
        "Let malloc keep this much freed memory instead of returning it: fresh pages for every"
        " message cost a fifth of the rate.",
        _TUNE,
    ),
    Option(
        "rendezvous_timeout",
        "BPSX_RENDEZVOUS_TIMEOUT",
        number(0.1),
        300.0,
        "seconds",
        "How long the job may take to come together before everybody gives up, naming who is"
        " missing.",
        _FAIL,
    ),
    Option(
        "gather_grace",
        "BPSX_GATHER_GRACE",
        number(0),
        3.0,
        "seconds",
        "While the job is coming together: how long one who had come and whose connection broke (a"
        " process that died, the scheduler), or who was refused for its options, may take to come"
        " back before everybody gives up, naming it.",
        _FAIL,
    ),
    Option(
        "heartbeat_interval",
        "PS_HEARTBEAT_INTERVAL",
        number(0),
        5.0,
        "seconds; 0: off",
        "How often connections are probed.",
        _FAIL,
    ),
    Option(
        "heartbeat_timeout",
        "PS_HEARTBEAT_TIMEOUT",
        number(0),
        30.0,
        "seconds",
        "Silence after which a peer counts as dead. A killed process is noticed at once.",
        _FAIL,
    ),
    Option(
        "stall_warn",
        "BPSX_STALL_WARN_SECONDS",
        number(0.1),
        30.0,
        "seconds",
        "A worker whose oldest push_pull is older than this is told of it once per stall, and again"
        " after ten times as long: tensor, round, how many more, who has not pushed.",
        _FAIL,
    ),
    Option(
        "deadlock_after",
        "BPSX_DEADLOCK_SECONDS",
        number(0.5),
        60.0,
        "seconds",
        "When the scripts of all workers have waited this long for tensors that another one has not"
        " pushed, all push_pulls under way fail. Scripts that have asked for equally many may catch"
        " that and go on; else the job has to end. What is under way and not waited for does not"
        " count; while another thread that has used bpsx does not wait, it takes ten times as"
        " long.",
        _FAIL,
    ),
    Option(
        "check_weights",
        "BPSX_CHECK_WEIGHTS",
        choice("warn", "error", "off"),
        "warn",
        "warn | error | off",
        "What happens in an optimizer's first step if workers have different weights, as after a"
        " forgotten broadcast_parameters or broadcast_variables: a sample of each parameter's"
        " elements is compared, bit for bit. TensorFlow warns in the second step. Not for MXNet's"
        " DistributedTrainer, which broadcasts, nor in TensorFlow 1's sessions.",
        _FAIL,
    ),
    Option(
        "shutdown_timeout",
        "BPSX_SHUTDOWN_TIMEOUT",
        number(0.1),
        5.0,
        "seconds",
        "How long shutdown waits for push_pulls under way and for the scheduler's goodbye.",
        _FAIL,
    ),
    Option(
        "term_grace",
        "BPSX_TERM_GRACE",
        number(0),
        30.0,
        "seconds",
        "After SIGTERM: how long servers and scheduler still serve workers that save, and how long "
        "bpsx-run waits for its workers before it ends them. A second SIGTERM ends at once.",
        _FAIL,
    ),
    Option(
        "log_level",
        "BYTEPS_LOG_LEVEL",
        choice(*_LEVELS),
        "warning",
        " | ".join(_LEVELS),
        "What is logged, to standard error.",
        _LOG,
    ),
    Option(
        "log_hide_time", "BYTEPS_LOG_HIDE_TIME", flag, False, FLAG, "Log without the time.", _LOG
    ),
    Option(
        "full_tracebacks",
        "BPSX_FULL_TRACEBACKS",
        flag,
        False,
        FLAG,
        "Errors and Ctrl-C show bpsx's own frames in tracebacks, too, instead of the script's"
        " only.",
        _LOG,
    ),
    Option(
        "verbose",
        "PS_VERBOSE",
        integer(0, 2),
        0,
        "0 | 1 | 2",
        "1: tell of connections made and lost; 2: also of every message (kind, key, round, bytes,"
        " peer), from workers and servers.",
        _SEE,
    ),
    Option(
        "key_log",
        "PS_KEY_LOG",
        flag,
        False,
        FLAG,
        "A server tells of each key at first sight: tensor name, type, bytes. A worker does at"
        " BYTEPS_LOG_LEVEL=debug.",
        _SEE,
    ),
    Option(
        "sample_tensor",
        "BYTEPS_DEBUG_SAMPLE_TENSOR",
        integer(-1, 2**64 - 1),
        None,
        "a key; -1: all",
        "A worker prints this key's first and last element at each stage of each push_pull.",
        _SEE,
    ),
    Option(
        "server_debug",
        "BYTEPS_SERVER_DEBUG",
        flag,
        False,
        FLAG,
        "A server prints first and last element as they are received, summed and sent.",
        _SEE,
    ),
    Option(
        "server_debug_key",
        "BYTEPS_SERVER_DEBUG_KEY",
        integer(-1, 2**64 - 1),
        -1,
        "a key; -1: all",
        "... of this key.",
        _SEE,
    ),
    Option(
        "telemetry",
        "BYTEPS_TELEMETRY_ON",
        flag,
        True,
        FLAG,
        "Count the bytes of tensors that come home; without it get_pushpull_speed() returns (0.0,"
        " 0.0).",
        _SEE,
    ),
    Option(
        "trace_on",
        "BYTEPS_TRACE_ON",
        flag,
        False,
        FLAG,
        "Record a timeline of the steps below, on workers and servers.",
        _SEE,
    ),
    Option(
        "trace_start",
        "BYTEPS_TRACE_START_STEP",
        integer(1, 2**31),
        10,
        "1 or more",
        "First step recorded. A tensor's step is its own count of push_pulls, from 1.",
        _SEE,
    ),
    Option(
        "trace_end",
        "BYTEPS_TRACE_END_STEP",
        integer(2, 2**31),
        20,
        "more than BYTEPS_TRACE_START_STEP",
        "Last step recorded.",
        _SEE,
    ),
    Option(
        "trace_dir",
        "BYTEPS_TRACE_DIR",
        folder,
        "./traces",
        "folder",
        "Timelines go to LOCAL_RANK/comm.json and server-RANK/comm.json in it.",
        _SEE,
    ),
    Option(
        "metrics_port",
        "BPSX_METRICS_PORT",
        host_port,
        None,
        "PORT or HOST:PORT; PORT 0: a free one, logged",
        "The scheduler serves the job's metrics to Prometheus here; on loopback unless a host is"
        " given. Off by default.",
        _SEE,
    ),
    Option(
        "cache_dir",
        "BPSX_CACHE_DIR",
        folder,
        "",
        "folder",
        "Where compiled kernels are kept. Default: bpsx in the user's cache folder.",
        _LOG,
    ),
    Option(
        "socket_path",
        "BYTEPS_SOCKET_PATH",
        folder,
        "",
        "folder",
        "Where processes of one machine meet: a folder of this user's below it. Default: the user's"
        " runtime folder, else the temporary folder.",
        _LOG,
    ),
    Option(
        "port_file",
        "BPSX_PORT_FILE",
        folder,
        "",
        "path",
        "The scheduler writes its port here once it listens; the launcher reads it.",
        _LOG,
    ),
    Option(
        "secret",
        "BPSX_SECRET",
        str,
        "",
        "text of 16 to 4096 bytes",
        "The job secret, the same for all processes of a job: who does not know it is kept out"
        " (docs/run/security.md). Wins over BPSX_SECRET_FILE.",
        _TRUST,
    ),
    Option(
        "secret_file",
        "BPSX_SECRET_FILE",
        folder,
        "",
        "path",
        "File that holds the job secret; readable by its owner only.",
        _TRUST,
    ),
    Option(
        "insecure",
        "BPSX_INSECURE",
        flag,
        False,
        FLAG,
        "Run without a secret although others than this machine can reach the job.",
        _TRUST,
    ),
    Option(
        "encrypt",
        "BPSX_ENCRYPT",
        flag,
        False,
        FLAG,
        "Encrypt gradients between workers and servers, too. The same on all processes; control"
        " messages are always encrypted.",
        _TRUST,
    ),
    Option(
        "announce",
        "BPSX_ANNOUNCE",
        flag,
        True,
        FLAG,
        "A scheduler or server says to standard error, when it starts, what it is and for whom it"
        " waits. Launchers say so themselves.",
        _LOG,
    ),
    Option(
        "state_fd",
        "BPSX_STATE_FD",
        integer(-1, 2**20),
        -1,
        "a file descriptor; -1: none",
        "The scheduler writes lines there: waiting, then running, then who has failed the job, if"
        " anybody has. The launcher reads it.",
        _LAUNCH,
    ),
    Option(
        "lifeline_fd",
        "BPSX_LIFELINE_FD",
        integer(-1, 2**20),
        -1,
        "a file descriptor; -1: none",
        "The scheduler or server ends when the other end of this socket closes before the job has"
        " begun: who started it is gone. The scheduler writes its port there once it listens.",
        _LAUNCH,
    ),
    Option(
        "visible_devices",
        "NVIDIA_VISIBLE_DEVICES",
        str,
        "",
        "all | none | void | names, comma separated",
        "bpsx-run starts one worker process per entry; with all one per GPU. Unset, empty, none or"
        " void: BYTEPS_LOCAL_SIZE processes.",
        _LAUNCH,
    ),
    Option(
        "numa_on",
        "BYTEPS_NUMA_ON",
        flag,
        True,
        FLAG,
        "bpsx-run binds the worker processes of a machine to cores when there are several, or when"
        " one of the next four options is set.",
        _LAUNCH,
    ),
    Option(
        "numa_default_quota",
        "BYTEPS_NUMA_DEFAULT_QUOTA",
        integer(0, 65535),
        0,
        "0..65535; 0: cores / processes",
        "Physical cores of each worker process but the root.",
        _LAUNCH,
    ),
    Option(
        "numa_root_quota",
        "BYTEPS_NUMA_ROOT_QUOTA",
        integer(0, 65535),
        0,
        "0..65535; 0: what is left",
        "Physical cores of the root, the process with the largest local rank.",
        _LAUNCH,
    ),
    Option(
        "visible_cpu_cores",
        "BYTEPS_VISIBLE_CPU_CORES",
        cpu_lists,
        "",
        "lists of logical CPUs as 0-3,8, with a colon between local ranks",
        "Exactly the CPUs of each worker process; quotas and blacklist do not count then.",
        _LAUNCH,
    ),
    Option(
        "cpu_blacklist",
        "BYTEPS_CPU_BLACKLIST",
        blacklist,
        "-1",
        "logical CPUs as 0-3,8; -1: none",
        "CPUs that no worker process is bound to.",
        _LAUNCH,
    ),
    Option(
        "multithreaded_cpu",
        "BYTEPS_MULTITHREADED_CPU",
        flag,
        True,
        FLAG,
        "A process gets all hardware threads of its cores; 0: the first of each.",
        _LAUNCH,
    ),
    Option(
        "enable_gdb",
        "BYTEPS_ENABLE_GDB",
        flag,
        False,
        FLAG,
        "bpsx-run runs workers and servers under gdb, which prints all threads' backtraces after a"
        " crash.",
        _LAUNCH,
    ),
)

TORCHRUN = "torchrun"
#: Variables that ``torchrun`` sets for its processes. They are parsed as text, as other programs
#: use some of these names for other things.
TORCHRUN_OPTIONS: tuple[Option, ...] = (
    Option("rank", "RANK", str, "", "0..WORLD_SIZE-1", "rank() of this process.", TORCHRUN),
    Option("size", "WORLD_SIZE", str, "", "1..65535", "size() of the job.", TORCHRUN),
    Option(
        "local_rank", "LOCAL_RANK", str, "", "0..LOCAL_WORLD_SIZE-1", "BYTEPS_LOCAL_RANK.", TORCHRUN
    ),
    Option(
        "local_size",
        "LOCAL_WORLD_SIZE",
        str,
        "",
        "1..65535",
        "BYTEPS_LOCAL_SIZE. Where it differs between machines, each process counts as a machine of"
        " its own. Unset: the processes of a machine find each other.",
        TORCHRUN,
    ),
    Option(
        "group_rank",
        "GROUP_RANK",
        str,
        "",
        "0..65534",
        "Not needed: the machine is RANK / LOCAL_WORLD_SIZE, which is the same.",
        TORCHRUN,
    ),
    Option(
        "master_addr",
        "MASTER_ADDR",
        str,
        "",
        "address or host name",
        "Where torchrun's store is, on the machine of rank 0, which starts the scheduler unless"
        " DMLC_PS_ROOT_URI is set.",
        TORCHRUN,
    ),
    Option("master_port", "MASTER_PORT", str, "", "1..65535", "The store's port.", TORCHRUN),
    Option(
        "run_id",
        "TORCHELASTIC_RUN_ID",
        str,
        "",
        "text",
        "Keeps this run's entries in the store apart from others'.",
        TORCHRUN,
    ),
)
