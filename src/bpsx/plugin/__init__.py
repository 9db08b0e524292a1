"""What plugins of frameworks share, and all that they may use."""
