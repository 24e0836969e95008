"""Root-mean-square normalization."""
