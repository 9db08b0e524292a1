# PyTorch's tensors as C sees them: by DLPack's table of functions for exchange
# (github.com/dmlc/dlpack, 1.2 and newer), which PyTorch has since 2.10. One call instead of one of
# PyTorch's methods for each question: those are a fifth of what a hook costs.
from cpython.exc cimport PyErr_Clear
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    ON_CPU = 1                  # kDLCPU
    ON_CUDA = 2                 # kDLCUDA
    MAJOR = 1                   # the version whose layout this is; later minor ones keep it

cdef struct Seen:               # DLTensor
    char *data
    int32_t device_type
    int32_t device
    int32_t dimensions
    uint8_t code                # kind of number,
    uint8_t bits                # ... and how many of each,
    uint16_t lanes              # ... and how many numbers an element is
    int64_t *shape              # the tensor's own: valid as long as it is
    int64_t *strides            # in elements
    uint64_t offset             # bytes, from data

cdef struct Table:              # DLPackExchangeAPI
    uint32_t major
    uint32_t minor
    Table *previous             # of an older major version
    void *allocate
    void *give
    void *take
    int (*look)(PyObject *tensor, Seen *seen) noexcept      # not 0: a Python error is set
    int (*stream)(int32_t device_type, int32_t device, void **stream) noexcept


cdef inline Table *table_of(object tensors):
    """That of a class of tensors; NULL: it has none that can be used."""
    cdef Table *table
    capsule = getattr(tensors, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    table = <Table *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while table != NULL and table.major != MAJOR:
        table = table.previous
    return table if table != NULL and table.look != NULL else NULL


cdef inline bint look(Table *table, object tensor, Seen *seen):
    """Ask for a tensor's layout. False if it has none: it is sparse, say."""
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
    """Whether the elements lie in order and close together; the stride of a dimension of one
    element says nothing.
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
    """Whether ``shape`` is a tuple that says the same."""
    cdef int32_t i
    if type(shape) is not tuple or len(<tuple>shape) != seen.dimensions:
        return False
    for i in range(seen.dimensions):
        if <int64_t>(<tuple>shape)[i] != seen.shape[i]:
            return False
    return True


cdef inline tuple shape_of(const Seen *seen):
    return tuple([seen.shape[i] for i in range(seen.dimensions)])
