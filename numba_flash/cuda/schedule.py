"""Which piece of the problem a block works on."""

from numba import njit


@njit
def work_item(index, blocks, heads, batch1):
    """(batch0, batch1, head, row block) of a one-dimensional grid; blocks of one head are neighbours, the last block first.

    With a causal mask the last rows see the most keys, so the longest work starts first.
    """
    block = blocks - 1 - index % blocks
    index //= blocks
    head = index % heads
    index //= heads
    return index // batch1, index % batch1, head, block
