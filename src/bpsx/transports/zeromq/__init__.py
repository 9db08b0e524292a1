"""TCP transport through ZeroMQ."""
