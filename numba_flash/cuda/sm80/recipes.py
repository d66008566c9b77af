"""Which kernels of the `sm80` tier serve a problem: a table for each pass, whose first row that
serves it is taken. Nothing else decides. Numba is not imported here.
"""

from dataclasses import replace

from numba_flash.cuda.config import PLAIN, RELATIVE, RESIDENT
from numba_flash.cuda.recipe import (
    KEY_BLOCKS,
    KEYS_OR_SPARSE,
    OF_GRADIENT,
    PLAIN_OR_OPTIONS,
    ROW_BLOCKS,
    ROWS_OR_SPARSE,
    SUMS,
    Call,
    Recipe,
)
from numba_flash.cuda.score.prepare_relative import alone
from numba_flash.cuda.sm80 import tiles
from numba_flash.cuda.sm80.backward import prepare_backward, prepare_dq
from numba_flash.cuda.sm80.backward.prepare_temporaries import backward_tile
from numba_flash.cuda.sm80.bias_gradient import (
    dbias_tiles,
    prepare_dbias,
    prepare_dq_dbias,
    prepare_dq_dbias_planes,
)
from numba_flash.cuda.sm80.decode import prepare_backward_decode, prepare_decode
from numba_flash.cuda.sm80.decode.decode_tiles import backward_decode_tile, decode_tile
from numba_flash.cuda.sm80.forward import prepare_forward
from numba_flash.cuda.sm80.operands import float64_tiles
from numba_flash.cuda.sm80.short_heads import prepare_short_heads
from numba_flash.cuda.sm80.tiles import Hardware, hardware
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.prepare_tile_lists import choose

# Work lists, and where dQ goes, in words.
DECODE_ROWS = "queries of all heads that share keys, times parts of the keys"
BESIDE_DBIAS = "beside the bias gradient"


def _there(call: Call) -> Hardware:
    return hardware(call.gpu.capability)


def _if_any(tile_of):
    """The problem of a call that there is a tile for."""
    return lambda call: None if tile_of(call) is None else call.problem


# ---- forward: the problem as its kernels see it, if a row serves it


def _decode_tile(call: Call):
    p = call.problem
    # planes of float32 are written and read anew
    few = grid.is_decode(p) and p.dtype in ("float16", "bfloat16")
    return decode_tile(p, _there(call)) if few else None


def forward_tile(p, gpu):
    """The tile of many queries, or of few blocks of them."""
    of, there = float64_tiles if p.dtype == "float64" else tiles, hardware(gpu.capability)
    tile = of.forward_tile(p, there)
    few = grid.items(p, p.nq, p.hq, tile.block_m) <= gpu.multiprocessors
    return of.small_tile(p, there, few) or tile


def _within_blocks(p, gpu):
    """The first tile of all for as many columns that lies within the blocks of the mask, if one
    does.
    """
    d, limit = max(p.d, p.dv), hardware(gpu.capability).shared_limit
    rows = (*tiles.MODIFIED_TILES, *tiles.SMALL_TILES)
    if p.dtype == "float32":
        rows = tiles.PLANES_TILES
    if p.dtype == "float64":
        rows = (*float64_tiles.FORWARD_TILES, *float64_tiles.SMALL_TILES)
    fit = (row.tile for row in rows if d <= row.d and row.shared <= limit)
    return next((t for t in fit if p.options.blocks.divided_by(t.block_m, t.block_n)), None)


def _forward(call: Call):
    """The tile, and the problem with lists for a mask of blocks, if one fits these."""
    p, gpu = call.problem, call.gpu
    return choose(p, lambda p: forward_tile(p, gpu), lambda p: _within_blocks(p, gpu))


def _relative(call: Call):
    """A problem whose numbers for each distance there is room for in shared memory."""
    p = alone(call.problem)
    if p is None:
        return None
    room = prepare_forward.shared_bytes(p, forward_tile(p, call.gpu), (p.d, p.dv))
    return p if room <= _there(call).shared_limit else None


def _float64(call: Call):
    return _forward(call).problem if call.problem.dtype == "float64" else None


FORWARD = (
    Recipe(
        problems="float32, short and narrow heads, many of them, no option but a bias",
        serves=_if_any(prepare_short_heads.tile_of),
        loops=("sm80.short_heads.forward_short_heads",),
        tile=lambda p, call: prepare_short_heads.tile_of(call),
        work="heads",
        stage="plain, or a bias",
        prepare=prepare_short_heads.prepare,
    ),
    Recipe(
        problems="up to 16 queries, 16 bits, neither packed nor a `BlockMask`",
        serves=_if_any(_decode_tile),
        loops=("sm80.decode.forward_decode",),
        tile=lambda p, call: _decode_tile(call),
        work=DECODE_ROWS,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_decode.prepare,
    ),
    Recipe(
        problems="16 bits, a `score_mod` that adds a number for each distance, no other option",
        serves=_relative,
        loops=("sm80.forward.forward",),
        tile=lambda p, call: forward_tile(p, call.gpu),
        work=ROW_BLOCKS,
        stage=RELATIVE,
        prepare=prepare_forward.prepare,
    ),
    Recipe(
        problems="float64",
        serves=_float64,
        loops=("sm80.forward.forward_float64",),
        tile=lambda p, call: _forward(call).tile,
        work=ROWS_OR_SPARSE,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_forward.prepare,
    ),
    Recipe(
        problems="all others, with keys in pages, too",
        serves=lambda call: _forward(call).problem,
        loops=("sm80.forward.forward",),
        tile=lambda p, call: _forward(call).tile,
        work=ROWS_OR_SPARSE,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_forward.prepare,
    ),
)


# ---- the gradient of a bias, where it is made by a kernel of its own


def _dbias(call: Call):
    p, there = call.problem, _there(call)
    of = float64_tiles if p.dtype == "float64" else dbias_tiles
    sums = any(grid.summed_axes(p, call.results.dbias))
    return choose(p, lambda p: of.dbias_tile(p, there, sums))


BIAS_GRADIENT = (
    Recipe(
        problems="float64",
        serves=lambda call: _dbias(call).problem if call.problem.dtype == "float64" else None,
        loops=("sm80.bias_gradient.dbias_float64",),
        tile=lambda p, call: _dbias(call).tile,
        work=OF_GRADIENT,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_dbias.Dbias,
    ),
    Recipe(
        problems="all others",
        serves=lambda call: _dbias(call).problem,
        loops=("sm80.bias_gradient.dbias",),
        tile=lambda p, call: _dbias(call).tile,
        work=OF_GRADIENT,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_dbias.Dbias,
    ),
)


# ---- backward


def _decode_gradients(call: Call):
    return call.problem if grid.is_decode_gradient(call.problem) else None


def _backward(call: Call):
    """The tile, and the problem with lists for a mask of blocks, if it fits these."""
    there = _there(call)
    return choose(call.problem, lambda p: backward_tile(p, there))


def _in_slots(call: Call):
    p, tile = _backward(call)
    return p if prepare_dq.serves(p, call.inputs, tile, _there(call).turing) else None


def _backward_of(dtype: str):
    return lambda call: _backward(call).problem if call.problem.dtype == dtype else None


def _shared(call: Call):
    p, tile = _backward(call)
    return p if tile.ways > 1 else None


BACKWARD = (
    Recipe(
        problems="few queries, from 512 keys on, 16 bits, scores as they are, D up to 128",
        serves=_decode_gradients,
        loops=("sm80.decode.backward_decode",),
        tile=lambda p, call: backward_decode_tile(p, _there(call)),
        work=DECODE_ROWS,
        stage=PLAIN,
        prepare=prepare_backward_decode.prepare,
        dq="in registers, of parts of the keys that are added up",
    ),
    Recipe(
        problems="16 bits, gradients with that of a bias that short, narrow heads share, no other",
        serves=_if_any(prepare_dq_dbias.tile_of),
        loops=("sm80.bias_gradient.dq_dbias", "sm80.bias_gradient.dk_dv"),
        tile=lambda p, call: prepare_dq_dbias.tile_of(call),
        work=OF_GRADIENT,
        stage=RESIDENT,
        prepare=prepare_dq_dbias.prepare,
        dq=BESIDE_DBIAS,
    ),
    Recipe(
        problems="float32, gradients with that of a bias that many such heads share, no other",
        serves=_if_any(prepare_dq_dbias_planes.tiles_of),
        loops=("sm80.bias_gradient.dq_dbias_planes", "sm80.bias_gradient.dk_dv_planes"),
        tile=lambda p, call: prepare_dq_dbias_planes.tiles_of(call),
        work=OF_GRADIENT,
        stage=RESIDENT,
        prepare=prepare_dq_dbias_planes.prepare,
        dq=BESIDE_DBIAS,
    ),
    Recipe(
        problems="16 bits, plain or causal, D beyond 128, blocks with 163 KB of shared memory",
        serves=_in_slots,
        loops=("sm80.backward.backward_shared", "sm80.backward.dq"),
        tile=lambda p, call: replace(_backward(call).tile, slots=True),
        work=KEY_BLOCKS,
        stage=PLAIN,
        prepare=prepare_backward.prepare,
        dq="of dS, stored in slots",
    ),
    Recipe(
        problems="float64",
        serves=_backward_of("float64"),
        loops=("sm80.backward.backward_float64",),
        tile=lambda p, call: _backward(call).tile,
        work=KEYS_OR_SPARSE,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_backward.prepare,
        dq=SUMS,
        beside=BIAS_GRADIENT,
    ),
    Recipe(
        problems="float32",
        serves=_backward_of("float32"),
        loops=("sm80.backward.backward_planes",),
        tile=lambda p, call: _backward(call).tile,
        work=KEYS_OR_SPARSE,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_backward.prepare,
        dq=SUMS,
        beside=BIAS_GRADIENT,
    ),
    Recipe(
        problems="D beyond 64, or beyond 128, where several warps share keys",
        serves=_shared,
        loops=("sm80.backward.backward_shared",),
        tile=lambda p, call: _backward(call).tile,
        work=KEYS_OR_SPARSE,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_backward.prepare,
        dq=SUMS,
        beside=BIAS_GRADIENT,
    ),
    Recipe(
        problems="all others",
        serves=lambda call: _backward(call).problem,
        loops=("sm80.backward.backward",),
        tile=lambda p, call: _backward(call).tile,
        work=KEYS_OR_SPARSE,
        stage=PLAIN_OR_OPTIONS,
        prepare=prepare_backward.prepare,
        dq=SUMS,
        beside=BIAS_GRADIENT,
    ),
)

PASSES = {"forward": FORWARD, "backward": BACKWARD, "gradient of a bias": BIAS_GRADIENT}
