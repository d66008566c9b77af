"""Which kernels of the `sm90` tier serve a problem: a table for each pass, whose first row that
serves it is taken. Nothing else decides. Numba is not imported here.
"""

from dataclasses import replace

from numba_flash.cuda.arguments import planes_of
from numba_flash.cuda.config import OPTIONS, PLAIN, RELATIVE, RESIDENT
from numba_flash.cuda.recipe import (
    BLOCK_SPARSE,
    KEY_BLOCKS,
    KEYS_OR_SPARSE,
    OF_GRADIENT,
    ROW_BLOCKS,
    ROWS_OR_SPARSE,
    SUMS,
    Call,
    Recipe,
)
from numba_flash.cuda.score.prepare_relative import alone
from numba_flash.cuda.sm90.backward import prepare_backward, prepare_block_sparse
from numba_flash.cuda.sm90.backward.backward_tiles import backward_tile, planes_backward_tile
from numba_flash.cuda.sm90.backward.options_tiles import MOST, backward_options_tile, storing_tile
from numba_flash.cuda.sm90.bias_gradient import prepare_dbias
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import dbias_tile, queries_tile
from numba_flash.cuda.sm90.config import NOTED, RESIDENT_QUERIES
from numba_flash.cuda.sm90.dq import prepare_dq_order
from numba_flash.cuda.sm90.forward import prepare_forward
from numba_flash.cuda.sm90.forward.forward_tiles import (
    copying_tile,
    forward_tile,
    kv_split_tile,
    options_tile,
    planes_tile,
    relative_tile,
    resident_tile,
)
from numba_flash.cuda.sm90.prepare_pairs import copied_pairs, tiles_of_bias
from numba_flash.cuda.work.prepare_tile_lists import choose

UNITS = "blocks of queries, batch innermost"  # a list of work, in words


# ---- forward: the problem as its kernels see it, if a row serves it


def _block_sparse(call: Call):
    """A problem whose scores have options beyond a softcap, with lists for a mask of blocks that
    tiles fit.
    """
    p = call.problem
    return choose(p, options_tile).problem if p.options.modifies_beyond_softcap else None


def _lists_alone(call: Call):
    p = _block_sparse(call)
    return p if p is not None and p.options.only_lists else None


def _copied(call: Call):
    p = _block_sparse(call)
    found = p is not None and copied_pairs(p, call.inputs) is not None
    return p if found else None


def _resident(call: Call):
    served = prepare_forward.has_resident_bias(call.problem, call.inputs, call.results)
    return call.problem if served else None


def _planes(call: Call):
    return call.problem if planes_of(call.problem) else None


FORWARD = (
    Recipe(
        problems="a bias that batch elements share, narrow heads, no other option",
        serves=_resident,
        loops=("sm90.resident_bias.forward_resident",),
        tile=lambda p, call: resident_tile(p),
        work=UNITS,
        stage=RESIDENT,
        prepare=prepare_forward.prepare_resident,
    ),
    Recipe(
        problems="float32",
        serves=_planes,
        loops=("sm90.fp16x2.forward_planes",),
        tile=lambda p, call: planes_tile(p),
        work=ROW_BLOCKS,
        stage=PLAIN,
        prepare=prepare_forward.prepare_split,
    ),
    Recipe(
        problems="a `score_mod` that adds a number for each distance, no other option",
        serves=lambda call: alone(call.problem),
        loops=("sm90.forward.forward",),
        tile=lambda p, call: relative_tile(p),
        kv_split_tile=lambda p: relative_tile(p, in_kv_splits=True),
        work=ROW_BLOCKS,
        stage=RELATIVE,
        prepare=prepare_forward.prepare_options,
    ),
    Recipe(
        problems="a `BlockMask` of whole tiles, no other option",
        serves=_lists_alone,
        loops=("sm90.forward.forward",),
        tile=lambda p, call: choose(call.problem, options_tile).tile,
        work=BLOCK_SPARSE,
        stage=PLAIN,
        prepare=prepare_forward.prepare_options,
    ),
    Recipe(
        problems="a bias, or a mask of pairs, that the copy engine brings",
        serves=_copied,
        loops=("sm90.forward.forward",),
        tile=lambda p, call: copying_tile(p, "bias" if p.options.bias else "mask"),
        work=ROWS_OR_SPARSE,
        stage=OPTIONS,
        prepare=prepare_forward.prepare_options,
    ),
    Recipe(
        problems="any other bias, mask, dropout or `score_mod`",
        serves=_block_sparse,
        loops=("sm90.forward.forward",),
        tile=lambda p, call: choose(call.problem, options_tile).tile,
        work=ROWS_OR_SPARSE,
        stage=OPTIONS,
        prepare=prepare_forward.prepare_options,
    ),
    Recipe(
        problems="all others",
        serves=lambda call: call.problem,
        loops=("sm90.forward.forward",),
        tile=lambda p, call: forward_tile(p),
        kv_split_tile=lambda p: kv_split_tile(p),
        work=ROW_BLOCKS,
        stage=PLAIN,
        prepare=prepare_forward.prepare,
    ),
)


# ---- the gradient of a bias, where it is made by a kernel of its own


def _rows_stay(call: Call):
    p = call.problem
    return p if prepare_dbias.rows_stay(p, call.inputs, call.results.dbias) else None


BIAS_GRADIENT = (
    Recipe(
        problems="16 bits of each pair, heads of its own, no other option, D up to 64",
        serves=_rows_stay,
        loops=("sm90.bias_gradient.dbias",),
        tile=lambda p, call: prepare_dbias.rows_tile_of(p, call.results.dbias),
        work="runs of tiles of a block of queries, batch innermost",
        stage=RESIDENT_QUERIES,
        prepare=prepare_dbias.DbiasRows,
    ),
    Recipe(
        problems="all others",
        serves=lambda call: choose(call.problem, dbias_tile).problem,
        loops=("sm90.bias_gradient.dbias",),
        tile=lambda p, call: choose(call.problem, dbias_tile).tile,
        work=OF_GRADIENT,
        stage=NOTED,
        prepare=prepare_dbias.Dbias,
    ),
)


# ---- backward


def _relative(call: Call):
    p = alone(call.problem)
    return p if p is not None and max(p.d, p.dv) <= MOST else None


def _resident_gradients(call: Call):
    p, wanted = call.problem, call.results.dbias is not None
    return p if prepare_dbias.has_resident_bias(p, call.inputs, wanted) else None


def _options(call: Call):
    """A problem whose scores have options beyond a softcap, with lists where tiles fit."""
    p = call.problem
    return choose(p, backward_options_tile).problem if p.options.modifies_beyond_softcap else None


def _gradients_of_lists(call: Call):
    p = _options(call)
    return p if p is not None and p.options.only_lists else None


def _stored(call: Call):
    p = _gradients_of_lists(call)
    if p is None or not call.deterministic or storing_tile(p) is None:
        return None
    return p if prepare_block_sparse.serves(p) else None


def _copied_bias(call: Call):
    p = _options(call)
    return p if p is not None and tiles_of_bias(p, call.inputs.bias) is not None else None


def _rounding(call: Call):
    p, tile = call.problem, backward_tile(call.problem)
    many = prepare_backward.many_items(p, tile, call.gpu)
    ordered = prepare_dq_order.ordered(p, tile, call.deterministic)
    return p if many and ordered and prepare_dq_order.rounds(p, tile) else None


BACKWARD = (
    Recipe(
        problems="a `score_mod` that adds a number for each distance, no other option, D up to 128",
        serves=_relative,
        loops=("sm90.backward.backward",),
        tile=lambda p, call: replace(backward_tile(p), relative=True),
        work=KEY_BLOCKS,
        stage=RELATIVE,
        prepare=prepare_backward.prepare,
        dq=SUMS,
    ),
    Recipe(
        problems="gradients with that of a bias that batch elements share, narrow heads, no other",
        serves=_resident_gradients,
        loops=("sm90.resident_bias.dq_dbias_resident", "sm90.resident_bias.dk_dv_resident"),
        tile=lambda p, call: queries_tile(p),
        work=UNITS,
        stage=RESIDENT,
        prepare=prepare_dbias.prepare_resident,
        dq="in registers, beside the bias gradient",
    ),
    Recipe(
        problems="float32, D up to 128",
        serves=_planes,
        loops=("sm90.fp16x2.backward_planes",),
        tile=lambda p, call: planes_backward_tile(p),
        work=KEY_BLOCKS,
        stage=PLAIN,
        prepare=prepare_backward.prepare_split,
        dq=SUMS,
    ),
    Recipe(
        problems="a `BlockMask` of whole tiles of dS, no other option, D beyond 64, deterministic",
        serves=_stored,
        loops=("sm90.backward.backward", "sm90.dq.dq"),
        tile=lambda p, call: storing_tile(p),
        work=BLOCK_SPARSE,
        stage=PLAIN,
        prepare=prepare_block_sparse.prepare,
        dq="of dS, stored in slots",
    ),
    Recipe(
        problems="a `BlockMask` of whole tiles, no other option",
        serves=_gradients_of_lists,
        loops=("sm90.backward.backward",),
        tile=lambda p, call: choose(call.problem, backward_options_tile).tile,
        work=BLOCK_SPARSE,
        stage=PLAIN,
        prepare=prepare_backward.prepare_options,
        dq=SUMS,
    ),
    Recipe(
        problems="a bias that the copy engine brings, D up to 128",
        serves=_copied_bias,
        loops=("sm90.backward.backward",),
        tile=lambda p, call: replace(backward_options_tile(p), copies_bias=True),
        work=KEYS_OR_SPARSE,
        stage=OPTIONS,
        prepare=prepare_backward.prepare_options,
        dq=SUMS,
        beside=BIAS_GRADIENT,
    ),
    Recipe(
        problems="any other bias, mask, dropout or `score_mod`, D up to 128",
        serves=_options,
        loops=("sm90.backward.backward",),
        tile=lambda p, call: choose(call.problem, backward_options_tile).tile,
        work=KEYS_OR_SPARSE,
        stage=OPTIONS,
        prepare=prepare_backward.prepare_options,
        dq=SUMS,
        beside=BIAS_GRADIENT,
    ),
    Recipe(
        problems="D beyond 128",
        serves=lambda call: None if backward_tile(call.problem).adds_dq else call.problem,
        loops=("sm90.backward.backward_wide", "sm90.dq.dq"),
        tile=lambda p, call: backward_tile(p),
        work=KEY_BLOCKS,
        stage=PLAIN,
        prepare=prepare_backward.prepare_wide,
        dq="of dS, stored for some blocks of keys at a time",
    ),
    Recipe(
        problems="plain or causal, many work items, few blocks of keys",
        serves=_rounding,
        loops=("sm90.backward.backward",),
        tile=lambda p, call: replace(backward_tile(p), rounds_dq=True),
        work=KEY_BLOCKS,
        stage=PLAIN,
        prepare=prepare_backward.prepare,
        dq="summed in memory, and rounded by a warp of the same kernel",
    ),
    Recipe(
        problems="all others",
        serves=lambda call: call.problem,
        loops=("sm90.backward.backward",),
        tile=lambda p, call: backward_tile(p),
        work=KEY_BLOCKS,
        stage=PLAIN,
        prepare=prepare_backward.prepare,
        dq=SUMS,
    ),
)

PASSES = {"forward": FORWARD, "backward": BACKWARD, "gradient of a bias": BIAS_GRADIENT}
