"""CUDA kernels, compiled by numba-cuda, or run by Numba's simulator in tests."""
