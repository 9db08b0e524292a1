"""push_pull and broadcast in what XLA compiles; see ``_xla.pyx``."""

def register() -> bool:
    """Make ``bpsx_exchange`` known to XLA, for the host; whether that can be."""
