# State of a worker's core: one struct, passed to every function. The core has no other state.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bpsx.core.gpu.device cimport N_STREAMS, Device
from bpsx.core.local.neighbour cimport Machine
from bpsx.core.partition cimport (
    CommitGroup, Counters, Heap, Lane, Partition, PinnedBlock, Server, Task, Tasks, Tensor, Term,
)
from bpsx.core.local.ring cimport Post
from bpsx.system.sync cimport Monitor
from bpsx.core.trace.watch cimport Watch
from bpsx.transports.abi cimport Endpoint

cdef enum:
    USER_STREAMS = 16           # lines of tasks that await input; several streams may share one
    MAX_THREADS = 64            # of a pool
    N_KINDS = 160               # sizes of pinned places

cdef struct Pool:               # threads that compress and copy; codec/pool.pxd
    Monitor monitor
    # Guarded by it:
    Heap todo
    Partition *done             # finished partitions, the latest first
    Partition *at_work[MAX_THREADS]
    bint stopping
    uint32_t n_threads
    int64_t ready               # partitions in `done`; read anywhere

cdef struct Places:             # pool of pinned memory; gpu/pinned_pool.pxd
    # free places by size, in the order in which they were returned
    PinnedBlock *unused[N_KINDS]
    PinnedBlock *latest[N_KINDS]      # the last of these
    PinnedBlock *made                 # all places, the latest first
    char *slab                  # the latest slab,
    uint64_t slab_offset        # ... its offset in the segment, if it is there,
    uint64_t slab_bytes         # ... its size,
    uint64_t given              # ... and the bytes of it that have been given out

cdef struct Awaited:            # partitions in the order in which their events fire
    Partition *first
    Partition *last

# GPU state of the core, allocated before the first task on a GPU. Owned by the driver, but for the
# last two.
cdef struct Gpu:
    Device *device
    # thread that queues compression kernels; NULL: nothing is compressed on the GPU
    Pool *coders
    # value that Device.enter gave to the driver's thread; negative: not in the GPU's context
    int entered
    # Partitions begin when their input is ready. Otherwise NCCL's stream waits for the input.
    bint watches
    Heap work                   # partitions with a copy to queue, most urgent first
    # On a machine's root, partitions with a collective to order:
    Heap unchecked              # shares whose operations have yet to be compared
    Heap gathers                # results
    Heap reductions             # shares
    uint32_t group              # largest number of collectives in one group
    Post *launches              # array with room for that many
    uint32_t n_launches         # on processes other than the root: those of an incomplete group
    Awaited awaited[N_STREAMS]
    uint64_t followed           # TaskOnGpu.input_number that NCCL's stream waits for last
    uint64_t ends               # number of tasks that have succeeded
    # Tasks whose input the GPU has not produced yet, by TaskOnGpu.next_unseen, in the order in
    # which their events were recorded.
    Tasks unseen[USER_STREAMS]
    Places places
    # Protected by the GIL:
    # CUDA's unique number of the user's stream that last waited for ends of tasks
    uint64_t met_by
    # per stream of the core: the latest end (TaskOnGpu.end_number) that it has waited for
    uint64_t met[N_STREAMS]

cdef struct Settings:           # constant once the core has started
    uint64_t job
    # the servers' number for this process; with a root per machine, the machine's number
    uint32_t rank
    int64_t credit              # bytes in flight per lane; 0: no bound
    # Time in which the slowest server's link can write out what is in flight to a server, but for
    # the exceptions in send.pxd; 0: no bound.
    int64_t ahead_ns
    uint32_t processes          # workers that one push stands for
    int64_t spin_ns             # time for which an idle driver yields the CPU before it parks
    bint telemetry              # count the bytes of completed tensors
    bint elastic                # keep outcomes: a server may be lost
    bint asynchronous           # lanes keep values, not sums of rounds
    bint shrinks                # the job goes on without workers that it loses: see commit.pxd
    uint32_t senders            # places for workers, or machines
    # the pool copies answers of at least so many bytes; 0: the driver copies all of them
    uint64_t copies_from

cdef struct Role:               # the driver's role; guarded by the monitor
    bint driving                # a thread has the driver role
    bint parked                 # the driver sleeps in endpoint.wait and must be woken
    bint background_idle        # the background thread sleeps on the monitor
    # threads that want the role for a moment: no other takes it. Written with the monitor held,
    # read by any thread
    int64_t wanted
    uint32_t waiters            # threads that sleep on the monitor until a task ends
    int64_t stopping            # written with the monitor held, read by any thread

cdef struct Inbox:              # work that is new to the driver; guarded by the monitor
    Task *first                 # submitted tasks
    Task *last
    Tensor *failing             # tensors that the driver is to fail
    Tensor *known               # tensors that the driver is to adopt without a task
    Term *terms                 # terms to begin, the oldest first
    uint32_t joins              # joins of all workers that have ended
    # The driver must look at the inbox, or at Core.failed. Written with the monitor held, read by
    # any thread.
    int64_t news
    CommitGroup *groups         # all groups; they stay for the core's life
    int64_t group_news          # some group may be complete. Not guarded: any thread, atomically

cdef struct Ended:              # finished tasks; guarded by the monitor
    Task *on_host               # ... whose memory Python has yet to release
    # ... whose memory the GPU may still use, in the order in which they finished
    Task *on_gpu
    Task *last_on_gpu

cdef struct Busy:               # written with the monitor held, read by any thread
    # tasks submitted and not finished, plus 1 while Machine.unsent, Moving.terms or Lanes.greeted
    int64_t outstanding
    int64_t since               # time at which `outstanding` last became positive
    int64_t total               # nanoseconds in which it was positive, up to then

cdef struct Core

cdef struct LateCalls:          # functions of the driver, which _core.pyx compiles
    void (*pause)(Core *c) noexcept nogil
    int (*ping)(Core *c, uint32_t peer, const char *nonce) noexcept nogil
    void (*end_lanes)(Core *c, const uint32_t *lanes, uint32_t n) noexcept nogil

cdef struct Lanes:
    LateCalls late              # called by _late_lanes.pyx
    # Threads of the transport hold pointers to lanes and servers, so these arrays never move.
    Lane *at
    Server *servers
    uint32_t n                  # lanes so far, lost ones included
    uint32_t n_servers
    uint32_t capacity           # room for lanes, and for servers
    uint32_t n_ready            # lanes that have sent the right proof
    uint32_t *living            # numbers of the lanes that are not lost, in order
    uint32_t n_living
    # lanes that joined the running job, were sent a PING, and are neither ready nor lost
    uint32_t greeted

cdef struct PartitionTable:     # partitions by Partition.index
    Partition **at
    uint32_t n
    uint32_t capacity

cdef struct Moving:             # partitions that lanes take over, from lost ones or anew
    uint32_t joins              # joins of all workers that have ended: messages count from the last
    # terms whose keys have not all been taken, the latest first
    Term *terms
    uint32_t untaken            # sum of Lane.untaken
    uint32_t yielding           # lanes with a Lane.yielding
    uint32_t era                # latest term in which workers were dropped or entered; 0: none was
    uint32_t living             # senders that live
    # APPLIED's body, for the next record of the message that is being handled; NULL: none came
    const char *applied
    # Guarded by the monitor: terms whose keys have all been taken, the latest first,
    Term *over
    int told                    # ... and an eventfd to write to for each; -1: none

cdef struct Queued:
    uint64_t next_order         # for Partition.order
    int64_t longest             # bytes of the longest partition

cdef struct Core:
    # Waits for a task, and drives if no other thread does: the driver's loop, which _core.pyx
    # compiles and _handle.pyx calls.
    bint (*wait_for)(Core *c, Task *task, int64_t deadline_ns) noexcept nogil
    Endpoint *endpoint
    Settings settings
    # threads that compress on the host, and copy answers; NULL: the driver copies all answers
    Pool *pool
    Machine *machine            # NULL: no other process of this machine shares the work
    Gpu *gpu                    # NULL: no tensor on a GPU so far; set once, by any thread

    Monitor monitor
    Role role
    Inbox inbox
    Ended ended
    Busy busy
    # Written with the monitor held, read by any thread:
    int64_t failed              # not 0: status with which every task ends

    # Owned by the driver:
    Lanes lanes
    PartitionTable table
    Queued queued
    Tensor *tensors
    Moving moving
    bint swept                  # every tensor has been failed with `failed`
    Counters counters
    Watch *watch                # recorder; NULL: no tracing
