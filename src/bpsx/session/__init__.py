"""One job, seen from one of its worker processes."""
