"""Reduction among the processes of one machine, over shared memory."""
