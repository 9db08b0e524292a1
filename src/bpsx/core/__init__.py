"""Units of the native core: ``.pxd`` files with structs and inline bodies that run without the
GIL.
"""
