"""What instructions compute, by kind."""
