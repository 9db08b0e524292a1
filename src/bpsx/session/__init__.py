"""A worker process's part of one job."""
