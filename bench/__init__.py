"""Benchmarks of bpsx against peers measured in the same run: ``python -m bench NAME [--json]
[--quick]``.

A figure alone says more about the machine than about the code. So every case is a ratio to a peer
that ran on the same machine a moment before: gloo's all_reduce, numpy.add, a bare ZeroMQ echo.
"""
