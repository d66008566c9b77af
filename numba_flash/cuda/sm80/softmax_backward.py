"""P and dS of the backward pass, on fragments of their transposes: keys along rows, queries along
columns (FlashAttention-2, Algorithm 2, lines 11 to 14). Fragments of S^T, P^T, dP^T and dS^T are
called sT, pT, dpT and dsT.
"""

from typing import Any, NamedTuple

from numba_flash import mask
from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import f32, i32, inline, u32


class SoftmaxBackward(NamedTuple):
    """Functions of a warp; see `build`."""

    hide: Any
    recompute_p: Any
    differentiate: Any


def build(m_tiles, columns):
    """`SoftmaxBackward` of a warp's 16 `m_tiles` keys and `columns` queries."""
    COUNT, COLUMNS = columns // 2, columns  # scores of a tile of 16 keys in registers
    WARP_KEYS, KEY_ROWS = 16 * m_tiles, 2 * m_tiles
    hide_row = softmax.build_hide(COUNT, True)

    @inline
    def hide(sT, key, row0, item):
        """Scores that the mask or the end of the keys hides become -inf; most tiles have none."""
        first, row1 = key - key % WARP_KEYS, row0 + COLUMNS
        low, high, keys, queries = item.low, item.high, item.rows, item.columns
        clear = mask.all_visible(first, first + WARP_KEYS, row0, row1, low, high)
        if not clear or first + WARP_KEYS > keys:
            column = i32(row0 + fragment.first_column())
            for r in range(KEY_ROWS):
                start, stop = mask.kv_range(key + r, key + r + 1, queries, low, high)
                if key + r >= keys:
                    stop = start
                hide_row(sT, r, i32(start - column), i32(stop - column))

    @inline
    def recompute_p(sT, lse, scale_log2):
        """(2) P = exp(S - lse), in the place of S."""
        for j in range(COLUMNS // 8):
            shift = ptx.load_shared_pair(u32(lse + u32(32 * j)))
            for r in range(KEY_ROWS):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    sT[e] = ptx.ex2(sT[e] * scale_log2 - shift[c])

    @inline
    def differentiate(dpT, pT, delta):
        """(5) dS = P * (dP - delta), in the place of dP."""
        for j in range(COLUMNS // 8):
            row_delta = ptx.load_shared_pair(u32(delta + u32(32 * j)))
            for r in range(KEY_ROWS):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    dpT[e] = pT[e] * (dpT[e] - row_delta[c]) if pT[e] != f32(0) else f32(0)

    return SoftmaxBackward(hide, recompute_p, differentiate)
