"""Code that the framework plugins share, and their interface to the rest of bpsx."""
