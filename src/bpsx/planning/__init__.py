"""Pure decisions: cutting tensors into partitions, placing them on servers, order of stages."""
