"""The backward pass of the `sm90` tier from the host: tiles, shared memory, and which kernels run with which grid."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from numba_flash import arrays
from numba_flash.cuda import launch, sm90
from numba_flash.cuda.swizzle import ADDERS, ALIGNMENT, DQ_PART, PANEL, panel_bytes, panels

KEYS = 64  # that a consumer owns
ROW_THREADS = 256  # of the kernels before and after the main one
# Bytes of dS at a time; as many as it takes to keep all multiprocessors busy, up to MOST_WORKSPACE; but at least FEWEST_BLOCKS blocks of
# keys, so that dq, which is kept as float32 in between, is not read and written for each of them.
WORKSPACE, MOST_WORKSPACE, FEWEST_BLOCKS = 2**30, 2**32, 8
# Bytes of sums of dq that blocks at work at the same time add to, so that they stay in the L2 cache (50 MB on an H200). D = 64, N = 16k,
# full, TFLOP/s: all 32 heads (134 MB) 481, 32 MB 502, 16 MB 503, 8 MB 497; at 4k, and at D = 128, no difference.
SUMS_AT_WORK = 2**25
# Blocks of keys of one head that are at work at the same time under a band, times the queries of a tile: they wait for each other at its
# first tile, longer if they are more, or tiles larger. Causal, TFLOP/s with 512, 256 and 169 at D = 64: 1k 291, 313, 302, 4k 431, 437, 410;
# with 256, 176 and 128 at D = 128: 1k 335, 334, 329, 4k 494, 487, 487.
BLOCKS_TIMES_QUERIES = 256


@dataclass(frozen=True)
class BackwardTile:
    """Shape of a block's work in the backward pass.

    Attributes
    ----------
    block_m : int
        Queries at a time: 64, or 128 where the head dimension is at most 64.
    stages, do_stages : int
        Slots of the rings of Q and of dO tiles.
    ahead : bool
        Start the next tile's scores before this one's dQ.
    """

    block_m: int
    stages: int
    do_stages: int
    ahead: bool
    consumers: ClassVar[int] = 2
    adds_dq: ClassVar[bool] = True  # in memory, part by part
    queries_apart: ClassVar[int] = 0  # the consumers' fragments
    kernel: ClassVar[str] = "backward_sm90.build"

    @property
    def block_n(self) -> int:
        return KEYS * self.consumers

    @property
    def columns(self) -> int:
        """Queries of a consumer's fragment."""
        return self.block_m

    @property
    def splits_rows(self) -> bool:
        """Each consumer computes some rows of a tile of dQ, not some columns."""
        return self.block_m == KEYS * self.consumers

    def width(self, head_dim: int) -> int:
        """Columns of a tile in shared memory, in whole panels or as many as there are."""
        return head_dim

    @property
    def registers(self) -> tuple[int, int]:
        return sm90.REGISTERS[self.consumers]

    @property
    def threads(self) -> int:
        return sm90.WARP_GROUP * (self.consumers + 1)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings as `numba_flash.cuda.pipeline` wants them, `ds`, `lse`, `delta`, `bounds`, the `bytes` of all.

        "dq" has one tile and two pairs of mbarriers, for even tiles and odd ones: its slots are the same memory, and a tile may come when
        the one before it has left, not when its own slot is free. "fetched" has no memory: all tiles of a work item have been asked for.
        """
        rings = {
            "q": (panels(head_dim) * panel_bytes(self.block_m), self.stages),
            "do": (panels(head_dim_v) * panel_bytes(self.block_m), self.do_stages),
            "k": (panels(head_dim) * panel_bytes(self.block_n), 1),
            "v": (panels(head_dim_v) * panel_bytes(self.block_n), 1),
            "dq": (0, ADDERS),  # the tile lies elsewhere, see below
            "work": (sm90.WORK_BYTES, sm90.WORK_SLOTS),
            "fetched": (0, 1),
        }
        ds_bytes = panels(self.block_m) * panel_bytes(self.block_n)
        dq = 2 * ds_bytes
        lse = dq + 4 * DQ_PART * self.consumers
        delta = lse + 4 * self.block_m * self.stages
        bounds = delta + 4 * self.block_m * self.do_stages
        slots = -(-(bounds + 16 * self.consumers) // ALIGNMENT) * ALIGNMENT
        layout = sm90.lay_out(rings, slots, ds=0, ds_bytes=ds_bytes, lse=lse, delta=delta, bounds=bounds)
        layout.dq = (dq, *layout.dq[1:])
        return layout


@dataclass(frozen=True)
class WideTile:
    """Shape of a block's work where dK and dV of 64 keys fill the registers of two consumers, of which each owns half of their columns.

    The attributes are those of `BackwardTile`, and properties, too; all of them are given.
    """

    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 2 * KEYS
    block_n: ClassVar[int] = KEYS
    columns: ClassVar[int] = KEYS
    queries_apart: ClassVar[int] = KEYS
    adds_dq: ClassVar[bool] = False
    kernel: ClassVar[str] = "backward_wide_sm90.build"
    registers: ClassVar[tuple[int, int]] = sm90.REGISTERS[2]
    threads: ClassVar[int] = 3 * sm90.WARP_GROUP

    def width(self, head_dim: int) -> int:
        return -(-head_dim // (2 * PANEL)) * 2 * PANEL

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory, as `BackwardTile`'s, and ``p``. Rings have one slot, so no consumer is a tile ahead of the other."""
        width, width_v = panels(self.width(head_dim)), panels(self.width(head_dim_v))
        rings = {
            "q": (width * panel_bytes(self.block_m), 1),
            "do": (width_v * panel_bytes(self.block_m), 1),
            "k": (width * panel_bytes(self.block_n), 1),
            "v": (width_v * panel_bytes(self.block_n), 1),
            "dq": (0, 0),
            "work": (sm90.WORK_BYTES, sm90.WORK_SLOTS),
            "fetched": (0, 0),
        }
        layout = sm90.lay_out(rings, 2 * self.ds_bytes, p=0, ds=self.ds_bytes)
        layout.lse = -(-(layout.bytes - ALIGNMENT) // 16) * 16  # of bulk copies
        layout.delta = layout.lse + 4 * self.block_m
        layout.bounds = layout.delta + 4 * self.block_m
        layout.bytes = layout.bounds + 16 * self.consumers + ALIGNMENT
        return layout

    @property
    def ds_bytes(self) -> int:
        """Size of a tile of dS."""
        return self.consumers * panel_bytes(KEYS)

    def dq_layout(self, head_dim: int) -> SimpleNamespace:
        """Shared memory of `dq_sm90`: rings ``tiles`` and ``work``, where dQ is staged (``o``), the `bytes` of all."""
        slot, staged = panels(head_dim) * panel_bytes(self.block_n) + self.ds_bytes, 2 * self.consumers * panel_bytes(KEYS)
        stages = (sm90.SHARED_LIMIT - staged - 2 * ALIGNMENT) // slot
        return sm90.lay_out({"tiles": (slot, stages), "work": (sm90.WORK_BYTES, sm90.WORK_SLOTS)}, staged, o=0)


# (largest head dimension of q and k, of v, tile). After each row: cuDNN's time divided by its own at N = 1k, 4k, 16k, full, and what was
# tried instead, over its speed or cuDNN's; bfloat16, B N = 16384, 2048 / D heads, deterministic, H200, each pair in one process.
TILES = (
    (64, 64, BackwardTile(128, 2, 2, False)),  # 1.21, 1.20, 1.20; BackwardTile(128, 2, 2, True) 0.93, 0.84, 0.87 of it
    (128, 128, BackwardTile(64, 3, 2, True)),  # 1.13, 1.09, 1.11; BackwardTile(64, 3, 2, False) 0.96, 0.95, 0.91 of it
    (256, 256, WideTile()),  # 1.34, 1.18, 1.24; with dQ added up in memory, from registers, 0.95, 0.71, 1.12
)


def tile_for(problem) -> BackwardTile | WideTile:
    """Tile of the main kernel."""
    return next(tile for d, dv, tile in TILES if problem.d <= d and problem.dv <= dv)


def prepare(problem, inputs, results, ordered):
    """See `sm90.prepare_backward`; `ordered` if it shall be deterministic."""
    if any(sm90.why_not_layout("", x) for x in results[:3]):  # only arrays of the user's are like that
        names = ("dq", "dk", "dv", "dbias")
        return sm90.prepare_compact(lambda results: prepare(problem, inputs, results, ordered), names, results)
    p, tile = problem, tile_for(problem)
    ordered = ordered and tile.adds_dq  # else it is so anyway
    present = lambda inputs: tuple(x for x in inputs[9:] if x is not None)
    first = lambda *operands: tuple(x.swapaxes(0, 1) if p.options.packed else x for x in operands)
    operands, lengths = first(*inputs[:5], *results[:3]), 1 if p.options.packed else p.batch
    extras = tuple((x, lengths) for x in present(inputs))
    grid = _row_blocks(p, tile)
    shapes = _temporaries(p, tile, grid, launch.multiprocessors(operands[1].data.device_id))
    allocate = lambda: [arrays.compact(*shape) for shape in shapes]
    temporary = allocate()
    sums = lambda temporary: temporary[1:] if tile.adds_dq else (None, None)
    before = launch.Launch(
        "rows_sm90.build_prepare",
        (p.dtype, p.dv, inputs[6] is not None, ordered, p.options.structure, tile, ROW_THREADS),
        grid=math.prod(grid),
        block=ROW_THREADS,
        operands=(
            _words(operands[0]),
            _words(operands[4]),
            *((x, 4) for x in inputs[5:7]),
            (temporary[0], 5),
            *zip(sums(temporary), (5, 1), strict=True),
        ),
        extras=extras,
        scalars=(p.nk,),
    )
    run_main = (_prepare_sums if tile.adds_dq else _prepare_parts)(p, tile, operands, temporary, extras, ordered)

    def run(inputs, results):
        operands, extras, temporary = first(*inputs[:5], *results[:3]), present(inputs), allocate()
        before(operands[0], operands[4], *inputs[5:7], temporary[0], *sums(temporary), *extras)
        run_main(operands, temporary, extras)

    return run


def _words(x):
    return x.view("uint32"), 5


def _row_blocks(p, tile) -> tuple[int, int, int, int]:
    """(b0, b1, heads, row blocks) by which kernels number blocks of queries."""
    if p.options.packed:
        return 1, 1, p.hq, p.nq // tile.block_m + p.batch[1]
    return *p.batch, p.hq, -(-p.nq // tile.block_m)


def _key_blocks(p, tile) -> int:
    """Of one head; of packed sequences an upper bound of all of them together."""
    return p.nk // tile.block_n + p.batch[1] if p.options.packed else -(-p.nk // tile.block_n)


def _temporaries(p, tile, grid, multiprocessors) -> list[tuple]:
    """Names, shapes and dtypes of what a call needs: rows, sums of dQ, and flags, or dS."""
    rows = ("rows", (2, *grid[:3], grid[3] * tile.block_m), "float32")
    if tile.adds_dq:
        sums, flags = ("sums of dq", (*grid, tile.consumers * DQ_PART), "float32"), ("flags", (math.prod(grid) + 1,), "int32")
        return [rows, sums, flags]
    blocks, parts = _parts(p, tile, math.prod(grid), multiprocessors)
    sums = ("sums of dq", (*grid, tile.block_m * p.d if parts > 1 else 0), "float32")
    return [rows, sums, ("dS", (*grid, blocks * tile.ds_bytes // 4), "float32")]


def _parts(p, tile, row_blocks: int, multiprocessors: int) -> tuple[int, int]:
    """(blocks of keys that dS is made for at a time, how many times): so many that work items fill turns of the multiprocessors."""
    blocks, heads = max(1, _key_blocks(p, tile)), p.hk * (1 if p.options.packed else math.prod(p.batch))
    heads, bytes_each = max(1, heads), max(1, row_blocks * tile.ds_bytes)
    room = max(WORKSPACE // bytes_each, min(-(-multiprocessors // heads), MOST_WORKSPACE // bytes_each), FEWEST_BLOCKS)
    most = min(room, blocks)
    turns = lambda at_a_time: -(-blocks // at_a_time) * -(-at_a_time * heads // multiprocessors)
    best = min(range(most, most // 2, -1), key=turns)
    return best, -(-blocks // best)


def _main(p, tile, operands, rows, sums, flags, extras, ordered, more=()):
    """Launch of the main kernel, `more` at the end of its sizes."""
    do, q, k, v, _, _, dk, dv = operands
    packed, multiprocessors = p.options.packed, launch.multiprocessors(q.data.device_id)
    key_blocks = _key_blocks(p, tile)
    items = key_blocks * p.hk * (1 if packed else math.prod(p.batch))
    section = _section(p, tile, key_blocks, multiprocessors, ordered)
    maps = ((do, tile.block_m), (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (dk, KEYS), (dv, KEYS))
    return launch.Launch(
        tile.kernel,
        (p.dtype, p.d, p.dv, sm90.band(p) != "none" and not ordered, not packed, ordered, p.options.structure, tile),
        grid=min(items, multiprocessors),
        block=(tile.threads, tile.layout(p.d, p.dv).bytes),
        operands=(_words(dk), _words(dv), (rows[0], 4), (rows[1], 4), (sums, 5), (flags, 1)),
        extras=extras,
        scalars=(items, -p.high, -p.low, p.nq, 1, p.hq // p.hk, section, p.batch[0], *more),
        parameters=(*sm90.scales(p), np.float32(p.scale)),
        maps=maps[:4] if packed else maps,
    )


def _section(p, tile, key_blocks: int, multiprocessors: int, ordered: bool) -> int:
    """Heads of k whose blocks of keys are handed out together.

    With a band, so many that few blocks of one head are at work at the same time, if they wait for each other, else that everyone gets the
    same work. Without one, if the tile adds to sums of dq, no more than have their sums in the cache: one each, since blocks at work at the
    same time walk over the heads of a group together.
    """
    even = sm90.even_section(key_blocks, multiprocessors)
    if sm90.band(p) != "none" and ordered:
        return -(-multiprocessors * tile.block_m // BLOCKS_TIMES_QUERIES)
    if sm90.band(p) != "none" or not tile.adds_dq:
        return even
    sums_of_a_head = 4 * DQ_PART * tile.consumers * -(-p.nq // tile.block_m)
    return max(1, min(even, SUMS_AT_WORK // sums_of_a_head))


def _prepare_sums(p, tile, operands, temporary, extras, ordered):
    """``run(operands, temporary, extras)`` of a tile that adds up dQ in memory."""
    rows, dq_sum, flags = temporary
    main = _main(p, tile, operands, rows, dq_sum, flags, extras, ordered)
    after = launch.Launch(
        "rows_sm90.build_finish",
        (p.dtype, p.d, p.options.structure, tile),
        grid=math.prod(_row_blocks(p, tile)),
        block=sm90.WARP_GROUP * tile.consumers,
        operands=((dq_sum, 5), _words(operands[5])),
        extras=extras,
        scalars=(p.nk, p.low, p.high),
        parameters=(np.float32(p.scale),),
    )

    def run(operands, temporary, extras):
        (do, q, k, v, _, dq, dk, dv), (rows, dq_sum, flags) = operands, temporary
        main(do, q, k, v, *(() if p.options.packed else (dk, dv)), dk, dv, rows[0], rows[1], dq_sum, flags, *extras)
        after(dq_sum, dq, *extras)

    return run


def _prepare_parts(p, tile, operands, temporary, extras, ordered):
    """The same, of a tile that makes dS for some blocks of keys at a time, of which `dq_sm90` makes dQ."""
    _, _, k, _, _, dq, _, _ = operands
    rows, dq_sum, ds = temporary
    packed, multiprocessors, items = p.options.packed, launch.multiprocessors(k.data.device_id), math.prod(_row_blocks(p, tile))
    (blocks, parts), scale = _parts(p, tile, items, multiprocessors), np.float32(p.scale)
    section = 1 if packed or sm90.band(p) == "none" else sm90.even_section(-(-p.nq // tile.block_m), multiprocessors)
    maps = ((k, tile.block_n), (dq, KEYS))
    main = _main(p, tile, operands, rows, ds, None, extras, ordered, (0, blocks))
    after = launch.Launch(
        "dq_sm90.build",
        (p.dtype, p.d, sm90.band(p) != "none", not packed, p.options.structure, tile),
        grid=min(items, multiprocessors),
        block=(tile.threads, tile.dq_layout(p.d).bytes),
        operands=(_words(dq), (dq_sum, 5), (ds, 5), (rows[0], 4)),
        extras=extras,
        scalars=(items, p.low, p.high, p.nk, 1, p.hk, section, p.batch[0], 0, blocks),
        parameters=(scale,),
        maps=maps[:1] if packed else maps,
    )

    def run(operands, temporary, extras):
        (do, q, k, v, _, dq, dk, dv), (rows, dq_sum, ds) = operands, temporary
        made = (do, q, k, v, *(() if packed else (dk, dv)), dk, dv, rows[0], rows[1], ds, None, *extras)
        summed = (k, *(() if packed else (dq,)), dq, dq_sum, ds, rows[0], *extras)
        for first in range(0, parts * blocks, blocks):
            main(*made, parameters=(first, blocks, *sm90.scales(p), scale))
            after(*summed, parameters=(first, blocks, scale))

    return run
