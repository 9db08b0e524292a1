"""As much of cupy as brings NCCL along."""
