"""Compression of tensors: what users ask for, and what a job keeps of it."""
