"""Attention of a ragged batch over the paged KV cache."""
