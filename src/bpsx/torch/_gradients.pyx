# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Gradients of a backward pass: their state, their memory, and the wait for each.

A step has hundreds of gradients, and each hook delays the backward pass: in Python a hook took 30
us. The build needs nothing of PyTorch.
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
    ON_CPU, ON_CUDA, DLTensor, ExchangeTable, address, elements, fill_view, has_shape,
    is_contiguous, shape_of, table_of,
)

from bpsx.torch.tensors import SUMMED

cdef enum:
    # References to the storage of an unshared tensor: the tensor's own, and the caller's.
    ALONE = 2

#: Test hook: if set, all memory counts as the first GPU's. It is called for each gradient with the
#: address, the size in bytes and PyTorch's storage.
ALL_ON_GPU = None

_strided, _Tensor = torch.strided, torch.Tensor
#: Calls of these cost less than calls of a tensor's methods.
_is_neg, _storage_of = torch.Tensor.is_neg, torch.Tensor.untyped_storage
_uses = getattr(torch._C, "_storage_Use_Count", None)
#: NULL: this PyTorch has no table, and its methods are called instead.
cdef ExchangeTable *DLPACK = table_of(_Tensor)
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


cdef bint take_view(tensor, DLTensor *view):
    """Fill in DLPack's view of the tensor. False if there is none."""
    return DLPACK != NULL and type(tensor) is _Tensor and fill_view(DLPACK, tensor, view)


cdef bint is_on_gpu(const DLTensor *view):
    """Return whether the tensor is on a GPU that bpsx supports."""
    return (
        view.lanes == 1
        and (view.device_type == ON_CUDA or view.device_type == ON_CPU and ALL_ON_GPU is not None)
    )


cdef bint view_on_gpu(tensor, DLTensor *view):
    """Same as :func:`is_dense_on_gpu`, and fill in DLPack's view of the tensor.

    Returns False also if there is no such view.
    """
    return take_view(tensor, view) and is_on_gpu(view)


cdef int device_of(tensor, const DLTensor *view) except -2:
    """Return the number of the GPU that has the tensor. ``view``: DLPack's view of it, or NULL."""
    if ALL_ON_GPU is not None:
        return 0
    return view.device if view != NULL else tensor.get_device()


cdef Py_ssize_t holders(memory):
    """Return the reference count of a storage's Python object.

    PyTorch keeps the object for the storage's life. PyTorch's own references are included; their
    number differs between releases.
    """
    return (<PyObject *>memory).ob_refcnt


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
    cdef DLTensor view
    return <uint64_t>address(&view) if take_view(tensor, &view) else tensor.data_ptr()


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
    :mod:`bpsx.torch._gradient_state`. They raise :class:`~bpsx.errors.InternalError` if it does not
    allow them.
    """

    def __init__(self, str name, parameter, info, int passes) -> None:
        self.name, self.parameter, self.info, self.passes_left, self.sparse_dim, self.wanted = (
            name, parameter, info, passes, 1, True
        )
        self.wire, self.priority, self.state = info.wire, info.priority, ADDING

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


cdef dtype_of(const DLTensor *view):
    """Return the name of the element type, or None if it cannot be summed."""
    return NAMES.get(view.code << 8 | view.bits)


cdef bint take_plain_memory(Pushed pushed, const DLTensor *view) except -1:
    """Return whether a gradient can be summed in its own memory; if so, note that memory.

    ``view``: DLPack's view of the tensor, or NULL.
    """
    gradient = pushed.gradient
    if view != NULL:
        dtype = dtype_of(view) if is_contiguous(view) else None
    else:
        fits = type(gradient) is _Tensor and not gradient.is_nested and gradient.is_contiguous()
        dtype = SUMMED.get(gradient.dtype) if fits else None
    if dtype is None or _is_neg(gradient):
        return False
    memory = _storage_of(gradient)
    if shares(memory):
        return False
    # The storage keeps the memory alive: `gradient.data` may be set to other memory meanwhile.
    pushed.owner, pushed.dtype = memory, dtype
    if view != NULL:
        if not has_shape(view, pushed.shape):
            pushed.shape = shape_of(view)
        pushed.address, pushed.nbytes = <uint64_t>address(view), elements(view) * (view.bits // 8)
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
        self.bucket, self.ctx, self.own, self.begun = None, alone.ctx, alone.own, alone.begun
        if not alone.own:
            self.version, self.written = UNCOUNTED, late and is_alone(self.gradient)

    cdef handle(self):
        if self.begun is None:
            with contextlib.suppress(Exception):    # the handle of a failed push raises it
                self.bucket.submit()
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
        return received if self.bucket is None else self.total()
