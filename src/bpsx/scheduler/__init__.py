"""Job membership: the scheduler (hub) and each node's control link to it.

Control messages only; gradients never pass through this package.
"""
