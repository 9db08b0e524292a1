"""Launchers: one role of a job on this machine, or a whole job.

:mod:`bpsx.launch.single_role` runs the one role, :mod:`bpsx.launch.local` a whole job here or over
ssh.
"""
