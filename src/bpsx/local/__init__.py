"""The worker processes of one machine.

They share memory and sum there first; then one of them speaks to the servers.
"""
