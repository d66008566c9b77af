"""Which tiles a block works on: items, sequences, block sparse lists, pages; counted on the host,
found on the device.
"""
