"""Table of all options: name, environment variable, type, default, help."""

from __future__ import annotations

import os

from bpsx.config.failure_options import FAILURE_OPTIONS
from bpsx.config.option import GPUS, JOB, LAUNCHER, LOGGING, SECURITY, SEEING, TUNING, Option
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
    "BPSX_ENCRYPT=1: plain sockets and RDMA (DMLC_ENABLE_RDMA=tcp, 1) cannot encrypt; use ZeroMQ,"
    " which does: DMLC_ENABLE_RDMA=0"
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


OPTIONS: tuple[Option, ...] = (
    Option(
        "role", "DMLC_ROLE", choice(*_ROLES), None, " | ".join(_ROLES), "Role of this process.", JOB
    ),
    Option(
        "root_uri",
        "DMLC_PS_ROOT_URI",
        str,
        None,
        "address or host name",
        "Address at which the scheduler listens.",
        JOB,
    ),
    Option(
        "root_port",
        "DMLC_PS_ROOT_PORT",
        integer(0, 65535),
        None,
        "0..65535",
        "Port of the scheduler. With 0 the scheduler takes a free port and prints it.",
        JOB,
    ),
    Option(
        "ports",
        "BPSX_PORTS",
        port_range,
        None,
        "LOW-HIGH, or one port",
        "Ports that this process may listen on where no other option names one: servers' lanes, a"
        " scheduler with port 0, BPSX_METRICS_PORT=0. Default: any free port. See ports.md.",
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
        "Number of server processes. Required unless a single worker runs without servers.",
        JOB,
    ),
    Option(
        "worker_id",
        "DMLC_WORKER_ID",
        integer(0, 65534),
        None,
        "0..DMLC_NUM_WORKER-1",
        "Index of this worker machine. It is at most BPSX_MAX_WORKERS-1 if that is set. With"
        " BPSX_ELASTIC=shrink or replace, and one process a machine, it may be missing: the"
        " scheduler then chooses a free one.",
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
        "Worker processes per machine, the same on all machines. rank = worker id * local size +"
        " local rank.",
        JOB,
    ),
    Option(
        "local_reduce",
        "BPSX_LOCAL_REDUCE",
        flag,
        True,
        FLAG,
        "With BYTEPS_LOCAL_SIZE > 1, the processes of a machine sum in shared memory first, and"
        " one of them communicates with the servers. 0: each communicates with the servers itself.",
        JOB,
    ),
    Option(
        "force_distributed",
        "BYTEPS_FORCE_DISTRIBUTED",
        flag,
        False,
        FLAG,
        "Use servers even with a single worker, which by default needs neither servers nor"
        " scheduler.",
        JOB,
    ),
    Option(
        "asynchronous",
        "BYTEPS_ENABLE_ASYNC",
        flag,
        False,
        FLAG,
        "Asynchronous training: servers hold values and add each push to them, and no worker waits"
        " for another. Must be the same on all workers and servers. See docs/train/async.md.",
        JOB,
    ),
    Option(
        "node_host",
        "DMLC_NODE_HOST",
        str,
        "",
        "address",
        "Address on which this process listens and which it advertises. Default: the address from"
        " which it reaches the scheduler.",
        JOB,
    ),
    Option(
        "interface",
        "DMLC_INTERFACE",
        str,
        "",
        "interface name",
        "Network interface whose address this process uses as its own. DMLC_NODE_HOST takes"
        " precedence.",
        JOB,
    ),
    Option(
        "transport",
        "DMLC_ENABLE_RDMA",
        choice(*TRANSPORT_NAMES),
        "0",
        " | ".join(TRANSPORT_NAMES),
        "Transport between workers and servers. 0, zmq and zeromq: TCP through ZeroMQ; tcp: TCP"
        " through plain sockets; 1, ibverbs and rdma: RDMA. See docs/run/rdma.md.",
        JOB,
    ),
    Option(
        "ipc",
        "BYTEPS_ENABLE_IPC",
        flag,
        True,
        FLAG,
        "Workers and servers of the same machine, user and job exchange partitions through shared"
        " memory. All other messages use the transport.",
        JOB,
    ),
    Option(
        "rdma_device",
        "BPSX_RDMA_DEVICE",
        str,
        "",
        "name of an adapter, and :number of a port",
        "RDMA adapter, such as mlx5_0 or mlx5_0:1. Default: the adapter that has a GID of this"
        " process's address.",
        JOB,
    ),
    Option(
        "rdma_gid_index",
        "BPSX_RDMA_GID_INDEX",
        integer(0, 4095),
        None,
        "0..4095",
        "Index of the GID in the adapter's table. Default: the GID of this process's address, RoCE"
        " v2 if there is one.",
        JOB,
    ),
    Option(
        "partition_bytes",
        "BYTEPS_PARTITION_BYTES",
        integer(4096),
        2 << 20,
        "a whole number of bytes, at least 4096",
        "Maximum size of a partition (in whole pages); tensors are cut into partitions. Compressed"
        " tensors have partitions of twice this size. Must be the same on all workers.",
        TUNING,
    ),
    Option(
        "key_hash_fn",
        "BYTEPS_KEY_HASH_FN",
        choice(*_HASHES),
        "balanced",
        " | ".join(_HASHES),
        "How partitions are assigned to servers: by bytes (balanced) or by one of BytePS' hash"
        " functions. Must be the same on all workers.",
        TUNING,
    ),
    Option(
        "mixed_mode",
        "BYTEPS_ENABLE_MIXED_MODE",
        flag,
        False,
        FLAG,
        "Servers on workers' machines get fewer bytes than other servers, so that all network"
        " cards carry the same load. Must be the same on all workers.",
        TUNING,
    ),
    Option(
        "server_weight",
        "BPSX_SERVER_WEIGHT",
        integer(1, 1000),
        1,
        "1..1000",
        "Of a server: its share of the bytes relative to other servers. In mixed mode: the speed"
        " of its machine's network card relative to others.",
        TUNING,
    ),
    Option(
        "hash_coefficient",
        "BYTEPS_BUILT_IN_HASH_COEF",
        integer(1, 2**31),
        1,
        "1..2147483648",
        "Multiplier of the built_in hash function.",
        TUNING,
    ),
    Option(
        "scheduling_credit",
        "BYTEPS_SCHEDULING_CREDIT",
        integer(0),
        4,
        "partitions; 0: no bound",
        "Most partitions per connection that a worker hands to the transport before they have been"
        " written out; half as many for servers on the same machine. A small credit lets urgent"
        " tensors overtake. 0 makes priorities ineffective.",
        TUNING,
    ),
    Option(
        "rdma_rx_depth",
        "BYTEPS_RDMA_RX_DEPTH",
        integer(16, 32768),
        512,
        "16..32768",
        "RDMA: most messages per connection that may be on their way to this process.",
        TUNING,
    ),
    Option(
        "rdma_start_depth",
        "BYTEPS_RDMA_START_DEPTH",
        integer(16, 32768),
        128,
        "16..32768",
        "RDMA: most messages per connection that may wait for the adapter to send them.",
        TUNING,
    ),
    Option(
        "rdma_inbox",
        "BPSX_RDMA_INBOX_MB",
        integer(4, 65536),
        64,
        "MiB, 4..65536",
        "RDMA: registered memory of a server's lane for the pushes of one worker, at least 8"
        " partitions. A worker registers a quarter of it for each lane's answers.",
        TUNING,
    ),
    Option(
        "send_ahead_ms",
        "BPSX_SEND_AHEAD_MS",
        number(0),
        10.0,
        "milliseconds; 0: no bound",
        "Most data per server, as sending time on the slowest server's link, that a worker hands"
        " to the transport ahead; at least one partition. With more under way, partitions share"
        " the link and all complete late. BYTEPS_SCHEDULING_CREDIT also limits it; if that is 0,"
        " this option has no effect.",
        TUNING,
    ),
    Option(
        "engine_threads",
        "BYTEPS_SERVER_ENGINE_THREAD",
        integer(1, 256),
        _default_lanes,
        "1..256",
        "Number of lanes of a server. Each lane is a thread with a port and one connection per"
        " worker. Default: a quarter of the cores, 1 to 4.",
        TUNING,
    ),
    Option(
        "server_schedule",
        "BYTEPS_SERVER_ENABLE_SCHEDULE",
        flag,
        False,
        FLAG,
        "A server processes waiting pushes by priority instead of by arrival.",
        TUNING,
    ),
    Option(
        "zmq_threads",
        "BYTEPS_ZMQ_NTHREADS",
        integer(1, 256),
        _default_lanes,
        "1..256",
        "ZeroMQ I/O threads of a process. Default: a quarter of the cores, 1 to 4.",
        TUNING,
    ),
    Option(
        "send_buffer",
        "BPSX_SEND_BUFFER_KB",
        zero_or(64, 2**20),
        None,
        "64..1048576 KiB; 0: the system's own tuning",
        "Send buffer of each data connection. Default: 448 on loopback, to stay in the CPU's"
        " caches; else 224, so that little data is ahead of an urgent tensor. Links with a round"
        " trip of 1 ms or more: use 0, or megabytes. A value below 64 would make traffic within a"
        " machine wait for TCP.",
        TUNING,
    ),
    Option(
        "spin_us",
        "BPSX_SPIN_US",
        number(0),
        50.0,
        "microseconds",
        "Time for which an idle thread yields its core before it sleeps. On most machines waking"
        " it takes longer than this.",
        TUNING,
    ),
    Option(
        "fixed_order",
        "BPSX_FIXED_ORDER",
        flag,
        False,
        FLAG,
        "Servers add the workers' pushes in order of rank, so that float sums of three or more"
        " workers have the same bits in every run. (Within a run all workers get the same bits in"
        " any case.)",
        TUNING,
    ),
    Option(
        "min_compress_bytes",
        "BYTEPS_MIN_COMPRESS_BYTES",
        integer(0),
        65536,
        "bytes",
        "Tensors smaller than this are not compressed. Must be the same on all workers.",
        TUNING,
    ),
    Option(
        "compress_threads",
        "BYTEPS_THREADPOOL_SIZE",
        integer(1, 64),
        _default_compressors,
        "1..64",
        "Threads of a worker that compress. Default: half of the cores, 1 to 4.",
        TUNING,
    ),
    Option(
        "compressors",
        "BPSX_COMPRESSORS",
        modules,
        "",
        "names of Python modules, comma separated",
        "Modules with compressors from outside the package. Workers and servers import them at"
        " start. Must be the same on all of them. See CONTRIBUTING.md.",
        TUNING,
    ),
    Option(
        "reduce_roots",
        "BYTEPS_REDUCE_ROOTS",
        ranks,
        None,
        "local ranks, comma separated",
        "GPUs of a machine that take turns as the target of NCCL's reductions and copy the sums to"
        " the host. Default: each GPU copies a part of every tensor. Must be the same on all"
        " processes of a machine. Cannot be combined with BYTEPS_PCIE_SWITCH_SIZE.",
        GPUS,
    ),
    Option(
        "switch_size",
        "BYTEPS_PCIE_SWITCH_SIZE",
        integer(1, 65535),
        None,
        "1..BYTEPS_LOCAL_SIZE, a divisor of it",
        "Number of GPUs, with consecutive local ranks, that reduce among themselves; the CPU adds"
        " their sums. Default: by topology, all GPUs of the machine if NVLink connects them. Must"
        " be the same on all processes of a machine.",
        GPUS,
    ),
    Option(
        "nccl_group",
        "BYTEPS_NCCL_GROUP_SIZE",
        integer(1, 256),
        None,
        "1..256",
        "Most NCCL collectives, due at the same time, that are queued as one group. Default: 64"
        " without servers; else 4, because the first copy to the host waits for the last"
        " collective of the group.",
        GPUS,
    ),
    Option(
        "nccl_rings",
        "BYTEPS_NCCL_NUM_RINGS",
        integer(0, 64),
        0,
        "0..64; 0: NCCL decides",
        "Minimum number of channels of NCCL's communicator. Each channel occupies a multiprocessor"
        " of the GPU.",
        GPUS,
    ),
    Option(
        "keep_memory",
        "BPSX_KEEP_MEMORY_MB",
        integer(0, 2**20),
        256,
        "MiB; 0: leave malloc alone",
        "Freed memory that malloc keeps instead of returning it to the system. Without it every"
        " message needs fresh pages, which costs a fifth of the throughput.",
        TUNING,
    ),
    *FAILURE_OPTIONS,
    Option(
        "log_level",
        "BYTEPS_LOG_LEVEL",
        choice(*_LEVELS),
        "warning",
        " | ".join(_LEVELS),
        "Lowest level of the messages that are logged to standard error.",
        LOGGING,
    ),
    Option(
        "log_hide_time", "BYTEPS_LOG_HIDE_TIME", flag, False, FLAG, "Log without the time.", LOGGING
    ),
    Option(
        "full_tracebacks",
        "BPSX_FULL_TRACEBACKS",
        flag,
        False,
        FLAG,
        "Tracebacks of errors and of Ctrl-C include bpsx's own frames, instead of the script's"
        " frames only.",
        LOGGING,
    ),
    Option(
        "verbose",
        "PS_VERBOSE",
        integer(0, 2),
        0,
        "0 | 1 | 2",
        "1: log connections made and lost. 2: also log every message (kind, key, round, bytes,"
        " peer). For workers and servers.",
        SEEING,
    ),
    Option(
        "key_log",
        "PS_KEY_LOG",
        flag,
        False,
        FLAG,
        "A server logs each new key with its tensor name, type and bytes. A worker does so at"
        " BYTEPS_LOG_LEVEL=debug.",
        SEEING,
    ),
    Option(
        "sample_tensor",
        "BYTEPS_DEBUG_SAMPLE_TENSOR",
        integer(-1, 2**64 - 1),
        None,
        "a key; -1: all",
        "A worker prints the first and last element of this key at each stage of each push_pull.",
        SEEING,
    ),
    Option(
        "server_debug",
        "BYTEPS_SERVER_DEBUG",
        flag,
        False,
        FLAG,
        "A server prints the first and last element of the key in BYTEPS_SERVER_DEBUG_KEY as they"
        " are received, summed and sent.",
        SEEING,
    ),
    Option(
        "server_debug_key",
        "BYTEPS_SERVER_DEBUG_KEY",
        integer(-1, 2**64 - 1),
        -1,
        "a key; -1: all",
        "Key that BYTEPS_SERVER_DEBUG prints.",
        SEEING,
    ),
    Option(
        "telemetry",
        "BYTEPS_TELEMETRY_ON",
        flag,
        True,
        FLAG,
        "Count the bytes of results received. With 0 get_pushpull_speed() returns (0.0, 0.0).",
        SEEING,
    ),
    Option(
        "trace_on",
        "BYTEPS_TRACE_ON",
        flag,
        False,
        FLAG,
        "Record a timeline of the steps from BYTEPS_TRACE_START_STEP to BYTEPS_TRACE_END_STEP, on"
        " workers and servers.",
        SEEING,
    ),
    Option(
        "trace_start",
        "BYTEPS_TRACE_START_STEP",
        integer(1, 2**31),
        10,
        "1 or more",
        "First step recorded. A tensor's step is its own count of push_pulls, from 1.",
        SEEING,
    ),
    Option(
        "trace_end",
        "BYTEPS_TRACE_END_STEP",
        integer(2, 2**31),
        20,
        "more than BYTEPS_TRACE_START_STEP",
        "Last step recorded.",
        SEEING,
    ),
    Option(
        "trace_dir",
        "BYTEPS_TRACE_DIR",
        folder,
        "./traces",
        "folder",
        "Folder for timelines: LOCAL_RANK/comm.json for workers, server-RANK/comm.json for"
        " servers.",
        SEEING,
    ),
    Option(
        "metrics_port",
        "BPSX_METRICS_PORT",
        host_port,
        None,
        "PORT or HOST:PORT; PORT 0: a free one, logged",
        "Address at which the scheduler serves the job's metrics to Prometheus; on loopback unless"
        " a host is given. Off by default. Needs prometheus-client: pip install 'bpsx[metrics]'.",
        SEEING,
    ),
    Option(
        "cache_dir",
        "BPSX_CACHE_DIR",
        folder,
        "",
        "folder",
        "Folder for compiled kernels. Default: bpsx in the user's cache folder.",
        LOGGING,
    ),
    Option(
        "socket_path",
        "BYTEPS_SOCKET_PATH",
        folder,
        "",
        "folder",
        "Folder for the Unix sockets by which processes of one machine find each other; bpsx"
        " creates a private subfolder for the user. Default: the user's runtime folder, else the"
        " temporary folder.",
        LOGGING,
    ),
    Option(
        "port_file",
        "BPSX_PORT_FILE",
        folder,
        "",
        "path",
        "File to which the scheduler writes its port once it listens; the launcher reads it.",
        LOGGING,
    ),
    Option(
        "secret",
        "BPSX_SECRET",
        str,
        "",
        "text of 16 to 4096 bytes",
        "The job secret, the same for all processes of a job. Processes that do not know it cannot"
        " connect (docs/run/security.md). Takes precedence over BPSX_SECRET_FILE.",
        SECURITY,
    ),
    Option(
        "secret_file",
        "BPSX_SECRET_FILE",
        folder,
        "",
        "path",
        "File that holds the job secret. Only its owner may have permission to read it.",
        SECURITY,
    ),
    Option(
        "insecure",
        "BPSX_INSECURE",
        flag,
        False,
        FLAG,
        "Run without a secret even though other machines can reach the job.",
        SECURITY,
    ),
    Option(
        "encrypt",
        "BPSX_ENCRYPT",
        flag,
        False,
        FLAG,
        "Also encrypt gradients between workers and servers; control messages are always"
        " encrypted. Must be the same on all processes.",
        SECURITY,
    ),
    Option(
        "announce",
        "BPSX_ANNOUNCE",
        flag,
        True,
        FLAG,
        "At start, a scheduler or server writes to standard error what it is and which processes"
        " it waits for. Launchers write this themselves.",
        LOGGING,
    ),
    Option(
        "state_fd",
        "BPSX_STATE_FD",
        integer(-1, 2**20),
        -1,
        "a file descriptor; -1: none",
        "The scheduler writes lines to this descriptor: waiting, then running, then which process"
        " has failed the job, if one has, then over. The launcher reads them.",
        LAUNCHER,
    ),
    Option(
        "lifeline_fd",
        "BPSX_LIFELINE_FD",
        integer(-1, 2**20),
        -1,
        "a file descriptor; -1: none",
        "Socket whose other end the starter of this scheduler or server holds. The process ends if"
        " that end closes before the job has begun, since its starter is gone. The scheduler"
        " writes its port there once it listens.",
        LAUNCHER,
    ),
    Option(
        "visible_devices",
        "NVIDIA_VISIBLE_DEVICES",
        str,
        "",
        "all | none | void | names, comma separated",
        "bpsx-run starts one worker process per entry, or with all one per GPU. Unset, empty, none"
        " or void: BYTEPS_LOCAL_SIZE processes.",
        LAUNCHER,
    ),
    Option(
        "numa_on",
        "BYTEPS_NUMA_ON",
        flag,
        True,
        FLAG,
        "bpsx-run binds the worker processes of a machine to cores if there are several, or if one"
        " of the next three options is set.",
        LAUNCHER,
    ),
    Option(
        "numa_default_quota",
        "BYTEPS_NUMA_DEFAULT_QUOTA",
        integer(0, 65535),
        0,
        "0..65535; 0: cores / processes",
        "Number of physical cores of each worker process except the root, the process with the"
        " largest local rank, which gets the rest.",
        LAUNCHER,
    ),
    Option(
        "visible_cpu_cores",
        "BYTEPS_VISIBLE_CPU_CORES",
        cpu_lists,
        "",
        "lists of logical CPUs as 0-3,8, with a colon between local ranks",
        "The CPUs of each worker process. Takes precedence over quota and blacklist.",
        LAUNCHER,
    ),
    Option(
        "cpu_blacklist",
        "BYTEPS_CPU_BLACKLIST",
        blacklist,
        "-1",
        "logical CPUs as 0-3,8; -1: none",
        "CPUs to which no worker process is bound.",
        LAUNCHER,
    ),
    Option(
        "enable_gdb",
        "BYTEPS_ENABLE_GDB",
        flag,
        False,
        FLAG,
        "bpsx-run runs workers and servers under gdb, which prints the backtraces of all threads"
        " after a crash.",
        LAUNCHER,
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
        "BYTEPS_LOCAL_SIZE. If it differs between machines, each process counts as a machine of"
        " its own. Unset: the processes of a machine find each other.",
        TORCHRUN,
    ),
    Option(
        "group_rank",
        "GROUP_RANK",
        str,
        "",
        "0..65534",
        "Not needed: bpsx computes the machine as RANK / LOCAL_WORLD_SIZE.",
        TORCHRUN,
    ),
    Option(
        "master_addr",
        "MASTER_ADDR",
        str,
        "",
        "address or host name",
        "Address of torchrun's store, on the machine of rank 0. Rank 0 starts the scheduler unless"
        " DMLC_PS_ROOT_URI is set.",
        TORCHRUN,
    ),
    Option(
        "master_port", "MASTER_PORT", str, "", "1..65535", "Port of torchrun's store.", TORCHRUN
    ),
    Option(
        "run_id",
        "TORCHELASTIC_RUN_ID",
        str,
        "",
        "text",
        "Identifies this run, so that its entries in the store are separate from those of other"
        " runs.",
        TORCHRUN,
    ),
)
