# Status codes of tasks, partitions and rounds. errors.py turns a negative status into an exception;
# tests/source checks that both lists agree.

cdef enum Status:
    PENDING = 0
    DONE = 1
    E_PEER_LOST = -1            # a worker, a server or the scheduler was lost
    E_MISMATCH = -2       # workers disagree about shape, dtype, operation or divisor
    # a worker left the job in good order while other workers still need it
    E_LEFT = -3
    # deadlock: each worker waits for a tensor that another worker has not pushed
    E_STALL = -4
    E_PROTOCOL = -5       # the peer refused a message as malformed
    E_SHUTDOWN = -6             # this process shut bpsx down while the operation was under way
    E_MEMORY = -7         # allocation failed
    E_JOINED = -9               # the root of a broadcast has called join(), so it pushes nothing
    # the kernel that sums this element type could not be compiled or loaded
    E_KERNELS = -10
    E_CODEC = -11               # a compressed body does not decode
    E_COMPRESSOR = -12          # the server does not know the compression of this tensor
    E_DEVICE = -13        # a GPU or NCCL failed
