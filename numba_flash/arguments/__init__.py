"""What users hand over: options, arrays and masks, their checks, and the problem that they make."""
