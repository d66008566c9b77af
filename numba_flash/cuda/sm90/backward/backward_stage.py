"""What a consumer of the Hopper backward pass does to a tile of scores between S^T = K Q^T and
dV = dV + P^T dO, dK = dK + dS^T Q: a `BackwardStage`. The loop,
`numba_flash.cuda.sm90.backward.backward`, is the same for all:
`numba_flash.cuda.sm90.backward.plain_gradients` and
`numba_flash.cuda.sm90.backward.option_gradients`.
"""

from typing import Any, NamedTuple


class PairRegisters(NamedTuple):
    """Arrays in a consumer's registers that belong to pairs.

    Attributes
    ----------
    slope : float32
        Derivatives of scores, where options bend them.
    bias_mask : uint32
        Bias and mask of a part of a tile.
    box : uint32
        Bias of this part and those after it, if the copy engine brings it.
    """

    slope: Any
    bias_mask: Any
    box: Any


class BackwardStage(NamedTuple):
    """Device functions of a consumer, and what the loop has to know to use them.

    A consumer goes through the n-th tile of all in parts of ``tile.columns`` queries. `step` says
    which tile of the work item that is, as in `numba_flash.cuda.sm90.backward.softmax_backward`,
    unless that is noted. A part, `x`, is the stage's own. `held` is a `PairRegisters`; `given` are
    the kernel's arguments.

    Attributes
    ----------
    begin_item : function
        ``begin_item(held, sT, smem, item_n, me, n, count, k_rows, given)``: wait for K and V of a
        work item whose first tile is the n-th, and, if the tile says ahead, for (1) S^T of that;
        `count` is how many tiles each head has. Returns the first step, and `end`, the number of
        the first tile of the next work item.
    begin_tile : function
        ``begin_tile(smem, item_n, me, n, step)``: wait for Q of the n-th tile, unless its S^T was
        started ahead, and perhaps for its dO.
    start_scores : function
        ``start_scores(sT, smem, me, n, part, k_rows)``: start (1) S^T = K Q^T of a part.
    wait_do : function
        ``wait_do(smem, item_n, me, n, step)``: wait for dO, unless `begin_tile` has.
    part_of : function
        ``part_of(smem, item_n, me, n, part, step, given)``: `x`.
    release_before : function
        ``release_before(smem, n, begin)``: (1) of the n-th tile is complete, and so are all
        products of the tile before it; `begin` is the first tile of the work item.
    recompute_p : function
        ``recompute_p(sT, held, smem, item_n, me, n, part, x, given)``: the options, (2) P^T =
        exp(S^T
        - lse), in the place of S^T, and dropout. What belongs to the next part may be read ahead.
    differentiate_cap : function
        ``differentiate_cap(dpT, sT, smem, me, n, given)``: dP^T - delta times a softcap's slope, if
        there is a softcap and no array of slopes.
    differentiate : function
        ``differentiate(dpT, sT, held, smem, me, n, x, chunk, given)``: (5) dS^T, in the place of
        dP^T, of 16 columns: a chunk of 8 and the next.
    next_step : function
        ``next_step(smem, item_n, me, step)``: the step after one.
    start_next : function
        ``start_next(sT, smem, item_n, me, n, end, step, k_rows)``: start (1) of the tile after the
        n-th; only of a tile that says ahead.
    read_first : function
        ``read_first(held, smem, item_n, me, n, end, given)``: what belongs to the first part of the
        n-th tile, if that is of this work item, may be read ahead.
    release_last : function
        ``release_last(smem, n)``: all products of the tile before the n-th, the last one of a work
        item, are complete.
    factors : function
        ``factors(smem, item_n, factor, scaled, scales)``: what dV and dK are multiplied by.
    early : bool
        The tile of dQ before is handed over before S is waited for, or else when P is there.
    interleaved : bool
        Keys, and so rows of dK and dV in registers, are in the order of
        `numba_flash.cuda.sm90.interleave`.
    slopes, words, kept : int
        Registers of each array of `PairRegisters`.
    """

    begin_item: Any
    begin_tile: Any
    start_scores: Any
    wait_do: Any
    part_of: Any
    release_before: Any
    recompute_p: Any
    differentiate_cap: Any
    differentiate: Any
    next_step: Any
    start_next: Any
    read_first: Any
    release_last: Any
    factors: Any
    early: bool
    interleaved: bool
    slopes: int
    words: int
    kept: int
