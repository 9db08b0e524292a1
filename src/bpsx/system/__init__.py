"""The operating system: hosts, processes, logs."""
