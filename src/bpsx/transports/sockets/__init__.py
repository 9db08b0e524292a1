"""What the transports over sockets of ours share."""
