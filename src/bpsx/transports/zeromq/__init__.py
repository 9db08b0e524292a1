"""TCP through ZeroMQ."""
