"""bpsx: gradient communication for distributed training. Importing does no work; ``init()`` starts it."""
