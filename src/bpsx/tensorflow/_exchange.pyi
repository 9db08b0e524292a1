"""Calls of TensorFlow's and XLA's, to the core and back; see ``_exchange.pyx``."""

class Plan:
    """What a call asks for: as an operation's attributes have it, or as text."""
