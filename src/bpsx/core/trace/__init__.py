"""Tracing of the core: records of stages, debug prints and counters."""
