# Arrays that grow, for code without the GIL.
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memset

cdef enum:
    LEAST_ROOM = 16             # items of the smallest array


cdef inline bint make_room(
    void *array, uint32_t *capacity, uint32_t wanted, size_t item_bytes
) noexcept nogil:
    """Make sure that an array has room for `wanted` items. New items are zeroed.

    `array`: address of the pointer to the first item. An array that grows at least doubles, so it
    moves seldom. Returns False when out of memory; the array then is as before.
    """
    cdef void *items = NULL
    cdef size_t room
    if wanted <= capacity[0]:
        return True
    room = max(wanted, 2 * capacity[0], <uint32_t>LEAST_ROOM)
    # Copied as bytes: the pointer has a type of its own, which C lets no `void **` stand for.
    memcpy(&items, array, sizeof(items))
    items = realloc(items, room * item_bytes)
    if items == NULL:
        return False
    memset(<char *>items + capacity[0] * item_bytes, 0, (room - capacity[0]) * item_bytes)
    memcpy(array, &items, sizeof(items))
    capacity[0] = <uint32_t>room
    return True
