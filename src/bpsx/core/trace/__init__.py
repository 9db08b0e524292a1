"""What the core writes down about itself."""
