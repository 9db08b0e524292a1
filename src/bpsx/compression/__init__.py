"""Compression of tensors: users' settings, and the state that a job keeps."""
