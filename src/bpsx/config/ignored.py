"""BytePS variables that have no effect in bpsx."""

#: Variables that cause a warning, rather than being ignored silently.
NOT_USED = frozenset(
    (
        "BYTEPS_GLOBAL_RANK",
        "BYTEPS_ORDERED_HOSTS",
        "BYTEPS_OMP_THREAD_PER_GPU",
        "BYTEPS_NUMA_ROOT_QUOTA",  # the root gets what BYTEPS_NUMA_DEFAULT_QUOTA leaves
        "BYTEPS_MULTITHREADED_CPU",  # the kernel says which hardware threads share a core
        "BYTEPS_MIXED_MODE_BOUND",  # range of BytePS's hash; bpsx counts bytes instead
        "BYTEPS_SERVER_ENGINE_BLOCKING",
        "BYTEPS_ADDRESS_POOL_SIZE",
        "BYTEPS_IPC_COPY_NUM_THREADS",
        "BYTEPS_IPC_ENABLE_ASYNC_COPY",
        "BYTEPS_PRINT_RDMA_LOG",
        "BYTEPS_RDMA_MAX_CONCURR_WR",
        "BYTEPS_UCX_ERRH_ENABLE",
        "BYTEPS_UCX_FORCE_REQ_ORDER",
        "BYTEPS_UCX_QUEUE_SENDS",
        "BYTEPS_UCX_RECONNECT_TMO",
        "BYTEPS_UCX_SHORT_THRESH",
        "BYTEPS_ZMQ_MAX_SOCKET",
        "DMLC_ENABLE_UCX",
        "DMLC_LOCAL",
        "DMLC_GROUP_SIZE",
        "DMLC_RANK",
        "DMLC_NUM_CPU_DEV",
        "DMLC_NUM_GPU_DEV",
        "DMLC_NUM_PORTS",
        "DMLC_PORT",
        "DMLC_USE_KUBERNETES",
        "DMLC_LOCKLESS_QUEUE",
        "DMLC_POLLING_IN_NANOSECOND",
        "PS_DROP_MSG",
        "PS_RESEND",
        "PS_RESEND_TIMEOUT",
    )
)
