"""The backward pass of the `sm90` tier from the host: tiles, shared memory, and which kernels run with which grid."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from numba_flash import arrays
from numba_flash.cuda import launch, sm90
from numba_flash.cuda.swizzle import ALIGNMENT, DQ_PART, PANEL, panel_bytes, panels

KEYS = 64  # that a consumer owns
ROW_THREADS = 256  # of the kernels before and after the main one


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

    shares_keys: ClassVar[bool] = False
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

    def parts(self, head_dim: int) -> int:
        """Parts of 64 x 64 elements that a consumer computes of a tile of dQ."""
        return 1

    @property
    def registers(self) -> tuple[int, int]:
        return sm90.REGISTERS[self.consumers]

    @property
    def threads(self) -> int:
        return sm90.WARP_GROUP * (self.consumers + 1)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings as `numba_flash.cuda.pipeline` wants them, `ds`, `lse`, `delta`, `bounds`, the `bytes` of all."""
        rings = {
            "q": (panels(head_dim) * panel_bytes(self.block_m), self.stages),
            "do": (panels(head_dim_v) * panel_bytes(self.block_m), self.do_stages),
            "k": (panels(head_dim) * panel_bytes(self.block_n), 1),
            "v": (panels(head_dim_v) * panel_bytes(self.block_n), 1),
            "dq": (4 * DQ_PART, self.consumers),
            "work": (sm90.WORK_BYTES, sm90.WORK_SLOTS),
        }
        ds_bytes = panels(self.block_m) * panel_bytes(self.block_n)
        lse = 2 * ds_bytes
        delta = lse + 4 * self.block_m * self.stages
        bounds = delta + 4 * self.block_m * self.do_stages
        slots = -(-(bounds + 16 * self.consumers) // ALIGNMENT) * ALIGNMENT
        return sm90.lay_out(rings, slots, ds=0, ds_bytes=ds_bytes, lse=lse, delta=delta, bounds=bounds)


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
    shares_keys: ClassVar[bool] = True
    splits_rows: ClassVar[bool] = True
    kernel: ClassVar[str] = "backward_wide_sm90.build"
    registers: ClassVar[tuple[int, int]] = sm90.REGISTERS[2]
    threads: ClassVar[int] = 3 * sm90.WARP_GROUP

    def width(self, head_dim: int) -> int:
        return -(-head_dim // (2 * PANEL)) * 2 * PANEL

    def parts(self, head_dim: int) -> int:
        return panels(self.width(head_dim))

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: as `BackwardTile`'s; what is in the ring ``dq`` is how to add a part. One slot each, so nobody is a tile ahead."""
        width, width_v = panels(self.width(head_dim)), panels(self.width(head_dim_v))
        rings = {
            "q": (width * panel_bytes(self.block_m), 1),
            "do": (width_v * panel_bytes(self.block_m), 1),
            "k": (width * panel_bytes(self.block_n), 1),
            "v": (width_v * panel_bytes(self.block_n), 1),
            "dq": (8, self.consumers),
            "work": (sm90.WORK_BYTES, sm90.WORK_SLOTS),
        }
        ds_bytes = self.consumers * panel_bytes(KEYS)
        layout = sm90.lay_out(rings, 2 * ds_bytes, p=0, ds=ds_bytes, ds_bytes=ds_bytes)
        layout.lse = -(-(layout.bytes - ALIGNMENT) // 16) * 16  # of bulk copies
        layout.delta = layout.lse + 4 * self.block_m
        layout.bounds = layout.delta + 4 * self.block_m
        layout.bytes = layout.bounds + 16 * self.consumers + ALIGNMENT
        return layout


# (largest head dimension of q and k, of v, tile). After each row: cuDNN's time divided by its own at N = 1k, 4k, 16k, full, not ordered,
# and the runner-up; bfloat16, B N = 16384, 2048 / D heads, H200, each pair in one process.
TILES = (
    (64, 64, BackwardTile(128, 2, 2, False)),  # 1.10, 1.09, 1.04; BackwardTile(128, 2, 2, True) 1.03, 0.98, 0.97
    (128, 128, BackwardTile(64, 3, 2, True)),  # 1.07, 1.06, 1.10; BackwardTile(64, 2, 2, False) 1.05, 1.02, 1.04
    (256, 256, WideTile()),
)


def tile_for(problem) -> BackwardTile:
    """Tile of the main kernel."""
    return next(tile for d, dv, tile in TILES if problem.d <= d and problem.dv <= dv)


def prepare(problem, inputs, results, ordered):
    """See `sm90.prepare_backward`; `ordered` if it shall be deterministic."""
    if any(sm90.why_not_layout("", x) for x in results[:3]):  # only arrays of the user's are like that
        return sm90.prepare_compact(lambda results: prepare(problem, inputs, results, ordered), results)
    p, tile = problem, tile_for(problem)
    present = lambda inputs: tuple(x for x in inputs[9:] if x is not None)
    packed = p.options.packed
    first = lambda *operands: tuple(x.swapaxes(0, 1) if packed else x for x in operands)
    do, q, k, v, o, dq, dk, dv = first(*inputs[:5], *results[:3])
    lse, dlse = inputs[5:7]
    blocks = p.nq // tile.block_m + p.batch[1] if packed else -(-p.nq // tile.block_m)
    batch = (1, 1) if packed else p.batch
    numbers = math.prod(batch) * p.hq * blocks
    shapes = (
        ("rows", (2, *batch, p.hq, blocks * tile.block_m), "float32"),
        ("sums of dq", (*batch, p.hq, blocks, tile.consumers * tile.parts(p.d) * DQ_PART), "float32"),
        ("flags", (*batch, p.hq, blocks, tile.consumers), "int32"),
    )
    allocate = lambda: [arrays.compact(*each) for each in shapes]
    rows, dq_sum, flags = allocate()
    lengths = 1 if packed else p.batch
    extras = tuple((x, lengths) for x in present(inputs))
    words = lambda x: (x.view("uint32"), 5)
    before = launch.Launch(
        "rows_sm90.build_prepare",
        (p.dtype, p.d, p.dv, dlse is not None, ordered, p.options.structure, tile, ROW_THREADS),
        grid=numbers,
        block=ROW_THREADS,
        operands=(words(do), words(o), (lse, 4), (dlse, 4), (rows, 5), (dq_sum, 5), (flags, 5)),
        extras=extras,
        scalars=(p.nk,),
    )
    main = _launch_main(p, tile, (do, q, k, v, dk, dv, rows, dq_sum, flags), extras, ordered)
    after = launch.Launch(
        "rows_sm90.build_finish",
        (p.dtype, p.d, p.options.structure, tile),
        grid=numbers * tile.parts(p.d),
        block=sm90.WARP_GROUP * tile.consumers,
        operands=((dq_sum, 5), words(dq)),
        extras=extras,
        scalars=(p.nk, p.low, p.high),
        parameters=(np.float32(p.scale),),
    )

    def run(inputs, results):
        do, q, k, v, o, dq, dk, dv = first(*inputs[:5], *results[:3])
        rows, dq_sum, flags = allocate()
        extras = present(inputs)
        before(do, o, *inputs[5:7], rows, dq_sum, flags, *extras)
        stored = () if packed else (dk, dv)
        main(do, q, k, v, *stored, dk, dv, rows[0], rows[1], dq_sum, flags, *extras)
        after(dq_sum, dq, *extras)

    return run


def _launch_main(problem, tile, operands, extras, ordered):
    p, (do, q, k, v, dk, dv, rows, dq_sum, flags) = problem, operands
    packed, multiprocessors = p.options.packed, launch.multiprocessors(q.data.device_id)
    key_blocks = p.nk // tile.block_n + p.batch[1] if packed else -(-p.nk // tile.block_n)
    items = key_blocks * p.hk * (1 if packed else math.prod(p.batch))
    section = sm90.even_section(key_blocks, multiprocessors)
    maps = ((do, tile.block_m), (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (dk, KEYS), (dv, KEYS))
    return launch.Launch(
        tile.kernel,
        (p.dtype, p.d, p.dv, sm90.band(p) != "none", not packed, ordered, p.options.structure, tile),
        grid=min(items, multiprocessors),
        block=(tile.threads, tile.layout(p.d, p.dv).bytes),
        operands=((dk.view("uint32"), 5), (dv.view("uint32"), 5), (rows[0], 4), (rows[1], 4), (dq_sum, 5), (flags, 5)),
        extras=extras,
        scalars=(items, -p.high, -p.low, p.nq, 1, p.hq // p.hk, section, p.batch[0]),
        parameters=(*sm90.scales(p), np.float32(p.scale)),
        maps=maps[:4] if packed else maps,
    )
