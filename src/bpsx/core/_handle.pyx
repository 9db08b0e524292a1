# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Request and handle of a push_pull: what a caller passes to the core, and what it waits for."""
from cpython.buffer cimport (
    PyBUF_CONTIG, PyBUF_CONTIG_RO, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from bpsx.core._tensor cimport CommitGroup, Declaration, Tensor
from bpsx.core.partition cimport FIRED
from bpsx.core.process cimport own_pid as c_own_pid
from bpsx.core.gpu.reclaim cimport waits_for_end, note_wait
from bpsx.core.status cimport DONE, PENDING
from bpsx.system.sync cimport atomic_add, atomic_load, atomic_store, lock, now_ns, unlock

from bpsx import errors
from bpsx.system.tracebacks import CUT, shorten

# Longest time that a wait stays without the GIL before it checks for signals (Ctrl-C).
cdef int64_t SLICE_NS = 200_000_000


def own_pid() -> int:
    """Return os.getpid() without a system call."""
    return c_own_pid()


cdef class Request:
    """Arguments of one push_pull. One thread fills it in; the core copies what it needs.

    ``source``, ``target``: C-contiguous buffers, or pairs (address, bytes) that ``owner`` keeps
    alive. With ``source`` None nothing is pushed, as by a broadcast's receivers. ``divisor``:
    divides the sum; in a broadcast it is the root's rank. ``asynchronous``: add to the servers'
    value and return that; in a broadcast, set it. ``will_wait``: the caller waits at once, so no
    other thread needs to be woken. ``rate``: the learning rate, for compression.
    ``is_codec_state``: return the servers' part of the tensor's compression state, after setting it
    to ``source`` if that is given. ``on``: see :class:`bpsx.local.devices.OnGpu`. ``result``:
    returned by the handle's wait.
    """

    def __init__(
        self, str name, source, target, *, uint32_t divisor=1, bint broadcast=False,
        bint asynchronous=False, int priority=0, bint will_wait=False, double rate=-1.0,
        bint is_codec_state=False, owner=None, result=None, on=None
    ) -> None:
        self.name, self.source, self.target, self.divisor = name, source, target, divisor
        self.broadcast, self.asynchronous, self.priority = broadcast, asynchronous, priority
        self.will_wait, self.rate, self.is_codec_state = will_wait, rate, is_codec_state
        self.owner, self.result, self.on = owner, result, on


cdef class Item:
    """One of several tensors that are summed in place, all made by one stream of one GPU; see
    :meth:`bpsx.session.session.Session.push_pull_all`.

    ``view``: see :class:`bpsx.plugin.adapter.TensorView`. ``begun``: the handle, once the push_pull
    has begun; the exception, if it could not begin; None before.
    """

    def __init__(self, str name, view, int priority=0) -> None:
        self.name, self.priority, self.begun = name, priority, None
        self.address, self.nbytes, self.dtype, self.shape, self.owner = (
            view.address, view.nbytes, view.dtype, view.shape, view.owner
        )

    cdef Tensor known_as(self, dict declared, dict codes):
        """Return the core's tensor of this name, if it is declared with this shape and dtype,
        uncompressed; otherwise None.
        """
        cdef Declaration found = declared.get(self.name)
        code = codes.get(self.dtype)
        if found is None or code is None:
            return None
        return found.take(self.shape, code, None)

    cdef Handle take_spare(self):
        """Return an empty handle: the spare one, if neither the core nor the user refers to it;
        otherwise a new one.
        """
        cdef Handle handle = self.spare
        self.spare = None
        if handle is None or (<PyObject *>handle).ob_refcnt != 1:
            return Handle.__new__(Handle)
        memset(&handle.task, 0, sizeof(Task))
        return handle


cdef Handle new_handle(core, CCore *c, str name, uint32_t divisor, int priority, owner, result):
    """Return the handle of a push_pull that has not begun."""
    cdef Handle handle = Handle.__new__(Handle)
    handle.fill(core, c, name, divisor, priority, owner, result)
    return handle


cdef class Handle:
    """One push_pull under way.

    Keeps input and output alive until the result has arrived and the transport has released them.

    Thread-safe: any thread may call :meth:`done` or :meth:`wait`.
    """

    def __dealloc__(self):
        self._release_buffers()
        if self.gpu is not None and self.event:
            self.gpu.give(self.event)

    cdef fill(self, core, CCore *c, str name, uint32_t divisor, int priority, owner, result):
        self.core, self.c, self.name, self.owner, self.result = core, c, name, owner, result
        self.task.divisor, self.task.priority, self.task.handle = divisor, priority, <void *>self

    cdef join_group(self, dict groups):
        """Count in the group of its name. Nothing that may fail comes between this and the start.

        A group waits for all that have joined it. ``groups``: the core's.
        """
        cdef CommitGroup group = groups.get(self.name) if groups else None
        if group is not None:
            group.c.submitted += 1
            self.task.group, self.task.number = &group.c, group.c.submitted

    cdef leave_group(self):
        """The push_pull has ended without having begun."""
        if self.task.group != NULL:
            atomic_add(&self.task.group.ended, 1)
            atomic_store(&self.c.inbox.group_news, 1)
            self.core.notify()

    cdef take_memory(self, Request request, uint64_t nbytes):
        """Point the task at the request's memory.

        Raises :class:`ValueError` for a buffer of another size than ``nbytes``.
        """
        if type(request.target) is tuple:
            self.task.output = <char *><uintptr_t>request.target[0]
        else:
            PyObject_GetBuffer(request.target, &self.view_out, PyBUF_CONTIG)
            self.has_out = True
            self.task.output = <char *>self.view_out.buf
            self._check_size("output", self.view_out.len, nbytes)
        if type(request.source) is tuple:
            self.task.input = <char *><uintptr_t>request.source[0]
        elif request.source is not None:
            PyObject_GetBuffer(request.source, &self.view_in, PyBUF_CONTIG_RO)
            self.has_in = True
            self.task.input = <char *>self.view_in.buf
            self._check_size("input", self.view_in.len, nbytes)

    cdef _check_size(self, str what, uint64_t found, uint64_t wanted):
        if found != wanted:
            raise ValueError(f"{self.name!r}: {what} has {found} bytes, {wanted} expected")

    cdef void _release_buffers(self):
        if self.has_in:
            self.has_in = False
            PyBuffer_Release(&self.view_in)
        if self.has_out:
            self.has_out = False
            PyBuffer_Release(&self.view_out)

    def done(self) -> bool:
        """Whether the operation has ended, well or not; on a GPU, ended there. Does not block."""
        cdef int64_t status = atomic_load(&self.task.status)
        if status == PENDING:
            self._ask()
            self.core.waiters.polls()
        return (
            status != PENDING
            and (
                self.gpu is None or status < 0 or self.task.gpu.end_state == FIRED
                or self.gpu.come(<uintptr_t>self.task.gpu.end_event)
            )
        )

    cdef _output(self):
        return <uintptr_t>self.task.output, self.tensor.nbytes

    def wait(self, timeout=None):       # Cython 3.1 would take no int for a `float | None`
        """Wait for the end and return the result.

        On a GPU the current stream waits instead: work queued on it from now on runs after the end.

        Raises a :class:`bpsx.errors.BpsxError` if the operation failed, :class:`TimeoutError` after
        ``timeout`` seconds.
        """
        try:
            return self._end(timeout)
        except CUT as error:
            shorten(error)
            raise error         # Cython's bare raise would bring the old traceback back

    cdef _end(self, timeout):
        cdef int64_t end = 0, slice_end
        cdef bint finished, waited = False
        if c_own_pid() != self.core.pid:
            raise errors.NotInitializedError(
                f"push_pull of {self.name!r} was started in process {self.core.pid}; a forked "
                "child cannot wait for it"
            )
        if timeout is not None:
            end = now_ns() + <int64_t>(timeout * 1e9)
        while atomic_load(&self.task.status) == PENDING:
            slice_end = now_ns() + SLICE_NS
            if end and slice_end > end:
                slice_end = end
            with nogil:
                finished = self.c.wait_for(self.c, &self.task, slice_end)
            if not finished:
                self._between_slices(end)
                waited = True
        if waited:
            self.core.waiters.over()
        if self.gpu is None:
            self.core.reap()
        # Even after a failure: later users of the memory must not meet this task's work there.
        else:
            self._meet(self.streams())
        if self.task.status < 0:
            # Ctrl-C has reached the other processes, too: report it instead of their end.
            PyErr_CheckSignals()
            raise self.core.error_of(self)
        return self.result

    cdef bint has_ended(self):
        """Whether a wait would return or raise at once.

        On a GPU this is so when the end has been queued there.
        """
        return atomic_load(&self.task.status) != PENDING

    cdef bint has_succeeded(self):
        """Whether a wait would neither block nor raise. Valid only for tensors on the host."""
        return atomic_load(&self.task.status) == DONE

    cdef rest(self):
        """Drop the references of a handle that has ended and been waited for, for reuse.

        Returns its core.
        """
        core, self.core, self.tensor = self.core, None, None
        return core

    cdef void call_at_end(self, EndCallback *callback) noexcept:
        """Have ``callback.run`` called once with the status: by the thread that ends the task,
        without the GIL, or right here if the task has ended.
        """
        cdef int64_t status
        callback.next = NULL
        self.by_graph = self.core.waiters.graphs = True
        if self.tensor is not None:
            self.tensor.by_graph = True
        with nogil:
            lock(&self.c.monitor)
            status = self.task.status
            if status == PENDING:
                callback.next = self.task.callbacks
                self.task.callbacks = callback
            unlock(&self.c.monitor)
            if status != PENDING:
                callback.run(callback, status)

    cdef error(self):
        """Return the exception for a status other than DONE."""
        return self.core.error_of(self)

    cdef bint is_behind(self, uint64_t stream, uint64_t by):
        """Whether the task has succeeded and ``stream``, whose number is ``by``, already waits for
        its end, so that nothing is left to wait for.
        """
        if atomic_load(&self.task.status) != DONE or not waits_for_end(self.c, &self.task, by):
            return False
        if self.by_stream and stream == self.task.gpu.stream:
            self.owner = None
        return True

    cdef _meet(self, uint64_t stream):
        """Make a stream wait for the end of this task.

        A stream that waits for a later end needs no more: one wait is enough for hundreds of
        gradients.
        """
        cdef uint64_t by = self.gpu.number_of(stream)
        if not waits_for_end(self.c, &self.task, by):
            self.core.reap()
            # Called even if the end has come, so that a captured stream is refused.
            self.gpu.wait(
                stream,
                <uintptr_t>self.event
                if self.task.gpu.end_state == FIRED
                else <uintptr_t>self.task.gpu.end_event
            )
            note_wait(self.c, &self.task, by)
        if self.by_stream and stream == self.task.gpu.stream:
            # The next user of the memory runs after this task on that stream. With the reference
            # kept, the memory would lie idle until the next reap.
            self.owner = None

    cdef _between_slices(self, int64_t end):
        """Check for signals and the deadline; before raising, let another thread drive."""
        self._ask()
        self.core.waiters.note(self)
        try:
            PyErr_CheckSignals()
            if end and now_ns() >= end:
                raise TimeoutError(f"push_pull of {self.name!r} did not finish in time")
            if self.c.role.stopping and atomic_load(&self.task.status) == PENDING:
                raise errors.ShutdownError(f"push_pull of {self.name!r}: bpsx was shut down")
        except BaseException:
            if self.tensor is not None:
                self.tensor.ask_no_more()
            self.core.waiters.over(atomic_load(&self.task.status) == PENDING)
            self.core.kick()
            raise

    cdef void _ask(self):
        """Note that a thread waits for this push_pull."""
        if self.tensor is not None:
            self.tensor.ask()
