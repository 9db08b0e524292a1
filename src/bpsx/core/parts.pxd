# A tensor's partitions: made, and freed.
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from bpsx.core.packed cimport packed_free, packed_new
from bpsx.core.partition cimport Partition, Tensor


cdef inline uint64_t make_parts(Tensor *tensor, list parts, list made) except? 0:
    """From (key, lane, slot, offset, length) of each and, if they are compressed, a bpsx.compression.Made. Returns their bytes. Raises MemoryError."""
    cdef size_t i
    cdef Partition *p
    cdef uint64_t nbytes = 0
    tensor.n_parts = len(parts)
    tensor.parts = <Partition *>calloc(len(parts), sizeof(Partition))
    if tensor.parts == NULL:
        raise MemoryError(f"no memory for {len(parts)} partitions")
    for i in range(len(parts)):
        p = &tensor.parts[i]
        p.key, p.lane, p.slot, p.offset, p.length = parts[i]
        p.tensor = tensor
        if made:
            p.packed = packed_new(made[i])
        nbytes += p.length
    return nbytes


cdef inline void free_parts(Tensor *tensor) noexcept:
    cdef size_t i
    if tensor.parts != NULL:
        for i in range(tensor.n_parts):
            free(tensor.parts[i].shares)
            packed_free(tensor.parts[i].packed)
    free(tensor.parts)
