# The things that the core moves. Who may touch what:
#   Task: made by the submitting thread, handed over through the inbox, then the driver's until
#   `status` leaves PENDING. Tensor, Partition: filled before they are handed over, then the
#   driver's alone. Lane.in_flight, Task.wire, Server: also by the transport's threads, atomically.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from bpsx.core.gpu.device cimport N_STREAMS
from bpsx.core.wire cimport PROOF_BYTES
from bpsx.core.codec.state cimport Packed
from bpsx.core.local.ring cimport Post

cdef enum:
    MAX_STAGES = 20
    EVERYBODY = 0xFFFFFFFF

# Pinned memory of the host's in which a partition lies between COPYD2H and COPYH2D; see
# pinned_pool.pxd.
cdef struct Place:
    char *host
    # from the start of the segment of the machine's root, if there is one
    uint64_t offset
    uint64_t slab, slab_bytes   # ... and of the memory that was taken at once, in which it lies
    uint32_t kind               # its size
    # there has been a copy up out of it: it can be taken again when `up` has come,
    bint used
    void *up                    # ... that event
    Place *next                 # another free one of its size, which was given back later
    Place *next_made            # any other

# What a partition owns besides once it has been on a GPU. The driver's alone.
cdef struct OnGpu:
    # NULL but between COPYD2H and COPYH2D, and elsewhere than at the root of a machine
    Place *place
    char *host                  # where the partition lies there, for this process
    char *data                  # on the GPU: what is copied down
    # bytes that its stages are about: its own, or, without servers, the whole tensor's
    uint64_t span
    uint32_t owner              # who of a group copies it: a rank in it, or EVERYBODY a share
    uint64_t begin, length      # bytes of it that this process copies
    void *queued[N_STREAMS]     # events: what its stages have queued last on each stream has come
    uint32_t reduction
    uint32_t others             # at the root: how many processes take part besides,
    uint32_t copied, loaded     # ... and have done their part down and up
    # Where it is compressed on the GPU:
    void *coder                 # the Python object that queues the kernels; NULL: not there
    char *wire                  # on the GPU, as Packed.wire on the host
    # there, too: how many bytes have been encoded (int64), and whether bytes made no sense when
    # decoded (int32)
    char *words
    int64_t size                # of what is encoded, where it is always the same; else -1
    uint64_t counter            # of what is to be encoded,
    double factor               # ... and by what the residual is multiplied
    bint answered               # elsewhere: the result is on the host
    int doom                    # ... or how the round has failed while an event was awaited
    uint32_t doom_a, doom_b
    Partition *next             # whose event comes after

cdef struct Partition:
    uint64_t key                # on the wire; unique in the job
    uint64_t offset             # bytes from the tensor's start
    uint64_t length             # bytes
    int32_t priority            # of its current task
    uint64_t order              # age: breaks ties of priority, first come first
    int64_t position            # bytes that had been queued before
    uint32_t lane               # the endpoint's peer that sums it
    uint32_t slot               # the lane's index of it
    uint32_t index              # ours: travels as the cookie
    uint32_t round
    uint8_t stage               # position in the tensor's list of stages
    bint registered             # the lane has been told about this key
    char *source                # what is pushed in this round; NULL: nothing
    char *target                # where the answer goes
    uint32_t divisor            # what the server shall do with it, see Header
    int64_t entered_ns          # its present stage, where it is recorded
    Tensor *tensor
    Packed *packed              # NULL: travels as it is
    # the present task is about what the server keeps of it, see Flag.STATE
    bint keeps
    bint encodes                # the pool shall encode it; else decode
    int codec_status            # of that
    Partition *next_done        # back from the pool
    OnGpu *gpu                  # NULL: never has been on a GPU
    bint on_gpu                 # in this round
    # With several processes on this machine, see reduce.pxd:
    uint32_t share_side         # elsewhere: which of its two places the share takes next
    # by local rank: what has been posted for this round; flags 0: nothing yet
    Post *shares
    uint32_t n_shares
    uint32_t result_owner       # where the others find the result
    uint64_t result_offset
    # not 0: this machine's processes disagree, and the servers have to be told so
    int share_status
    uint32_t share_a, share_b

cdef struct Tensor:
    Partition *parts
    uint32_t n_parts
    # what each partition goes through in this round, ended by END: one of
    uint8_t *stages
    uint8_t on_host[MAX_STAGES]
    uint8_t on_gpu[MAX_STAGES]
    uint8_t dtype
    int last_stream             # where the last of its stages on a GPU is queued
    bint adopted                # the driver has given the partitions their index
    int status                  # DONE, or why every task of this tensor fails
    uint32_t detail_a
    uint32_t detail_b
    char *name                  # UTF-8
    uint32_t name_bytes
    char *codec                 # compression, as spec.py says it in a line
    uint32_t codec_bytes        # 0: none
    Task *current               # the task whose partitions are under way
    # its partitions are in their stages, and not waiting for the GPU to make them
    bint begun
    int64_t started_ns          # when that was submitted
    bint waits_for_others       # whether that needs other workers' pushes
    uint32_t step               # of the present task, counted from 1; with `watched` only
    uint8_t recorded            # the recordings that it belongs to (core/trace/recorder.pxd)
    Task *first_waiting         # later tasks on the same tensor: one round after another
    Task *last_waiting
    Tensor *next                # all tensors of the core
    Tensor *next_known          # to be adopted without a task
    # of this process's share in its segment, when another process is the machine's root
    uint64_t share_offset
    uint64_t share_span         # bytes from the share's one place to its other
    int failing_status          # what the driver shall fail it with; guarded by the core's monitor
    Tensor *next_failing

# Who wants to know of a task's end without waiting for it. Its memory is the asker's, and his again
# when `run` begins.
cdef struct Tell:
    # by whoever ends the task, once: nothing that waits
    void (*run)(Tell *self, int64_t status) noexcept nogil
    Tell *next

cdef struct Task:
    Tensor *tensor
    char *input                 # NULL: nothing to push (a broadcast's receivers)
    char *output
    uint32_t divisor            # or the broadcast's root
    bint broadcast
    bint asynchronous           # waits for no other worker; a broadcast: sets the servers' value
    bint on_gpu                 # input and output are there, and then:
    # the event after which the input is there and the output may be written to,
    void *ready
    # ... and the one after which neither is in use any more. With DONE it has been recorded, not
    # yet come.
    void *over
    # ... `over` is that of a group's last task, which is as good, and has been recorded
    bint marked
    # ... it has come. From then on it may be somebody else's. Read and written with the GIL.
    bint come
    uint64_t stream             # the user's, on which `ready` was recorded,
    uint64_t recorded           # ... as the how many-th of all; tasks may share one
    uint64_t ended              # the how many-th of those that have ended well; 0: has not
    Task *next_unseen           # whose `ready` was recorded later, perhaps on another stream
    # about what servers keep of a compressed tensor: input and output are that, partition by
    # partition
    bint keeps
    int32_t priority
    double rate                 # the learning rate, where compression asks for it
    uint32_t remaining          # partitions not home yet
    int64_t status              # PENDING until the driver is done with it; read atomically
    int64_t wire                # bodies that the transport still holds
    int error                   # of a partition; the task ends with it when all partitions are home
    int64_t submitted_ns
    uint32_t detail_a           # with an error: the ranks it is about
    uint32_t detail_b
    Tell *tells                 # guarded by the core's monitor; NULL once it has ended
    # the Python Handle, which outlives the task's use here; NULL: a stand-in, see reduce.pxd
    void *handle
    Task *next

cdef struct Server:             # what its lanes share
    bint beside                 # it is on this machine
    int64_t in_flight           # bytes handed to the transport and not yet written out
    int64_t pace                # nanoseconds in which a MiB is; 0: not known yet
    int64_t starved             # as a lane's
    int first                   # the lane with the most urgent partition that has credit; -1: none

cdef struct Lane:
    Server *server              # NULL in a queue that is no lane's
    Partition **heap            # partitions ready to push, most urgent first
    uint32_t size
    uint32_t capacity
    int64_t in_flight           # bytes handed to the transport and not yet written out
    # the driver stopped for lack of credit: who returns some must wake it
    int64_t starved
    char proof[PROOF_BYTES]     # what its answer to our ping must hold
    bint ready                  # has answered our ping, and rightly

cdef struct Counters:
    int64_t tasks               # completed
    int64_t bytes               # of tensors that came home
    int64_t sent                # bytes handed to the transport, headers included
    int64_t received
    int64_t messages_out
    int64_t messages_in
    int64_t malformed           # records that made no sense


cdef inline uint8_t *wire_of(Partition *p) noexcept nogil:
    """Where the encoded bytes of a compressed partition lie on the host."""
    return <uint8_t *>p.gpu.host if p.on_gpu and p.gpu.coder != NULL else p.packed.wire
