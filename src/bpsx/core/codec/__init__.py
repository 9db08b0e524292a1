"""Compression, as the core sees it."""
