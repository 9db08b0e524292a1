"""TCP over plain sockets."""
