"""Summation server: its process, its lanes and their state."""
