"""Interface of ``_exit_status.pyx``."""

def set_exit_status(status: int) -> bool:
    """Make the process exit with ``status`` after finalization, where it would exit with 0.

    The first call wins. Returns whether ``status`` is the one that takes effect.
    """
