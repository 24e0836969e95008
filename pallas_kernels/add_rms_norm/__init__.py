"""The sum of two arrays, and its root-mean-square normalization."""
