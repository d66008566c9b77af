"""P and dS of float64 on the fragments of a warp in the backward pass, with every option."""

from typing import Any, NamedTuple

from numba_flash import mask, numeric
from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f64, i32, inline, once, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.sm80.operands import products_float64 as products


class SoftmaxBackward(NamedTuple):
    """Functions of a warp, and its registers for slopes, and for bias and mask; see `build`."""

    fetch: Any
    recompute_p: Any
    put_weights: Any
    differentiate: Any
    slopes: int
    words: int


@once
def build(options, vectors, keys, columns, pitch_p):
    """`SoftmaxBackward` of a warp's `keys` and `columns` queries. A lane has neighbouring keys, as
    `numba_flash.cuda.score.fragment.build_key_rows` has them, if options change scores or weights.
    """
    COUNT, COLUMNS, KEYS, KEY_ROWS = columns // 2, columns, keys, keys // 8
    SCORES = KEY_ROWS * COUNT // 2
    MODIFIED, CHANGES, DROPOUT = options.modifies, options.changes, bool(options.dropout)
    SLOPES = options.sloped
    runs = fragment.runs_of_keys(keys // 16, columns)
    read, drop = build_fetch(options, runs, vectors), build_drop(options, runs, True)
    modify = build_modify("float64", options, runs, True)
    hide_row = softmax.build_hide(COUNT, True)
    put = products.build_put(keys // 16, columns, pitch_p)

    @inline
    def fetch(bias_mask, tile, extras):
        """What options need from memory."""
        if MODIFIED:
            read(bias_mask, tile.query, tile.key, tile.region, tile.at, tile.whole, extras)

    @inline
    def hide(sT, first, row0, item):
        """Scores that the mask or the end of the keys hides become -inf; most tiles have none.
        The warp's are those of keys from `first` and queries from `row0` on.
        """
        low, high = item.low, item.high
        clear = mask.all_visible(first, first + KEYS, row0, row0 + COLUMNS, low, high)
        if not clear or first + KEYS > item.rows:
            query = i32(row0 + fragment.first_column())
            for r in range(KEY_ROWS):
                key = i32(first + products.first_row() + 8 * r)
                start, stop = mask.kv_range(key, key + 1, item.columns, low, high)
                if key >= item.rows:
                    stop = start
                hide_row(sT, r, i32(start - query), i32(stop - query))

    @inline
    def exponentiate(sT, lse, scale_log2):
        for j in range(COLUMNS // 8):
            shift = ptx.load_shared_float64s(u32(lse + u32(64 * j)))
            for r in range(KEY_ROWS):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    if CHANGES:  # in base e; the difference of large numbers loses no digits
                        sT[e] = numeric.exp2((sT[e] - shift[c]) * scale_log2)
                    else:
                        sT[e] = numeric.exp2(sT[e] * scale_log2 - shift[c])

    @inline
    def recompute_p(sT, slope, bias_mask, lse, scale_log2, first, tile, item, parameters):
        """(2) P = exp(S - lse), in the place of S, negative where dropout drops it."""
        if MODIFIED:  # the options, on S
            i, j, region, at, whole = tile.query, tile.key, tile.region, tile.at, tile.whole
            modify(sT, slope, bias_mask, i, j, region, at, whole, parameters)
        else:
            hide(sT, first, tile.row0, item)
        exponentiate(sT, lse, scale_log2)
        if DROPOUT:
            drop(sT, tile.query, tile.key, tile.at, parameters)

    @inline
    def put_weights(address, column, p, slope):
        """P on its way to dV, without what is dropped; then P times the derivatives of scores, in
        its place. Returns a bit for each that is dropped.
        """
        dropped = u32(0)
        if DROPOUT:
            kept = cuda.local.array(SCORES, f64)
            for e in range(SCORES):
                gone = p[e] < f64(0)
                kept[e] = f64(0) if gone else p[e]
                dropped |= u32(1 << e) if gone else u32(0)
                p[e] = abs(p[e])
            put(address, column, kept)
        else:
            put(address, column, p)
        if SLOPES:
            for e in range(SCORES):
                p[e] *= slope[e]
        return dropped

    @inline
    def differentiate(dpT, pT, dropped, delta, parameters):
        """(5) dS = P * (dP - delta), in the place of dP."""
        for j in range(COLUMNS // 8):
            row_delta = ptx.load_shared_float64s(u32(delta + u32(64 * j)))
            for r in range(KEY_ROWS):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    if DROPOUT:
                        gone = (dropped & u32(1 << e)) != u32(0)
                        dpT[e] = f64(0) if gone else dpT[e] * parameters.keep_scale
                    dpT[e] = pT[e] * (dpT[e] - row_delta[c])

    slopes, words = SCORES if SLOPES else 1, max(1, held(options, runs).words)
    return SoftmaxBackward(fetch, recompute_p, put_weights, differentiate, slopes, words)
