"""The verbs, and the life of a job in this process."""
