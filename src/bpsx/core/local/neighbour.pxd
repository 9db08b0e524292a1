# The processes of one machine, as seen by one of them. local/_machine.pyx owns this state; while
# the core runs, it belongs to the driver.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from bpsx.core.local.ring cimport Post, Segment
from bpsx.core.partition cimport Heap, Tensor
from bpsx.kernels.abi cimport Kernels

cdef enum:
    N_DTYPES = 32
    # key = number of the tensor * 2^PART_BITS + number of the partition, see placement.py
    PART_BITS = 20
    MOST_TENSORS = 1 << 24
    PAGE = 4096
    MOST_ROOTS = 64

cdef struct Posts:              # queue in private memory
    Post *items
    uint32_t size
    uint32_t capacity

# A process of this machine, as this process sees it.
cdef struct Neighbour:
    Segment *segment            # its segment, mapped in this process
    uint64_t nbytes             # of the segment
    int wake_fd                 # eventfd that ends the sleep of its driver
    bint dirty                  # this process has posted to it since it was last woken
    Posts overflow              # posts for which its ring had no room
    int64_t gone                # it has left the job in good order; set by any thread
    bint noticed                # ... and the driver has handled that
    int64_t joined              # it has called join(), and not all workers have; set by any thread

cdef struct GroupedGpus:        # which GPUs of the machine reduce together
    bint collects               # the other processes may need this process's GPU
    uint32_t group_size         # GPUs that reduce together: those of a PCIe switch, or all
    uint32_t n_groups
    # ranks within a group to which partitions are reduced by turns; 0: each rank copies a part
    uint32_t n_roots
    uint32_t roots[MOST_ROOTS]
    uint8_t *pinned             # by number: slabs of the root's segment that this process pinned

cdef struct Machine:
    uint32_t size               # processes of this machine
    uint32_t me                 # local rank
    uint32_t first_rank         # rank of the first worker on this machine
    uint32_t root               # local rank of the process that speaks to the servers
    bint alone                  # there are no servers: the root's sum is the result
    GroupedGpus gpus
    Neighbour *all              # by local rank, including this process
    uint64_t used               # bytes of this process's segment that are allocated
    Posts early                 # shares of tensors that the root has not adopted yet
    Tensor **tensors            # by number, as in the keys
    uint32_t n_tensors
    Heap work                   # partitions to copy or sum, most urgent first
    bint somebody_gone
    bint unsent                 # posts to neighbours wait because a ring is full
    int64_t joined_news         # a `joined` has been set since the driver last looked
    char **parts                # scratch array with an address per process
    Kernels kernels[N_DTYPES]   # by dtype code; `add` is NULL until loaded
    bint (*load)(void *owner, int dtype) noexcept nogil
    void *owner
