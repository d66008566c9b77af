"""The `sm90` tier from the host: tiles, shared memory, and which kernels run with which grid. Numba is not imported here."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from numba_flash import arrays
from numba_flash.cuda import launch
from numba_flash.cuda.swizzle import ALIGNMENT, ROW_BYTES, panels
from numba_flash.options import PLAIN

LOG2E = math.log2(math.e)
WARP_GROUP, MBARRIER_BYTES = 128, 8
OUTPUT_ROWS = 64  # of O that a consumer stores at a time
COMBINE_ROWS, COMBINE_LANES = 4, 32
TMA_BYTES = 16  # granularity of tensor maps
WORK_BYTES, WORK_SLOTS = 64, 3  # what a work item is, written down for the consumers
SHARED_LIMIT = 227 * 1024
REGISTERS = {2: (40, 232), 3: (32, 160)}  # per thread of the producer's warp group and of the consumers', by the number of consumers


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
        """Shared memory: rings ``q k v work`` as `numba_flash.cuda.pipeline` wants them, where ``o`` is staged, and the `bytes` of all."""
        rings = {
            "q": (panels(head_dim) * self.block_m * ROW_BYTES, self.q_stages),
            "k": (panels(head_dim) * self.block_n * ROW_BYTES, self.stages),
            "v": (panels(head_dim_v) * self.block_n * ROW_BYTES, self.stages),
            "work": (WORK_BYTES, WORK_SLOTS),
        }
        o_panels = min(self.o_panels, panels(head_dim_v))
        return lay_out(rings, o_panels * self.block_m * ROW_BYTES, o=0, o_panels=o_panels)


def lay_out(rings: dict, slots: int, **others) -> SimpleNamespace:
    """Rings, of (bytes of a slot, slots), from an offset on, their mbarriers after them, the `bytes` of all; and `others`."""
    layout = SimpleNamespace(ALIGNMENT=ALIGNMENT, **others)
    mbarriers = slots + sum(slot_bytes * count for slot_bytes, count in rings.values())
    for name, (slot_bytes, count) in rings.items():
        setattr(layout, name, (slots, slot_bytes, count, mbarriers, mbarriers + count * MBARRIER_BYTES))
        slots, mbarriers = slots + slot_bytes * count, mbarriers + 2 * count * MBARRIER_BYTES
    layout.bytes = mbarriers + ALIGNMENT  # the base of dynamic shared memory is aligned by hand
    return layout


ANY = 2**31
# Per kind of mask: (longest keys, largest head dimension of q and k, of v, tile). After each row: cuDNN's time divided by its own at the
# lengths named, and the runner-up; bfloat16, B N = 16384, 2048 / D heads, H200, each pair in one process.
TILES = {
    "full": (
        (ANY, 64, 64, Tile(192, 128, 2, 3, 1, True)),  # 512 1.10, 4k 1.13, 16k 1.18; Tile(128, 128, 2, 4, 1, True) 1.02, 0.93, 0.93
        (ANY, 128, 128, Tile(128, 128, 2, 2, 2, True)),  # 512 1.08, 4k 1.11, 16k 1.10; Tile(128, 176, 1, 2, 1, True) 0.92, 1.07, 1.10
        (ANY, 256, 256, Tile(128, 64, 1, 2, 2, False)),  # 512 1.14, 4k 1.17, 16k 1.17; the same with turns 1.14, 1.17, 1.18
    ),
    "band": (
        (1024, 64, 64, Tile(128, 128, 2, 4, 1, True)),  # 512 1.01, 1k 0.98; Tile(192, 128, 2, 3, 1, True) 0.94, 0.88
        (ANY, 64, 64, Tile(192, 128, 2, 3, 1, True)),  # 2k 1.04, 16k 1.16; Tile(128, 128, 2, 4, 1, True) 0.97, 0.94
        (6144, 128, 128, Tile(128, 128, 2, 2, 2, True)),  # 1k 1.16, 4k 1.19; Tile(128, 160, 1, 2, 1, True) 1.01, 1.17
        (ANY, 128, 128, Tile(128, 176, 1, 2, 1, True)),  # 8k 1.19, 16k 1.19; Tile(128, 128, 2, 2, 2, True) 1.18, 1.16
        (ANY, 256, 256, Tile(128, 64, 1, 2, 2, False)),  # 512 1.04, 4k 1.27, 16k 1.28; the same with turns 1.04, 1.27, 1.27
    ),
}
# The same where the keys are split into parts; stores of float32 parts leave fewer registers for the tile.
PART_TILES = (
    (64, 64, Tile(128, 128, 2, 4, 1, True)),
    (128, 128, Tile(128, 112, 2, 2, 2, True)),
    (256, 256, Tile(128, 48, 1, 2, 2, False)),
)
UNSUPPORTED = {"score_mod": "a score_mod", "bias": "a bias", "mask": "a mask array", "dropout": "dropout"}
GREATEST_SOFTCAP = 1024  # by an estimate, tanh is off by up to 2**-22 of it, which a score has to bear
GREATEST_RATIO = 1e38  # of scale to softcap, within float32 also times 2 log2(e)
FEWEST_TILES = 4  # of keys that are worth a part of their own
SNAKE_TURNS = 64  # items per multiprocessor from which on their order does not matter
ITEM_TILES = 0.5  # what an item costs besides its tiles, in tiles


def band(problem) -> str:
    """Which keys the band hides from some query: ``"none"``, those ``"above"`` a diagonal, or ``"both"``, those below one, too."""
    p = problem
    return "both" if p.low > 1 - p.nq else "above" if p.high < p.nk - 1 else "none"


def tile_for(problem) -> Tile:
    """Tile of the forward kernel."""
    p = problem
    return next(
        tile for length, d, dv, tile in TILES["full" if band(p) == "none" else "band"] if p.nk <= length and p.d <= d and p.dv <= dv
    )


def takes_numpy() -> bool:
    """False: kernels read arrays on a GPU."""
    return False


def tiles_of(problem) -> tuple:
    """Rows and columns of the score tiles."""
    tile = tile_for(problem)
    return (("forward", (tile.block_m, tile.block_n)),)


def why_not(kind: str, problem, inputs: dict, demanded: bool) -> str | None:
    """Reason why these kernels cannot run `problem` (None: anything) on such arrays, or None."""
    if launch.simulated():
        return "the CUDA simulator has no tensor cores"
    q, p = inputs["q"], problem
    reason = launch.why_not(q)
    if reason is not None:
        return reason
    major, minor = launch.capability(q.data.device_id if arrays.library(q) == "cupy" else arrays.current_gpu().id)
    if major != 9:
        return f"needs a GPU of compute capability 9.0 (Hopper); this one has {major}.{minor}"
    if p is None:
        return None
    reason, names = _why_not_problem(p), ("q", "k", "v")
    if kind == "backward":
        names = (*names, "do", "o")
    return reason or next(filter(None, (why_not_layout(name, inputs[name]) for name in names)), None)


def _why_not_problem(p) -> str | None:
    if p.dtype not in ("float16", "bfloat16"):
        return f"serves float16 and bfloat16; q.dtype is {p.dtype}"
    for option, name in UNSUPPORTED.items():
        if getattr(p.options, option):
            return f"does not know {name}"
    if p.options.softcap and not p.scale / GREATEST_RATIO < p.options.softcap <= GREATEST_SOFTCAP:
        return f"needs a softcap between scale / {GREATEST_RATIO:.0e} and {GREATEST_SOFTCAP}; got {p.options.softcap}"
    if p.d % 8 or p.dv % 8:
        return f"needs head dimensions that are multiples of 8; q.shape[-1] is {p.d}, v.shape[-1] {p.dv}"
    if not 0 < p.scale < math.inf:
        return f"needs a positive, finite scale; got {p.scale}"
    if 0 in (*p.batch, p.hq, p.nq, p.nk):
        return "needs at least one query and one key"
    return None


def why_not_layout(name: str, x) -> str | None:
    """Reason why no tensor map can describe the array, or None."""
    *strides, last = (stride if size > 1 else 0 for stride, size in zip(x.strides, x.shape, strict=True))
    if last != x.dtype.itemsize:
        return f"needs neighbours along the head dimension to be neighbours in memory; {name} has strides {x.strides}"
    if any(stride % TMA_BYTES or stride < 0 for stride in strides):
        return f"needs strides that are multiples of {TMA_BYTES} bytes and not negative; {name} has strides {x.strides}"
    if arrays.library(x) == "cupy" and x.data.ptr % TMA_BYTES:
        return f"needs addresses that are multiples of {TMA_BYTES}; {name} begins {x.data.ptr % TMA_BYTES} bytes after one"
    return None


def _heads_first(problem, x):
    return x.swapaxes(0, 1) if problem.options.packed else x


def _items(problem, tile: Tile) -> int:
    """Work items: row blocks of all heads, for packed sequences at least as many."""
    p = problem
    if p.options.packed:
        return (p.nq // tile.block_m + p.batch[1]) * p.hq
    return math.prod(p.batch) * p.hq * -(-p.nq // tile.block_m)


def _parts(problem, tile: Tile, items: int, multiprocessors: int) -> int:
    """Parts that the keys of each row block are split into: more than one where there are too few row blocks for the GPU."""
    p = problem
    if p.options.packed or 2 * items > multiprocessors:
        return 1
    tiles = min(p.nk, p.high - p.low + tile.block_m) // tile.block_n
    return max(1, min(multiprocessors // items, tiles // FEWEST_TILES))


def scales(problem) -> tuple:
    """(slope, scale_log2) of the kernels: with softcap, slope leads to the tanh; what comes after, or the score, times scale_log2."""
    scale, cap = problem.scale, problem.options.softcap
    return (np.float32(2 * LOG2E * scale / cap), np.float32(cap * LOG2E)) if cap else (np.float32(0), np.float32(scale * LOG2E))


def even_section(blocks: int, multiprocessors: int) -> int:
    """Fewest heads of so many blocks that are a whole number of turns there and back."""
    return 2 * multiprocessors // math.gcd(blocks, 2 * multiprocessors)


def _section(problem, tile: Tile, multiprocessors: int) -> int:
    """Heads whose row blocks are handed out together, longest first, so that no multiprocessor gets much more work than another."""
    p, turns = problem, multiprocessors
    blocks, pairs = -(-p.nq // tile.block_m), math.prod(p.batch) * p.hq
    even, step = even_section(blocks, turns), max(1, turns // 6)
    if blocks * pairs > SNAKE_TURNS * turns:  # one item more or less is nothing
        return even
    rows = np.arange(blocks) * tile.block_m
    first = np.maximum(p.low + rows, 0) // tile.block_n
    last = -(-np.clip(p.high + rows + tile.block_m, 0, p.nk) // tile.block_n)
    work = np.maximum(last - first, 1) + ITEM_TILES
    return min((even, *range(step, 2 * turns + 1, step)), key=lambda section: _most_work(work, pairs, section, turns))


def _most_work(work, pairs: int, section: int, turns: int) -> float:
    """Work of the busiest of `turns` blocks that take what `schedule.build_item` numbers, as `schedule.snake` says."""
    number = np.arange(len(work) * pairs)
    begin = number // (section * len(work)) * section
    block = len(work) - 1 - (number - begin * len(work)) // np.minimum(section, pairs - begin)
    load = np.pad(work[block], (0, -len(number) % turns)).reshape(-1, turns)
    return (load[::2].sum(0) + load[1::2, ::-1].sum(0)).max()


def prepare_forward(problem, inputs, results):
    """Prepared launches ``run((q, k, v, bias, mask, q_lengths, kv_lengths), (o, lse))`` for such arrays; absent ones are None."""
    p, (o, lse), tile = problem, results, tile_for(problem)
    if why_not_layout("o", o) is not None:  # only an array of the user's is like that
        return prepare_compact(lambda results: prepare_forward(p, inputs, results), ("o", "lse"), results)
    part_tile = next(tile for d, dv, tile in PART_TILES if p.d <= d and p.dv <= dv)
    parts = _parts(p, part_tile, _items(p, part_tile), launch.multiprocessors(inputs[0].data.device_id))
    if parts == 1:
        forward = _launch(p, tile, inputs, results, 1)
        if p.options == PLAIN:
            return lambda inputs, results: forward(*inputs[:3], results[0], *results)
        mapped = slice(0 if p.options.packed else 1)  # what is stored through a map, too
        return lambda inputs, results: forward(*inputs[:3], *results[mapped], *results, *_present(inputs[5:]))
    shape = (parts * p.batch[0], p.batch[1], p.hq, p.nq)
    allocate = lambda: tuple(arrays.compact(f"parts of {x}", n, "float32") for x, n in (("o", (*shape, p.dv)), ("lse", shape)))
    partial = allocate()
    forward = _launch(p, part_tile, inputs, partial, parts)
    combine = launch.Launch(
        "combine_sm90.build",
        (p.dtype, p.dv, lse is not None, parts, COMBINE_ROWS),
        grid=-(-math.prod(shape) // parts // COMBINE_ROWS),
        block=COMBINE_ROWS * COMBINE_LANES,
        operands=((partial[0], 5), (partial[1], 4), (o, 5), (lse, 4)),
    )

    def run(inputs, results):
        partial = allocate()
        forward(*inputs[:3], *partial, *_present(inputs[5:]))
        combine(*partial, *results)

    return run


def _present(optional: tuple) -> tuple:
    return tuple(x for x in optional if x is not None)


def _launch(problem, tile: Tile, inputs, results, parts: int):
    """The attention kernel, on results of the problem, or on float32 parts of them."""
    p, items = problem, _items(problem, tile) * parts
    q, k, v, o = (x if x is None else _heads_first(p, x) for x in (*inputs[:3], results[0]))
    store = "parts" if parts > 1 else "words" if p.options.packed else "map"
    lengths = 1 if p.options.packed else p.batch
    multiprocessors = launch.multiprocessors(q.data.device_id)
    section = 1 if p.options.packed or band(p) == "none" else _section(p, tile, multiprocessors)
    maps = ((q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (o, OUTPUT_ROWS))
    return launch.Launch(
        "forward_sm90.build",
        (p.dtype, p.d, p.dv, results[1] is not None, band(p), store, p.options.structure, tile),
        grid=min(items, multiprocessors),
        block=(tile.threads, tile.layout(p.d, p.dv).bytes),
        operands=((o if parts > 1 else o.view("uint32"), 5), (results[1], 4)),
        extras=tuple((x, lengths) for x in _present(inputs[5:])),
        scalars=(items, p.low, p.high, p.nk, parts, p.hk, section, p.batch[0]),
        parameters=scales(p),
        maps=maps if store == "map" else maps[:3],
    )


def prepare_backward(problem, inputs, results, deterministic=True):
    """Prepared launches ``run((do, q, k, v, o, lse, dlse, bias, mask, q_lengths, kv_lengths), (dq, dk, dv, dbias))`` in the same way."""
    from numba_flash.cuda import sm90_backward

    return sm90_backward.prepare(problem, inputs, results, deterministic)


def prepare_compact(prepare, names, results):
    """``run(inputs, results)``, prepared by ``prepare(results)``, by way of arrays that a tensor map can describe where results are not.

    The results are called `names`.
    """
    replaced = [x is not None and x.dtype.itemsize == 2 and why_not_layout("", x) is not None for x in results]
    compact = lambda results: tuple(
        arrays.compact(f"{name} before it goes to out", x.shape, x.dtype) if mine else x
        for name, x, mine in zip(names, results, replaced, strict=True)
    )
    run_compact = prepare(compact(results))

    def run(inputs, results):
        there = compact(results)
        run_compact(inputs, there)
        for x, y, mine in zip(results, there, replaced, strict=True):
            if mine:
                x[...] = y

    return run
