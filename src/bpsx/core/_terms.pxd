# Terms for the driver, made from what the scheduler says.
from libc.stdint cimport uint32_t

from bpsx.core.partition cimport Term

cdef Term *new_term(
    uint32_t lanes, uint32_t number, list lost, bint missed, list yields, uint32_t living,
    bint enters,
) except NULL
