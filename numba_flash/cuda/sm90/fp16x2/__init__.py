"""Float32 on Hopper: each number is two of float16."""
