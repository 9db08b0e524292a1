# What _ops.pyx and _xla.pyx see of _exchange.pyx.
from bpsx.tensorflow.calls cimport Call, Kernel


cdef bint python_ends() noexcept nogil
cdef void submit(Call *call) noexcept nogil
cdef void end_call(Call *call) noexcept nogil
cdef void forget_kernel(Kernel *kernel) noexcept nogil
