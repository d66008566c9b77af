"""`BlockMask`: which blocks of pairs see each other, for patterns too large to write down pair by pair."""

from typing import NamedTuple

import numpy as np

from numba_flash.arguments import arrays, checks

LARGEST = 2**30  # as `problem.MAX_LENGTH`: positions stay within int32 in every kernel


class BlockSize(NamedTuple):
    """Queries and keys of a block.

    Attributes
    ----------
    queries, keys : int
        From 1 to `LARGEST`.
    """

    queries: int
    keys: int

    def counts(self, queries: int, keys: int) -> tuple[int, int]:
        """Blocks along so many queries and keys, of which the last ones may be cut off."""
        return -(-queries // self.queries), -(-keys // self.keys)

    def divided_by(self, queries: int, keys: int) -> bool:
        """True if each tile of that size lies within one block."""
        return self.queries % queries == 0 and self.keys % keys == 0


class BlockMask:
    """A `mask` of blocks: query i sees key j iff ``blocks[..., i // bm, j // bn]``.

    It takes the memory of its blocks, and time in proportion to what is visible: for patterns such as local and global, dilated, or
    document masks of lengths whose mask of pairs nobody could store.

    Parameters
    ----------
    blocks : array of bool, broadcastable to (..., Hq, ceil(Nq / bm), ceil(Nk / bn))
        False hides all pairs of a block. NumPy, CuPy, or what `forward` takes besides; 2 to 5 dimensions, any strides, read by each call.
    block_size : int, or (int, int) as a tuple or list
        bm queries and bn keys of a block. The last blocks may reach beyond the last query and key.

    Attributes
    ----------
    blocks : array of bool
        As given.
    block_size : (int, int)
        bm and bn.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or value. Whether there are as many blocks as q and k have is checked by `forward` and `backward`.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> near = np.abs(np.subtract.outer(np.arange(500), np.arange(500))) <= 1
    >>> mask = numba_flash.BlockMask(near, 128)  # of 64,000 queries and keys: 250 KB, where one of pairs has 4 GB
    >>> numba_flash.BlockMask(near[:2, :2], (2, 3)).dense(3, 5).astype(int)
    array([[1, 1, 1, 1, 1],
           [1, 1, 1, 1, 1],
           [1, 1, 1, 1, 1]])
    """

    __slots__ = ("block_size", "blocks")

    def __init__(self, blocks, block_size):
        self.blocks, self.block_size = _checked_blocks(checks.adopt("mask.blocks", blocks)), _checked_size(block_size)

    def __repr__(self) -> str:
        return f"BlockMask(blocks of shape {tuple(self.blocks.shape)}, block_size={tuple(self.block_size)})"

    def dense(self, queries: int, keys: int):
        """The mask of pairs, for tests and small problems.

        Parameters
        ----------
        queries, keys : int
            Nq and Nk.

        Returns
        -------
        array of bool, shape (..., Nq, Nk)
            A new array where the blocks are; axes that these broadcast keep the size 1.
        """
        with arrays.beside(self.blocks):
            xp = np if isinstance(self.blocks, np.ndarray) else arrays.cupy()
            i, j = (xp.arange(n) // size for n, size in zip((queries, keys), self.block_size, strict=True))
        rows, columns = self.blocks.shape[-2:]
        return self.blocks[..., (i if rows != 1 else i * 0)[:, None], j if columns != 1 else j * 0]


def _checked_blocks(blocks):
    checks.layout("mask.blocks", blocks)
    if blocks.dtype.name != "bool":
        raise TypeError(f"mask.blocks.dtype ({blocks.dtype.name}) must be bool")
    if not 2 <= blocks.ndim <= 5:
        raise ValueError(
            f"mask.blocks must have 2 to 5 dimensions (..., blocks of queries, blocks of keys); got shape {tuple(blocks.shape)}"
        )
    return blocks


def _checked_size(size) -> BlockSize:
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2:
        raise TypeError(f"mask.block_size must be an integer or a tuple (queries, keys); got {size!r}")
    sizes = BlockSize(*(checks.integer("mask.block_size", n) for n in pair))
    if not all(1 <= n <= LARGEST for n in sizes):
        raise ValueError(f"mask.block_size must lie between 1 and {LARGEST}; got {size!r}")
    return sizes
