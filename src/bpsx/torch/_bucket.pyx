# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Bucket of gradients on a GPU that start together, and the hook that fills it during backward.

Each gradient alone would cost an event on the stream, a lock, a wake-up and a collective. Gradients
on the host start at once.
"""
import contextlib
from copy import copy

import torch
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from bpsx.torch._gradient_state cimport Event, allows
from bpsx.torch._gradients cimport (
    UNCOUNTED, Managed, Pushed, counted, device_of, dtype_of, is_dense_on_gpu, is_on_gpu,
    take_plain_memory, take_view, view_on_gpu,
)
from bpsx.torch.dlpack cimport ON_CPU, DLTensor, elements, is_contiguous
from bpsx.torch.rlock cimport RLock, drop_turn, end_turn, new_turn, take_turn

from bpsx.torch.dynamo import eager, set_compiler
from bpsx.torch.tensors import streams_of


cdef bint is_only_ours(Pushed pushed):
    """Return whether the caller's one variable holds the only reference."""
    return (<PyObject *>pushed).ob_refcnt == 1


cdef class Bucket:
    """Bucket: gradients that one optimizer's hooks have added and that have not started yet.

    The bucket starts when it is large enough, when backward ends or changes to another stream, and
    when a gradient is waited for. Buckets may differ between workers, because starting one does not
    wait for other workers. Thread-safe.
    """

    #: Hooks may skip the checks of :meth:`bpsx.torch.exchange.Exchange.accumulated`.
    cdef public bint quick
    cdef object begin, begin_alone, begin_here, worth, streams, stream
    cdef RLock turn
    cdef list waiting               # the Managed objects whose gradients are in State.BUCKETED
    cdef int device
    cdef uint64_t nbytes, most

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
        cdef DLTensor filled
        cdef DLTensor *view = &filled if view_on_gpu(gradient, &filled) else NULL
        cdef Pushed pushed = self.new_pushed(managed, gradient)
        take_turn(&self.turn)
        try:
            self.turn_to(device_of(gradient, view))
            if take_plain_memory(pushed, view):
                self.append(managed, pushed)
            else:
                managed.start(self.begin_alone(gradient, managed.info))
        finally:
            end_turn(&self.turn)

    cdef bint add_quickly(self, Managed managed, gradient, const DLTensor *view) except -1:
        """Add a gradient on the GPU with few checks; the rest follow when the bucket starts.

        Returns False if this gradient cannot wait for that.
        """
        cdef Pushed pushed
        if dtype_of(view) is None or not is_contiguous(view):
            return False
        pushed = self.new_pushed(managed, gradient)
        pushed.nbytes = elements(view) * (view.bits // 8)
        take_turn(&self.turn)
        try:
            self.turn_to(device_of(gradient, view))
            self.append(managed, pushed)
        finally:
            end_turn(&self.turn)
        return True

    cdef bint start_on_host(self, Managed managed, gradient, const DLTensor *view) except -1:
        """Start the sum of a gradient on the host at once.

        Returns False if the gradient needs the slow path: it is not plain, shares its memory, or
        has not been declared yet with this shape and dtype.
        """
        cdef Pushed pushed
        if view.device_type != ON_CPU or view.lanes != 1 or elements(view) == 0:
            return False
        pushed = self.new_pushed(managed, gradient)
        if pushed.version == UNCOUNTED or not take_plain_memory(pushed, view):
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

        Returns False if a gradient on the host needs the slow path; see :meth:`start_on_host`.
        """
        cdef DLTensor view
        if is_dense_on_gpu(gradient):
            self.add(managed, gradient)
            return True
        return take_view(gradient, &view) and self.start_on_host(managed, gradient, &view)

    cdef Pushed new_pushed(self, Managed managed, gradient):
        cdef Pushed pushed = managed.spare
        managed.spare = None
        if pushed is not None and pushed.bucket is self and is_only_ours(pushed):
            pushed.gradient, pushed.version, pushed.written, pushed.waited = gradient, counted(
                gradient
            ), False, False
            return pushed
        pushed = Pushed.__new__(Pushed)
        pushed.gradient, pushed.own, pushed.bucket, pushed.version = gradient, True, self, counted(
            gradient
        )
        pushed.info, pushed.name, pushed.priority = managed.info, managed.wire, managed.priority
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
            together = self.begin_alone_ones(waiting)
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

    cdef list begin_alone_ones(self, list waiting):
        """Start the gradients that need to go alone, before the sums of the others start.

        Returns the others.
        """
        cdef Managed managed
        cdef Pushed pushed
        cdef list together = []
        for managed in waiting:
            pushed = managed.pushed
            try:
                if pushed.owner is not None or self.may_join(pushed):
                    together.append(pushed)
                    continue
                with self.on_its_stream():
                    pushed.follow(self.begin_alone(pushed.gradient, pushed.info))
            except Exception as e:
                if pushed.begun is None:
                    pushed.begun, pushed.bucket = e.with_traceback(None), None
        return together

    cdef bint may_join(self, Pushed pushed) except -1:
        """Return whether a deferred gradient can go with the others.

        Its memory may have changed since the hook saw it.
        """
        cdef DLTensor view
        return (
            view_on_gpu(pushed.gradient, &view)
            and device_of(pushed.gradient, &view) == self.device
            and take_plain_memory(pushed, &view)
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
    cdef Bucket bucket
    #: Tells torch.compile not to trace it.
    _torchdynamo_disable = True

    def __init__(self, exchange, managed, Bucket bucket, accumulated) -> None:
        """Create the hook.

        ``exchange`` and ``managed``: weak references to the arguments of ``accumulated``.
        :attr:`Bucket.quick` lets the hook skip that call.
        """
        self.exchange, self.managed, self.bucket = exchange, managed, bucket
        self.accumulated = eager(accumulated)

    def rival(self) -> None:
        """Note that another hook sums the same gradient.

        Both hooks must then look at its memory at once, to see whether it is in flight.
        """
        cdef Managed managed = self.managed()
        if managed is not None:
            managed.rivalled, managed.quick = True, False

    def __call__(self, _) -> None:
        cdef Managed managed = self.managed()
        cdef DLTensor view
        if managed is None:             # the exchange, which owns it, is gone
            return
        if (
            self.bucket.quick
            and managed.quick
            and allows(managed.state, Event.BUCKET)
            and managed.passes_left == 1
        ):
            gradient = managed.parameter.grad
            if gradient is not None and take_view(gradient, &view):
                managed.passes_left = 0         # before anything can interrupt
                managed.stands_in = False
                if (
                    self.bucket.add_quickly(managed, gradient, &view)
                    if is_on_gpu(&view)
                    else self.bucket.start_on_host(managed, gradient, &view)
                ):
                    return
                managed.passes_left = 1
        exchange = self.exchange()
        if exchange is not None:
            self.accumulated(exchange, managed)
