"""The `sm90` tier from the host: tiles, shared memory, and which kernels run with which grid. Numba is not imported here."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

from numba_flash.cuda import launch

LOG2E = math.log2(math.e)
PANEL, ROW_BYTES, WARP_GROUP, MBARRIER_BYTES = 64, 128, 128, 8
ALIGNMENT = 1024  # of tiles that the copy engine swizzles
SHARED_LIMIT = 227 * 1024
REGISTERS = {1: 240, 2: 240, 3: 160}  # of a consumer's threads, by the number of consumers; the producer keeps 24


@dataclass(frozen=True)
class Tile:
    """Shape of a block's work.

    Attributes
    ----------
    block_m, block_n : int
        Rows and columns of the score tile; 64 rows per consumer warp group, columns a multiple of 16.
    stages : int
        Slots of the rings of K and of V tiles.
    ping_pong : bool
        Consumers take turns at starting products.
    """

    block_m: int
    block_n: int
    stages: int
    ping_pong: bool

    @property
    def consumers(self) -> int:
        return self.block_m // 64

    @property
    def registers(self) -> int:
        return REGISTERS[self.consumers]

    @property
    def threads(self) -> int:
        return WARP_GROUP * (self.consumers + 1)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Offsets in shared memory: tiles ``q k v``, mbarriers ``*_ready *_free``, slot sizes, and the `bytes` of it all."""
        panels = lambda columns: -(-columns // PANEL)
        k_slot, v_slot = (panels(columns) * self.block_n * ROW_BYTES for columns in (head_dim, head_dim_v))
        at = SimpleNamespace(q=0, k=panels(head_dim) * self.block_m * ROW_BYTES, k_slot=k_slot, v_slot=v_slot, ALIGNMENT=ALIGNMENT)
        at.v = at.k + self.stages * k_slot
        end = at.v + self.stages * v_slot
        for name, slots in (("q", 1), ("k", self.stages), ("v", self.stages)):
            for event in ("ready", "free"):
                setattr(at, f"{name}_{event}", end)
                end += slots * MBARRIER_BYTES
        at.bytes = end + ALIGNMENT  # the base of dynamic shared memory is aligned by hand
        return at


# Per direction, mask and larger head dimension: (largest head dimension of q and k, of v, tile).
TILES = {
    "full": ((64, 64, Tile(192, 128, 2, True)), (128, 128, Tile(128, 176, 2, True)), (256, 256, Tile(128, 80, 2, False))),
    "band": ((64, 64, Tile(192, 128, 2, True)), (128, 128, Tile(128, 128, 2, True)), (256, 256, Tile(128, 80, 2, False))),
}
SECTION_BYTES = 24 * 2**20  # of keys and values that row blocks at work at the same time read: half of the L2 cache
UNSUPPORTED = {"score_mod": "score_mod", "bias": "a bias", "mask": "a mask array", "dropout": "dropout"}
FORCED = None


def banded(problem) -> bool:
    """True if the band hides a key from a query."""
    p = problem
    return p.low > 1 - p.nq or p.high < p.nk - 1


def tile_for(problem) -> Tile:
    """Tile of the forward kernel."""
    p = problem
    if FORCED is not None:
        return FORCED
    return next(tile for d, dv, tile in TILES["band" if banded(p) else "full"] if p.d <= d and p.dv <= dv)


def takes_numpy() -> bool:
    return False


def tiles_of(problem) -> tuple:
    tile = tile_for(problem)
    return (("forward", (tile.block_m, tile.block_n)),)


def _heads_first(problem, x):
    return x.swapaxes(0, 1) if problem.options.packed else x


def prepare_forward(problem, inputs, results):
    """Prepared launch ``run((q, k, v, bias, mask, q_lengths, kv_lengths), (o, lse))`` for arrays of these layouts; absent ones are None."""
    p, (o, lse), tile = problem, results, tile_for(problem)
    q, k, v, o = (_heads_first(p, x) for x in (*inputs[:3], o))
    pairs = math.prod(p.batch) * p.hq
    blocks = -(-p.nq // tile.block_m)
    items = pairs * blocks
    if p.options.packed:
        items = (p.nq // tile.block_m + p.batch[1]) * p.hq
    group = p.hq // p.hk
    section = 1
    if banded(p):
        section = max(1, SECTION_BYTES // (p.nk * (p.d + p.dv) * 2)) * group
    lengths = 1 if p.options.packed else p.batch
    extras = tuple((x, view) for x, view in zip(inputs[5:], (lengths, lengths), strict=True) if x is not None)
    cap = p.options.softcap
    slope, scale_log2 = (2 * LOG2E * p.scale / cap, cap * LOG2E) if cap else (0.0, p.scale * LOG2E)
    words = o.view("uint32")
    forward = launch.Launch(
        "forward_sm90.build",
        (p.dtype, p.d, p.dv, lse is not None, banded(p), False, p.options.structure, tile),
        grid=min(items, launch.multiprocessors(q.data.device_id)),
        block=tile.threads,
        operands=((words, 5), (lse, 4)),
        extras=extras,
        scalars=(items, p.low, p.high, p.nk, min(section, pairs), 1, p.hk, 1),
        parameters=(slope, scale_log2),
        maps=((q, tile.block_m), (k, tile.block_n), (v, tile.block_n)),
        shared_bytes=tile.layout(p.d, p.dv).bytes,
    )

    def run(inputs, results):
        forward(*inputs[:3], *results, *(x for x in inputs[5:] if x is not None))

    return run
