"""Several I/O threads for one endpoint: each drives an endpoint of its own, with some peers."""
