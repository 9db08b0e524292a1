# PyTorch's tensors view from C through DLPack's exchange API (github.com/dmlc/dlpack, 1.2 and
# newer), which PyTorch provides since 2.10. One call replaces several calls of PyTorch's methods,
# which are a fifth of a hook's cost. Call with the GIL.
from cpython.exc cimport PyErr_Clear
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    ON_CPU = 1                  # kDLCPU
    ON_CUDA = 2                 # kDLCUDA
    MAJOR = 1                   # version of this layout; later minor versions keep it

cdef struct DLTensor:
    char *data
    int32_t device_type
    int32_t device
    int32_t dimensions
    uint8_t code                # kind of number
    uint8_t bits                # bits per number
    uint16_t lanes              # numbers per element
    int64_t *shape              # owned by the tensor, and valid as long as it is
    int64_t *strides            # in elements
    uint64_t offset             # bytes, from data

cdef struct ExchangeTable:      # DLPackExchangeAPI
    uint32_t major
    uint32_t minor
    ExchangeTable *previous             # table of an older major version
    void *allocate
    void *give
    void *take
    # nonzero: a Python error is set
    int (*describe)(PyObject *tensor, DLTensor *view) noexcept
    int (*stream)(int32_t device_type, int32_t device, void **stream) noexcept


cdef inline ExchangeTable *table_of(object tensors):
    """Return the table of a tensor class; NULL if it has no usable one."""
    cdef ExchangeTable *table
    capsule = getattr(tensors, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    table = <ExchangeTable *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while table != NULL and table.major != MAJOR:
        table = table.previous
    return table if table != NULL and table.describe != NULL else NULL


cdef inline bint fill_view(ExchangeTable *table, object tensor, DLTensor *view):
    """Fill in a tensor's layout. False if it has none, as a sparse tensor."""
    if table.describe(<PyObject *>tensor, view) == 0:
        return True
    PyErr_Clear()
    return False


cdef inline char *address(const DLTensor *view) noexcept:
    return view.data + view.offset


cdef inline uint64_t elements(const DLTensor *view) noexcept:
    cdef uint64_t n = 1
    cdef int32_t i
    for i in range(view.dimensions):
        n *= <uint64_t>view.shape[i]
    return n


cdef inline bint is_contiguous(const DLTensor *view) noexcept:
    """Return whether the elements are in order without gaps.

    The stride of a dimension of length 1 does not matter.
    """
    cdef int64_t expected = 1
    cdef int32_t i
    if view.strides == NULL or elements(view) == 0:
        return True
    for i in reversed(range(view.dimensions)):
        if view.shape[i] != 1 and view.strides[i] != expected:
            return False
        expected *= view.shape[i]
    return True


cdef inline bint has_shape(const DLTensor *view, shape):
    """Return whether ``shape`` is a tuple with the same lengths."""
    cdef int32_t i
    if type(shape) is not tuple or len(<tuple>shape) != view.dimensions:
        return False
    for i in range(view.dimensions):
        if <int64_t>(<tuple>shape)[i] != view.shape[i]:
            return False
    return True


cdef inline tuple shape_of(const DLTensor *view):
    return tuple([view.shape[i] for i in range(view.dimensions)])
