"""push_pull and broadcast as asynchronous operations of TensorFlow; see ``_ops.pyx``."""

def check() -> None:
    """Raise :class:`ImportError`, which names what is missing, unless operations are registered."""

def distrust(on: bool) -> None:
    """Have all calls refused, as if TensorFlow's callbacks had an unknown layout.

    For tests.
    """
