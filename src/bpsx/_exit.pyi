"""See ``_exit.pyx``."""

def set_exit_status(status: int) -> bool:
    """Let the interpreter, once it has finalised, end with ``status`` instead of its own. What was said first counts. Returns whether
    that is what counts."""
