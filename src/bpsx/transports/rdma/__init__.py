"""RDMA transport over libibverbs."""
