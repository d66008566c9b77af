"""The tier for machines without a GPU."""
