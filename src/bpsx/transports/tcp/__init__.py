"""TCP transport over plain sockets."""
