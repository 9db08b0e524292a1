"""Starts processes: one role on this machine (:mod:`bpsx.launch.roles`) or a whole job here
(:mod:`bpsx.launch.local`).
"""
