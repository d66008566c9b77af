"""Tiles of few queries of float32 and float64 whose columns lanes share. Numba is not imported
here.

A step of a warp is a few keys, for which it has places of its own in shared memory; several steps
are on their way while one is computed. 4 keys and values, a step, are 4 KB, for which an H200's
memory needs 213 cycles of a multiprocessor; its 480 instructions take 120. On their way are 3 steps
of 12 warps, 144 KB; 29 would be enough.

A pass takes as long as a copy of as many bytes, at D = 64 up to a tenth longer, and two thirds of
the time of `simt.decode`, where each thread has a key. Numbers of steps and blocks hardly matter.
Measured: docs/lab/any_gpu.md, `tile_of`.
"""

from dataclasses import dataclass

from numba_flash.cuda.arguments import chunked

WARP, CHUNK = 32, 16  # threads of a warp; bytes that are copied at a time
SIZES = {"float32": 4, "float64": 8}
ROWS = 4, 8  # of a block; of one, there is a kernel that is as fast as memory
MOST_HELD, MOST_KEYS = 2, 4  # chunks of a row that a lane has; keys of a step, if that is one
LEAST = (8, 0)  # compute capability, for copies that go on


@dataclass(frozen=True)
class LanesTile:
    """Shape of a block whose warps have the same rows, and keys of their own.

    Attributes
    ----------
    rows : int
        Queries of all heads that read the same keys, a power of two.
    size : int
        Bytes of a number.
    lanes : int
        That share the columns of a key.
    held : int
        Chunks of a row that each of them has: one, and another one `lanes` chunks behind it.
    keys : int
        That a lane has in a step.
    warps : int
        Of a block.
    stages : int
        Steps that there is room for.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    group : int
        Heads that read the same keys.
    """

    rows: int
    size: int
    lanes: int
    held: int
    keys: int
    warps: int = 4
    stages: int = 4
    min_blocks: int = 3
    group: int = 1

    @property
    def block_m(self) -> int:
        return self.rows

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def per_chunk(self) -> int:
        """Numbers of a chunk."""
        return CHUNK // self.size

    @property
    def columns(self) -> int:
        """That a lane has."""
        return self.held * self.per_chunk

    @property
    def warp_n(self) -> int:
        """Keys of a warp's step."""
        return self.keys * WARP // self.lanes

    @property
    def step_n(self) -> int:
        """Of all warps'."""
        return self.warp_n * self.warps

    @property
    def block_n(self) -> int:
        """Of as many steps as there is room for: what a block asks for before it begins."""
        return self.step_n * self.stages

    @property
    def scores(self) -> int:
        """Of a step, that a lane has a part of; each is one lane's then, or of several alike."""
        return self.rows * self.keys

    @property
    def layout(self) -> "LanesLayout":
        part = self.keys * self.held * CHUNK * WARP  # of K in a step
        weights = self.stages * 2 * part * self.warps
        sums = self.warps * self.rows * self.held * CHUNK * self.lanes
        used = weights + self.warps * self.warp_n * self.rows * self.size
        in_the_end = sums + 2 * self.warps * self.rows * self.size
        return LanesLayout(part, weights, sums, max(used, in_the_end))


@dataclass(frozen=True)
class LanesLayout:
    """Where such a block keeps what in shared memory, in bytes.

    Attributes
    ----------
    part : int
        Of the keys of a warp's step; their values lie behind them.
    weights : int
        Where the weights of all warps begin, behind the steps of all.
    sums : int
        In the end, where m and l of all warps begin, behind the O of all.
    bytes : int
        What there is in all.
    """

    part: int
    weights: int
    sums: int
    bytes: int


def lanes_tile(problem, inputs, capability: tuple[int, int]) -> LanesTile | None:
    """The one for few queries that read whole chunks of keys and values (their layouts are among
    the `inputs`), without options that change scores; None if none fits.
    """
    p, group = problem, problem.hq // problem.hk
    if p.nq * group == 1 or p.dtype not in SIZES or capability < LEAST:
        return None
    if p.options.modifies or p.options.paged or not chunked(inputs.k, inputs.v):
        return None
    return tile_of(p.dtype, max(p.d, p.dv), p.nq * group, group)


def tile_of(dtype: str, d: int, rows: int, group: int) -> LanesTile | None:
    """That of so many rows, of which `group` heads have each query's."""
    size, fit = SIZES[dtype], next((each for each in ROWS if rows <= each), None)
    chunks = -(-d * size // CHUNK)
    lanes, held = (WARP // 2, 1) if chunks <= WARP // 2 else (WARP, -(-chunks // WARP))
    if fit is None or held > MOST_HELD:
        return None
    keys = min(MOST_KEYS // held, lanes // fit)
    return LanesTile(fit, size, lanes, held, keys, min_blocks=4 - held, group=group)
