"""Tiles of the gradient of a bias on Hopper, and of all gradients of narrow heads with a bias that
batch elements share, which kernels keep. Numba is not imported here.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from numba_flash.cuda.score.swizzle import NARROW, NARROW_ROW_BYTES, PANEL, panel_bytes, panels
from numba_flash.cuda.sm90.backward.options_tiles import MOST
from numba_flash.cuda.sm90.rings import Buffer, Slots, lay_out, up_to
from numba_flash.cuda.sm90.tiles import ANY, SHARED_LIMIT, Consumers, Row, WarpGroups, fitting

WARPS = 4  # of a consumer
LOADERS = 3  # threads that read what is written down of a step, and have its tiles fetched
NOTE_BYTES, NOTES = 80, 8  # slots further ahead than tiles can be
ALL_REGISTERS = 504  # per thread, of three warp groups


@dataclass(frozen=True)
class DbiasTile(WarpGroups):
    """Shape of a block's work in `numba_flash.cuda.sm90.bias_gradient.dbias`.

    Attributes
    ----------
    part, parts : int
        A consumer has scores of so many keys in registers at a time; so many times that are the
        keys of a block.
    row_stages, key_stages : int
        Slots of the ring of Q and dO tiles, and of that of parts of K and V tiles, or, where
        queries stay, of tiles of K with V behind.
    fewest : int
        Registers per thread of the producer's warp group; the consumers have the others.
    elements : int
        Batch elements that are summed, Q and dO of all of which stay in shared memory, where tiles
        of Q and dO of the next element come while this one's are in use; 0 if they do not stay.
    pair_stages : int
        Slots of the ring of tiles of the bias where they do, from which the gradient of the tile
        before is stored.
    """

    part: int
    parts: int
    row_stages: int
    key_stages: int
    fewest: int = 40
    elements: int = 0
    pair_stages: int = 0
    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 128
    pair_panels: ClassVar[int] = 1

    @property
    def registers(self) -> tuple[int, int]:
        return self.fewest, (ALL_REGISTERS - self.fewest) // self.consumers

    @property
    def block_n(self) -> int:
        return self.part * self.parts

    @property
    def apart(self) -> bool:
        """K and V have slots of their own."""
        return not self.elements

    @property
    def pair_bytes(self) -> int:
        return self.pair_panels * panel_bytes(self.block_m)

    def layout(self, head_dim: int, head_dim_v: int) -> NamedTuple:
        """Shared memory; `values` are the lse or delta of each tile of `rows`, and `sums` where a
        block's sums over its rows or columns go.
        """
        most, together = max(panels(head_dim), panels(head_dim_v)), 1 if self.apart else 2
        sums = 4 * max(WARPS * self.consumers * self.block_n, self.block_m)
        table = {
            "values": Buffer(4 * self.block_m, self.row_stages),
            **({"sums": Buffer(sums)} if self.apart else {}),
            "rows": Slots(most * panel_bytes(self.block_m), self.row_stages),
            "keys": Slots(together * most * panel_bytes(self.part), self.key_stages),
        }
        more = Slots(NOTE_BYTES, NOTES) if self.apart else Slots(self.pair_bytes, self.pair_stages)
        return lay_out(table | {"notes" if self.apart else "pairs": more})


# Tiles of 128 queries by 128 keys; and those for where registers have to hold more than a bias of
# 16 bits and one other option. Tiles of 192 keys need fewer reads of queries, but lack registers,
# and gradients take 3 to 4 % longer. Measured: docs/lab/hopper_backward.md, `TILES`.
TILES = (
    Row(ANY, 64, 64, DbiasTile(64, 2, 4, 16, 40)),
    Row(ANY, MOST, MOST, DbiasTile(64, 2, 4, 5, 40)),
)
CROWDED = (
    Row(ANY, 64, 64, DbiasTile(32, 4, 4, 16, 56)),
    Row(ANY, MOST, MOST, DbiasTile(32, 4, 4, 8, 56)),
)


def dbias_tile(problem) -> DbiasTile:
    """The one whose bias and sums registers have room for."""
    p, o = problem, problem.options
    several = bool(o.mask) + bool(o.score_mod) + bool(o.sequences) > 1
    rows = CROWDED if o.bias == "float32" or o.dropout or several else TILES
    return fitting(rows, p)


# By batch elements that are summed. Sums of several elements stay in registers, so that the kernel
# of the bias takes two thirds of the time that it takes with `TILES`; K and V have no slots of
# their own: with these, and S of the next step begun behind the exponentials, it took a fifth
# longer. Of one to three elements nothing was timed. Measured: docs/lab/hopper_backward.md,
# `ROWS_TILES`.
ROWS_TILES = {
    1: DbiasTile(PANEL, 1, 4, 4, elements=1, pair_stages=2),
    2: DbiasTile(PANEL, 1, 4, 4, elements=2, pair_stages=2),
    3: DbiasTile(PANEL, 1, 6, 4, elements=3, pair_stages=2),
    4: DbiasTile(PANEL, 1, 8, 4, elements=4, pair_stages=1),
}


def dbias_rows_tile(problem, elements: int) -> DbiasTile | None:
    """The one whose queries stay in shared memory, if there is room for them."""
    return ROWS_TILES.get(elements) if max(problem.d, problem.dv) <= PANEL else None


# ---- with a bias that is kept

QUERIES = 64  # of a tile
ROW_BYTES = 8  # of what is known of a row of queries: its lse in base 2, and delta
CHUNK = 64  # keys of which a consumer has scores in registers at a time
MOST_KEYS = 384  # for whose dbias there are registers
PATTERN = 8 * NARROW_ROW_BYTES  # bytes that the swizzle repeats after
WIDE, HALF = 4, 2  # bytes of an element of the bias that is kept


@dataclass(frozen=True)
class KeysTile(Consumers):
    """Shape of a block of dK and dV.

    Attributes
    ----------
    block_m : int
        Keys, 64 of each consumer.
    tiles : int
        Of queries of a head.
    stages, kv_stages : int
        Slots of tiles of queries, and of keys.
    queries : int
        Of a tile.
    """

    block_m: int
    tiles: int
    stages: int
    kv_stages: int
    queries: int

    @property
    def resident_bytes(self) -> int:
        """Of the bias."""
        return HALF * self.block_m * self.queries * self.tiles

    def layout(self) -> NamedTuple:
        """Shared memory; where dO, what is known of rows, and V are within their slots."""
        of_tile, of_keys = self.queries * NARROW_ROW_BYTES, self.block_m * NARROW_ROW_BYTES
        of_rows = up_to(self.queries * ROW_BYTES, PATTERN)
        table = {
            "resident": Buffer(self.resident_bytes),
            "q": Slots(2 * of_tile + of_rows, self.stages),
            "kv": Slots(2 * of_keys, self.kv_stages),
        }
        return lay_out(table, do=of_tile, rows=2 * of_tile, v=of_keys)


@dataclass(frozen=True)
class QueriesTile(WarpGroups):
    """Shape of a block of dQ and dbias, which has 64 queries and all keys.

    Attributes
    ----------
    consumers : int
        Each has as many keys.
    chunks : int
        Times 64, keys of a consumer.
    """

    consumers: int
    chunks: int
    stages: ClassVar[int] = 2
    block_m: ClassVar[int] = QUERIES

    @property
    def keys(self) -> int:
        """Of a consumer."""
        return CHUNK * self.chunks

    @property
    def block_n(self) -> int:
        return self.consumers * self.keys

    @property
    def resident_bytes(self) -> int:
        """Of the bias, as float32."""
        return WIDE * QUERIES * self.block_n

    def layout(self) -> NamedTuple:
        """Shared memory; where dO, O and V are within their slots."""
        of_tile, of_keys = QUERIES * NARROW_ROW_BYTES, self.block_n * NARROW_ROW_BYTES
        table = {
            "resident": Buffer(self.resident_bytes),
            "q": Slots(3 * of_tile, self.stages),
            "kv": Slots(2 * of_keys, self.stages),
            "dq": Slots((self.consumers - 1) * 4 * QUERIES * NARROW, 1),
            "rows": Slots(QUERIES * ROW_BYTES, self.stages),
        }
        return lay_out(table, do=of_tile, o=2 * of_tile, v=of_keys)


# Chosen for triangle attention, N = 384, D = 32. One kernel makes dQ and dbias, and one dK and dV;
# together they take two thirds of the time of `sm80`. The first reads 3 TB/s from the L2 cache. Of
# the second, tiles of 96 queries take a little less time than those of 64. Neither got faster where
# consumers take turns, where work of the next tile lies beside that of this one, or with three
# consumers. Measured: docs/lab/hopper_backward.md, `STAGES`.
STAGES, KV_STAGES = {64: 6, 96: 4}, 2  # of `KeysTile`, for its queries
KEYS = 128  # of its block
CONSUMERS = 2  # of `QueriesTile`


def keys_tile(problem) -> KeysTile | None:
    """That of dK and dV, if the bias of its keys can be kept."""
    blocks = lambda rows: -(-problem.nq // rows)
    known = blocks(QUERIES) * QUERIES  # rows that the kernel of dQ tells of
    rows = next(n for n in (96, 64) if blocks(n) * n <= known)
    tile = KeysTile(KEYS, blocks(rows), STAGES[rows], KV_STAGES, rows)
    return tile if tile.layout().bytes <= SHARED_LIMIT else None


def queries_tile(problem) -> QueriesTile | None:
    """That of dQ and dbias, if all keys fit."""
    tile = QueriesTile(CONSUMERS, -(-problem.nk // (CONSUMERS * CHUNK)))
    return tile if problem.nk <= MOST_KEYS else None
