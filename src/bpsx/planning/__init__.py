"""Pure decisions: partitions, places, order of stages."""
