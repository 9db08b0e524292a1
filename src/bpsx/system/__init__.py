"""Operating system services: hosts, processes, signals, logs."""
