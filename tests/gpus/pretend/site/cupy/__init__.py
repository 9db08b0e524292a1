"""The part of cupy that provides NCCL."""
