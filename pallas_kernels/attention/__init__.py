"""Causal attention over tokens that are all at hand."""
