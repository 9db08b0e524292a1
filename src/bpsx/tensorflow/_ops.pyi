"""push_pull and broadcast as asynchronous operations of TensorFlow; see ``_ops.pyx``."""

def check() -> None:
    """Raise :class:`ImportError`, naming what is missing, unless the operations have been
    registered.
    """

def distrust(on: bool) -> None:
    """Have all calls refused, as if TensorFlow's callbacks looked unlike what is known.

    For tests.
    """
