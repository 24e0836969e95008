"""Rows of a quantized table."""
