"""Transport within one process: the smallest complete one, to be copied for a new transport."""
