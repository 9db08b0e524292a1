"""Kernels for the CPU, compiled by Numba to C functions."""
