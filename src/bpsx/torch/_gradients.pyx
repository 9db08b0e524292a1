# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Gradients of a backward pass on their way: what a hook does for each of them, and for many together.

A step has hundreds, and a hook holds up the pass: in Python this took 30 us for each. Those that are made on a GPU begin together: each alone would
cost a record on the stream, a lock, a wake-up and a collective. Of PyTorch nothing is needed to build this.
"""
import contextlib
import threading
from copy import copy

import torch

from bpsx._adapter import Item, TensorView
from bpsx.torch.eager import eager
from bpsx.torch.ops import SUMMED, mark_all_written, streams_of

#: References to the memory of a tensor that is alone: its own, and that of who asks.
cdef int ALONE = 2
#: A test may take all memory for a GPU's.
ALL_ON_GPU = False

_strided, _Tensor = torch.strided, torch.Tensor
_uses = getattr(torch._C, "_storage_Use_Count", None)


cpdef bint is_on_gpu(tensor) except -1:
    """Whether ``tensor`` is on a GPU that bpsx knows."""
    return tensor.is_cuda or ALL_ON_GPU


def is_shared(gradient) -> bool:
    """Whether other tensors have their elements in the same memory. Autograd may give two parameters one gradient's memory: where both go into one
    sum through views of them. The average of the first would come home into what the second has still to push."""
    return _uses is not None and _uses(gradient.untyped_storage()._cdata) > ALONE


def is_alone(tensor) -> bool:
    """Whether no other tensor can live in the same memory, and so share its version counter."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def version(tensor) -> int | None:
    """How often ``tensor``, or another one in the same memory, has been written to; None if nobody counts."""
    return tensor._version if tensor.layout is _strided and not tensor.is_inference() else None


cdef class Pushed:
    """A gradient under way: ``gradient`` is what the average goes into, ``ctx`` the compressor's. It may have to wait for others of a ``batch``.

    ``own``: nothing else is in its memory, and so it may travel as it lies, and a write to it from now on until the wait is noticed. ``plain``: the
    tensor that has the sum then, if it is not the handle that gives it.
    """
    cdef readonly object gradient, ctx
    cdef readonly bint own
    cdef readonly bint written      # known after the wait
    cdef Batch batch
    cdef object handle, plain, version
    cdef bint waited

    def __init__(self, gradient, ctx, bint own, handle=None, plain=None, Batch batch=None) -> None:
        self.gradient, self.ctx, self.own, self.handle, self.plain, self.batch = gradient, ctx, own, handle, plain, batch
        self.version = version(gradient) if own else None

    @property
    def failed(self) -> bool:
        """Whether it could not begin."""
        return isinstance(self.handle, Failed)

    cdef handle_now(self):
        if self.handle is None:
            with contextlib.suppress(Exception):    # the handle of what has failed says so
                self.batch.submit()
        return self.handle

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not block."""
        return self.handle_now().done()

    def wait(self):
        """The sum. Raises what has made it fail."""
        handle = self.handle_now()
        if not self.waited:         # the wait may itself write, to bring home what had to be laid out in another way
            self.written = self.version is not None and self.gradient._version != self.version and is_alone(self.gradient)
        received = handle.wait()
        self.waited = True
        return received if self.plain is None else self.plain


def all_together(list managed) -> bool:
    """Whether each of them has a gradient of its own on its way, with others on a GPU."""
    cdef Pushed pushed
    for m in managed:
        if type(m.pushed) is not Pushed:
            return False
        pushed = m.pushed
        if pushed.batch is None or pushed.handle is None or pushed.failed or m.stands_in:
            return False
    return True


def settle(list managed) -> list:
    """Wait for gradients that are :func:`all_together`, and see that they are where the optimizer looks. Returns those with which something is the
    matter, as they are: failed, written to, with other memory."""
    cdef Pushed pushed
    cdef list odd = [], done = []
    try:
        for m in managed:
            pushed = m.pushed
            gradient = pushed.gradient
            if pushed.version is None or gradient._version != pushed.version or gradient.data_ptr() != pushed.plain.data_ptr():
                odd.append(m)
                continue
            try:
                pushed.handle.wait()
            except Exception:
                odd.append(m)           # who waits again is told again
                continue
            done.append(gradient)
            m.pushed = None
            if m.parameter.grad is not gradient:
                m.parameter.grad = gradient
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
    cdef object begin, begin_alone, worth, lock, streams, stream
    cdef list waiting
    cdef int device
    cdef long long nbytes, most

    def __init__(self, begin, begin_alone, worth) -> None:
        """``begin``: of items made by a stream, in place, puts handles or exceptions into a list of their length; ``begin_alone``: of a gradient and
        its name gives a :class:`Pushed`; ``worth``: gives how many bytes are worth beginning."""
        self.begin, self.begin_alone, self.worth = eager(begin), eager(begin_alone), eager(worth)
        self.lock, self.waiting, self.device = threading.RLock(), [], -2

    def add(self, gradient, named) -> Pushed:
        """Sum a gradient on the GPU: at once, on the current stream, if it has to be laid out in another way or shares its memory. Raises why that
        cannot begin; what cannot begin with others is told by the wait."""
        cdef Pushed pushed
        cdef int device = gradient.get_device()
        with self.lock:
            if device != self.device:
                self.submit_quietly()
                self.device, self.streams = device, streams_of(device)
            view = self.plain_view(gradient)
            if view is None:
                return self.begin_alone(gradient, named)
            pushed = Pushed(gradient, None, True, None, view.owner, self)
            stream = self.streams()
            if self.waiting and stream != self.stream:
                self.submit_quietly()
            if not self.waiting:
                self.open_for(stream)
            self.waiting.append((pushed, Item(named.wire, view, named.priority)))
            self.nbytes += <long long>view.nbytes
            if self.nbytes >= self.most:
                self.submit_quietly()
            return pushed

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
        with self.lock:
            waiting, self.waiting = self.waiting, []
            if waiting:
                failure = self.begin_all(waiting)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure     # which knows this frame

    cdef begin_all(self, list waiting):
        """Begin them. Returns a failure."""
        cdef Pushed pushed
        cdef list begun = [None] * len(waiting)
        failure = None
        try:
            self.begin([item for _, item in waiting], self.stream, begun)
        except Exception as e:
            begun = [e.with_traceback(None)] * len(waiting)
        finally:        # also if it is interrupted: what has begun has, and the rest waits on
            for one, handle in zip(waiting, begun):
                pushed = one[0]
                if handle is None:
                    self.waiting.append(one)
                elif isinstance(handle, Exception):
                    pushed.handle, failure = Failed(handle), copy(handle)
                else:
                    pushed.handle = handle
        return failure

    cdef plain_view(self, gradient):
        """A gradient that can be summed as it lies, or None."""
        dtype = SUMMED.get(gradient.dtype)
        if dtype is None or gradient.layout is not _strided or type(gradient) is not _Tensor or not gradient.is_contiguous() or gradient.is_neg() \
                or gradient.is_nested or is_shared(gradient):
            return None
        own = gradient.detach()             # `grad.data` may be set to other memory meanwhile
        return TensorView(own.data_ptr(), gradient.nbytes, dtype, gradient.shape, own, self.device, self.streams)


cdef class Hook:
    """What autograd calls when it has added to a parameter's gradient. Keeps neither the exchange alive nor the parameter, on which it hangs."""
    cdef object exchange, managed, accumulated
    cdef Batch batch
    #: The compiler leaves this alone.
    _torchdynamo_disable = True

    def __init__(self, exchange, managed, Batch batch, accumulated) -> None:
        """``exchange`` and ``managed``: weak references to what ``accumulated`` is called with, but for what :attr:`Batch.quick` allows."""
        self.exchange, self.managed, self.batch, self.accumulated = exchange, managed, batch, eager(accumulated)

    def __call__(self, _) -> None:
        exchange, managed = self.exchange(), self.managed()
        if exchange is None or managed is None:
            return
        if self.batch.quick and managed.quick and managed.pushed is None and managed.passes_left == 1:
            gradient = managed.parameter.grad
            if gradient is not None and gradient.layout is _strided and is_on_gpu(gradient):
                managed.passes_left = 0
                managed.stands_in = False
                managed.pushed = self.batch.add(gradient, managed.named)
                return
        self.accumulated(exchange, managed)
