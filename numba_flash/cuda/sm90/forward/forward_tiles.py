"""Tiles of the forward pass on Hopper, with what was measured. Numba is not imported here."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from numba_flash.cuda.arguments import planes_of
from numba_flash.cuda.score.swizzle import NARROW, NARROW_ROW_BYTES, panel_bytes, panels
from numba_flash.cuda.sm90.rings import Buffer, Slots, lay_out
from numba_flash.cuda.sm90.tiles import ANY, SHARED_LIMIT, STEP, WORK, Consumers, Row, fitting


@dataclass(frozen=True)
class Tile(Consumers):
    """Shape of a block's work in `numba_flash.cuda.sm90.forward.forward` and `forward_split`.

    Attributes
    ----------
    block_m, block_n : int
        Rows and columns of the score tile; 64 rows per consumer warp group, columns a multiple of
        16.
    q_stages, stages : int
        Slots of the ring of Q tiles, and of those of K and of V tiles.
    o_panels : int
        Panels of 64 columns of O that a consumer stages at a time; 0 if registers store O.
    ping_pong : bool
        Consumers take turns at starting products.
    pair_stages : int
        Slots of the ring of what belongs to pairs (`numba_flash.cuda.sm90.pair_tiles`), a bias or a
        mask; 0 if threads read it from memory.
    keys_of_element : int
        Keys of an element of 16 bits: 1 of a bias, 2 of a mask.
    pairs_ahead : bool
        What belongs to the pairs of a tile is read as soon as that of the tile before has been
        used.
    packs_early : bool
        P is rounded while exponentials are computed, not after O has been rescaled.
    relative : bool
        With each tile of K comes what a `score_mod` adds for each distance.
    planes : int
        Of each of q, k and v (`numba_flash.cuda.passes.write_planes`).
    """

    block_m: int
    block_n: int
    q_stages: int
    stages: int
    o_panels: int
    ping_pong: bool
    pair_stages: int = 0
    keys_of_element: int = 1
    pairs_ahead: bool = False
    packs_early: bool = field(default=False, kw_only=True)
    relative: bool = field(default=False, kw_only=True)
    planes: int = field(default=1, kw_only=True)

    @property
    def pair_panels(self) -> int:
        return panels(self.block_n // self.keys_of_element)

    @property
    def pair_bytes(self) -> int:
        return self.pair_panels * panel_bytes(self.block_m)

    def layout(self, head_dim: int, head_dim_v: int) -> NamedTuple:
        """Shared memory; `o` is where O is staged. In a slot, the panels of the low plane come
        after those of the high one.
        """
        of = lambda columns, rows: self.planes * panels(columns) * panel_bytes(rows)
        o_panels = min(self.o_panels, panels(head_dim_v))
        table = {
            "o": Buffer(panel_bytes(self.block_m), o_panels),
            "q": Slots(of(head_dim, self.block_m), self.q_stages),
            "k": Slots(of(head_dim, self.block_n), self.stages),
            "v": Slots(of(head_dim_v, self.block_n), self.stages),
            "work": WORK,
        }
        relative = {"relative": Buffer(self.relative_bytes, self.stages)} if self.relative else {}
        pairs = {"pairs": Slots(self.pair_bytes, self.pair_stages)} if self.pair_stages else {}
        return lay_out(table, relative | pairs, o_panels=o_panels)


# Per kind of mask, up to a number of keys and head dimensions. A larger tile reads K and V fewer
# times, but leaves room for fewer slots, and has more hidden scores at the edge of a band. Where P
# is packed early or late was chosen for each row. Neighbours of a row are up to 6 % slower. On an
# H100 cuDNN is slower, too, but for N = 512 under a band at D = 128 and 256. Measured:
# docs/lab/hopper_forward.md, `FORWARD_TILES`.
FORWARD_TILES = {
    "full": (
        Row(ANY, 64, 64, Tile(192, 128, 2, 4, 1, True, packs_early=True)),
        Row(1024, 128, 128, Tile(128, 128, 2, 2, 2, True)),
        Row(ANY, 128, 128, Tile(128, 128, 2, 2, 2, True, packs_early=True)),
        Row(ANY, 256, 256, Tile(128, 64, 1, 2, 2, False, packs_early=True)),
    ),
    "band": (
        Row(1024, 64, 64, Tile(128, 128, 2, 4, 1, True, packs_early=True)),
        Row(ANY, 64, 64, Tile(192, 128, 2, 4, 1, True, packs_early=True)),
        Row(1024, 128, 128, Tile(128, 128, 2, 2, 2, True)),
        Row(12288, 128, 128, Tile(128, 128, 2, 2, 2, True, packs_early=True)),
        Row(ANY, 128, 128, Tile(128, 176, 1, 2, 1, True, packs_early=True)),
        Row(ANY, 256, 256, Tile(128, 64, 1, 2, 2, False, packs_early=True)),
    ),
}
# Where the keys are split into parts: stores of float32 parts leave fewer registers for the tile.
KV_SPLIT_TILES = (
    Row(ANY, 64, 64, Tile(128, 128, 2, 4, 1, True)),
    Row(ANY, 128, 128, Tile(128, 112, 2, 2, 2, True)),
    Row(ANY, 256, 256, Tile(128, 48, 1, 2, 2, False)),
)


def forward_tile(problem) -> Tile:
    """Tile of the forward kernel."""
    return fitting(FORWARD_TILES["full" if problem.band == "none" else "band"], problem)


def kv_split_tile(problem) -> Tile:
    """Tile of the forward kernel where the keys are split."""
    return fitting(KV_SPLIT_TILES, problem)


def relative_tile(problem, in_kv_splits=False) -> Tile:
    """That of both where sums begin with what a `score_mod` adds; where there is no room for these
    numbers, O is stored by single panels, or tiles have 16 keys less.
    """
    p = problem
    tile = replace(kv_split_tile(p) if in_kv_splits else forward_tile(p), relative=True)
    fewer = replace(tile, o_panels=1)
    tiles = (tile, fewer, replace(fewer, block_n=tile.block_n - 16))
    return next(each for each in tiles if each.layout(p.d, p.dv).bytes <= SHARED_LIMIT)


# ---- with bias, mask, dropout or a function of the score

# By how many words a lane keeps of bias and mask for four of its scores. They were chosen by
# registers. Where P is packed early, dropout is a few percent faster at D = 128; elsewhere, with a
# bias or a mask, too, it is all the same. Measured: docs/lab/hopper_forward.md, `OPTION_TILES`.
OPTION_TILES = {
    0: (
        Row(ANY, 64, 64, Tile(128, 128, 2, 4, 1, True)),
        Row(ANY, 128, 128, Tile(128, 128, 2, 2, 2, True, packs_early=True)),
        Row(ANY, 256, 256, Tile(128, 64, 1, 2, 2, False)),
    ),
    1: (
        Row(ANY, 64, 64, Tile(128, 128, 2, 4, 1, True)),
        Row(ANY, 128, 128, Tile(128, 96, 2, 2, 2, True)),
        Row(ANY, 256, 256, Tile(128, 48, 1, 2, 2, False)),
    ),
    2: (
        Row(ANY, 64, 64, Tile(128, 96, 2, 4, 1, True)),
        Row(ANY, 128, 128, Tile(128, 64, 2, 3, 2, True)),
        Row(ANY, 256, 256, Tile(128, 32, 1, 3, 2, False)),
    ),
    3: (
        Row(ANY, 64, 64, Tile(128, 64, 2, 4, 1, True)),
        Row(ANY, 128, 128, Tile(128, 48, 2, 3, 2, True)),
        Row(ANY, 256, 256, Tile(128, 32, 1, 3, 2, False)),
    ),
}


# Where the copy engine brings the bias, or the mask, up to D = 64. What belongs to pairs takes room
# that K and V have otherwise; in return no thread waits for it, and the kernel is faster by more
# than a quarter than with threads that read it from memory, and faster than `sm80` and cuDNN. A
# bias is read ahead, by consumers that do not take turns. Measured: docs/lab/hopper_forward.md,
# `COPYING`.
COPYING = {
    "bias": (Row(ANY, 64, 64, Tile(128, 128, 2, 3, 1, False, 2, 1, True)),),
    "mask": (Row(ANY, 64, 64, Tile(128, 128, 2, 4, 1, True, 2, 2)),),
}


def words_held(options) -> int:
    """Words that a lane keeps of bias and mask for four of its scores."""
    bias = {None: 0, "float32": 2}.get(options.bias, 1)
    return bias + int(options.mask)


def options_tile(problem) -> Tile:
    """That of a problem whose threads read bias and mask from memory."""
    return fitting(OPTION_TILES[words_held(problem.options)], problem)


def copying_tile(problem, name: str) -> Tile | None:
    """That of a problem whose "bias" or "mask" the copy engine brings, if there is one."""
    return fitting(COPYING[name], problem)


# ---- float32 in planes of float16

# Tiles of float32 have 128 keys, of which registers hold S and its low sums, or P in two planes,
# unless they have to hold O with more than 64 columns. A larger tile is a little faster for long
# sequences and slower for short ones; these were timed when sums of S still were of all columns.
# Measured: docs/lab/hopper_forward.md, `PLANES_TILES`.
PLANES_TILES = (
    Row(ANY, 64, 64, Tile(128, 128, 1, 2, 0, True, planes=2)),
    Row(ANY, 128, 128, Tile(128, 64, 1, 2, 0, True, planes=2)),
)


def planes_tile(problem) -> Tile:
    """Tile of the forward kernel of float32."""
    return replace(fitting(PLANES_TILES, problem), planes=planes_of(problem))


# ---- a bias that stays in shared memory

MOST_STAGES = 2  # that help


class Kind(NamedTuple):
    """Rows of a block, most keys of a tile, for registers, and whether the bias is float32."""

    rows: int
    keys: int
    wide: bool


# The first whose bias fits, and that has not more rows than the next, serves. More rows read K and
# V fewer times; a bias that is kept as float32 needs no conversion, but more room. With the first
# kind, triangle attention takes a tenth less time than FlexAttention's, with the others as much;
# with -inf in the bias it takes longer. In `sm80` it does not pay to keep the bias. Work of the
# next tile beside the softmax, or fewer instructions for the bias, make the kernel slower: it waits
# for something else. Measured: docs/lab/hopper_forward.md, `KINDS`.
KINDS = (Kind(192, 128, False), Kind(128, 192, True), Kind(128, 192, False))


@dataclass(frozen=True)
class ResidentTile(Consumers):
    """Shape of a block's work.

    Attributes
    ----------
    block_m, block_n : int
        Rows and columns of the score tile; 64 rows per consumer, columns a multiple of 16.
    tiles : int
        Of all keys.
    stages : int
        Slots of the rings of K and of V.
    wide : bool
        The bias is kept as float32, else as it is, in 16 bits.
    """

    block_m: int
    block_n: int
    tiles: int
    stages: int
    wide: bool
    q_stages: ClassVar[int] = 1

    @property
    def resident_bytes(self) -> int:
        """Of the bias."""
        return self.block_m * self.block_n * self.tiles * (4 if self.wide else 2)

    def layout(self, head_dim: int = NARROW, head_dim_v: int = NARROW) -> NamedTuple:
        """Shared memory, of head dimensions up to `NARROW`."""
        return lay_out(
            {
                "resident": Buffer(self.resident_bytes),
                "q": Slots(self.block_m * NARROW_ROW_BYTES, self.q_stages),
                "k": Slots(self.block_n * NARROW_ROW_BYTES, self.stages),
                "v": Slots(self.block_n * NARROW_ROW_BYTES, self.stages),
            }
        )


def resident_tile(problem) -> ResidentTile | None:
    """That for a problem with such a bias, if it can be kept. As float32 it takes two instructions
    fewer for each score than in 16 bits.
    """
    p = problem
    kinds = [kind for kind in KINDS if kind.wide or p.options.bias != "float32"]
    rows_of = lambda kind: kind.rows * -(-p.nq // kind.rows)
    fewest = min(map(rows_of, kinds))
    wanted = (
        _of_keys(kind, p.nk, stages)
        for kind in kinds
        if rows_of(kind) == fewest
        for stages in range(MOST_STAGES, 0, -1)
    )
    return next((tile for tile in wanted if tile.layout().bytes <= SHARED_LIMIT), None)


def _of_keys(kind: Kind, keys: int, stages: int) -> ResidentTile:
    tiles = -(-keys // kind.keys)
    return ResidentTile(kind.rows, -(-keys // (tiles * STEP)) * STEP, tiles, stages, kind.wide)
