# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Gradients of a backward pass on their way: what a hook does for each of them, and for many together.

A step has hundreds, and a hook holds up the pass: in Python this took 30 us for each. Those that are made on a GPU begin together: each alone would
cost a record on the stream, a lock, a wake-up and a collective. Of PyTorch nothing is needed to build this.
"""
import contextlib
from copy import copy

import torch
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from bpsx._adapter cimport Handle, Item
from bpsx.torch.dlpack cimport ON_CPU, ON_CUDA, Seen, Table, address, elements, is_contiguous, look, shape_of, table_of
from bpsx.torch.turn cimport Turn, drop_turn, end_turn, new_turn, take_turn

from bpsx.torch.eager import eager
from bpsx.torch.ops import SUMMED, mark_all_written, streams_of

cdef enum:
    ALONE = 2                   # references to the memory of a tensor that is alone: its own, and that of who asks
    UNCOUNTED = -1              # a version that nobody counts

#: A test may take all memory for the first GPU's. Then it is called with that of each gradient: address, bytes, PyTorch's storage.
ALL_ON_GPU = None

_strided, _Tensor = torch.strided, torch.Tensor
_uses = getattr(torch._C, "_storage_Use_Count", None)
#: NULL: this PyTorch has none, and is asked by its methods.
cdef Table *DLPACK = table_of(_Tensor)
#: By DLPack's kind of number and bits.
cdef dict NAMES = {code << 8 | bits: name for code, bits, name in (
    (2, 16, "float16"), (4, 16, "bfloat16"), (2, 32, "float32"), (2, 64, "float64"), (1, 8, "uint8"), (0, 8, "int8"), (0, 32, "int32"), (0, 64, "int64"))}


cpdef bint is_dense_on_gpu(tensor) except -1:
    """Whether ``tensor`` is dense, and on a GPU that bpsx knows."""
    return tensor.layout is _strided and (tensor.is_cuda or ALL_ON_GPU is not None)


cdef bint see(tensor, Seen *seen):
    """What DLPack says of it. False where it cannot be asked."""
    return DLPACK != NULL and type(tensor) is _Tensor and look(DLPACK, tensor, seen)


cdef bint see_on_gpu(tensor, Seen *seen):
    """As :func:`is_dense_on_gpu`, and what DLPack says of it. False also where it cannot be asked."""
    if not see(tensor, seen) or seen.lanes != 1:
        return False
    return seen.device_type == ON_CUDA or seen.device_type == ON_CPU and ALL_ON_GPU is not None


cdef Py_ssize_t holders(memory):
    """References to this object, which PyTorch keeps for the storage's life, its own among them: their number differs between releases."""
    return (<PyObject *>memory).ob_refcnt


cdef Py_ssize_t holders_of_one():
    """How many there are when the caller has got it from a tensor, and nobody else."""
    tensor = torch.empty(1, device="cpu")
    memory = tensor.untyped_storage()
    return holders(memory)


cdef Py_ssize_t NOT_HELD = holders_of_one()


cdef bint shares(memory) except -1:
    """Whether others than one tensor have this storage, or hold it, as what is under way does: one tensor may be the gradient of two parameters."""
    return holders(memory) > NOT_HELD or (_uses is not None and <int64_t>_uses(memory._cdata) > ALONE)


def is_shared(gradient) -> bool:
    """Whether others have the gradient's elements in the same memory. Autograd may give two parameters one gradient's memory: where both go into one
    sum through views of them. The average of the first would come home into what the second has still to push."""
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
    except RuntimeError:            # made in inference mode. To ask before costs every other tensor a call
        return UNCOUNTED


def version(tensor) -> int | None:
    """How often ``tensor``, or another one in the same memory, has been written to; None if nobody counts."""
    cdef int64_t found = counted(tensor) if tensor.layout is _strided else UNCOUNTED
    return None if found == UNCOUNTED else found


cdef class Managed:
    """A parameter that is trained: its name on the wire, its urgency, the backward passes left until it is pushed, and the push."""
    cdef object __weakref__
    cdef readonly object parameter, named
    cdef readonly str name
    cdef public object pushed           # a Pushed, a SparseSum or None
    cdef public object hook
    cdef public object kind             # None: the workers have not agreed yet
    cdef public object averaged         # what an implicit wait has left in grad, and its version; or None
    cdef public int passes_left, sparse_dim
    cdef public bint deferred           # a sparse gradient that is complete, and waits for that
    cdef public bint stands_in          # what has been pushed are zeros for a gradient that this worker has not had
    cdef public bint quick              # on a GPU it is dense, and goes with others
    cdef public bint rivalled           # another optimizer sums its gradient, too
    cdef public bint sparse_here        # the optimizer needs a sparse gradient; what has been pushed is dense
    cdef public bint wanted             # False: no worker has a gradient in this step, as far as is known

    def __init__(self, str name, parameter, named, int passes) -> None:
        self.name, self.parameter, self.named, self.passes_left, self.sparse_dim, self.wanted = name, parameter, named, passes, 1, True

    def is_sparse(self) -> bool:
        """Whether the gradient is sparse as it stands."""
        gradient = self.parameter.grad
        return gradient is not None and gradient.layout is torch.sparse_coo


cdef name_of(const Seen *seen):
    """The element type, or None: no such are summed."""
    return NAMES.get(seen.code << 8 | seen.bits)


cdef bint lies_plain(Pushed pushed, const Seen *seen) except -1:
    """Whether a gradient can be summed as it lies. Then its memory is noted. ``seen``: what DLPack says of it, if it does."""
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
        pushed.shape, pushed.address, pushed.nbytes = shape_of(seen), <uint64_t>address(seen), elements(seen) * (seen.bits // 8)
    else:
        pushed.shape, pushed.address, pushed.nbytes = gradient.shape, gradient.data_ptr(), gradient.nbytes
    if ALL_ON_GPU is not None:
        ALL_ON_GPU(pushed.address, pushed.nbytes, memory)
    return True


cdef class Pushed(Item):
    """A gradient under way: ``gradient`` is what the average goes into, ``ctx`` the compressor's. It may have to wait for others of a batch.

    ``own``: nothing else is in its memory, and so it may travel as it lies, and a write to it from now on until the wait is noticed.
    """
    cdef readonly object gradient, ctx
    cdef readonly bint own
    cdef readonly bint written      # known after the wait
    cdef object named
    cdef Batch batch                # None: it has begun alone
    cdef int64_t version
    cdef bint waited

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
        """A tensor of the memory that was pushed: the gradient, unless ``gradient.data`` has been set meanwhile."""
        if self.gradient.data_ptr() == self.address:
            return self.gradient
        memory, dtype = self.owner, getattr(torch, self.dtype)
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, (self.address - memory.data_ptr()) // dtype.itemsize, self.shape)

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not block."""
        return self.handle().done()

    def wait(self):
        """The sum. Raises what has made it fail."""
        handle = self.handle()
        if not self.waited:         # the wait may itself write, to bring home what had to be laid out in another way
            if self.version != UNCOUNTED and counted(self.gradient) != self.version and is_alone(self.gradient):
                self.written = True
        received = handle.wait()
        self.waited = True
        return received if self.batch is None else self.total()


def pushed_of(list managed) -> list:
    """Those whose gradients are on their way."""
    return [m for m in managed if (<Managed?>m).pushed is not None]


def missing_of(list managed) -> list:
    """Those that are trained, wanted and not on their way. What could not begin is not, and goes again."""
    cdef Managed m
    cdef list found = []
    for m in managed:
        if type(m.pushed) is Pushed and type((<Pushed>m.pushed).begun) is Failed:
            m.pushed = None
        if m.pushed is None and m.wanted and m.parameter.requires_grad:
            found.append(m)
    return found


def restart(list managed, int passes) -> None:
    """Forget backward passes that have been added up so far, and averages, whose memory may be wanted."""
    cdef Managed m
    for m in managed:
        m.passes_left = passes
        m.averaged = None


def all_together(list managed) -> bool:
    """Whether each of them has a gradient of its own on its way, with others on a GPU."""
    cdef Pushed pushed
    cdef Managed m
    for m in managed:
        if type(m.pushed) is not Pushed:
            return False
        pushed = m.pushed
        if pushed.batch is None or type(pushed.begun) is not Handle or m.stands_in:
            return False
    return True


def settle(list managed) -> list:
    """Wait for gradients that are :func:`all_together`, and see that they are where the optimizer looks. Returns those with which something is the
    matter, as they are: failed, written to, with other memory."""
    cdef Pushed pushed
    cdef Managed m
    cdef Handle handle
    cdef uint64_t stream = 0, by = 0
    cdef list odd = [], done = []
    try:
        for m in managed:
            pushed = m.pushed
            gradient = pushed.gradient
            if pushed.version == UNCOUNTED or <int64_t>gradient._version != pushed.version or place_of(gradient) != pushed.address:
                odd.append(m)
                continue
            handle = pushed.begun
            try:
                if by == 0 or not handle.is_behind(stream, by):
                    handle.wait()
                    stream = handle.streams()
                    by = handle.gpu.number_of(stream)
                if m.parameter.grad is not gradient:
                    m.parameter.grad = gradient
            except Exception:
                if not handle.has_ended():
                    raise                   # the wait was interrupted
                odd.append(m)               # who tries again is told again
                continue
            done.append(gradient)
            m.pushed = None
    finally:
        mark_all_written(done)
    return odd


cdef class Failed:
    """The handle of a push that could not begin."""
    cdef object failure

    def __init__(self, failure) -> None:
        self.failure = copy(failure)        # without a traceback: who raises it keeps alive only what is his

    def done(self) -> bool:
        """At once."""
        return True

    def wait(self, timeout=None):
        """Raises why."""
        raise copy(self.failure)


cdef class Batch:
    """What one optimizer's hooks have been given and have not begun yet. It begins when it is worth it, when backward ends or turns to another
    stream, and when somebody waits. Workers need not have the same in a batch: nobody waits here. Thread-safe."""
    cdef public bint quick          # hooks may leave out what they check otherwise: see Exchange.accumulated
    cdef object begin, begin_alone, worth, streams, stream
    cdef Turn turn
    cdef list waiting
    cdef int device
    cdef uint64_t nbytes, most

    def __cinit__(self) -> None:
        new_turn(&self.turn)

    def __dealloc__(self) -> None:
        drop_turn(&self.turn)

    def __init__(self, begin, begin_alone, worth) -> None:
        """``begin``: of a list of :class:`bpsx._handle.Item`, their GPU, what gives its current stream, and the stream that made them, begins them as
        :meth:`bpsx.session.Session.push_pull_all` does; ``begin_alone``: of a gradient and its name gives a :class:`Pushed`; ``worth``: gives how
        many bytes are worth beginning."""
        self.begin, self.begin_alone, self.worth = eager(begin), eager(begin_alone), eager(worth)
        self.waiting, self.device = [], -2

    def add(self, Managed managed not None, gradient) -> None:
        """Sum a parameter's dense gradient on the GPU: at once, on the current stream, if it has to be laid out in another way or shares its memory.
        Raises why that cannot begin; what cannot begin with others is told by the wait. ``managed.pushed`` of what goes with others is set before
        anything can interrupt."""
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
        """The same of one on the GPU, for a hook that has no time: it is looked at when the batch begins. False: this one cannot wait for that."""
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

    cdef Pushed new_pushed(self, Managed managed, gradient):
        cdef Pushed pushed = Pushed.__new__(Pushed)
        pushed.gradient, pushed.own, pushed.batch, pushed.version = gradient, True, self, counted(gradient)
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
        with contextlib.suppress(RuntimeError):         # no backward pass: who pushes like that waits, or says that it is all
            torch.autograd.Variable._execution_engine.queue_callback(self.submit)

    cdef submit_quietly(self):
        with contextlib.suppress(Exception):
            self.submit()

    def submit(self) -> None:
        """Begin what there is. Raises the first failure; whoever waits for that gradient is told, too."""
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
        """Begin those that cannot go with others, before the sums of these are on their way. Returns the rest."""
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
        """Whether what a hook has put off can go with the others; its memory may be other than it was then."""
        cdef Seen seen
        return see_on_gpu(pushed.gradient, &seen) and (ALL_ON_GPU is not None or seen.device == self.device) and lies_plain(pushed, &seen)

    cdef on_its_stream(self):
        """A context in which the stream that made the gradients is the current one."""
        if self.streams() == self.stream:
            return contextlib.nullcontext()
        # PyTorch makes a new stream of the number 0, which is the default one's.
        return torch.cuda.stream(torch.cuda.ExternalStream(self.stream, device=self.device) if self.stream else torch.cuda.default_stream(self.device))


cdef class Hook:
    """What autograd calls when it has added to a parameter's gradient. Keeps neither the exchange alive nor the parameter, on which it hangs."""
    cdef object exchange, managed, accumulated
    cdef Batch batch
    #: The compiler leaves this alone.
    _torchdynamo_disable = True

    def __init__(self, exchange, managed, Batch batch, accumulated) -> None:
        """``exchange`` and ``managed``: weak references to what ``accumulated`` is called with, but for what :attr:`Batch.quick` allows."""
        self.exchange, self.managed, self.batch, self.accumulated = exchange, managed, batch, eager(accumulated)

    def rival(self) -> None:
        """Another hook sums the same gradient: each has to look at its memory at once, to see whether it is under way."""
        cdef Managed managed = self.managed()
        if managed is not None:
            managed.rivalled, managed.quick = True, False

    def __call__(self, _) -> None:
        cdef Managed managed = self.managed()
        cdef Seen seen
        if managed is None:             # the exchange, which owns it, is no more
            return
        if self.batch.quick and managed.quick and managed.pushed is None and managed.passes_left == 1:
            gradient = managed.parameter.grad
            if gradient is not None and see_on_gpu(gradient, &seen):
                managed.passes_left = 0         # before anything can interrupt
                managed.stands_in = False
                if self.batch.put(managed, gradient, &seen):
                    return
                managed.passes_left = 1
        exchange = self.exchange()
        if exchange is not None:
            self.accumulated(exchange, managed)
