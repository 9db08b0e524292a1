"""The smallest complete transport, to be copied."""
