"""Options of a job: its processes, and their addresses and transports."""

from __future__ import annotations

from bpsx.config.option import JOB, Option
from bpsx.config.parsers import AUTO, FLAG, choice, flag, integer, port_range

_ROLES = ("worker", "server", "scheduler")
#: Values of DMLC_ENABLE_RDMA but "auto" -> name of the transport.
TRANSPORT_NAMES = {
    "0": "zeromq",
    "zmq": "zeromq",
    "zeromq": "zeromq",
    "tcp": "tcp",
    "1": "rdma",
    "ibverbs": "rdma",
    "rdma": "rdma",
}
#: Most worker processes in a job. A server keeps a record of each for every partition.
MOST_WORKERS = 65535

JOB_OPTIONS: tuple[Option, ...] = (
    Option(
        "role",
        "DMLC_ROLE",
        choice(*_ROLES),
        None,
        " | ".join(_ROLES),
        "Role of this process.",
        JOB,
        required=True,
    ),
    Option(
        "root_uri",
        "DMLC_PS_ROOT_URI",
        str,
        None,
        "address or host name",
        "Address at which the scheduler listens.",
        JOB,
        required=True,
    ),
    Option(
        "root_port",
        "DMLC_PS_ROOT_PORT",
        integer(0, 65535),
        None,
        "0..65535",
        "Port of the scheduler. With 0 the scheduler takes a free port and prints it.",
        JOB,
        required=True,
    ),
    Option(
        "ports",
        "BPSX_PORTS",
        port_range,
        None,
        "LOW-HIGH, or one port",
        "Ports that this process may listen on where no other option names one: servers' lanes, a"
        " scheduler with port 0, BPSX_METRICS_PORT=0. Default: any free port. See"
        " docs/run/ports.md.",
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
        "Number of server processes.",
        JOB,
        required=True,
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
        required=True,
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
        choice(AUTO, *TRANSPORT_NAMES),
        AUTO,
        " | ".join([AUTO, *TRANSPORT_NAMES]),
        "Transport between workers and servers. auto: tcp, or zmq if BPSX_ENCRYPT=1; tcp: TCP"
        " through plain sockets; 0, zmq and zeromq: TCP through ZeroMQ; 1, ibverbs and rdma: RDMA."
        " See docs/run/rdma.md.",
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
)
