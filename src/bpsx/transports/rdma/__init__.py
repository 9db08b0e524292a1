"""RDMA, by libibverbs."""
