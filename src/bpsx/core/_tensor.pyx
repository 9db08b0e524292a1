# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""A declared tensor in the core: its partitions and their stages."""
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from bpsx.core.gpu.device cimport BETWEEN, DOWN, N_STREAMS, UP, Device
from bpsx.core.wire cimport MAX_CODEC_BYTES, MAX_NAME_BYTES
from bpsx.core.codec.low_rank cimport common_state_bytes, matrix_free
from bpsx.core.codec.made cimport matrix_new, packed_new, state_of, state_of_matrix
from bpsx.core.codec.state cimport packed_free, server_state_bytes
from bpsx.core.logs cimport free_backup
from bpsx.core.partition cimport (
    COPYH2D, DECOMPRESS, MAX_STAGES, PROJECTING, PROJECTING_BACK, Matrix, OnGpu, Partition, Task,
)
from bpsx.core.status cimport DONE
from bpsx.system.sync cimport atomic_store, lock, now_ns, unlock

from bpsx.core.declared_state import DECLARED, DeclaredState
from bpsx.errors import DeviceError

cdef enum:
    COMMON_BYTES = 16           # counter and learning rate, see save_state
cdef int PLACED = DeclaredState.PLACED.value
# A thread that has not asked for so long is busy with something else; see waiters.RECENT.
cdef int64_t RECENT_NS = 3_000_000_000


def waiting(tensors, double age_s, int64_t everything_ns) -> list:
    """Return push_pulls that need other workers and are older than ``age_s`` seconds.

    The oldest come first: [(name, generation, round, seconds under way, seconds that a thread has
    waited for it or -1)]. ``everything_ns``: time from which all are waited for, in ns of the
    monotonic clock; 0: not.
    """
    cdef int64_t now = now_ns()
    cdef int64_t since
    cdef Tensor tensor
    found = []
    # Read without the monitor: the pointer to the task may go stale, so only the tensor's own,
    # permanent memory is read.
    for tensor in list(tensors):
        if (
            tensor.c.current == NULL
            or not tensor.c.waits_for_others
            or now - tensor.c.started_ns <= age_s * 1e9
        ):
            continue
        since = 0
        # An earlier question was about an earlier round.
        if tensor.asked >= tensor.c.started_ns and now - tensor.asked < RECENT_NS:
            since = max(tensor.asking_since, tensor.c.started_ns)
        elif tensor.by_graph:
            since = tensor.c.started_ns
        elif everything_ns:
            since = max(everything_ns, tensor.c.started_ns)
        found.append(
            (
                tensor.name, tensor.generation, tensor.rounds,
                (now - tensor.c.started_ns) / 1e9, (now - since) / 1e9 if since else -1
            )
        )
    return sorted(found, key=lambda item: -item[3])


cdef uint64_t make_parts(CTensor *tensor, list parts, list made) except? 0:
    """Allocate the partitions from (key, lane, slot, offset, length) of each and, if they are
    compressed, a bpsx.compression.spec.Made each.

    Returns their total bytes. Raises MemoryError.
    """
    cdef size_t i
    cdef Partition *p
    cdef uint64_t nbytes = 0
    tensor.n_parts = len(parts)
    tensor.parts = <Partition *>calloc(len(parts), sizeof(Partition))
    if tensor.parts == NULL:
        raise MemoryError(f"no memory for {len(parts)} partitions")
    for i in range(len(parts)):
        p = &tensor.parts[i]
        p.key, p.lane, p.slot, p.offset, p.length = parts[i]
        p.tensor = tensor
        if made:
            p.packed = packed_new(made[i])
        nbytes += p.length
    return nbytes


cdef OnGpu *new_on_gpu(Device *d) except NULL:
    """Allocate GPU state. The caller is in the GPU's context. Raises MemoryError."""
    cdef OnGpu *g = <OnGpu *>calloc(1, sizeof(OnGpu))
    cdef int which
    if g == NULL:
        raise MemoryError("no memory for a partition on a GPU")
    for which in range(N_STREAMS):
        g.queued[which] = d.new_event(d.self)
        if g.queued[which] == NULL:
            drop_events(g, d)
            free(g)
            raise MemoryError("no more CUDA events")
    return g


cdef void drop_events(OnGpu *g, Device *d) noexcept:
    """Release CUDA events. The caller is in the GPU's context."""
    cdef int which
    for which in range(N_STREAMS if g != NULL else 0):
        if g.queued[which] != NULL:
            d.drop_event(d.self, g.queued[which])


cdef int give_gpu(CTensor *tensor, Device *d) except -1:
    """Allocate the GPU state of a tensor's partitions, or of a matrix, whose partitions are those
    of its factors, on the host. Call it in the GPU's context, before the first task on the GPU.

    Raises MemoryError.
    """
    cdef size_t i
    if tensor.matrix != NULL:
        tensor.matrix.hands[0].gpu = new_on_gpu(d)
    for i in range(tensor.n_parts if tensor.matrix == NULL else 0):
        tensor.parts[i].gpu = new_on_gpu(d)
    return 0


cdef void take_gpu(CTensor *tensor, Device *d) noexcept:
    """Release the CUDA events of a tensor. The caller is in the GPU's context."""
    cdef size_t i
    if tensor.matrix != NULL:
        drop_events(tensor.matrix.hands[0].gpu, d)
    for i in range(tensor.n_parts if tensor.parts != NULL else 0):
        drop_events(tensor.parts[i].gpu, d)


cdef void free_parts(CTensor *tensor) noexcept:
    cdef size_t i
    if tensor.parts != NULL:
        for i in range(tensor.n_parts):
            if tensor.parts[i].local != NULL:
                free(tensor.parts[i].local.shares)
            free(tensor.parts[i].local)
            free(tensor.parts[i].gpu)
            if tensor.parts[i].kept != NULL:
                free(tensor.parts[i].kept.memory)
                free(tensor.parts[i].kept.applied)
            free(tensor.parts[i].kept)
            free_backup(&tensor.parts[i])
            packed_free(tensor.parts[i].packed)
    free(tensor.parts)


cdef int take_coders(CTensor *tensor, list coders) except -1:
    """Let each partition be compressed on the GPU by its bpsx.compression.gpu.Coder.

    The caller keeps the coders alive.
    """
    cdef size_t i
    cdef OnGpu *g
    for i in range(tensor.n_parts):
        g = tensor.parts[i].gpu
        g.wire = <char *><uintptr_t>coders[i].wire
        g.words = <char *><uintptr_t>coders[i].words
        g.size = -1 if coders[i].size is None else coders[i].size
        g.coder = <void *>coders[i]
    return 0


cdef int queue_step(CCore *c, CTensor *tensor) except -1:
    """Call a matrix's coder to queue the work of its state."""
    cdef Matrix *m = tensor.matrix
    cdef uintptr_t data = <uintptr_t>tensor.current.input
    cdef uintptr_t stream = <uintptr_t>c.gpu.device.streams[DOWN]
    coder = <object>m.coder
    if m.state == PROJECTING:
        coder.project(data, <uintptr_t>m.q, stream)
    elif m.state == PROJECTING_BACK:
        coder.project_back(data, <uintptr_t>m.sums, stream)
    else:
        coder.restore(
            data, <uintptr_t>tensor.current.output, <uintptr_t>(m.sums + m.q_offset), m.broken,
            stream
        )
    return 0


cdef int queue_kernels(CCore *c, Partition *p) except -1:
    """Call the partition's coder to queue the kernels that encode or decode it."""
    cdef OnGpu *g = p.gpu
    cdef Task *task = p.tensor.current
    if p.tensor.matrix != NULL:
        return queue_step(c, p.tensor)
    coder = <object>g.coder
    if p.encodes:
        coder.encode(<uintptr_t>g.data, g.counter, g.factor, <uintptr_t>c.gpu.device.streams[DOWN])
    else:
        coder.decode(
            <uintptr_t>(task.output + p.offset if task.output != NULL else c.gpu.device.waste),
            p.packed.size, <uintptr_t>c.gpu.device.streams[UP]
        )
    return 0


cdef Device *device_of(gpu):
    """Return the table of a :class:`bpsx.local._cuda.Gpu`."""
    return <Device *>PyCapsule_GetPointer(gpu.abi(), b"bpsx.Device")


cdef class Tensor:
    """A declared tensor: its partitions with key, lane and slot.

    One thread makes it; it is immutable afterwards, and any thread may use it.
    """

    def __cinit__(
        self, str name, int dtype, list parts, bytes stages, uint32_t generation=0, str codec="",
        made=(), bytes on_gpu=b"", matrix=None
    ):
        """``parts``: a list of (key, lane, slot, offset, length), the last two in bytes;
        ``stages``: codes from ``stages.py``; ``generation``: number of the name's declaration.

        ``codec``: description of the compression for the servers, and ``made``: a
        :class:`bpsx.compression.spec.Made` for each partition, if it is compressed. ``on_gpu``: the
        stages of a push_pull on a GPU. ``matrix``: a
        :class:`bpsx.compression.factors.MadeMatrix`, if the tensor is exchanged as two factors.
        The partitions are then those of the factors, and ``dtype`` is theirs.
        """
        cdef size_t i
        if max(len(stages), len(on_gpu)) >= MAX_STAGES:
            raise ValueError(f"{stages!r}, {on_gpu!r}: at most {MAX_STAGES - 1} stages are allowed")
        self.name, self.generation, self.codec = name, generation, codec.encode()
        if len(self.codec) > MAX_CODEC_BYTES:
            raise ValueError(
                f"tensor {name!r}: its compression parameters take {len(self.codec)} bytes; at "
                f"most {MAX_CODEC_BYTES} are allowed"
            )
        # Servers sum factors as they are, and need no description.
        self.c.codec.at, self.c.codec.size = self.codec, len(self.codec) if matrix is None else 0
        self.made = [*made, matrix]
        self.encoded = name.encode()[:MAX_NAME_BYTES]
        self.c.name.at, self.c.name.size = self.encoded, len(self.encoded)
        self.c.dtype = dtype
        self.c.outcome.status = DONE
        for i in range(len(stages)):
            self.c.on_host[i] = stages[i]
        for i in range(len(on_gpu)):
            self.c.on_gpu[i] = on_gpu[i]
        self.c.stages = &self.c.on_host[0]
        # If the host decodes, a DECOMPRESS after COPYH2D does nothing; see code_on().
        self.c.last_stream = (
            UP
            if on_gpu.rstrip(bytes([DECOMPRESS])).endswith(bytes([COPYH2D]))
            else BETWEEN
        )
        self.nbytes = make_parts(&self.c, parts, list(made))
        if matrix is not None:
            self.c.matrix = matrix_new(&self.c, matrix)
            self.nbytes = matrix.nbytes

    def __dealloc__(self):
        free_parts(&self.c)
        matrix_free(self.c.matrix)

    cdef put_on(self, gpu):
        """Allocate the GPU state, before the first push_pull on a GPU. Idempotent.

        Raises :class:`MemoryError`, :class:`~bpsx.errors.DeviceError`.
        """
        if self.gpu is None:
            with gpu:
                try:
                    give_gpu(&self.c, device_of(gpu))
                except MemoryError:
                    take_gpu(&self.c, device_of(gpu))
                    raise DeviceError(gpu.failure) if gpu.failure else MemoryError from None
            self.gpu = gpu

    cdef take_off(self):
        """Release the GPU state, when no thread drives any more. Call in the GPU's context."""
        if self.gpu is not None:
            take_gpu(&self.c, device_of(self.gpu))
            self.gpu = None

    def code_on(self, gpu, list coders) -> None:
        """Compress this tensor on the GPU from now on.

        ``coders``: a :class:`bpsx.compression.gpu.Coder` for each partition. Call before the first
        push_pull there.
        """
        cdef size_t i
        self.put_on(gpu)
        self.coders = coders
        # Both if kernels decode and if collectives spread the result.
        self.c.last_stream = BETWEEN
        for i in range(self.c.n_parts):
            coders[i].store(
                <uintptr_t>self.c.parts[i].packed.residual,
                <uintptr_t>self.c.parts[i].packed.momentum, <uintptr_t>&self.c.parts[i].packed.state
            )
        take_coders(&self.c, coders)

    cdef bint factor_on(self, gpu) except -1:
        """Make a matrix's coder for a push_pull on ``gpu``, None: from host memory. Idempotent.

        Returns whether there is one. Raises :class:`~bpsx.errors.DeviceError` if an earlier
        push_pull was elsewhere: the residual has stayed there.
        """
        if self.coders if gpu is None else self.on_host:
            raise DeviceError(
                f"tensor {self.name!r} is exchanged as two factors, and cannot be pushed from"
                f" {'a GPU' if gpu is not None else 'host memory'} any more: its first push_pull"
                f" was from {'host memory' if gpu is not None else 'a GPU'}"
            )
        self.on_host = gpu is None
        if gpu is not None and not self.coders:
            coder = self.made[len(self.made) - 1].on_gpu(gpu)
            if self.c.matrix.residual != NULL:
                coder.store(<uintptr_t>self.c.matrix.residual)
            self.c.matrix.hands[0].gpu.host = <char *><uintptr_t>coder.shares
            self.c.matrix.coder, self.coders = <void *>coder, [coder]
            self.c.last_stream = DOWN
        return gpu is not None

    cdef void ask_no_more(self):
        """Note that a thread has stopped waiting for this tensor."""
        self.asked = 0

    cdef void ask(self):
        """Note that a thread waits for this tensor, or asks whether it has ended."""
        cdef int64_t now = now_ns()
        if now - self.asked > RECENT_NS:
            self.asking_since = now
        self.asked = now

    @property
    def rounds(self) -> int:
        """Number of its push_pulls that have ended, well or not."""
        if self.c.matrix != NULL:
            return self.c.parts[self.c.n_parts - 1].round       # of the second factor
        return self.c.parts[0].round if self.c.n_parts else 0

    @property
    def busy(self) -> bool:
        """Whether a push_pull of it is under way, as far as the driver knows."""
        return self.c.current != NULL

    def state(self, list saved=None) -> list:
        """Return the compression state of each partition as bytes (core/codec/state.pxd), or the
        one of a matrix (core/codec/low_rank.pxd), after setting it to ``saved``, if that is given.

        Not while it is :attr:`busy`. Raises :class:`ValueError` for bytes of another length.
        """
        found = []
        if self.c.matrix != NULL:
            kept = self.coders if self.c.matrix.residual != NULL else None
            if kept:
                kept[0].fetch(<uintptr_t>self.c.matrix.residual)
            found = [state_of_matrix(self.c.matrix, saved[0] if saved else None)]
            if kept and saved:
                kept[0].store(<uintptr_t>self.c.matrix.residual)
            return found
        for i in range(self.c.n_parts):
            coder = self.coders[i] if self.coders else None
            memory = (
                <uintptr_t>self.c.parts[i].packed.residual,
                <uintptr_t>self.c.parts[i].packed.momentum, <uintptr_t>&self.c.parts[i].packed.state
            )
            if coder is not None:
                coder.fetch(*memory)
            found.append(state_of(self.c.parts[i].packed, saved[i] if saved else None))
            if coder is not None and saved:
                coder.store(*memory)
        return found

    @property
    def common_bytes(self) -> int:
        """First bytes of each item of :meth:`state` that are the same on all workers."""
        return common_state_bytes(self.c.matrix) if self.c.matrix != NULL else COMMON_BYTES

    @property
    def server_bytes(self) -> int:
        """Bytes of the servers' compression state, which :meth:`Core.prepare` with
        ``is_codec_state`` transfers; 0 if they have none.
        """
        if self.c.matrix != NULL:
            return 0
        return sum([server_state_bytes(self.c.parts[i].packed) for i in range(self.c.n_parts)])


cdef class CommitGroup:
    """Push_pulls that count as a whole, in a job that goes on without lost workers.

    A push_pull belongs to the group of its name, if the core's ``groups`` has one. None of them
    ends before :meth:`seal`. ``core``: a :class:`bpsx._core.Core`, for whose life the group stays.
    Thread-safe.
    """

    def __init__(self, core not None) -> None:
        self.of = <CCore *>PyCapsule_GetPointer(core.abi(), b"bpsx.Core")
        core.all_groups.append(self)
        lock(&self.of.monitor)
        self.c.next = self.of.inbox.groups
        self.of.inbox.groups = &self.c
        unlock(&self.of.monitor)

    def seal(self) -> None:
        """The push_pulls so far end a step: they are committed together once all have answers.

        The caller notifies the core.
        """
        atomic_store(&self.c.sealed, self.c.submitted)
        atomic_store(&self.of.inbox.group_news, 1)


cdef class Declaration:
    """A worker's declaration of a generation of a name."""

    def __init__(self, uint32_t generation, shape, int dtype, uint64_t nbytes, codec=None) -> None:
        self.generation, self.shape, self.dtype, self.nbytes, self.codec = (
            generation, shape, dtype, nbytes, codec
        )
        self.pending, self.number, self.last = [], DeclaredState.ASKED.value, -1

    @property
    def state(self) -> DeclaredState:
        """State of the declaration."""
        return DeclaredState(self.number)

    def move(self, event) -> None:
        """Go to the state that follows ``event``. The caller holds the session's lock."""
        self.number = DECLARED.after(DeclaredState(self.number), event).value

    cpdef Tensor take(self, shape, int dtype, codec):
        """Return the tensor for one more push_pull, which counts from now on.

        None, if it is not placed, if it may begin no more push_pulls, or if shape, dtype or codec
        have changed.
        """
        if (
            self.number == PLACED
            and self.dtype == dtype
            and self.codec is codec
            and self.shape == shape
            and self.count_use()
        ):
            return self.tensor
        return None

    cpdef bint bound(self, int64_t last) noexcept:
        """Set the most push_pulls that may begin. Returns False, and sets nothing, if more have.

        No other thread with the GIL sees it half done.
        """
        if self.count > last:
            return False
        self.last = last
        return True

    cpdef bint count_use(self) noexcept:
        """Count one more push_pull. Returns False, and counts nothing, if there may be no more.

        No other thread with the GIL sees it half done: all workers have to stop after the same one.
        """
        if self.last >= 0 and self.count >= self.last:
            return False
        self.uses += 1
        self.count += 1
        return True
