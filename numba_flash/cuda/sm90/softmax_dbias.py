"""P and dS of a consumer that sums the gradient of a bias on Hopper, and where its threads' scores
are in a tile.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import f32, i32, inline, once
from numba_flash.cuda.score import LOG2E
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.softmax import raised_backward

ROWS = 64  # queries of a consumer


@inline
def first_row(me):
    """This thread's first query in a tile; found again where it is wanted, for registers."""
    thread = ptx.thread_here()
    return i32(me * ROWS + thread % 128 // 32 * 16 + thread % 32 // 4)


@inline
def first_column():
    """Its first key."""
    return i32(ptx.thread_here() % 4 * 2)


@inline
def release_keys(smem, ring, n):
    """As `pipeline.release_group`."""
    if ptx.thread_here() % 128 == 0:
        pipeline.release(smem, ring, n)


@once
def build_differentiate(options, scores, bfloat16):
    """``recompute_p(s, lse)``: (2) P = exp(S - lse), in the place of S; ``differentiate(acc, p, dp,
    delta, parameters)``: (5) acc += dS = P * (dP - delta), where P is negative if dropped.
    """
    SCORES, DROPOUT, SEQUENCES = scores, bool(options.dropout), options.sequences
    LOWERED = 2.0 ** -raised_backward(bfloat16)

    @inline
    def recompute_p(s, lse):
        for e in range(SCORES):
            s[e] = ptx.ex2(s[e] * f32(LOG2E) - lse[e // 2 % 2])

    @inline
    def differentiate(acc, p, dp, delta, parameters):
        for e in range(SCORES):
            weight, slope = p[e], dp[e]
            if DROPOUT:  # dP is 0 where the weight is -P
                slope = slope if weight > f32(0) else f32(0)
                slope *= f32(parameters.keep_scale)
            slope = slope * f32(LOWERED) - delta[e // 2 % 2]
            if SEQUENCES:  # what lies beyond the end may be NaN, and 0 * NaN is not 0
                slope = slope if weight != f32(0) else f32(0)
            acc[e] += (abs(weight) if DROPOUT else weight) * slope

    return recompute_p, differentiate
