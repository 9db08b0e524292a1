"""What the core does on GPUs."""
