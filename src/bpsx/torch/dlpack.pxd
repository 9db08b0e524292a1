# PyTorch's tensors seen from C through DLPack's exchange API (github.com/dmlc/dlpack, 1.2 and
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

cdef struct Seen:               # DLTensor
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

cdef struct Table:              # DLPackExchangeAPI
    uint32_t major
    uint32_t minor
    Table *previous             # table of an older major version
    void *allocate
    void *give
    void *take
    int (*look)(PyObject *tensor, Seen *seen) noexcept      # nonzero: a Python error is set
    int (*stream)(int32_t device_type, int32_t device, void **stream) noexcept


cdef inline Table *table_of(object tensors):
    """Return the table of a tensor class; NULL if it has no usable one."""
    cdef Table *table
    capsule = getattr(tensors, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    table = <Table *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while table != NULL and table.major != MAJOR:
        table = table.previous
    return table if table != NULL and table.look != NULL else NULL


cdef inline bint look(Table *table, object tensor, Seen *seen):
    """Fill in a tensor's layout. False if it has none, as a sparse tensor."""
    if table.look(<PyObject *>tensor, seen) == 0:
        return True
    PyErr_Clear()
    return False


cdef inline char *address(const Seen *seen) noexcept:
    return seen.data + seen.offset


cdef inline uint64_t elements(const Seen *seen) noexcept:
    cdef uint64_t n = 1
    cdef int32_t i
    for i in range(seen.dimensions):
        n *= <uint64_t>seen.shape[i]
    return n


cdef inline bint is_contiguous(const Seen *seen) noexcept:
    """Return whether the elements are in order without gaps.

    The stride of a dimension of length 1 does not matter.
    """
    cdef int64_t expected = 1
    cdef int32_t i
    if seen.strides == NULL or elements(seen) == 0:
        return True
    for i in reversed(range(seen.dimensions)):
        if seen.shape[i] != 1 and seen.strides[i] != expected:
            return False
        expected *= seen.shape[i]
    return True


cdef inline bint has_shape(const Seen *seen, shape):
    """Return whether ``shape`` is a tuple with the same lengths."""
    cdef int32_t i
    if type(shape) is not tuple or len(<tuple>shape) != seen.dimensions:
        return False
    for i in range(seen.dimensions):
        if <int64_t>(<tuple>shape)[i] != seen.shape[i]:
            return False
    return True


cdef inline tuple shape_of(const Seen *seen):
    return tuple([seen.shape[i] for i in range(seen.dimensions)])
