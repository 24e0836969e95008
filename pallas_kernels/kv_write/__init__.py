"""Writing new keys and values into the paged cache."""
