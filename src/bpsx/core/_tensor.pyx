# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What a name was declared as, for the core: its partitions, and what they go through."""
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from bpsx.core.gpu.device cimport BETWEEN, UP, Device
from bpsx.core.wire cimport MAX_CODEC_BYTES, MAX_NAME_BYTES
from bpsx.core.codec.state cimport server_state_bytes, state_of
from bpsx.core.partition cimport MAX_STAGES
from bpsx.core.tensor_alloc cimport free_parts, give_gpu, make_parts, take_coders, take_gpu
from bpsx.core.stage cimport COPYH2D, DECOMPRESS
from bpsx.core.status cimport DONE
from bpsx.system.sync cimport now_ns

from bpsx.errors import DeviceError

# A thread that has not asked for so long does something else meanwhile; see asking.RECENT.
cdef int64_t RECENT_NS = 3_000_000_000


def waiting(tensors, double age_s, int64_t everything_ns) -> list:
    """Of ``tensors``, those whose push_pull needs the other workers and is older than ``age_s``
    seconds, the oldest first: [(name, generation, round, seconds, seconds that it has been waited
    for or -1)].

    ``everything_ns``: since when all are waited for; 0: not.
    """
    cdef int64_t now = now_ns()
    cdef int64_t since
    cdef Tensor tensor
    found = []
    # A glance without the monitor: the pointer may go stale, so only the tensor's own, permanent
    # memory is read.
    for tensor in list(tensors):
        if (
            tensor.c.current == NULL
            or not tensor.c.waits_for_others
            or now - tensor.c.started_ns <= age_s * 1e9
        ):
            continue
        since = 0
        # else what was asked for was an earlier round
        if tensor.asked >= tensor.c.started_ns and now - tensor.asked < RECENT_NS:
            since = max(tensor.asking_since, tensor.c.started_ns)
        elif tensor.by_graph:
            since = tensor.c.started_ns
        elif everything_ns:
            since = max(everything_ns, tensor.c.started_ns)
        found.append(
            (
                tensor.name, tensor.generation, tensor.c.parts[0].round,
                (now - tensor.c.started_ns) / 1e9, (now - since) / 1e9 if since else -1
            )
        )
    return sorted(found, key=lambda item: -item[3])


cdef Device *device_of(gpu):
    """The table of a :class:`bpsx.local._cuda.Gpu`."""
    return <Device *>PyCapsule_GetPointer(gpu.abi(), b"bpsx.Device")


cdef class Tensor:
    """A declared tensor: its partitions with key, lane and slot.

    Immutable once made; made by one thread, used by any.
    """

    def __cinit__(
        self, str name, int dtype, list parts, bytes stages, uint32_t generation=0, str codec="",
        made=(), bytes on_gpu=b""
    ):
        """``parts``: a list of (key, lane, slot, offset, length), bytes; ``stages``: codes from
        ``stages.py``; ``generation``: which declaration of the name this is.

        ``codec``: how it is compressed, as servers are told, and ``made``: a
        :class:`bpsx.compression.spec.Made` for each partition, if it is. ``on_gpu``: the stages of
        a push_pull on a GPU.
        """
        cdef size_t i
        if max(len(stages), len(on_gpu)) >= MAX_STAGES:
            raise ValueError(f"{stages!r}, {on_gpu!r}: at most {MAX_STAGES - 1} stages are allowed")
        self.name, self.generation, self.codec = name, generation, codec.encode()
        if len(self.codec) > MAX_CODEC_BYTES:
            raise ValueError(
                f"tensor {name!r}: {len(self.codec)} bytes say how it is compressed; at most "
                f"{MAX_CODEC_BYTES} are allowed"
            )
        self.c.codec, self.c.codec_bytes = self.codec, len(self.codec)
        self.made = list(made)
        self.encoded = name.encode()[:MAX_NAME_BYTES]
        self.c.name, self.c.name_bytes = self.encoded, len(self.encoded)
        self.c.dtype = dtype
        self.c.status = DONE
        for i in range(len(stages)):
            self.c.on_host[i] = stages[i]
        for i in range(len(on_gpu)):
            self.c.on_gpu[i] = on_gpu[i]
        self.c.stages = &self.c.on_host[0]
        # Where the host decodes, DECOMPRESS behind COPYH2D does nothing; see code_on().
        self.c.last_stream = (
            UP
            if on_gpu.rstrip(bytes([DECOMPRESS])).endswith(bytes([COPYH2D]))
            else BETWEEN
        )
        self.nbytes = make_parts(&self.c, parts, self.made)

    def __dealloc__(self):
        free_parts(&self.c)

    cdef put_on(self, gpu):
        """Before its first push_pull on a GPU. Idempotent.

        Raises :class:`MemoryError`, :class:`~bpsx.errors.DeviceError`.
        """
        if self.gpu is None:
            self.gpu = gpu
            with gpu:
                try:
                    give_gpu(&self.c, device_of(gpu))
                except MemoryError:
                    raise DeviceError(gpu.failure) if gpu.failure else MemoryError from None

    cdef take_off(self):
        """When nobody drives any more. In the GPU's context."""
        if self.gpu is not None:
            take_gpu(&self.c, device_of(self.gpu))
            self.gpu = None

    def code_on(self, gpu, list coders) -> None:
        """Have it compressed on the GPU from now on, by a :class:`bpsx.compression.gpu.Coder` for
        each partition.

        Before its first push_pull there.
        """
        cdef size_t i
        self.put_on(gpu)
        self.coders = coders
        self.c.last_stream = BETWEEN        # where kernels decode, or processes spread the result
        for i in range(self.c.n_parts):
            coders[i].store(
                <uintptr_t>self.c.parts[i].packed.residual,
                <uintptr_t>self.c.parts[i].packed.momentum, <uintptr_t>&self.c.parts[i].packed.state
            )
        take_coders(&self.c, coders)

    cdef void ask_no_more(self):
        """A thread that has waited for it does something else from now on."""
        self.asked = 0

    cdef void ask(self):
        """A thread waits for it, or asks whether it has come."""
        cdef int64_t now = now_ns()
        if now - self.asked > RECENT_NS:
            self.asking_since = now
        self.asked = now

    @property
    def rounds(self) -> int:
        """How many of its push_pulls have ended, well or not."""
        return self.c.parts[0].round if self.c.n_parts else 0

    @property
    def busy(self) -> bool:
        """Whether a push_pull of it is under way, as far as the driver knows."""
        return self.c.current != NULL

    def state(self, list saved=None) -> list:
        """What is kept of each compressed partition, as bytes (core/codec/state.pxd), once it is
        what ``saved`` says, if that is given.

        Not while it is :attr:`busy`. Raises :class:`ValueError` for bytes of another length.
        """
        found = []
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
    def server_bytes(self) -> int:
        """How many bytes say what the servers keep of it: what :meth:`Core.prepare` with
        ``keeps`` moves.
        """
        return sum([server_state_bytes(self.c.parts[i].packed) for i in range(self.c.n_parts)])


cdef class Declared:
    """A name as a worker has declared it last."""

    def __init__(self, uint32_t generation, shape, int dtype, uint64_t nbytes, codec=None) -> None:
        self.generation, self.shape, self.dtype, self.nbytes, self.codec = (
            generation, shape, dtype, nbytes, codec
        )
        self.pending = []

    cpdef Tensor now(self, shape, int dtype, codec):
        """What the core knows of it, if it is placed and still means that."""
        return (
            self.tensor
            if (
                not self.failed
                and self.dtype == dtype
                and self.codec is codec
                and self.shape == shape
            )
            else None
        )
