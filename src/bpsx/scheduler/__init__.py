"""Who is in the job: the scheduler (hub) and each node's link to it.

Control only; no gradient passes through here.
"""
