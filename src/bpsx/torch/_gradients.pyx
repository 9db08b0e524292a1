# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Gradients of a backward pass in flight: the hook's work for each, and buckets of them.

A step has hundreds of gradients, and each hook delays the backward pass: in Python a hook took 30
us. Gradients on a GPU start in buckets. Each alone would cost an event on the stream, a lock, a
wake-up and a collective. The build needs nothing of PyTorch.
"""
import contextlib
from copy import copy

import cython
import torch
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from bpsx.plugin.adapter cimport Item
from bpsx.torch._gradient_state cimport ADDING, Event, allows, enter, is_pushed
from bpsx.torch.dlpack cimport (
    ON_CPU, ON_CUDA, Seen, Table, address, elements, has_shape, is_contiguous, look, shape_of,
    table_of,
)
from bpsx.torch.rlock cimport drop_turn, end_turn, new_turn, take_turn

from bpsx.torch.dynamo import eager, set_compiler
from bpsx.torch.tensors import SUMMED, streams_of

cdef enum:
    # References to the storage of an unshared tensor: the tensor's own, and the caller's.
    ALONE = 2

#: Test hook: if set, all memory counts as the first GPU's. It is called for each gradient with the
#: address, the size in bytes and PyTorch's storage.
ALL_ON_GPU = None

_strided, _Tensor = torch.strided, torch.Tensor
_uses = getattr(torch._C, "_storage_Use_Count", None)
#: NULL: this PyTorch has no table, and its methods are called instead.
cdef Table *DLPACK = table_of(_Tensor)
#: Dtype names by DLPack's kind of number and bits.
cdef dict NAMES = {
    code << 8 | bits: name for code, bits,
    name in (
        (2, 16, "float16"), (4, 16, "bfloat16"), (2, 32, "float32"), (2, 64, "float64"),
        (1, 8, "uint8"), (0, 8, "int8"), (0, 32, "int32"), (0, 64, "int64")
    )
}


cpdef bint is_dense_on_gpu(tensor) except -1:
    """Return whether ``tensor`` is dense and on a GPU that bpsx supports."""
    return tensor.layout is _strided and (tensor.is_cuda or ALL_ON_GPU is not None)


cdef bint see(tensor, Seen *seen):
    """Fill in DLPack's view of the tensor. False if there is none."""
    return DLPACK != NULL and type(tensor) is _Tensor and look(DLPACK, tensor, seen)


cdef bint is_on_gpu(const Seen *seen):
    """Return whether the tensor is on a GPU that bpsx supports."""
    return (
        seen.lanes == 1
        and (seen.device_type == ON_CUDA or seen.device_type == ON_CPU and ALL_ON_GPU is not None)
    )


cdef bint see_on_gpu(tensor, Seen *seen):
    """Same as :func:`is_dense_on_gpu`, and fill in DLPack's view of the tensor.

    Returns False also if there is no such view.
    """
    return see(tensor, seen) and is_on_gpu(seen)


cdef Py_ssize_t holders(memory):
    """Return the reference count of a storage's Python object.

    PyTorch keeps the object for the storage's life. PyTorch's own references are included; their
    number differs between releases.
    """
    return (<PyObject *>memory).ob_refcnt


cdef bint is_only_ours(Pushed pushed):
    """Return whether the caller's one variable holds the only reference."""
    return (<PyObject *>pushed).ob_refcnt == 1


cdef Py_ssize_t holders_of_one():
    """Return the reference count when only the caller has taken the storage from a tensor."""
    tensor = torch.empty(1, device="cpu")
    memory = tensor.untyped_storage()
    return holders(memory)


cdef Py_ssize_t NOT_HELD = holders_of_one()


cdef bint shares(memory) except -1:
    """Return whether the storage has other users than one tensor.

    A gradient in flight is such a user: one tensor may be the gradient of two parameters.
    """
    return (
        holders(memory) > NOT_HELD
        or (_uses is not None and <int64_t>_uses(memory._cdata) > ALONE)
    )


def is_shared(gradient) -> bool:
    """Return whether other tensors have the gradient's elements in the same memory.

    Autograd may give two parameters the same gradient memory, if both enter one sum through views.
    The average of the first would overwrite the second before it is pushed.
    """
    memory = gradient.untyped_storage()
    return shares(memory)


cdef uint64_t place_of(tensor) except? 0:
    """Return the address of the tensor's first element."""
    cdef Seen seen
    return <uint64_t>address(&seen) if see(tensor, &seen) else tensor.data_ptr()


def is_alone(tensor) -> bool:
    """Return whether no other tensor can share the memory, and so the version counter."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


cdef int64_t counted(tensor) except -2:
    """Return the version counter of a dense tensor: the number of writes to it."""
    try:
        return tensor._version
    # An inference tensor. Asking before would cost a call for every other tensor.
    except RuntimeError:
        return UNCOUNTED


def version(tensor) -> int | None:
    """Return the version counter of ``tensor``'s memory; None if the memory has no counter."""
    cdef int64_t found = counted(tensor) if tensor.layout is _strided else UNCOUNTED
    return None if found == UNCOUNTED else found


@cython.final
cdef class Managed:
    """A trained parameter: its wire name, urgency, remaining backward passes, and its gradient.

    ``state`` is the gradient's; the methods that are events change it by the table in
    :mod:`bpsx.torch._gradient_state`. They raise :class:`RuntimeError` if it does not allow them.
    """

    def __init__(self, str name, parameter, named, int passes) -> None:
        self.name, self.parameter, self.named, self.passes_left, self.sparse_dim, self.wanted = (
            name, parameter, named, passes, 1, True
        )
        self.state = ADDING

    cdef int move(self, Event event) except -1:
        """Enter the next state, in which nothing of the one before is kept."""
        enter(&self.state, event, self.name)
        self.pushed = self.averaged = None
        return 0

    cdef int go_on(self, Event event) except -1:
        """Enter the next state, in which the same push is under way."""
        enter(&self.state, event, self.name)
        return 0

    def allows(self, Event event) -> bool:
        """Return whether the event can occur in the gradient's state."""
        return allows(self.state, event)

    def is_pushed(self) -> bool:
        """Return whether the bucket or the core has the gradient, and the wait has not ended."""
        return is_pushed(self.state)

    def add(self) -> None:
        """Backward has added to the gradient."""
        self.move(Event.ADD)

    def defer(self) -> None:
        """The gradient is complete and sparse; the workers have to agree on its kind first."""
        self.move(Event.DEFER)

    def agree(self) -> None:
        """The workers have agreed, so a deferred gradient can be pushed."""
        self.move(Event.AGREE)

    cdef int bucket(self, Pushed pushed) except -1:
        """The gradient waits in a bucket."""
        self.move(Event.BUCKET)
        self.pushed = pushed
        return 0

    cpdef int start(self, pushed) except -1:
        """The sum of the gradient has started; ``pushed`` is what the wait needs."""
        self.move(Event.START)
        self.pushed = pushed
        return 0

    def step(self) -> None:
        """CrossBarrier's step has gone on; the parameter's update will wait."""
        self.go_on(Event.STEP)

    cpdef receive(self):
        """The wait has ended, and the sum is there."""
        self.move(Event.RECEIVE)

    cpdef drop(self):
        """Forget the push: it has failed, or its sum is not needed."""
        self.move(Event.DROP)

    cpdef clear(self):
        """A new step begins."""
        self.move(Event.CLEAR)

    def is_sparse(self) -> bool:
        """Return whether the current gradient is sparse."""
        gradient = self.parameter.grad
        return gradient is not None and gradient.layout is torch.sparse_coo


cdef name_of(const Seen *seen):
    """Return the name of the element type, or None if it cannot be summed."""
    return NAMES.get(seen.code << 8 | seen.bits)


cdef bint lies_plain(Pushed pushed, const Seen *seen) except -1:
    """Return whether a gradient can be summed in its own memory; if so, note that memory.

    ``seen``: DLPack's view of the tensor, or NULL.
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
    # The storage keeps the memory alive: `gradient.data` may be set to other memory meanwhile.
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
    """A gradient in flight, possibly waiting in a bucket.

    ``gradient``: receives the average. ``ctx``: the compressor's context. ``own``: no other tensor
    has elements in its memory. Then the gradient is sent from its own memory, and a write to it
    before the wait is noticed.
    """

    def __init__(self, gradient, ctx, bint own, handle) -> None:
        self.gradient, self.ctx, self.own, self.begun = gradient, ctx, own, handle
        self.version = counted(gradient) if own else UNCOUNTED

    cdef follow(self, Pushed alone):
        """Take over the state of ``alone``, started outside the bucket. Not interruptible."""
        cdef bint late = self.version != UNCOUNTED and counted(self.gradient) != self.version
        self.batch, self.ctx, self.own, self.begun = None, alone.ctx, alone.own, alone.begun
        if not alone.own:
            self.version, self.written = UNCOUNTED, late and is_alone(self.gradient)

    cdef handle(self):
        if self.begun is None:
            with contextlib.suppress(Exception):    # the handle of a failed push raises it
                self.batch.submit()
        return self.begun

    cdef total(self):
        """Return a tensor of the memory that was pushed.

        That is the gradient, unless ``gradient.data`` has been set in the meantime.
        """
        if self.gradient.data_ptr() == self.address:
            return self.gradient
        memory, dtype = self.owner, getattr(torch, self.dtype)
        return torch.empty(0, dtype=dtype, device=memory.device).set_(
            memory, (self.address - memory.data_ptr()) // dtype.itemsize, self.shape
        )

    def done(self) -> bool:
        """Return whether the push has ended, successfully or not, without blocking."""
        handle = self.handle()
        return isinstance(handle, Exception) or handle.done()

    def wait(self):
        """Return the sum. Raises the error that made the push fail."""
        handle = self.handle()
        if isinstance(handle, Exception):
            # A copy without a traceback: raising it keeps only the caller's frames alive.
            raise copy(handle)
        # The wait itself may write to the gradient, to copy a result back into its layout.
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


cdef class Batch:
    """Bucket: gradients that one optimizer's hooks have added and that have not started yet.

    The bucket starts when it is large enough, when backward ends or changes to another stream, and
    when a gradient is waited for. Buckets may differ between workers, because starting one does not
    wait for other workers. Thread-safe.
    """

    def __cinit__(self) -> None:
        new_turn(&self.turn)

    def __dealloc__(self) -> None:
        drop_turn(&self.turn)

    def __init__(self, begin, begin_alone, begin_here, worth) -> None:
        """Create an empty bucket.

        Arguments:
        - ``begin``: starts items, as :meth:`bpsx.session.session.Session.push_pull_all` does. It
          takes a list of :class:`bpsx.core._handle.Item`, their GPU, a function that returns its
          current stream, and the stream that made them.
        - ``begin_alone``: takes a gradient and its names, and returns a :class:`Pushed`.
        - ``begin_here``: starts an item on the host, as
          :meth:`bpsx.session.session.Session.push_pull_known` does.
        - ``worth``: returns the bucket size in bytes at which the bucket starts.
        """
        self.begin, self.begin_alone, self.worth = eager(begin), eager(begin_alone), eager(worth)
        self.begin_here = begin_here
        self.waiting, self.device = [], -2

    def add(self, Managed managed not None, gradient) -> None:
        """Add a dense gradient on the GPU.

        A gradient that needs another layout or shares its memory starts at once, on the current
        stream. If it cannot start, its error is raised here. An error of a bucketed gradient is
        raised by the wait.
        """
        cdef Seen seen
        cdef Pushed pushed = self.new_pushed(managed, gradient)
        take_turn(&self.turn)
        try:
            self.turn_to(0 if ALL_ON_GPU is not None else gradient.get_device())
            if lies_plain(pushed, &seen if see_on_gpu(gradient, &seen) else NULL):
                self.append(managed, pushed)
            else:
                managed.start(self.begin_alone(gradient, managed.named))
        finally:
            end_turn(&self.turn)

    cdef bint put(self, Managed managed, gradient, const Seen *seen) except -1:
        """Add a gradient on the GPU with few checks; the rest follow when the bucket starts.

        Returns False if this gradient cannot wait for that.
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
        """Start the sum of a gradient on the host at once.

        Returns False if the gradient needs the slow path: it is not plain, shares its memory, or
        has not been declared yet with this shape and dtype.
        """
        cdef Pushed pushed
        if seen.device_type != ON_CPU or seen.lanes != 1 or elements(seen) == 0:
            return False
        pushed = self.new_pushed(managed, gradient)
        if pushed.version == UNCOUNTED or not lies_plain(pushed, seen):
            return False
        before = set_compiler(None) if set_compiler is not None else None
        try:
            self.begin_here(pushed)
        finally:
            if set_compiler is not None:
                set_compiler(before)
            if pushed.begun is not None:        # also after an interruption
                managed.start(pushed)
        return pushed.begun is not None

    def take(self, Managed managed not None, gradient) -> bool:
        """Sum a parameter's dense gradient, on the GPU as :meth:`add` does.

        Returns False if a gradient on the host needs the slow path; see :meth:`put_here`.
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
        managed.bucket(pushed)
        self.waiting.append(managed)
        self.nbytes += pushed.nbytes
        if self.nbytes >= self.most:
            self.submit_quietly()

    cdef open_for(self, stream):
        self.stream, self.nbytes, self.most = stream, 0, self.worth()
        # Outside of a backward pass there is no callback: the caller then waits or submits itself.
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(self.submit)

    cdef submit_quietly(self):
        with contextlib.suppress(Exception):
            self.submit()

    def submit(self) -> None:
        """Start all gradients in the bucket.

        Raises the first failure; the wait for that gradient raises it too.
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
                del failure     # it refers to this frame

    cdef begin_all(self, list waiting):
        """Start the gradients and return a failure, if any."""
        cdef Managed managed
        cdef list together
        failure = of_all = None
        try:
            together = self.begin_odd(waiting)
            if together:
                self.begin(together, self.device, self.streams, self.stream)
        except Exception as e:
            of_all = e.with_traceback(None)
        finally:        # also on an interruption: started ones are kept, the rest waits on
            for managed in waiting:
                failure = self.note_begun(managed, of_all) or failure
        return failure

    cdef note_begun(self, Managed managed, of_all):
        """Note whether the sum has started, and return the exception if it could not.

        ``of_all``: what has stopped the whole bucket, or None.
        """
        cdef Pushed pushed = managed.pushed
        if pushed.begun is None:
            if of_all is None:
                self.waiting.append(managed)
                return None
            pushed.begun = of_all
        if isinstance(pushed.begun, Exception):
            managed.go_on(Event.FAIL)
            pushed.begun = copy(pushed.begun)   # without its traceback, which keeps frames alive
            return copy(pushed.begun)
        managed.go_on(Event.SUBMIT)

    cdef list begin_odd(self, list waiting):
        """Start the gradients that need to go alone, before the sums of the others start.

        Returns the others.
        """
        cdef Managed managed
        cdef Pushed pushed
        cdef list together = []
        for managed in waiting:
            pushed = managed.pushed
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
        """Return whether a deferred gradient can go with the others.

        Its memory may have changed since the hook saw it.
        """
        cdef Seen seen
        return (
            see_on_gpu(pushed.gradient, &seen)
            and (ALL_ON_GPU is not None or seen.device == self.device)
            and lies_plain(pushed, &seen)
        )

    cdef on_its_stream(self):
        """Return a context in which the stream that made the gradients is the current one."""
        if self.streams() == self.stream:
            return contextlib.nullcontext()
        # For the number 0, the default stream's, PyTorch would create a new stream.
        return torch.cuda.stream(
            torch.cuda.ExternalStream(self.stream, device=self.device) if self.stream
            else torch.cuda.default_stream(self.device)
        )


cdef class Hook:
    """Gradient hook: autograd calls it after it has added to a parameter's gradient.

    It keeps alive neither the exchange nor the parameter on which it is registered.
    """
    cdef object exchange, managed, accumulated
    cdef Batch batch
    #: Tells torch.compile not to trace it.
    _torchdynamo_disable = True

    def __init__(self, exchange, managed, Batch batch, accumulated) -> None:
        """Create the hook.

        ``exchange`` and ``managed``: weak references to the arguments of ``accumulated``.
        :attr:`Batch.quick` lets the hook skip that call.
        """
        self.exchange, self.managed, self.batch, self.accumulated = exchange, managed, batch, eager(
            accumulated
        )

    def rival(self) -> None:
        """Note that another hook sums the same gradient.

        Both hooks must then look at its memory at once, to see whether it is in flight.
        """
        cdef Managed managed = self.managed()
        if managed is not None:
            managed.rivalled, managed.quick = True, False

    def __call__(self, _) -> None:
        cdef Managed managed = self.managed()
        cdef Seen seen
        if managed is None:             # the exchange, which owns it, is gone
            return
        if (
            self.batch.quick
            and managed.quick
            and allows(managed.state, Event.BUCKET)
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
