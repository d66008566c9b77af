"""Tiles of the backward pass of narrow heads with a bias that batch elements share, which kernels
keep. Numba is not imported here.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from numba_flash.cuda.sm90.rings import lay_out
from numba_flash.cuda.sm90.tiles import SHARED_LIMIT, Consumers, WarpGroups
from numba_flash.cuda.swizzle import NARROW, NARROW_ROW_BYTES

QUERIES = 64  # of a tile
ROW_BYTES = 8  # of what is known of a row of queries: its lse in base 2, and delta
CHUNK = 64  # keys of which a consumer has scores in registers at a time
MOST = NARROW  # columns
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
    def kept_bytes(self) -> int:
        """Of the bias."""
        return HALF * self.block_m * self.queries * self.tiles

    def layout(self) -> SimpleNamespace:
        """Shared memory: rings ``q kv`` as `numba_flash.cuda.sm90.pipeline` wants them, after the
        bias, where dO, what is known of rows, and V are within their slots, and the `bytes` of all.
        """
        of_tile, of_keys = self.queries * NARROW_ROW_BYTES, self.block_m * NARROW_ROW_BYTES
        of_rows = -(-self.queries * ROW_BYTES // PATTERN) * PATTERN
        rings = {
            "q": (2 * of_tile + of_rows, self.stages),
            "kv": (2 * of_keys, self.kv_stages),
        }
        return lay_out(rings, self.kept_bytes, kept=0, do=of_tile, rows=2 * of_tile, v=of_keys)


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
    def kept_bytes(self) -> int:
        """Of the bias, as float32."""
        return WIDE * QUERIES * self.block_n

    def layout(self) -> SimpleNamespace:
        """The same: rings ``q kv rows dq``, where dO, O and V are within their slots."""
        of_tile, of_keys = QUERIES * NARROW_ROW_BYTES, self.block_n * NARROW_ROW_BYTES
        rings = {
            "q": (3 * of_tile, self.stages),
            "kv": (2 * of_keys, self.stages),
            "dq": ((self.consumers - 1) * 4 * QUERIES * NARROW, 1),
            "rows": (QUERIES * ROW_BYTES, self.stages),
        }
        return lay_out(rings, self.kept_bytes, kept=0, do=of_tile, o=2 * of_tile, v=of_keys)


# Triangle attention, bfloat16, B = 384, H = 4, N = 384, D = 32, with the gradient of the bias:
# predicted 260 to 350 us, on an H200 400 to 410, sm80 598, FlexAttention 596; with -inf in the
# bias 422. dQ and dbias are 189 of them (sm80 330), 3.0 TB/s from the L2 cache; with S of the next
# chunk beside the sums of this one 291. dK and dV are 221 (sm80 266), predicted 140; but with
# products of the next tile beside the exponentials of this one 225, with the bias by products with
# the unit matrix 237, by three consumers 225. N = 256, B = 256: 148, sm80 199. In another
# process dK and dV are 190 with tiles of 96 queries that are given back one tile later, 197 with
# these tiles alone, 204 with 64 queries, given back later or not; where consumers take turns 191
# to 240. All is 378 then (FlexAttention 578), 392 with 64 queries; where consumers of dQ take
# turns 424, where its S begins with the bias 422, with 5 shares 393.
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
