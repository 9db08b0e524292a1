"""Launchers: one role of a job on this machine, or a whole job.

:mod:`bpsx.launch.single_role` runs the one role, :mod:`bpsx.launch.job` the plan of a back end.
"""
