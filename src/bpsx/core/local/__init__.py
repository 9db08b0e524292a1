"""What the processes of one machine do together."""
