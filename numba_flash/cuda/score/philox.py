"""`numba_flash.rng.philox4x32` for registers of 32 bits: the same words, from products of 32 by 32
bits, of which a GPU has the upper half at once.
"""

from typing import NamedTuple

from numba_flash import rng
from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import inline, u32

ROUNDS = rng.ROUNDS
MULTIPLIER_0, MULTIPLIER_1 = int(rng.MULTIPLIER_0), int(rng.MULTIPLIER_1)
WEYL_0, WEYL_1 = int(rng.WEYL_0), int(rng.WEYL_1)


class Words(NamedTuple):
    """Of a counter, or of what it becomes; all are uint32."""

    w0: int
    w1: int
    w2: int
    w3: int


@inline
def philox4x32(c0, c1, c2, c3, k0, k1):
    """The `Words` of the counter ``(c0, c1, c2, c3)`` under the key ``(k0, k1)``."""
    for _ in range(ROUNDS):
        low0, high0 = ptx.mul_wide(c0, u32(MULTIPLIER_0))
        low1, high1 = ptx.mul_wide(c2, u32(MULTIPLIER_1))
        c0, c1 = u32(high1 ^ c1 ^ k0), low1
        c2, c3 = u32(high0 ^ c3 ^ k1), low0
        k0, k1 = u32(k0 + u32(WEYL_0)), u32(k1 + u32(WEYL_1))
    return Words(c0, c1, c2, c3)
