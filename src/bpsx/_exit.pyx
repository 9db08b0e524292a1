# cython: language_level=3
"""The process's exit status, which can be changed only after all of Python's exit functions."""

cdef extern from "<unistd.h>" nogil:
    void _exit(int status)

cdef extern from "Python.h":
    int Py_AtExit(void (*f)() noexcept nogil)

cdef int exit_status = 0


cdef void end_with_status() noexcept nogil:
    if exit_status:
        _exit(exit_status)


def set_exit_status(int status) -> bool:
    """Let the interpreter, once it has finalised, end with ``status`` instead of its own. What was said first counts. Returns whether
    that is what counts."""
    global exit_status
    if exit_status:
        return exit_status == status
    if Py_AtExit(end_with_status) != 0:
        raise RuntimeError("the interpreter takes no more exit functions")
    exit_status = status
    return True
