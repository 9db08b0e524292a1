"""CPU kernels, compiled by Numba to C functions."""
