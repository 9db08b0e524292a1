# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Gradients of a backward pass on their way: what a hook does for each of them, and for many
together.

A step has hundreds, and a hook holds up the pass: in Python this took 30 us for each. Those that
are made on a GPU begin together: each alone would cost a record on the stream, a lock, a wake-up
and a collective. Of PyTorch nothing is needed to build this.
"""
import contextlib
from copy import copy

import torch
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from bpsx.plugin.adapter cimport Handle, Item
from bpsx.torch.dlpack cimport (
    ON_CPU, ON_CUDA, Seen, Table, address, elements, has_shape, is_contiguous, look, shape_of,
    table_of,
)
from bpsx.torch.rlock cimport Turn, drop_turn, end_turn, new_turn, take_turn

from bpsx.torch.dynamo import eager, set_compiler
from bpsx.torch.ops import SUMMED, streams_of

cdef enum:
    # references to the memory of a tensor that is alone: its own, and that of who asks
    ALONE = 2

#: A test may take all memory for the first GPU's. Then it is called with that of each gradient:
#: address, bytes, PyTorch's storage.
ALL_ON_GPU = None

_strided, _Tensor = torch.strided, torch.Tensor
_uses = getattr(torch._C, "_storage_Use_Count", None)
#: NULL: this PyTorch has none, and is asked by its methods.
cdef Table *DLPACK = table_of(_Tensor)
#: By DLPack's kind of number and bits.
cdef dict NAMES = {
    code << 8 | bits: name for code, bits,
    name in (
        (2, 16, "float16"), (4, 16, "bfloat16"), (2, 32, "float32"), (2, 64, "float64"),
        (1, 8, "uint8"), (0, 8, "int8"), (0, 32, "int32"), (0, 64, "int64")
    )
}


cpdef bint is_dense_on_gpu(tensor) except -1:
    """Whether ``tensor`` is dense, and on a GPU that bpsx knows."""
    return tensor.layout is _strided and (tensor.is_cuda or ALL_ON_GPU is not None)


cdef bint see(tensor, Seen *seen):
    """What DLPack says of it. False where it cannot be asked."""
    return DLPACK != NULL and type(tensor) is _Tensor and look(DLPACK, tensor, seen)


cdef bint is_on_gpu(const Seen *seen):
    """Whether it is on a GPU that bpsx knows."""
    return (
        seen.lanes == 1
        and (seen.device_type == ON_CUDA or seen.device_type == ON_CPU and ALL_ON_GPU is not None)
    )


cdef bint see_on_gpu(tensor, Seen *seen):
    """As :func:`is_dense_on_gpu`, and what DLPack says of it.

    False also where it cannot be asked.
    """
    return see(tensor, seen) and is_on_gpu(seen)


cdef Py_ssize_t holders(memory):
    """References to this object, which PyTorch keeps for the storage's life, its own among them:
    their number differs between releases.
    """
    return (<PyObject *>memory).ob_refcnt


cdef bint is_only_ours(Pushed pushed):
    """Whether nobody but the caller's one variable has it."""
    return (<PyObject *>pushed).ob_refcnt == 1


cdef Py_ssize_t holders_of_one():
    """How many there are when the caller has got it from a tensor, and nobody else."""
    tensor = torch.empty(1, device="cpu")
    memory = tensor.untyped_storage()
    return holders(memory)


cdef Py_ssize_t NOT_HELD = holders_of_one()


cdef bint shares(memory) except -1:
    """Whether others than one tensor have this storage, or hold it, as what is under way does:
    one tensor may be the gradient of two parameters.
    """
    return (
        holders(memory) > NOT_HELD
        or (_uses is not None and <int64_t>_uses(memory._cdata) > ALONE)
    )


def is_shared(gradient) -> bool:
    """Whether others have the gradient's elements in the same memory.

    Autograd may give two parameters one gradient's memory: where both go into one sum through views
    of them. The average of the first would come home into what the second has still to push.
    """
    memory = gradient.untyped_storage()
    return shares(memory)


cdef uint64_t place_of(tensor) except? 0:
    """Where its elements begin."""
    cdef Seen seen
    return <uint64_t>address(&seen) if see(tensor, &seen) else tensor.data_ptr()


def is_alone(tensor) -> bool:
    """Whether no other tensor can live in the same memory, and so share its version counter."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


cdef int64_t counted(tensor) except -2:
    """How often a dense tensor has been written to."""
    try:
        return tensor._version
    # made in inference mode. To ask before costs every other tensor a call
    except RuntimeError:
        return UNCOUNTED


def version(tensor) -> int | None:
    """How often ``tensor``, or another one in the same memory, has been written to; None if
    nobody counts.
    """
    cdef int64_t found = counted(tensor) if tensor.layout is _strided else UNCOUNTED
    return None if found == UNCOUNTED else found


cdef class Managed:
    """A parameter that is trained: its name on the wire, its urgency, the backward passes left
    until it is pushed, and the push.
    """

    def __init__(self, str name, parameter, named, int passes) -> None:
        self.name, self.parameter, self.named, self.passes_left, self.sparse_dim, self.wanted = (
            name, parameter, named, passes, 1, True
        )

    def is_sparse(self) -> bool:
        """Whether the gradient is sparse as it stands."""
        gradient = self.parameter.grad
        return gradient is not None and gradient.layout is torch.sparse_coo


cdef name_of(const Seen *seen):
    """The element type, or None: no such are summed."""
    return NAMES.get(seen.code << 8 | seen.bits)


cdef bint lies_plain(Pushed pushed, const Seen *seen) except -1:
    """Whether a gradient can be summed as it lies.

    Then its memory is noted. ``seen``: what DLPack says of it, if it does.
    """
    gradient = pushed.gradient
    if seen != NULL:
        dtype = name_of(seen) if is_contiguous(seen) else None
    else:
        fits = type(gradient) is _Tensor and not gradient.is_nested and gradient.is_contiguous()
        dtype = SUMMED.get(gradient.dtype) if fits else None
    if dtype is None or gradient.is_neg():
        return False
    memory = gradient.untyped_storage()
    if shares(memory):
        return False
    # Kept by its storage: `gradient.data` may be set to other memory meanwhile.
    pushed.owner, pushed.dtype = memory, dtype
    if seen != NULL:
        if not has_shape(seen, pushed.shape):
            pushed.shape = shape_of(seen)
        pushed.address, pushed.nbytes = <uint64_t>address(seen), elements(seen) * (seen.bits // 8)
    else:
        pushed.shape, pushed.address, pushed.nbytes = (
            gradient.shape, gradient.data_ptr(), gradient.nbytes
        )
    if ALL_ON_GPU is not None:
        ALL_ON_GPU(pushed.address, pushed.nbytes, memory)
    return True


cdef class Pushed(Item):
    """A gradient under way: ``gradient`` is what the average goes into, ``ctx`` the compressor's.

    It may have to wait for others of a batch.

    ``own``: nothing else is in its memory, and so it may travel as it lies, and a write to it from
    now on until the wait is noticed.
    """

    def __init__(self, gradient, ctx, bint own, handle) -> None:
        self.gradient, self.ctx, self.own, self.begun = gradient, ctx, own, handle
        self.version = counted(gradient) if own else UNCOUNTED

    cdef follow(self, Pushed alone):
        """It has begun alone after all. Nothing can interrupt this."""
        cdef bint late = self.version != UNCOUNTED and counted(self.gradient) != self.version
        self.batch, self.ctx, self.own, self.begun = None, alone.ctx, alone.own, alone.begun
        if not alone.own:
            self.version, self.written = UNCOUNTED, late and is_alone(self.gradient)

    cdef handle(self):
        if self.begun is None:
            with contextlib.suppress(Exception):    # the handle of what has failed says so
                self.batch.submit()
        return self.begun

    cdef total(self):
        """A tensor of the memory that was pushed: the gradient, unless ``gradient.data`` has
        been set meanwhile.
        """
        if self.gradient.data_ptr() == self.address:
            return self.gradient
        memory, dtype = self.owner, getattr(torch, self.dtype)
        return torch.empty(0, dtype=dtype, device=memory.device).set_(
            memory, (self.address - memory.data_ptr()) // dtype.itemsize, self.shape
        )

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not block."""
        return self.handle().done()

    def wait(self):
        """The sum. Raises what has made it fail."""
        handle = self.handle()
        # the wait may itself write, to bring home what had to be laid out in another way
        if not self.waited:
            if (
                self.version != UNCOUNTED
                and counted(self.gradient) != self.version
                and is_alone(self.gradient)
            ):
                self.written = True
        received = handle.wait()
        self.waited = True
        return received if self.batch is None else self.total()


cdef class Failed:
    """The handle of a push that could not begin."""

    def __init__(self, failure) -> None:
        # without a traceback: who raises it keeps alive only what is his
        self.failure = copy(failure)

    def done(self) -> bool:
        """At once."""
        return True

    def wait(self, timeout=None):
        """Raises why."""
        raise copy(self.failure)


cdef class Batch:
    """What one optimizer's hooks have been given and have not begun yet.

    It begins when it is worth it, when backward ends or turns to another stream, and when somebody
    waits. Workers need not have the same in a batch: nobody waits here. Thread-safe.
    """

    def __cinit__(self) -> None:
        new_turn(&self.turn)

    def __dealloc__(self) -> None:
        drop_turn(&self.turn)

    def __init__(self, begin, begin_alone, begin_here, worth) -> None:
        """``begin``: of a list of :class:`bpsx.core._handle.Item`, their GPU, what gives its
        current stream, and the stream that made them, begins them as
        :meth:`bpsx.session.session.Session.push_pull_all` does; ``begin_alone``: of a gradient
        and its name gives a :class:`Pushed`; ``begin_here``: begins an item on the host as
        :meth:`bpsx.session.session.Session.push_pull_known` does; ``worth``: gives how many
        bytes are worth beginning.
        """
        self.begin, self.begin_alone, self.worth = eager(begin), eager(begin_alone), eager(worth)
        self.begin_here = begin_here
        self.waiting, self.device = [], -2

    def add(self, Managed managed not None, gradient) -> None:
        """Sum a parameter's dense gradient on the GPU: at once, on the current stream, if it has to
        be laid out in another way or shares its memory.

        Raises why that cannot begin; what cannot begin with others is told by the wait.
        ``managed.pushed`` of what goes with others is set before anything can interrupt.
        """
        cdef Seen seen
        cdef Pushed pushed = self.new_pushed(managed, gradient)
        take_turn(&self.turn)
        try:
            self.turn_to(0 if ALL_ON_GPU is not None else gradient.get_device())
            if lies_plain(pushed, &seen if see_on_gpu(gradient, &seen) else NULL):
                self.append(managed, pushed)
            else:
                managed.pushed = self.begin_alone(gradient, managed.named)
        finally:
            end_turn(&self.turn)

    cdef bint put(self, Managed managed, gradient, const Seen *seen) except -1:
        """The same of one on the GPU, for a hook that has no time: it is looked at when the batch
        begins.

        False: this one cannot wait for that.
        """
        cdef Pushed pushed
        if name_of(seen) is None or not is_contiguous(seen):
            return False
        pushed = self.new_pushed(managed, gradient)
        pushed.nbytes = elements(seen) * (seen.bits // 8)
        take_turn(&self.turn)
        try:
            self.turn_to(0 if ALL_ON_GPU is not None else seen.device)
            self.append(managed, pushed)
        finally:
            end_turn(&self.turn)
        return True

    cdef bint put_here(self, Managed managed, gradient, const Seen *seen) except -1:
        """Begin to sum one on the host, at once.

        False: it has to go the long way, since it does not lie plain, shares its memory, or is not
        known yet as what it is.
        """
        cdef Pushed pushed
        if seen.device_type != ON_CPU or seen.lanes != 1 or elements(seen) == 0:
            return False
        pushed = self.new_pushed(managed, gradient)
        if pushed.version == UNCOUNTED or not lies_plain(pushed, seen):
            return False
        managed.pushed = pushed         # before anything can interrupt
        before = set_compiler(None) if set_compiler is not None else None
        try:
            self.begin_here(pushed)
        finally:
            if set_compiler is not None:
                set_compiler(before)
            if pushed.begun is None:
                managed.pushed = None
        return managed.pushed is not None

    def take(self, Managed managed not None, gradient) -> bool:
        """Sum a parameter's dense gradient, on the GPU as :meth:`add` does.

        False: on the host it has to go the long way, as :meth:`put_here` says.
        """
        cdef Seen seen
        if is_dense_on_gpu(gradient):
            self.add(managed, gradient)
            return True
        return see(gradient, &seen) and self.put_here(managed, gradient, &seen)

    cdef Pushed new_pushed(self, Managed managed, gradient):
        cdef Pushed pushed = managed.spare
        managed.spare = None
        if pushed is not None and pushed.batch is self and is_only_ours(pushed):
            pushed.gradient, pushed.version, pushed.written, pushed.waited = gradient, counted(
                gradient
            ), False, False
            return pushed
        pushed = Pushed.__new__(Pushed)
        pushed.gradient, pushed.own, pushed.batch, pushed.version = gradient, True, self, counted(
            gradient
        )
        pushed.named = managed.named
        pushed.name, pushed.priority = pushed.named.wire, pushed.named.priority
        return pushed

    cdef turn_to(self, int device):
        if device != self.device:
            self.submit_quietly()
            self.device, self.streams = device, streams_of(device)

    cdef append(self, Managed managed, Pushed pushed):
        stream = self.streams()
        if self.waiting and stream != self.stream:
            self.submit_quietly()
        if not self.waiting:
            self.open_for(stream)
        managed.pushed = pushed
        self.waiting.append(pushed)
        self.nbytes += pushed.nbytes
        if self.nbytes >= self.most:
            self.submit_quietly()

    cdef open_for(self, stream):
        self.stream, self.nbytes, self.most = stream, 0, self.worth()
        # no backward pass: who pushes like that waits, or says that it is all
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(self.submit)

    cdef submit_quietly(self):
        with contextlib.suppress(Exception):
            self.submit()

    def submit(self) -> None:
        """Begin what there is.

        Raises the first failure; whoever waits for that gradient is told, too.
        """
        failure = None
        take_turn(&self.turn)
        try:
            waiting, self.waiting = self.waiting, []
            if waiting:
                failure = self.begin_all(waiting)
        finally:
            end_turn(&self.turn)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure     # which knows this frame

    cdef begin_all(self, list waiting):
        """Begin them. Returns a failure."""
        cdef Pushed pushed
        cdef list together
        failure = of_all = None
        try:
            together = self.begin_odd(waiting)
            if together:
                self.begin(together, self.device, self.streams, self.stream)
        except Exception as e:
            of_all = e.with_traceback(None)
        finally:        # also if it is interrupted: what has begun has, and the rest waits on
            for pushed in waiting:
                if pushed.begun is None:
                    pushed.begun = of_all
                if pushed.begun is None:
                    self.waiting.append(pushed)
                elif isinstance(pushed.begun, Exception):
                    failure = copy(pushed.begun)
                    pushed.begun = Failed(pushed.begun)
        return failure

    cdef list begin_odd(self, list waiting):
        """Begin those that cannot go with others, before the sums of these are on their way.

        Returns the rest.
        """
        cdef Pushed pushed
        cdef list together = []
        for pushed in waiting:
            try:
                if pushed.owner is not None or self.goes_along(pushed):
                    together.append(pushed)
                    continue
                with self.on_its_stream():
                    pushed.follow(self.begin_alone(pushed.gradient, pushed.named))
            except Exception as e:
                if pushed.begun is None:
                    pushed.begun, pushed.batch = e.with_traceback(None), None
        return together

    cdef bint goes_along(self, Pushed pushed) except -1:
        """Whether what a hook has put off can go with the others; its memory may be other than
        it was then.
        """
        cdef Seen seen
        return (
            see_on_gpu(pushed.gradient, &seen)
            and (ALL_ON_GPU is not None or seen.device == self.device)
            and lies_plain(pushed, &seen)
        )

    cdef on_its_stream(self):
        """A context in which the stream that made the gradients is the current one."""
        if self.streams() == self.stream:
            return contextlib.nullcontext()
        # PyTorch makes a new stream of the number 0, which is the default one's.
        return torch.cuda.stream(
            torch.cuda.ExternalStream(self.stream, device=self.device) if self.stream
            else torch.cuda.default_stream(self.device)
        )


cdef class Hook:
    """What autograd calls when it has added to a parameter's gradient.

    Keeps neither the exchange alive nor the parameter, on which it hangs.
    """
    cdef object exchange, managed, accumulated
    cdef Batch batch
    #: The compiler leaves this alone.
    _torchdynamo_disable = True

    def __init__(self, exchange, managed, Batch batch, accumulated) -> None:
        """``exchange`` and ``managed``: weak references to what ``accumulated`` is called with,
        but for what :attr:`Batch.quick` allows.
        """
        self.exchange, self.managed, self.batch, self.accumulated = exchange, managed, batch, eager(
            accumulated
        )

    def rival(self) -> None:
        """Another hook sums the same gradient: each has to look at its memory at once, to see
        whether it is under way.
        """
        cdef Managed managed = self.managed()
        if managed is not None:
            managed.rivalled, managed.quick = True, False

    def __call__(self, _) -> None:
        cdef Managed managed = self.managed()
        cdef Seen seen
        if managed is None:             # the exchange, which owns it, is no more
            return
        if (
            self.batch.quick
            and managed.quick
            and managed.pushed is None
            and managed.passes_left == 1
        ):
            gradient = managed.parameter.grad
            if gradient is not None and see(gradient, &seen):
                managed.passes_left = 0         # before anything can interrupt
                managed.stands_in = False
                if (
                    self.batch.put(managed, gradient, &seen)
                    if is_on_gpu(&seen)
                    else self.batch.put_here(managed, gradient, &seen)
                ):
                    return
                managed.passes_left = 1
        exchange = self.exchange()
        if exchange is not None:
            self.accumulated(exchange, managed)
