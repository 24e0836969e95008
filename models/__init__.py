"""Model families (flax) and checkpoint readers."""
