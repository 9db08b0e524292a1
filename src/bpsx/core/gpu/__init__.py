"""GPU stages of the core: copies, collectives and pinned memory."""
