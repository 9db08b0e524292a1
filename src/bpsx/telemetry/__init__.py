"""A job's telemetry: timelines, rates, statistics, clock synchronization."""
