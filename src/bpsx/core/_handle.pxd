# C-level interface of _handle.pyx for other extension modules.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bpsx.core._tensor cimport CommitGroup, Tensor
from bpsx.core.partition cimport EndCallback, Task
from bpsx.core.state cimport Core as CCore


cdef class Handle


cdef class Request:             # see _handle.pyx
    cdef readonly str name
    cdef public object source, target, owner, on
    cdef readonly object result
    cdef readonly uint32_t divisor
    cdef readonly int priority
    cdef readonly double rate
    cdef readonly bint broadcast, asynchronous, will_wait, is_codec_state


cdef class Item:                # see _handle.pyx
    cdef readonly str name, dtype
    cdef readonly object shape, owner
    cdef readonly uint64_t address, nbytes
    cdef readonly int priority
    cdef public object begun
    # handle of an earlier push_pull, to be reused if nothing else refers to it; or None
    cdef Handle spare

    cdef Tensor known_as(self, dict declared, dict codes)
    cdef Handle take_spare(self)


cdef class Handle:
    cdef Task task
    cdef CCore *c               # state of the core,
    cdef object core            # ... which this reference keeps alive
    cdef Tensor tensor
    cdef object owner           # keeps the memory behind task.input and task.output alive
    cdef Py_buffer view_in, view_out
    cdef bint has_in, has_out
    cdef str failure
    cdef bint by_graph          # a framework's graph waits for this push_pull
    cdef readonly object gpu    # None: not on a GPU
    cdef object streams         # with a GPU: function that returns the current stream
    cdef object moment          # ... recorded when the input is ready
    # ... the handle's own event; `task.gpu.end_event` may be that of another task in its group
    cdef uint64_t event
    # ... its memory is freed in the order of the stream that made it, as PyTorch's is
    cdef public bint by_stream
    cdef readonly str name
    cdef public object result

    cdef join_group(self, dict groups)
    cdef leave_group(self)
    cdef fill(self, core, CCore *c, str name, uint32_t divisor, int priority, owner, result)
    cdef take_memory(self, Request request, uint64_t nbytes)
    cdef _check_size(self, str what, uint64_t found, uint64_t wanted)
    cdef void _release_buffers(self)
    cdef _end(self, timeout)
    cdef _output(self)
    cdef _meet(self, uint64_t stream)
    cdef bint has_ended(self)
    cdef bint has_succeeded(self)
    cdef rest(self)
    cdef void call_at_end(self, EndCallback *callback) noexcept
    cdef error(self)
    cdef bint is_behind(self, uint64_t stream, uint64_t by)
    cdef _between_slices(self, int64_t end)
    cdef void _ask(self)


cdef Handle new_handle(core, CCore *c, str name, uint32_t divisor, int priority, owner, result)
