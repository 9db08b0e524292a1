"""Options that change how fast a job is: partitions, threads, placement, GPUs."""

from __future__ import annotations

import os

from bpsx.config.option import GPUS, TUNING, Option
from bpsx.config.parsers import (
    AUTO,
    FLAG,
    auto_or,
    choice,
    flag,
    integer,
    modules,
    number,
    ranks,
    word,
    zero_or,
)

#: Default of BYTEPS_PARTITION_BYTES.
PARTITION_BYTES = 2 << 20
_HASHES = ("balanced", "naive", "built_in", "djb2", "sdbm")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def lanes_by_cores(most: int) -> int:
    """Return a quarter of the cores, 1 to ``most``.

    More threads help only while cores are free, and one or two workers may share the server's
    machine.
    """
    return max(1, min(most, _cores() // 4))


def _default_zmq_threads() -> int:
    return lanes_by_cores(4)


def _default_io_threads() -> int:
    """A quarter of the cores, at most 6; none where that is less than 2.

    One alone would only pass the work on, and with few cores another thread of this machine needs
    the core more.
    """
    quarter = _cores() // 4
    return min(6, quarter) if quarter >= 2 else 0


def _default_compressors() -> int:
    return max(1, min(4, _cores() // 2))


TUNING_OPTIONS: tuple[Option, ...] = (
    Option(
        "partition_bytes",
        "BYTEPS_PARTITION_BYTES",
        integer(4096),
        PARTITION_BYTES,
        "a whole number of bytes, at least 4096",
        "Maximum size of a partition (in whole pages); tensors are cut into partitions. Compressed"
        " tensors have partitions of twice this size, unless they travel as halves (fp16) or"
        " factors (PowerSGD). With the default, the job measures its links and takes smaller"
        " partitions on slow ones (BPSX_AUTOTUNE). Must be the same on all workers.",
        TUNING,
    ),
    Option(
        "key_hash_fn",
        "BYTEPS_KEY_HASH_FN",
        choice(*_HASHES),
        "balanced",
        " | ".join(_HASHES),
        "Assignment of partitions to servers: by bytes (balanced) or by one of BytePS' hash"
        " functions. Must be the same on all workers.",
        TUNING,
    ),
    Option(
        "mixed_mode",
        "BYTEPS_ENABLE_MIXED_MODE",
        auto_or(flag),
        AUTO,
        f"auto, {FLAG}",
        "Servers on workers' machines get fewer bytes than other servers, so that all network"
        " cards carry the same load. auto: if there are servers of both kinds. Must be the same on"
        " all workers.",
        TUNING,
    ),
    Option(
        "autotune",
        "BPSX_AUTOTUNE",
        flag,
        True,
        FLAG,
        "A job of several machines measures its links when it begins, and chooses the size of"
        " partitions and the number of lanes that fit them, unless BYTEPS_PARTITION_BYTES has"
        " another value than its default. It chooses anew if links carry four times as much or less"
        " later, unless workers may be lost or join (BPSX_ELASTIC). Must be the same on all"
        " workers.",
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
        4.0,
        "milliseconds; 0: no bound",
        "Most data per server, as sending time on the slowest server's link, that a worker hands"
        " to the transport ahead; at least one partition. With more under way, partitions share"
        " the link and all complete late. Twice as much, and at least one partition per lane, where"
        " only one server is on another machine. If 20 round trips take longer, as much as the"
        " link sends in them, but no more than a partition per lane; over ZeroMQ bpsx takes 0.5 ms"
        " for a round trip. BYTEPS_SCHEDULING_CREDIT also limits it; if that is 0, this option has"
        " no effect.",
        TUNING,
    ),
    Option(
        "engine_threads",
        "BYTEPS_SERVER_ENGINE_THREAD",
        auto_or(integer(1, 256)),
        AUTO,
        "auto, 1..256",
        "Number of lanes of a server. Each lane is a thread with a port and one connection per"
        " worker. Uncompressed tensors use fewer of them on slow links (BPSX_AUTOTUNE). auto: a"
        " quarter of the cores, 1 to 8; with RDMA 1 to 4, as each lane registers memory for each"
        " worker.",
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
        "congestion",
        "BPSX_CONGESTION",
        word(15),
        AUTO,
        "auto, system, or a name of at most 15 characters, such as cubic",
        "TCP congestion control of connections over plain sockets. auto: the system's, but between"
        " near machines cubic, or else reno, in place of BBR, which pauses each connection every"
        " ten seconds. system: the system's in any case.",
        TUNING,
    ),
    Option(
        "zmq_threads",
        "BYTEPS_ZMQ_NTHREADS",
        integer(1, 256),
        _default_zmq_threads,
        "1..256",
        "ZeroMQ I/O threads of a process. Default: a quarter of the cores, 1 to 4.",
        TUNING,
    ),
    Option(
        "io_threads",
        "BPSX_IO_THREADS",
        integer(0, 64),
        _default_io_threads,
        "0..64",
        "I/O threads of a worker over tcp, for links that one core cannot fill. Each reads and"
        " writes a share of the connections, those through shared memory included. The threads of"
        " BYTEPS_THREADPOOL_SIZE then copy large sums. 0: the thread that waits for the sums does"
        " all of it itself. ZeroMQ has threads of its own: BYTEPS_ZMQ_NTHREADS. Default: a quarter"
        " of the cores, at most 6; 0 with less than 8 cores.",
        TUNING,
    ),
    Option(
        "send_buffer",
        "BPSX_SEND_BUFFER_KB",
        zero_or(64, 2**20),
        None,
        "64..1048576 KiB; 0: the system's own tuning",
        "Send buffer of each data connection. Default: 448 on loopback, to stay in the CPU's"
        " caches; else 224, so that little data is ahead of an urgent tensor. Over"
        " plain sockets a worker that has measured slow links has less (BPSX_AUTOTUNE). For links"
        " with a round trip of 2 ms or more, plain sockets have 0 by default; with ZeroMQ, set 0. A"
        " value below 64 would make traffic within a machine wait for TCP.",
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
        "Threads of a worker that compress, and that copy sums beside BPSX_IO_THREADS. Default:"
        " half of the cores, 1 to 4.",
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
        "keep_memory",
        "BPSX_KEEP_MEMORY_MB",
        integer(0, 2**20),
        256,
        "MiB; 0: leave malloc alone",
        "Freed memory that malloc keeps instead of returning it to the system. Without it every"
        " message needs fresh pages, which costs a fifth of the throughput.",
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
)
