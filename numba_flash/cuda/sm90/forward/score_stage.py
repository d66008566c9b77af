"""What a consumer of the Hopper forward pass does to a tile of scores between S = Q K^T and
O = O + P V: a `ScoreStage`. The loop, `numba_flash.cuda.sm90.forward.forward`, is the same for all:
`numba_flash.cuda.sm90.forward.plain_scores` and `numba_flash.cuda.sm90.forward.option_scores`.
"""

from typing import Any, NamedTuple


class ScoreStage(NamedTuple):
    """Device functions of a consumer, and what the loop has to know to use them.

    A tile of scores, `x`, is a named tuple of the stage's own: the loop asks for ``x.count``, the
    tiles of the work item, ``x.item_n``, its number, and ``x.q_tile``, the descriptor of the
    consumer's rows of Q.

    Attributes
    ----------
    first : function
        ``first(smem, item_n, item, o, extras)``: the first tile of a `BegunItem` work item.
    following : function
        ``following(x, before, t)``: the t-th tile. `x` is the work item's first tile, which the
        loop does not change; `before` is the one before the t-th.
    masked : function
        ``masked(x)``: how many tiles, the first ones, may hide something.
    rest : function
        ``rest(x)``: keys from the first column of the tile on.
    begin_sums : function
        ``begin_sums(s, smem, me, n)``: what scores of the n-th tile of all begin with.
    read : function
        ``read(bias_mask, smem, me, n, x, extras, first)``: what belongs to these scores, into
        registers, unless that was done ahead, as of all but the `first` tile of a work item.
    weigh : function
        ``weigh(s, bias_mask, m_i, l_i, alpha, x, scales, smem, me, n, more)``: the options, then
        (2) m_i, (3) P, (4) l_i, and dropout. With `more` tiles in the work item, what belongs to
        the next one's scores may be read ahead.
    weigh_clear : function
        The same of a tile that hides nothing.
    numbers : function
        ``numbers(x, scales)``: what the end of a work item depends on.
    log_sum, factor : function
        ``log_sum(m, l, numbers)`` and ``factor(smem, item_n, extras, numbers)`` of rows at the end
        of a work item, see `numba_flash.cuda.sm90.forward.finish`.
    reset : function
        ``reset(m_i, l_i)``: before a work item's first tile.
    held : int
        Registers of `bias_mask`.
    """

    first: Any
    following: Any
    masked: Any
    rest: Any
    begin_sums: Any
    read: Any
    weigh: Any
    weigh_clear: Any
    numbers: Any
    log_sum: Any
    factor: Any
    reset: Any
    held: int
