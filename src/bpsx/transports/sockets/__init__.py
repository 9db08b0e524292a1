"""Parts shared by the transports that use sockets directly (TCP, shared memory, RDMA)."""
