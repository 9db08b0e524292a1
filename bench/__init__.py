"""Benchmarks of bpsx, each against a peer measured in the same run: ``python -m bench NAME [--json]
[--quick]``.

A figure alone says more about the machine than about the code, so every case is a ratio to
something else that ran on the same machine a moment before: gloo's all_reduce, numpy.add, a bare
ZeroMQ echo.
"""
