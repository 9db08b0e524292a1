# State of a worker's core: one struct, passed to every function. The core has no other state.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bpsx.core.gpu.device cimport N_STREAMS, Device
from bpsx.core.local.group cimport Group
from bpsx.core.codec.pool cimport Pool
from bpsx.core.partition cimport Counters, Lane, Partition, Server, Task, Tensor
from bpsx.core.gpu.pinned_pool cimport Places
from bpsx.core.local.ring cimport Post
from bpsx.system.sync cimport Monitor
from bpsx.core.trace.recorder cimport Watch
from bpsx.transports.abi cimport Endpoint

cdef enum:
    USER_STREAMS = 16           # lines of tasks that await input; several streams may share one

cdef struct Awaited:            # partitions in the order in which their events fire
    Partition *first
    Partition *last

# Tasks whose input the GPU has not produced yet, in the order in which their events were recorded.
cdef struct Unseen:
    Task *first
    Task *last

cdef struct Gpu:                # GPU state of the core; owned by the driver
    # value that Device.enter gave to the driver's thread; negative: not in the GPU's context
    int entered
    # Partitions begin when their input is ready. Otherwise NCCL's stream waits for the input.
    bint watches
    Lane work                   # partitions with a copy to queue, most urgent first
    # On a machine's root, partitions with a collective to order:
    Lane unchecked              # shares whose operations have yet to be compared
    Lane gathers                # results
    Lane reductions             # shares
    uint32_t group              # largest number of collectives in one group
    Post *orders                # array with room for that many
    uint32_t n_orders           # on processes other than the root: orders of an incomplete group
    Awaited awaited[N_STREAMS]
    uint64_t followed           # last input that NCCL's stream waits for, see Task.recorded
    uint64_t ends               # number of tasks that have succeeded
    Unseen unseen[USER_STREAMS]
    Places places

cdef struct Core:
    # Waits for a task, and drives if no other thread does: the driver's loop, which _core.pyx
    # compiles and _handle.pyx calls.
    bint (*wait_for)(Core *c, Task *task, int64_t deadline_ns) noexcept nogil
    Endpoint *endpoint
    uint64_t job
    # the servers' number for this process; with a root per machine, the machine's number
    uint32_t rank
    uint32_t epoch
    int64_t credit              # bytes in flight per lane; 0: no bound
    # Time in which the slowest server's link can write out what is in flight to a server; 0: no
    # bound.
    int64_t ahead_ns
    # threads that compress on the host; NULL: nothing is compressed there
    Pool *pool
    # thread that queues compression kernels; NULL: nothing is compressed on the GPU
    Pool *coders
    Group *machine            # NULL: no other process of this machine shares the work
    Device *device              # NULL: no tensor on a GPU so far; set once, by any thread
    uint32_t processes          # workers that one push stands for
    int64_t spin_ns             # how long a driver without progress yields the CPU before it parks

    Monitor monitor
    # Guarded by the monitor:
    bint driving                # a thread has the driver role
    bint parked                 # the driver sleeps in endpoint.wait and must be woken
    bint background_idle        # the background thread sleeps on the monitor
    uint32_t waiters            # threads that sleep on the monitor until a task ends
    Task *inbox_first           # submitted tasks that the driver has not seen
    Task *inbox_last
    Tensor *failing             # tensors that the driver is to fail
    Tensor *known               # tensors that the driver is to adopt without a task
    Task *reap_first            # finished tasks whose memory Python has yet to release
    # finished tasks whose memory the GPU may still use, in the order in which they finished
    Task *reap_on_gpu
    Task *reap_last             # last of these
    # Written with the monitor held, read by any thread:
    int64_t news                # the driver must look at the inbox, `known`, `failing` or `failed`
    int64_t failed              # not 0: status with which every task ends
    # not 0: number of the lane to which a send failed, plus 1. Nothing is sent any more; the
    # scheduler will soon report the dead process.
    int64_t mute
    int64_t outstanding         # tasks submitted and not finished, plus 1 while `unsent`
    int64_t busy_since          # time at which `outstanding` last became positive
    int64_t busy_total          # nanoseconds in which it was positive, up to then
    int64_t stopping

    # Protected by the GIL:
    # CUDA's unique number of the user's stream that last waited for ends of tasks
    uint64_t met_by
    # per stream of the core: the latest end (Task.ended) that it has waited for
    uint64_t met[N_STREAMS]

    # Owned by the driver:
    Lane *lanes
    uint32_t n_lanes
    Server *servers
    uint32_t n_servers
    uint32_t n_ready            # lanes that have sent the right proof
    Partition **table           # partitions by Partition.index
    uint32_t n_table
    uint32_t table_capacity
    uint64_t next_order
    int64_t queued              # bytes queued for servers so far
    int64_t longest             # bytes of the longest partition
    Tensor *tensors
    Gpu gpu
    bint swept                  # every tensor has been failed with `failed`
    # Posts to other processes of this machine wait because a ring is full.
    bint unsent
    Counters counters
    bint telemetry              # count the bytes of completed tensors
    Watch *watch                # recorder; NULL: no tracing
