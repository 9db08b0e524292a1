"""The summation server."""
