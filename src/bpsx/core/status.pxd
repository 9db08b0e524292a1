# Status codes: what a task, a partition or a round ended with. errors.py turns a negative one into
# an exception; tests/source checks that both lists agree.

cdef enum Status:
    PENDING = 0
    DONE = 1
    E_PEER_LOST = -1      # a worker, a server or the scheduler is gone
    E_MISMATCH = -2       # workers disagree about shape, dtype, operation or divisor
    E_LEFT = -3           # a worker left the job in good order while others still need it
    E_STALL = -4          # every worker waits for something that another one has not pushed
    E_PROTOCOL = -5       # the peer refused a message as malformed
    E_SHUTDOWN = -6       # this process shut bpsx down with the operation under way
    E_MEMORY = -7         # allocation failed
    E_JOINED = -9         # a broadcast's root has called join() and so pushes nothing
    E_KERNELS = -10       # the code that sums this element type could not be compiled or loaded
    E_CODEC = -11         # what a worker has compressed does not decode
    E_COMPRESSOR = -12    # the server does not know how this tensor is compressed
    E_DEVICE = -13        # a GPU or NCCL failed
