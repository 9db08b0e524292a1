# Data structures of the worker's core: tensors, their partitions, tasks, lanes and servers.
#
# Ownership: the submitting thread makes a Task and hands it over through the inbox; from then on
# the driver owns it until `status` leaves PENDING. Tensor and Partition are filled before they are
# handed over and then belong to the driver alone. The transport's threads also access
# Lane.in_flight, Task.bodies_in_flight and Server, atomically.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from bpsx.core.gpu.device cimport N_STREAMS
from bpsx.core.wire cimport PROOF_BYTES, Settlement
from bpsx.core.codec.packed cimport Packed
from bpsx.core.local.ring cimport Post
from bpsx.kernels.abi cimport orthogonalise_fn, project_fn, refresh_fn, restore_fn
from bpsx.transports.abi cimport Message

cdef enum:
    MAX_STAGES = 20
    EVERYBODY = 0xFFFFFFFF

# planning/stages.py has the same names and codes, and chooses each tensor's list of stages.
cdef enum Stage:
    END = 0
    COORDINATE_REDUCE = 1       # the machine's root waits for the shares of the other processes
    # root: add the shares; other processes: copy the own share to where the root can add it
    REDUCE = 2
    COPYD2H = 3
    PCIE_REDUCE = 4
    COORDINATE_PUSH = 5
    COMPRESS = 6
    PUSH = 7                    # queued in its lane until it is sent
    PULL = 8                    # sent; waits for the reply
    DECOMPRESS = 9
    COPYH2D = 10
    COORDINATE_BROADCAST = 11   # waits for the root's post that the result is ready
    # copy the result to the output; the root first posts it to the other processes
    BROADCAST = 12
    COPY = 13                   # a thread copies the answer to the output, or to where it goes on

cdef struct Outcome:            # outcome of a tensor, a task or a round
    int status                  # DONE or 0, or an error
    uint32_t a, b               # with an error: the ranks that it concerns

# Pinned host memory of one partition from COPYD2H to COPYH2D; see pinned_pool.pxd.
cdef struct PinnedBlock:
    char *host
    # bytes from the start of the segment of the machine's root, if there is one
    uint64_t offset
    uint64_t slab, slab_bytes   # offset and size of the slab that contains this place
    uint32_t kind               # size class
    # A copy from here to the GPU has been queued: reuse it only after the event `up`.
    bint used
    void *up                    # event recorded after that copy
    PinnedBlock *next                 # next free place of this size; it was given back later
    PinnedBlock *next_made            # next in the list of all places

# GPU state of a partition, allocated before its first push_pull on a GPU. Owned by the driver. More
# than 20 fields: a copy and a compression read most of them.
cdef struct OnGpu:
    # NULL except from COPYD2H to COPYH2D; always NULL on processes other than the machine's root
    PinnedBlock *place
    char *host                  # address of the place in this process
    char *data                  # address on the GPU that COPYD2H copies from
    # bytes that the stages cover: the partition's, or without servers the whole tensor's
    uint64_t span
    # rank within its group that copies the partition; EVERYBODY: each rank copies a share
    uint32_t owner
    uint64_t begin, length      # byte range of the partition that this process copies
    # per stream: event recorded after the last work of this partition's stages
    void *queued[N_STREAMS]
    uint32_t reduction
    uint32_t others             # on the root: number of other processes that take part,
    uint32_t copied, loaded     # ... and how many of them have copied down (COPIED) and up (LOADED)
    # Compression on the GPU:
    # Python object that queues the kernels; NULL: compressed on the host or not at all
    void *coder
    char *wire                  # encoded bytes on the GPU, as Packed.wire on the host
    # on the GPU: number of encoded bytes (int64), and whether decoding found invalid bytes (int32)
    char *words
    int64_t size                # encoded size in bytes if it is constant; else -1
    uint64_t counter            # counter of the next encoding,
    double factor               # ... and the factor for its residual
    bint answered               # on processes other than the root: the result is on the host
    Outcome doom                # ... or the round failed while an event was awaited
    Partition *next             # next partition in the line of awaited events

# A partition of a tensor that the machine's processes sum before the root pushes it, see
# local/reduce.pxd. Owned by the driver.
cdef struct LocalRound:
    # on processes other than the root: which of the two places the next share takes
    uint32_t side
    # root: posts of this round by local rank; flags 0: nothing posted yet. NULL on others
    Post *shares
    uint32_t n_shares
    uint32_t result_owner       # local rank in whose share the result lies
    uint64_t result_offset
    # status not 0: the machine's processes disagree, and the push must say so to the servers
    Outcome disagreement

cdef struct SumNumbers:         # state of the lane's compression, in its answers
    uint32_t sum                # number of the latest sum
    uint32_t stored             # ... of the sum that the stored snapshot follows
    uint64_t counter            # the lane's counter

# Outcome of a partition's latest round, kept for workers that may lack it when a server is lost;
# core/keep.pxd. Owned by the driver.
cdef struct Kept:
    bint held                   # there is one
    uint32_t round              # its round, as messages count
    Outcome outcome             # status DONE, or the error
    uint64_t length             # bytes of `body`
    char *body                  # in `message` or in `memory`
    SumNumbers numbers          # of a result of a compressed partition
    # In an asynchronous job, by sender: its pushes in `body` (core/values.pxd); else NULL.
    uint32_t *applied
    bint in_message
    Message message             # the answer's message, if `in_message`
    bint uncopied               # COPY has yet to copy `body`, in `message`, to Partition.target
    bint settled                # ... and then it is not needed any more
    # else a copy; unless it is to be acknowledged, this has room for any that is not
    char *memory

cdef struct LogEntry:           # an encoded push that has become part of a sum
    uint32_t sum                # number of that sum
    uint32_t divisor
    uint64_t length             # bytes of `body`
    char *body

cdef struct Snapshot:           # the lane's state of a partition, after a sum
    bint held
    bint was_set                # from a checkpoint, by this worker
    uint32_t sum                # number of that sum
    uint64_t counter            # the lane's counter; of a partition without a residual that is all
    uint64_t length             # bytes of `body`
    char *body                  # in `message` or in `memory`
    bint in_message
    Message message             # the SNAP's message, if `in_message`
    char *memory                # else a copy

# Data with which another lane continues a compressed partition of a lost lane; core/logs.pxd.
# Owned by the driver.
cdef struct Backup:
    uint32_t sum                # number of the latest sum whose outcome has arrived; 0: of none
    bint summed                 # the latest outcome was that sum
    uint32_t gap                # number of the latest sum before a worker was lost, see Coded
    Snapshot snapshot
    bint unconfirmed            # the lane does not know yet that `snapshot` has arrived
    LogEntry *entries           # pushes after the stored snapshot, the oldest first
    uint32_t n_entries
    uint32_t entries_capacity
    uint64_t logged             # bytes of the entries' bodies

cdef struct Coding:             # report of a pool's thread to the driver
    int status                  # result of that encoding, decoding or copy
    Partition *next             # next in the pool's list of finished partitions

# More than 20 fields: seven say which bytes these are and where they are summed. The driver needs
# the others for each message of the partition.
cdef struct Partition:
    uint64_t key                # key in the job, as in messages
    uint64_t offset             # bytes from the tensor's start
    uint64_t length             # bytes
    int32_t priority            # of the current task
    uint64_t order              # age: among equal priorities the smaller order goes first
    uint32_t lane               # endpoint's peer number of the lane that sums it
    uint32_t slot               # the lane's index of the key
    uint32_t index              # this worker's index of the partition; see cookie_of
    # This worker's rounds of the partition that are over, and how many of them were over at the
    # latest join(), from which messages count.
    uint32_t round
    uint32_t joined_at
    uint32_t term               # see Header
    # State: the Stage under way; END: no round of it is. Set by move_partition.
    uint8_t stage
    uint8_t stage_index         # position of `stage` in the tensor's list of stages
    bint registered             # REGISTER for this key has been sent
    bint answered               # in PULL: `kept` is the answer, which has not been committed
    char *source                # data to push in this round; NULL: no body
    char *target                # address for the reply's body
    uint32_t divisor            # divisor for the server, see Header
    int64_t entered_ns          # start of the present stage; only for recorded steps
    Tensor *tensor
    Packed *packed              # NULL: not compressed
    # The current task reads or sets the server's compression state, see Flag.STATE.
    bint is_codec_state
    bint encodes                # the pool is to encode it; otherwise to decode it
    Coding coding
    OnGpu *gpu                  # NULL: the tensor has not been on a GPU
    bint on_gpu                 # this round is on the GPU
    LocalRound *local           # NULL: no other process of this machine shares the work
    Kept *kept                  # NULL: no outcome has been kept so far
    Backup *backup              # NULL: not compressed, or nothing has arrived so far

# State of a matrix; core/transitions.pxd has the table.
cdef enum MatrixState:
    IDLE = 0
    PROJECTING = 1              # threads make this worker's P = M Q
    SUMMING_P = 2               # the partitions of P go through their stages
    ORTHOGONALISING = 3         # a thread makes the columns of the summed P orthonormal
    PROJECTING_BACK = 4         # threads make this worker's Q = M^T P
    SUMMING_Q = 5               # the partitions of Q go through their stages
    REFRESHING = 6              # a thread makes the next step's Q
    RESTORING = 7               # threads write the result P Q^T and the residual

# A tensor that is exchanged as two factors of low rank: docs/internals/powersgd.md. Its partitions
# are those of P, then those of Q, of the wide type. Owned by the driver, and by the threads that
# compress while `working`. More than 20 fields: the functions, the sizes, and the memory.
cdef struct Matrix:
    project_fn project
    project_fn project_back
    restore_fn restore
    orthogonalise_fn orthogonalise
    refresh_fn refresh
    int64_t rows
    int64_t columns
    int64_t rank
    uint64_t nbytes             # of the tensor
    uint32_t wide_itemsize
    uint64_t scratch            # bytes of scratch memory of a thread
    bint feedback
    int64_t seed
    uint64_t counter            # steps so far
    char *residual              # NULL: no error feedback
    char *q                     # the next step's Q, orthonormal
    char *shares                # this worker's P and Q, as pushed
    char *sums                  # the summed P and Q
    uint64_t q_offset           # offset of Q in these two
    uint32_t n_first            # partitions of P
    uint8_t state               # set by move_matrix
    bint broken                 # the summed Q is not finite
    # entries in the pool's heap for threads that take pieces; the first one, for work on a GPU
    Partition *hands
    uint32_t n_hands
    uint32_t working            # of these, those that have not come back
    int64_t pieces              # of the present work
    int64_t next_piece          # atomic
    int64_t began_ns            # only for recorded steps
    # bpsx.compression.gpu_factors.FactorsOnGpu or FactorsByHost, the caller keeps it alive;
    # NULL: gradients are in host memory
    void *coder

cdef struct Text:               # UTF-8, not terminated; the Python Tensor owns it
    char *at
    uint32_t size               # bytes

cdef struct Tasks:              # list by Task.next
    Task *first
    Task *last

cdef struct TensorTrace:        # only with `watched`
    uint32_t step               # step of the current task, counted from 1
    uint8_t recorded            # bits of the recordings that include it (core/trace/recorder.pxd)

cdef struct ShareMemory:        # this process's share, if another process is the machine's root
    uint64_t offset             # in this process's segment
    uint64_t span               # bytes between the two places of the share

# More than 20 fields: a task's progress, the lists that the tensor is in, and what it is.
cdef struct Tensor:
    Partition *parts
    uint32_t n_parts
    # stages of this round, terminated by END: points to on_host or on_gpu
    uint8_t *stages
    uint8_t on_host[MAX_STAGES]
    uint8_t on_gpu[MAX_STAGES]
    uint8_t dtype
    int last_stream             # stream on which the last GPU stage is queued
    bint adopted                # the driver has given the partitions their index
    Outcome outcome             # DONE, or the error with which every task of this tensor fails
    Text name
    Text codec                  # compression, in one line as spec.py writes it; empty: none
    Matrix *matrix              # NULL: not exchanged as factors
    Task *current               # task whose partitions are under way
    uint32_t answered           # partitions of it that are `answered`
    bint ready                  # it has all answers, and its group is not committed
    bint linked                 # this tensor is in its group's list
    Tensor *next_ready
    int64_t started_ns          # submission time of the current task
    bint waits_for_others       # the current task needs the pushes of other workers
    TensorTrace trace
    Tasks waiting               # later tasks of the same tensor, one round each
    Tensor *next                # list of all tensors of the core
    Tensor *next_known          # list of tensors to adopt without a task
    ShareMemory share
    # status with which the driver is to fail it; guarded by the core's monitor
    int failing_status
    Tensor *next_failing

# Callback for the end of a task. The memory belongs to the caller, who may free or reuse it as soon
# as `run` begins.
cdef struct EndCallback:
    # Called once by the thread that ends the task; must not block.
    void (*run)(EndCallback *self, int64_t status) noexcept nogil
    EndCallback *next

# State of a task; core/transitions.pxd has the table.
cdef enum TaskState:
    PREPARED = 0                # belongs to the thread that fills it in
    SUBMITTED = 1               # in the inbox
    WAITING = 2                 # behind an earlier round of its tensor
    AWAITS_INPUT = 3            # the GPU still computes its input
    RUNNING = 4                 # its partitions are in their stages
    ENDED = 5                   # `status` is its outcome
    RELEASED = 6                # neither transport nor GPU uses its memory any more

cdef enum EndState:
    UNRECORDED = 0
    # The event has been recorded: by `finish`, or before, if it is that of the group's last task.
    RECORDED = 1
    # The event has fired, and may belong to another task by now. Set and read with the GIL.
    FIRED = 2

cdef struct TaskOnGpu:
    # event after which the input is complete and the output may be overwritten
    void *input_event
    # sequence number of `input_event` among all records; tasks submitted together share it
    uint64_t input_number
    uint64_t stream             # user's stream on which `input_event` was recorded
    Task *next_unseen           # next in the line of unseen inputs, in order of `input_number`
    # Event after which input and output are no longer in use; NULL: not on a GPU. With status DONE
    # it has been recorded, but may not have fired yet.
    void *end_event
    EndState end_state
    # sequence number among the tasks that succeeded; 0: not one of them (yet)
    uint64_t end_number

cdef struct CommitGroup:        # push_pulls that are committed together; core/groups.pxd
    int64_t submitted           # tasks so far; guarded by the GIL
    int64_t sealed              # the last that belongs to a whole step; read atomically
    int64_t ended               # tasks that have ended; written atomically
    # Owned by the driver:
    int64_t seen                # `sealed`, as of the latest look
    int64_t due                 # tasks up to `seen` that are ready
    Tensor *first               # tensors that are ready, and others, by Tensor.next_ready
    CommitGroup *next           # next group of the core

# More than 20 fields: what the caller asks for, and how far it has come.
cdef struct Task:
    Tensor *tensor
    CommitGroup *group          # NULL: it is committed by itself
    int64_t number              # in its group, from 1
    char *input                 # NULL: nothing to push (a receiver of a broadcast)
    char *output
    uint32_t divisor            # divisor of the sum, or the root's rank for a broadcast
    bint broadcast
    # does not wait for other workers; with `broadcast`: sets the servers' value
    bint asynchronous
    bint on_gpu                 # input and output are on the GPU
    TaskOnGpu gpu
    # Reads or sets the servers' state of a compressed tensor: input and output hold that state,
    # partition after partition.
    bint is_codec_state
    int32_t priority
    double rate                 # learning rate, for compression that needs it
    TaskState state             # set by move_task
    uint32_t remaining          # partitions that have not completed
    int64_t status              # PENDING until the driver has finished the task; read atomically
    int64_t bodies_in_flight    # bodies that the transport still holds
    # first error of a partition; the task ends with it after its last partition
    Outcome error
    int64_t submitted_ns
    EndCallback *callbacks      # guarded by the core's monitor; NULL after the end
    # Python Handle, which outlives the task's use here; NULL: a stand-in, see reduce.pxd
    void *handle
    Task *next

cdef struct Server:             # state that the lanes of a server share
    bint beside                 # the server is on this machine
    int64_t in_flight           # bytes handed to the transport and not yet written out
    int64_t messages            # number of the messages that these bytes are in
    int64_t pace                # nanoseconds per MiB written; 0: not measured yet
    int64_t starved             # as Lane.starved
    bint lost                   # its lanes are
    uint32_t n_lanes            # its lanes that are not lost
    int64_t trip_ns             # shortest round trip of its lanes: Endpoint.round_trip
    int first                   # lane with the most urgent partition that has credit; -1: none

cdef struct Heap:               # partitions, most urgent first; see queue.pxd
    Partition **items
    uint32_t size
    uint32_t capacity

cdef struct Target:             # a lane that takes slots of another one, from slot `base` on
    uint32_t lane               # the other lane itself: these slots stay
    uint32_t base

cdef struct Move:               # slots of a lane, divided among targets
    uint32_t lane
    uint32_t term
    uint32_t limit              # the lane's slots from here on do not move
    bint yields                 # the lane lives and yields the slots; else it is lost
    bint done                   # the lane is lost, or has said that it has yielded
    uint32_t n
    Target *targets
    Move *next                  # the lane's move in a later term

cdef struct Told:               # a target of a term
    uint32_t lane
    uint32_t haves              # HAVEs of this term sent to it

cdef struct Term:               # see docs/internals/elastic.md
    uint32_t number
    Move *moves
    uint32_t n
    bint missed                 # a worker has left before: no lane will take the keys
    Told *told                  # the lanes that are told HAVES, each once
    uint32_t n_told
    uint32_t room               # lanes for which `told` has room
    bint said                   # they have been sent HAVES
    uint32_t living             # senders from now on, if workers were lost or enter; 0: neither
    bint enters                 # workers enter: all partitions stay where they are
    # set by the driver: partitions that have moved and had been used, and the bytes pushed again,
    # headers included
    uint64_t partitions
    uint64_t again
    bint taken                  # Python has read that; guarded by the core's monitor
    Term *next

cdef struct Lane:
    Server *server
    bint mute                   # a send failed: nothing more is sent
    bint lost                   # its connection has been ended for ever
    Move *moved                 # moves of its slots to other lanes, by Move.next; NULL: none
    Move *yielding              # move for which the lane has yet to send LEFT
    uint32_t untaken            # HAVES that it has not replied to with TOOK
    # results of this lane that have arrived, to be acknowledged
    Settlement *acks
    uint32_t n_acks
    uint32_t acks_capacity
    uint64_t acks_bytes         # bytes of those results
    Heap queue                  # partitions ready to push
    int64_t in_flight           # bytes handed to the transport and not yet written out
    # The driver stopped for lack of credit: the thread that returns credit must wake the driver.
    int64_t starved
    char proof[PROOF_BYTES]     # proof that the lane must send in reply to this worker's PING
    bint ready                  # the lane has sent that proof
    bint greeted                # it joined the running job, and is counted in Lanes.greeted

cdef struct Peak:               # see peak.pxd
    int64_t since_ns            # when the present stretch has begun
    int64_t received            # since then, from servers on other machines
    int64_t rate                # of the best stretch, bytes per second; any thread takes it

cdef struct Counters:
    int64_t tasks               # completed
    int64_t bytes               # bytes of tensors whose push_pull completed
    int64_t sent                # bytes handed to the transport, headers included
    int64_t received
    int64_t messages_out
    int64_t messages_in
    int64_t malformed           # records that were invalid
    int64_t stale               # records of lost lanes, or of partitions that have moved; ignored
    int64_t logged              # bytes of pushes in the logs, now
    int64_t held                # bytes of snapshots that are held, now
    int64_t kept                # bytes of outcomes that are kept, now
    Peak peak


cdef inline char *input_of(Partition *p) noexcept nogil:
    """Return the address of what this process pushes of a partition; NULL: nothing."""
    cdef Task *task = p.tensor.current
    if p.tensor.matrix != NULL and task.handle != NULL:
        return p.tensor.matrix.shares + p.offset
    return task.input + p.offset if task.input != NULL else NULL


cdef inline char *output_of(Partition *p) noexcept nogil:
    """Return the address for a partition's result; NULL: it is not wanted."""
    cdef Task *task = p.tensor.current
    if p.tensor.matrix != NULL:
        return p.tensor.matrix.sums + p.offset
    return task.output + p.offset if task.output != NULL else NULL


cdef inline uint64_t cookie_of(Partition *p) noexcept nogil:
    """Return the cookie of a push, which tells its answer from one to a push of an earlier term."""
    return <uint64_t>p.index | <uint64_t>p.term << 32


cdef inline uint8_t *wire_of(Partition *p) noexcept nogil:
    """Return the address of a compressed partition's encoded bytes on the host."""
    return <uint8_t *>p.gpu.host if p.on_gpu and p.gpu.coder != NULL else p.packed.wire
