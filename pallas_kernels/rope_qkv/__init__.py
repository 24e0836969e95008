"""Rotary position embedding of the queries and keys in a fused product, which is split at once."""
