"""Options for operating a job: logs, metrics, traces, security, the launcher."""

from __future__ import annotations

from bpsx.config.option import LAUNCHER, LOGGING, SECURITY, SEEING, Option
from bpsx.config.parsers import FLAG, blacklist, choice, cpu_lists, flag, folder, host_port, integer

_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
NO_ENCRYPTION = (
    "BPSX_ENCRYPT=1: plain sockets and RDMA (DMLC_ENABLE_RDMA=tcp, 1) cannot encrypt; use ZeroMQ,"
    " which does: DMLC_ENABLE_RDMA=0"
)

OPERATION_OPTIONS: tuple[Option, ...] = (
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
        "state_fd",
        "BPSX_STATE_FD",
        integer(-1, 2**20),
        -1,
        "a file descriptor; -1: none",
        "The scheduler writes lines to this descriptor: waiting, then running, then which process"
        " has failed the job, if one has, then over. The launcher reads them. Over ssh it passes"
        " some on to the bpsx-run of each worker machine, which reads them from this descriptor.",
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
