# cython: language_level=3
"""Sets the process's exit status, which takes effect after all of Python's exit functions."""

cdef extern from *:
    """
    #include <stdlib.h>
    #include <unistd.h>
    static int bpsx_status = 0;
    #ifdef __GLIBC__
    static void bpsx_end(int status, void *unused) { if (status == 0) _exit(bpsx_status); }
    static int bpsx_end_with(int status) { bpsx_status = status; return on_exit(bpsx_end, NULL); }
    #else
    /* The interpreter's own status is not known to its exit functions. */
    static void bpsx_end(void) { _exit(bpsx_status); }
    static int bpsx_end_with(int status) { bpsx_status = status; return Py_AtExit(bpsx_end); }
    #endif
    """
    int end_with "bpsx_end_with"(int status)

cdef int exit_status = 0


def set_exit_status(int status) -> bool:
    """Make the process exit with ``status`` after finalization, where it would exit with 0.

    The first call wins. Returns whether ``status`` is the one that takes effect.

    Raises :class:`RuntimeError` if the process takes no more exit functions.
    """
    global exit_status
    if exit_status:
        return exit_status == status
    if end_with(status) != 0:
        raise RuntimeError("the process takes no more exit functions")
    exit_status = status
    return True
