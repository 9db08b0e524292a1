"""Inside one machine: its worker processes share memory, sum there first, and let one of them speak
to the servers.
"""
