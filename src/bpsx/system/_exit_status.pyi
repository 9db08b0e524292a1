"""See ``_exit_status.pyx``."""

def set_exit_status(status: int) -> bool:
    """Let the process, once the interpreter has finalised, end with ``status`` where it would with
    0.

    What was said first counts. Returns whether that is what counts.
    """
