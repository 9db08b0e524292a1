"""Kernels for CUDA devices, compiled by Numba (numba-cuda), or run by its simulator, for tests."""
