"""Geometry of shared tiles that the copy engine writes and wgmma reads: panels of 64 columns of 16
bits, swizzled rows of 128 bytes.

Within a panel, the 16-byte chunk c of row r lies at ``128 r + 16 (c ^ (r % 8))``. Where tiles have
no more than 32 columns, panels may be narrow: in rows of 64 bytes it lies at ``64 r + 16 (c ^ (r //
2 % 4))``.
"""

PANEL = 64  # columns
ROW_BYTES = 128
NARROW, NARROW_ROW_BYTES = 32, 64  # the same of a narrow panel
ALIGNMENT = 1024  # of a panel: the swizzle is a function of the address


def panels(columns: int) -> int:
    """Panels that hold this many columns."""
    return -(-columns // PANEL)


def panel_bytes(rows: int) -> int:
    """Size of a panel."""
    return rows * ROW_BYTES
