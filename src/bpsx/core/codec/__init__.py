"""Compression in the core: the state of a compressed partition, and the threads that encode."""
