"""The verbs, and the lifecycle of a job in this process."""
