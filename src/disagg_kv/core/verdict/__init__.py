"""Who says how a room ended: all ranks of an instance, or each for itself."""
