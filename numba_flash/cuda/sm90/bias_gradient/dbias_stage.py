"""What the loop of the gradient of a bias on Hopper, `numba_flash.cuda.sm90.bias_gradient.dbias`,
is given: a `DbiasStage`; and what both kinds have in common: dS, and how tiles of Q and dO come.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import f32, i32, inline, once, u32, u64
from numba_flash.cuda.score.softmax import raised_backward
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type

ROWS = 64  # queries of a consumer
CHUNK = 64  # rows of queries, of which memory has whole ones


class DbiasWalk(NamedTuple):
    """Which tiles come after each other: device functions of a consumer, `w` being its
    `numba_flash.cuda.sm90.bias_gradient.dbias.ConsumerWork`.

    Where it is, `x`, is a named tuple of the walk's own.

    Attributes
    ----------
    first : function
        ``first(w)``: where it begins.
    is_tile, has_steps : function
        ``is_tile(w, x)``: there is a tile of the gradient; ``has_steps(x)``: it has steps.
    look : function
        ``look(w, x, shows)``: the `ScoreTile`.
    proceed, leave : function
        ``proceed(w, x, step)``: where it is after a step; ``leave(w, x)``: after those of a tile.
    """

    first: Any
    is_tile: Any
    has_steps: Any
    look: Any
    proceed: Any
    leave: Any


class DbiasStage(NamedTuple):
    """What happens to a tile of scores, and to a tile of the gradient: device functions likewise,
    and what the loop has to know.

    Attributes
    ----------
    walk : DbiasWalk
    take : function
        ``take(w, x)``: bring the bias of a tile of the gradient; `shows`, whether it hides nothing.
    read : function
        ``read(part, w, x, step)``: what else belongs to the scores of a part of the keys; returns
        where these are.
    exponents : function
        ``exponents(part, w, x, step, here)``: S - lse in base 2, with the options, in the place of
        P; `here` is what `read` returned.
    weigh : function
        ``weigh(w, step, here)``: P, and dropout.
    finish, end : function
        ``finish(w, x)``: store a tile of the gradient; ``end(w, x)``: or the last one.
    parameters : function
        ``parameters(given)``: numbers of the options, of the kernel's arguments.
    ahead : bool
        S of a part of the keys is started while P of the part before is made. Then each tile of
        the gradient has steps.
    held, number
        Registers of the bias, and their type.
    rings, producers, senders, arguments
        What `numba_flash.cuda.sm90.hopper_kernel` has to know, beside consumers.
    """

    walk: DbiasWalk
    take: Any
    read: Any
    exponents: Any
    weigh: Any
    finish: Any
    end: Any
    parameters: Any
    ahead: bool
    held: int
    number: Any
    rings: tuple
    producers: tuple
    senders: int
    arguments: dict


class ScoreTile(NamedTuple):
    """A tile of scores.

    Attributes
    ----------
    n, m : uint32
        Numbers of its tile of Q, behind which dO is, and of its first one of keys.
    next_n, next_m : uint32
        If the stage is ahead, the same numbers of the step whose S is started before this one ends.
    begins, ends, waits : bool
        dO has to be waited for; its rows are used for the last time; Q of the next has to be waited
        for, if the stage is ahead.
    last : bool
        It completes a tile of the gradient.
    own
        What the stage wants to know of it.
    """

    n: int
    m: int
    next_n: int
    next_m: int
    begins: bool
    ends: bool
    waits: bool
    last: bool
    own: Any


@inline
def first_row(me):
    """This thread's first query in a tile; found again where it is wanted, for registers."""
    thread = ptx.thread_here()
    return i32(me * ROWS + thread % 128 // 32 * 16 + thread % 32 // 4)


@once
def build_differentiate(options, scores, bfloat16):
    """``differentiate(acc, p, dp, delta, parameters)``: (5) acc += dS = P * (dP - delta), where P
    is negative if dropped.
    """
    SCORES, DROPOUT, SEQUENCES = scores, bool(options.dropout), options.sequences
    LOWERED = 2.0 ** -raised_backward(bfloat16)

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

    return differentiate


def build_load_rows(columns, tile, layout):
    """``load_rows(tensor_map, smem, n, place, values)``: have the n-th tile of Q or dO fetched, and
    its rows' lse or delta; instead of those beyond the last any others.
    """
    ROWS, VALUES, BYTES = one_type(layout.rows), layout.values, 4 * tile.block_m
    CHUNKS, CHUNK_BYTES = tile.block_m // CHUNK, 4 * CHUNK
    load = pipeline.build_load(ROWS, columns, tile.block_m, BYTES)

    @inline
    def load_rows(tensor_map, smem, n, place, values):
        head = values[index(place.b0), index(place.b1), index(place.head)]
        address, last = ptx.global_address(head), i32(head.shape[0] - CHUNK)
        to = u32(smem + u32(VALUES) + n % u32(ROWS.slots) * u32(BYTES))
        pipeline.wait_free(smem, ROWS, n)
        load(tensor_map, smem, n, place)
        ready = pipeline.mbarrier(smem, ROWS, ROWS.ready, n)
        for chunk in range(CHUNKS):
            row = min(i32(place.row + chunk * CHUNK), last)
            source = u64(address + u64(row * 4))
            ptx.bulk_load(u32(to + u32(chunk * CHUNK_BYTES)), source, u32(CHUNK_BYTES), ready)

    return load_rows
