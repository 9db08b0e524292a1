# The worker's core: one struct, passed to every function. No file of the core has state of its own.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bpsx.core.gpu.device cimport N_STREAMS, Device
from bpsx.core.local.group cimport Machine
from bpsx.core.codec.pool cimport Pool
from bpsx.core.partition cimport Counters, Lane, Partition, Server, Task, Tensor
from bpsx.core.gpu.pinned_pool cimport Places
from bpsx.core.local.ring cimport Post
from bpsx.system.sync cimport Monitor
from bpsx.core.trace.recorder cimport Watch
from bpsx.transports.abi cimport Endpoint

cdef enum:
    USER_STREAMS = 16           # lines in which their tasks wait; streams may share one

cdef struct Awaited:            # partitions, in the order in which their events come
    Partition *first
    Partition *last

# tasks whose input the GPU has yet to make, in the order in which they were asked for
cdef struct Unseen:
    Task *first
    Task *last

cdef struct Gpu:                # the driver's alone
    # what `enter` gave the driver's thread; less than 0: not in the GPU's context
    int entered
    # partitions begin when their input is there; else NCCL's stream waits for it
    bint watches
    Lane work                   # partitions with a copy to be queued, most urgent first
    # at a machine's root: with a collective to be ordered, which may be one that others do not
    # mean,
    Lane unchecked
    Lane gathers                # or is about results,
    Lane reductions             # ... or about shares
    uint32_t group              # collectives that go together at most
    Post *orders                # room for as many
    uint32_t n_orders           # elsewhere: of a group that is not complete
    Awaited awaited[N_STREAMS]
    uint64_t followed           # the last input for which NCCL's stream waits, see Task.recorded
    uint64_t ends               # tasks that have ended well
    Unseen unseen[USER_STREAMS]
    Places places

cdef struct Core:
    Endpoint *endpoint
    uint64_t job
    # as the servers know this process: its machine's number if only one of the machine speaks to
    # them
    uint32_t rank
    uint32_t epoch
    int64_t credit              # bytes per lane; 0: no bound
    # in which what has been handed over for a server can be written out by the slowest; 0: no bound
    int64_t ahead_ns
    Pool *pool                  # NULL: nothing is compressed
    Pool *coders                # NULL: ... on a GPU
    Machine *machine            # NULL: no other process of this machine shares the work
    Device *device              # NULL: no tensor on a GPU so far; set once, by any thread
    uint32_t processes          # workers for whom one push stands
    int64_t spin_ns             # how long a driver without work yields before it parks

    Monitor monitor
    # Guarded by the monitor:
    bint driving                # some thread has the driver role
    bint parked                 # ... and sleeps in endpoint.wait: wake it
    bint background_idle        # the background thread sleeps on the monitor
    uint32_t waiters            # threads that sleep on the monitor for a task
    Task *inbox_first           # submitted, not yet seen by the driver
    Task *inbox_last
    Tensor *failing             # tensors to be failed by the driver
    Tensor *known               # tensors to be adopted without a task
    Task *reap_first            # finished; Python still has to let go of their memory
    # ... which the GPU may be at: in the order in which they have finished
    Task *reap_on_gpu
    Task *reap_last             # of those
    # Written under the monitor, read anywhere:
    int64_t news                # the inbox, `failing` or `failed` has something for the driver
    int64_t failed              # not 0: this status ends every task
    # not 0: the transport could send nothing to this lane, less 1. Nothing leaves any more; soon it
    # is known who is gone
    int64_t mute
    int64_t outstanding         # tasks submitted and not finished, and one more while `unsent`
    int64_t busy_since          # when that last became more than 0
    int64_t busy_total          # time in which it was, up to then
    int64_t stopping

    # Of whoever has the GIL:
    # a user's stream, by CUDA's number that no other ever has: it goes on after
    uint64_t met_by
    # ... what has ended up to then, see Task.ended; by the stream of ours where it did
    uint64_t met[N_STREAMS]

    # The driver's alone:
    Lane *lanes
    uint32_t n_lanes
    Server *servers
    uint32_t n_servers
    uint32_t n_ready
    Partition **table           # by Partition.index
    uint32_t n_table
    uint32_t table_capacity
    uint64_t next_order
    int64_t queued              # bytes that have been queued for servers,
    int64_t longest             # ... and the longest partition
    Tensor *tensors
    Gpu gpu
    bint swept                  # everything has been failed with `failed`
    # neighbours on this machine have not room for what we have to tell them
    bint unsent
    Counters counters
    bint telemetry              # count what came home
    Watch *watch                # NULL: nobody wants to know
