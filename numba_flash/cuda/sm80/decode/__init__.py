"""Few queries with many keys."""
