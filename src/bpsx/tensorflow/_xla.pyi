"""push_pull and broadcast in programs that XLA compiles; see ``_xla.pyx``."""

def register() -> bool:
    """Register ``bpsx_exchange`` with XLA, for the host. Returns whether that is possible."""
