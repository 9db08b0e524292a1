"""Native core of a worker: ``.pxd`` files of structs and inline functions that run without the
GIL.
"""
