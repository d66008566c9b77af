"""Tiles of kernels of the `sm80` tier that have all keys of a head in shared memory, as planes of
float16 that they make of float32 there. Numba is not imported here.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from numba_flash.cuda.arguments import planes_of
from numba_flash.cuda.sm80.tiles import KB, ROWS, WARP, Hardware, padded, pitch


class HeadLayout(NamedTuple):
    """Where a block keeps what in shared memory, in bytes: planes of K and V, their centres, and
    what warps tell each other of their largest numbers; and what there is in all.
    """

    k: int
    v: int
    centres: int
    extremes: int
    bytes: int


@dataclass(frozen=True)
class HeadTile:
    """Shape of a block of the forward pass that has all keys of a head.

    Attributes
    ----------
    warps, m_tiles : int
        Warps of a block; times 16, the rows that each has at a time.
    columns : int
        Keys of which a warp has scores in registers at a time.
    keys : int
        Of a head there is room for so many.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    """

    warps: int
    m_tiles: int
    columns: int
    keys: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def block_m(self) -> int:
        return ROWS * self.m_tiles

    @property
    def block_n(self) -> int:
        return self.columns

    def layout(self, d: int, dv: int) -> HeadLayout:
        pitches = pitch(2 * padded(d)), pitch(2 * padded(dv))
        sizes = *(self.keys * each for each in pitches), 2 * 4 * MOST_COLUMNS, 2 * 8 * self.warps
        return HeadLayout(*accumulate(sizes, initial=0))


# Planes of so many keys leave room for a second block; each head's fill so many chunks of a row.
MOST_KEYS, MOST_COLUMNS, LEAST_SHARED = 384, 32, 227 * KB
FEWEST_ROWS = 64  # what is made of keys is worth it for so many queries
FORWARD_HEAD = 6, 1, 32, 2  # Not timed.


def forward_head_tile(problem, hardware: Hardware) -> HeadTile | None:
    """The tile where a bias is all that may change scores, and heads are short and many; else
    None.
    """
    p, o = problem, problem.options
    if o.softcap or o.score_mod or o.mask or o.dropout or o.sequences or p.band != "none":
        return None
    if planes_of(p) != 2 or hardware.turing or hardware.shared_limit < LEAST_SHARED:
        return None
    if any(MOST_COLUMNS % padded(each) for each in (p.d, p.dv)):
        return None
    if not (0 < p.nk <= MOST_KEYS and p.nq >= FEWEST_ROWS):
        return None
    warps, m_tiles, columns, min_blocks = FORWARD_HEAD
    rows = 4 * WARP * warps // padded(min(p.d, p.dv))  # that are copied at a time
    unit = math.lcm(columns, rows)
    return HeadTile(warps, m_tiles, columns, -(-p.nk // unit) * unit, min_blocks)


def many_heads(problem, multiprocessors: int) -> bool:
    """A block for each head fills the GPU."""
    return math.prod(problem.batch) * problem.hq >= multiprocessors
