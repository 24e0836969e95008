"""Graph IR and the passes that rewrite it."""
