"""The `sm90` tier from the host: tiles, shared memory, and which kernels run with which grid. Numba is not imported here."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from numba_flash.cuda import launch
from numba_flash.cuda.swizzle import ALIGNMENT, ROW_BYTES, panels

LOG2E = math.log2(math.e)
WARP_GROUP, MBARRIER_BYTES = 128, 8
WORK_BYTES, WORK_SLOTS = 64, 3  # what a work item is, written down for the consumers
SHARED_LIMIT = 227 * 1024
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # per thread of the data movers and of the consumers, by the number of consumers


@dataclass(frozen=True)
class Tile:
    """Shape of a block's work.

    Attributes
    ----------
    block_m, block_n : int
        Rows and columns of the score tile; 64 rows per consumer warp group, columns a multiple of 16.
    q_stages, stages : int
        Slots of the ring of Q tiles, and of those of K and of V tiles.
    o_panels : int
        Panels of 64 columns of O that a consumer stages at a time.
    ping_pong : bool
        Consumers take turns at starting products.
    """

    block_m: int
    block_n: int
    q_stages: int
    stages: int
    o_panels: int
    ping_pong: bool

    @property
    def consumers(self) -> int:
        return self.block_m // 64

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers]

    @property
    def threads(self) -> int:
        return WARP_GROUP * (self.consumers + 1)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings ``q k v work`` as `numba_flash.cuda.pipeline` wants them, where ``o`` is staged, and the `bytes` of it all."""
        rings = {
            "q": (panels(head_dim) * self.block_m * ROW_BYTES, self.q_stages),
            "k": (panels(head_dim) * self.block_n * ROW_BYTES, self.stages),
            "v": (panels(head_dim_v) * self.block_n * ROW_BYTES, self.stages),
            "work": (WORK_BYTES, WORK_SLOTS),
        }
        o_panels = min(self.o_panels, panels(head_dim_v))
        layout = SimpleNamespace(ALIGNMENT=ALIGNMENT, o=0, o_panels=o_panels)
        slots = o_panels * self.block_m * ROW_BYTES
        mbarriers = slots + sum(slot_bytes * count for slot_bytes, count in rings.values())
        for name, (slot_bytes, count) in rings.items():
            setattr(layout, name, (slots, slot_bytes, count, mbarriers, mbarriers + count * MBARRIER_BYTES))
            slots, mbarriers = slots + slot_bytes * count, mbarriers + 2 * count * MBARRIER_BYTES
        layout.bytes = mbarriers + ALIGNMENT  # the base of dynamic shared memory is aligned by hand
        return layout


# Per direction, mask and larger head dimension: (largest head dimension of q and k, of v, tile).
TILES = {
    "full": ((64, 64, Tile(192, 128, 1, 2, 1, True)), (128, 128, Tile(128, 176, 1, 2, 1, True)), (256, 256, Tile(128, 64, 1, 2, 2, False))),
    "band": ((64, 64, Tile(192, 128, 1, 2, 1, True)), (128, 128, Tile(128, 128, 1, 2, 1, True)), (256, 256, Tile(128, 64, 1, 2, 2, False))),
}
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
    blocks, grid = -(-p.nq // tile.block_m), launch.multiprocessors(q.data.device_id)
    items = math.prod(p.batch) * p.hq * blocks
    section = 2 * grid // math.gcd(blocks, 2 * grid)
    if p.options.packed:
        items = (p.nq // tile.block_m + p.batch[1]) * p.hq
    store = "words" if p.options.packed or not tile.o_panels else "map"
    lengths = 1 if p.options.packed else p.batch
    extras = tuple((x, view) for x, view in zip(inputs[5:], (lengths, lengths), strict=True) if x is not None)
    cap = p.options.softcap
    slope, scale_log2 = (2 * LOG2E * p.scale / cap, cap * LOG2E) if cap else (0.0, p.scale * LOG2E)
    maps = ((q, tile.block_m), (k, tile.block_n), (v, tile.block_n)) + (((o, 64),) if store == "map" else ())
    forward = launch.Launch(
        "forward_sm90.build",
        (p.dtype, p.d, p.dv, lse is not None, banded(p), store, p.options.structure, tile),
        grid=min(items, grid),
        block=tile.threads,
        operands=((o.view("uint32"), 5), (lse, 4)),
        extras=extras,
        scalars=(items, p.low, p.high, p.nk, 1, p.hk, section, 1),
        parameters=(np.float32(slope), np.float32(scale_log2)),
        maps=maps,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
    )

    def run(inputs, results):
        o, lse = results
        mapped = (o,) if store == "map" else ()
        forward(*inputs[:3], *mapped, o, lse, *(x for x in inputs[5:] if x is not None))

    return run
