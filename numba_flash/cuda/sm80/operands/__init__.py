"""What a loop multiplies, by number type: 16 bits, float32 as two float16, float64."""
