"""The `sm90` kernels that are compiled to machine code without a GPU, by name."""

from dataclasses import replace
from types import SimpleNamespace

from compiled import Kernel

from numba_flash.arguments.block_mask import BlockSize
from numba_flash.arguments.options import PLAIN, Options
from numba_flash.cuda.arguments import BASE_E, RAISED_BASE_2, Vectors
from numba_flash.cuda.config import OPTIONS as OPTIONS_STAGE
from numba_flash.cuda.config import RELATIVE as RELATIVE_STAGE
from numba_flash.cuda.config import RESIDENT, PreprocessConfig
from numba_flash.cuda.passes.prepare_kv_splits import ROWS
from numba_flash.cuda.sm90.backward.backward_tiles import BACKWARD_TILES, WIDE_DQ_TILE, BackwardTile, WideTile, with_options
from numba_flash.cuda.sm90.backward.backward_tiles import PLANES_TILES as BACKWARD_SPLIT_TILES
from numba_flash.cuda.sm90.backward.options_tiles import DQ_TILE, SPARSE_TILES, STORING_TILE, crowded
from numba_flash.cuda.sm90.backward.options_tiles import TILES as BACKWARD_OPTION_TILES
from numba_flash.cuda.sm90.backward.prepare_block_sparse import SLOT_THREADS
from numba_flash.cuda.sm90.backward.prepare_pass import ROW_THREADS
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import CROWDED, ROWS_TILES, KeysTile, QueriesTile
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import TILES as DBIAS_TILES
from numba_flash.cuda.sm90.config import RESIDENT_QUERIES, BackwardConfig, BiasGradientConfig, DqConfig, ForwardConfig
from numba_flash.cuda.sm90.forward.forward_tiles import (
    COPYING,
    FORWARD_TILES,
    KV_SPLIT_TILES,
    OPTION_TILES,
    ResidentTile,
    Tile,
    relative_tile,
    resident_tile,
    words_held,
)
from numba_flash.cuda.sm90.forward.forward_tiles import PLANES_TILES as FORWARD_SPLIT_TILES
from numba_flash.cuda.sm90.tiles import DQ_PART, Row
from numba_flash.cuda.work.prepare_tile_lists import LISTS as WARPS_OF_LISTS

LENGTHS = Options(q_lengths="int32", kv_lengths="int64", follows=True)
PACKED = Options(q_lengths="int32", kv_lengths="int32", packed=True, follows=True)
SOFTCAP, RELATIVE = Options(softcap=1.0), Options(relative=True)
BLOCK_SPARSE = Options(block_sparse=True)
LISTED_LENGTHS, LISTED_PACKED, LISTED_SOFTCAP = (replace(options, block_sparse=True) for options in (LENGTHS, PACKED, SOFTCAP))


def first(table: tuple[Row, ...], d: int, dv: int):
    """Tile of long sequences."""
    return next(row.tile for row in table if 2**20 <= row.keys and d <= row.d and dv <= row.dv)


def tile_of(d: int, dv: int) -> Tile:
    return first(FORWARD_TILES["full"], d, dv)


def part_tile_of(d: int) -> Tile:
    return first(KV_SPLIT_TILES, d, d)


def backward_tile(d: int, dv: int) -> BackwardTile | WideTile:
    return first(BACKWARD_TILES, d, dv)


# Every tile at the head dimension it was made for; and one of each: dtype, store, options, head dimensions that fill no panel.
FORWARD = {
    **{f"{row.d}-{row.keys}-none": ("bfloat16", row.d, row.dv, True, "none", "map", PLAIN, row.tile) for row in FORWARD_TILES["full"]},
    **{f"{row.d}-{row.keys}-above": ("bfloat16", row.d, row.dv, True, "above", "map", PLAIN, row.tile) for row in FORWARD_TILES["band"]},
    **{f"{d}-both": ("bfloat16", d, d, True, "both", "map", PLAIN, tile_of(d, d)) for d in (64, 128, 256)},
    **{f"{row.d}-parts": ("bfloat16", row.d, row.dv, True, "none", "kv_splits", PLAIN, row.tile) for row in KV_SPLIT_TILES},
    "float16": ("float16", 128, 128, False, "none", "map", PLAIN, tile_of(128, 128)),
    "72, 40": ("bfloat16", 72, 40, True, "above", "map", PLAIN, tile_of(72, 40)),
    "192, 128": ("float16", 192, 128, True, "none", "map", PLAIN, tile_of(192, 128)),
    "lengths": ("bfloat16", 128, 128, True, "above", "map", LENGTHS, tile_of(128, 128)),
    "lengths in parts": ("float16", 128, 128, True, "above", "kv_splits", LENGTHS, part_tile_of(128)),
    "packed": ("bfloat16", 64, 64, True, "above", "words", PACKED, tile_of(64, 64)),
    "packed, 128": ("float16", 128, 128, True, "none", "words", PACKED, tile_of(128, 128)),
    "softcap": ("bfloat16", 128, 128, True, "none", "map", SOFTCAP, tile_of(128, 128)),
    "softcap, 64": ("float16", 64, 64, True, "above", "map", SOFTCAP, tile_of(64, 64)),
}
# The same without a tile, where sums begin with what a score_mod adds.
OF_DISTANCES = {
    "64 relative": ("bfloat16", 64, 64, True, "none", "map", RELATIVE),
    "128 relative, causal": ("float16", 128, 128, True, "above", "map", RELATIVE),
    "256 relative": ("bfloat16", 256, 256, True, "none", "map", RELATIVE),
    "64 relative, lengths, parts": ("float16", 64, 64, True, "above", "kv_splits", replace(LENGTHS, relative=True)),
}


def relative_tile_of(d: int, dv: int, band: str, store: str) -> Tile:
    return relative_tile(SimpleNamespace(d=d, dv=dv, nk=2**20, band=band, options=RELATIVE), store == "kv_splits")


FORWARD |= {name: (*config, relative_tile_of(*config[1:3], *config[4:6])) for name, config in OF_DISTANCES.items()}
# dtype, head dimensions, lse, band, store, options
LISTS = {
    "64 lists": ("bfloat16", 64, 64, True, "none", "map", BLOCK_SPARSE),
    "64 lists, causal": ("float16", 64, 64, True, "above", "map", BLOCK_SPARSE),
    "128 lists": ("float16", 128, 128, True, "none", "map", BLOCK_SPARSE),
    "128 lists, window": ("bfloat16", 128, 128, True, "both", "map", BLOCK_SPARSE),
    "128 lists, lengths, parts": ("float16", 128, 128, True, "above", "kv_splits", LISTED_LENGTHS),
    "128 lists, packed": ("bfloat16", 128, 128, True, "above", "words", LISTED_PACKED),
    "256 lists": ("bfloat16", 256, 256, True, "none", "map", BLOCK_SPARSE),
    "256 lists, parts": ("bfloat16", 256, 256, True, "none", "kv_splits", BLOCK_SPARSE),
}

BIAS, BIAS_32, MASK, DROPOUT = Options(bias="bfloat16"), Options(bias="float32"), Options(mask=True), Options(dropout=0.5)
BIAS_16 = Options(bias="float16")
BLOCKS = Options(mask=True, blocks=BlockSize(100, 50))
ODD_BLOCKS = Options(mask=True, blocks=BlockSize(100, 33))
EVERYTHING = replace(LENGTHS, bias="float32", mask=True, dropout=0.5, softcap=1.0)
PAIRS, ONES = Vectors(True, True), Vectors()


def options_tile_of(options: Options, d: int) -> Tile:
    return first(OPTION_TILES[words_held(options)], d, d)


FORWARD |= {name: (*config, options_tile_of(config[-1], config[1])) for name, config in LISTS.items()}
FORWARD = {name: ForwardConfig(*config) for name, config in FORWARD.items()}
FORWARD |= {name: replace(config, stage=RELATIVE_STAGE) for name, config in FORWARD.items() if config.options.relative}

# One for each tile: dtype, head dimensions, lse, band, store, how bias and mask are read, options.
FORWARD_OPTIONS = {
    "forward sm90 64 dropout": ("bfloat16", 64, 64, True, "above", "words", PAIRS, replace(PACKED, dropout=0.5)),
    "forward sm90 128 dropout": ("float16", 128, 128, True, "none", "map", PAIRS, DROPOUT),
    "forward sm90 256 dropout": ("float16", 256, 256, True, "none", "map", PAIRS, DROPOUT),
    "forward sm90 64 bias": ("bfloat16", 64, 64, True, "none", "map", PAIRS, BIAS),
    "forward sm90 128 bias": ("bfloat16", 128, 128, True, "above", "map", PAIRS, BIAS),
    "forward sm90 256 mask": ("bfloat16", 256, 256, True, "none", "map", PAIRS, MASK),
    "forward sm90 128 blocks": ("bfloat16", 128, 128, True, "none", "map", ONES, LISTED_SOFTCAP),
    "forward sm90 128 blocks that do not fit": ("bfloat16", 128, 128, True, "above", "map", ONES, BLOCKS),
    "forward sm90 64 bias of float32": ("float16", 64, 64, True, "above", "map", ONES, BIAS_32),
    "forward sm90 128 bias of float32": ("float16", 128, 128, True, "none", "map", PAIRS, BIAS_32),
    "forward sm90 256 bias of float32": ("bfloat16", 256, 256, True, "none", "map", PAIRS, BIAS_32),
    "forward sm90 64 everything": ("float16", 64, 64, True, "both", "kv_splits", ONES, EVERYTHING),
    "forward sm90 128 everything": ("float16", 128, 128, True, "none", "map", PAIRS, EVERYTHING),
    "forward sm90 256 everything": ("float16", 256, 256, True, "none", "map", PAIRS, EVERYTHING),
}
FORWARD_OPTIONS = {name: (*config, options_tile_of(config[-1], config[1])) for name, config in FORWARD_OPTIONS.items()}
FORWARD_OPTIONS |= {
    "forward sm90 64 copied bias": ("bfloat16", 64, 64, True, "none", "map", PAIRS, BIAS, first(COPYING["bias"], 64, 64)),
    "forward sm90 64 copied bias, causal": ("float16", 64, 64, True, "above", "kv_splits", PAIRS, BIAS_16, first(COPYING["bias"], 64, 64)),
    "forward sm90 64 copied mask": ("float16", 64, 64, True, "none", "map", PAIRS, MASK, first(COPYING["mask"], 64, 64)),
}
FORWARD_OPTIONS = {
    name: ForwardConfig(*sizes, options, tile, vectors, OPTIONS_STAGE) for name, (*sizes, vectors, options, tile) in FORWARD_OPTIONS.items()
}

# dtype, head dimensions, lse, how the bias is read, options, queries and keys
FORWARD_KEPT = {
    "kept bias": ("bfloat16", 32, 32, True, PAIRS, BIAS, 128, 384),
    "kept bias of 192 queries": ("bfloat16", 32, 32, True, PAIRS, BIAS, 384, 384),
    "kept bias of 16 bits": ("float16", 24, 16, False, ONES, Options(bias="float16"), 128, 700),
    "kept bias of float32": ("float16", 32, 32, True, ONES, BIAS_32, 128, 256),
}


def kept_tile_of(options: Options, nq: int, nk: int) -> ResidentTile:
    return resident_tile(SimpleNamespace(options=options, nq=nq, nk=nk))


FORWARD_KEPT = {
    name: ForwardConfig(*sizes, "none", "words", options, kept_tile_of(options, nq, nk), vectors, RESIDENT)
    for name, (*sizes, vectors, options, nq, nk) in FORWARD_KEPT.items()
}

ALL_BATCHES = (False, True, False, False, False)  # what dbias is summed over
DQ_DBIAS_KEPT = {  # dtype, head dimensions, how the bias is read, options, dlse, out and how it is written, tile
    "dq and dbias, kept": ("bfloat16", 32, 32, PAIRS, BIAS, False, "float32", True, ALL_BATCHES, QueriesTile(2, 3)),
    "dq and dbias 24, 16, kept": ("float16", 24, 16, ONES, BIAS_16, True, "float16", False, ALL_BATCHES, QueriesTile(2, 1)),
}
DK_DV_KEPT = {  # dtype, head dimensions, how the bias is read, options, tile
    "dk and dv, kept": ("bfloat16", 32, 32, PAIRS, BIAS, KeysTile(128, 4, 4, 2, 96)),
    "dk and dv 24, 16, kept": ("float16", 24, 16, ONES, BIAS_16, KeysTile(128, 2, 6, 2, 64)),
}
DQ_DBIAS_KEPT = {
    name: BiasGradientConfig(*sizes, False, options, tile, out, summed, wide, vectors, dlse, RESIDENT)
    for name, (*sizes, vectors, options, dlse, out, wide, summed, tile) in DQ_DBIAS_KEPT.items()
}
DK_DV_KEPT = {
    name: BackwardConfig(*sizes, False, False, False, options, tile, vectors, RESIDENT)
    for name, (*sizes, vectors, options, tile) in DK_DV_KEPT.items()
}

# Head dimensions, lse, band, how o is stored, options, tile.
SPLIT_64, SPLIT_128 = (row.tile for row in FORWARD_SPLIT_TILES)
FORWARD_SPLIT = {
    "float32 64": (64, 64, True, "none", "floats", PLAIN, SPLIT_64),
    "float32 64, causal": (64, 64, True, "above", "floats", PLAIN, SPLIT_64),
    "float32 128": (128, 128, True, "none", "floats", PLAIN, SPLIT_128),
    "float32 128, window, lengths, parts": (128, 128, True, "both", "kv_splits", LENGTHS, SPLIT_128),
    "float32 72, 40, packed": (72, 40, False, "above", "floats", PACKED, SPLIT_128),
    "float32 64, less accurate": (64, 64, True, "none", "floats", PLAIN, replace(SPLIT_64, planes=1)),
}
FORWARD_SPLIT = {name: ForwardConfig("float32", *config) for name, config in FORWARD_SPLIT.items()}

# dtype, head dimensions, banded, stored through maps, ordered, options
BACKWARD = {
    "backward 64": ("bfloat16", 64, 64, False, True, True, PLAIN),
    "backward 128": ("bfloat16", 128, 128, False, True, True, PLAIN),
    "backward 40, 72": ("bfloat16", 40, 72, False, True, True, PLAIN),
    "backward lengths": ("bfloat16", 128, 128, False, True, True, LENGTHS),
    "backward packed": ("float16", 64, 64, False, False, True, PACKED),
    "backward packed, 128": ("bfloat16", 128, 128, False, False, True, PACKED),
    "backward packed, in any order": ("float16", 64, 64, True, False, False, PACKED),
    "backward packed, 128, in any order": ("float16", 128, 128, True, False, False, PACKED),
    "backward softcap": ("bfloat16", 128, 128, False, True, True, SOFTCAP),
    "backward 256": ("bfloat16", 256, 256, True, True, False, PLAIN),
    "backward 192, 128": ("float16", 192, 128, False, True, False, PLAIN),
    "backward packed, 136, 256": ("bfloat16", 136, 256, True, False, False, PACKED),
    "backward softcap, 64": ("bfloat16", 64, 64, False, True, True, SOFTCAP),
}
BACKWARD = {name: (*config, with_options(backward_tile(*config[1:3]), config[-1])) for name, config in BACKWARD.items()}
BACKWARD_ROUNDING = {
    "backward 64 rounding": ("bfloat16", 64, 64, False, True, True, PLAIN),
    "backward 128 rounding": ("float16", 128, 128, False, True, True, PLAIN),
    "backward 72, 40 rounding": ("bfloat16", 72, 40, False, True, True, PLAIN),
}
BACKWARD |= {name: (*config, replace(backward_tile(*config[1:3]), rounds_dq=True)) for name, config in BACKWARD_ROUNDING.items()}
BACKWARD_LISTS = {
    "backward 64 lists": ("bfloat16", 64, 64, False, True, True, BLOCK_SPARSE),
    "backward 64 lists, lengths, in any order": ("float16", 64, 64, True, True, False, LISTED_LENGTHS),
    "backward 128 lists": ("float16", 128, 128, False, True, True, BLOCK_SPARSE),
    "backward 128 lists, in any order": ("bfloat16", 128, 128, False, True, False, BLOCK_SPARSE),
    "backward 128 lists, packed": ("bfloat16", 128, 128, False, False, True, LISTED_PACKED),
    "backward 72, 40 lists, lengths": ("float16", 72, 40, False, True, True, LISTED_LENGTHS),
}
BACKWARD |= {name: (*config, first(SPARSE_TILES, *config[1:3])) for name, config in BACKWARD_LISTS.items()}

BACKWARD_RELATIVE = {
    "backward 64 relative": ("bfloat16", 64, 64, False, True, True, RELATIVE),
    "backward 128 relative": ("float16", 128, 128, False, True, True, RELATIVE),
    "backward 128 relative, packed": ("bfloat16", 128, 128, False, False, True, replace(PACKED, relative=True)),
}
BACKWARD |= {
    name: (*config, replace(with_options(backward_tile(*config[1:3]), config[-1]), relative=True))
    for name, config in BACKWARD_RELATIVE.items()
}

# What stores dS, of which another makes dQ.
BACKWARD_STORED = {
    "backward 128 stored": ("float16", 128, 128, False, True, False, BLOCK_SPARSE),
    "backward 72, 40 stored, lengths": ("bfloat16", 72, 40, True, True, False, LISTED_LENGTHS),
}
BACKWARD |= {name: (*config, STORING_TILE) for name, config in BACKWARD_STORED.items()}
BACKWARD = {name: BackwardConfig(*config) for name, config in BACKWARD.items()}
BACKWARD |= {name: replace(config, stage=RELATIVE_STAGE) for name, config in BACKWARD.items() if config.options.relative}

# dtype, head dimensions, banded, stored through maps, ordered, how bias and mask are read, options; one for each tile, and for each option
BACKWARD_OPTIONS = {
    "backward sm90 64 dropout": ("float16", 64, 64, False, True, True, PAIRS, DROPOUT),
    "backward sm90 128 dropout": ("bfloat16", 128, 128, False, True, True, PAIRS, DROPOUT),
    "backward sm90 64 packed dropout": ("bfloat16", 64, 64, False, False, True, PAIRS, replace(PACKED, dropout=0.5)),
    "backward sm90 64 mask": ("bfloat16", 64, 64, False, True, True, PAIRS, MASK),
    "backward sm90 128 mask": ("float16", 128, 128, False, True, True, ONES, MASK),
    "backward sm90 64 blocks": ("float16", 64, 64, True, True, False, ONES, LISTED_SOFTCAP),
    "backward sm90 128 blocks": ("bfloat16", 128, 128, False, True, True, ONES, LISTED_SOFTCAP),
    "backward sm90 64 blocks and a bias": ("bfloat16", 64, 64, False, True, True, PAIRS, replace(BIAS, block_sparse=True)),
    "backward sm90 64 blocks that do not fit": ("bfloat16", 64, 64, False, True, True, ONES, BLOCKS),
    "backward sm90 128 blocks that do not fit": ("float16", 128, 128, False, True, True, ONES, BLOCKS),
    "backward sm90 128 blocks of odd sizes": ("float16", 128, 128, False, True, True, ONES, ODD_BLOCKS),
    "backward sm90 64 bias": ("bfloat16", 64, 64, False, True, True, PAIRS, BIAS),
    "backward sm90 128 bias of float32": ("float16", 128, 128, False, True, True, ONES, BIAS_32),
    "backward sm90 64 softcap and dropout": ("float16", 64, 64, False, True, True, PAIRS, Options(dropout=0.5, softcap=1.0)),
    "backward sm90 64 everything": ("float16", 64, 64, False, True, True, ONES, EVERYTHING),
    "backward sm90 72, 40 everything": ("bfloat16", 72, 40, True, True, False, PAIRS, EVERYTHING),
    "backward sm90 128 everything": ("float16", 128, 128, False, True, True, PAIRS, EVERYTHING),
}
BACKWARD_OPTIONS = {
    name: (*config, first(BACKWARD_OPTION_TILES[crowded(config[-1])], *config[1:3])) for name, config in BACKWARD_OPTIONS.items()
}
COPIED_BIAS = {
    "backward sm90 64 copied bias": ("bfloat16", 64, 64, False, True, True, PAIRS, BIAS),
    "backward sm90 128 copied bias": ("bfloat16", 128, 128, False, True, True, PAIRS, BIAS),
    "backward sm90 128 copied bias and a mask": (
        "float16",
        128,
        128,
        False,
        True,
        True,
        PAIRS,
        replace(LENGTHS, bias="float16", mask=True),
    ),
}
BACKWARD_OPTIONS |= {
    name: (*config, replace(first(BACKWARD_OPTION_TILES[crowded(config[-1])], *config[1:3]), copies_bias=True))
    for name, config in COPIED_BIAS.items()
}
BACKWARD_OPTIONS = {
    name: BackwardConfig(*sizes, options, tile, vectors, OPTIONS_STAGE)
    for name, (*sizes, vectors, options, tile) in BACKWARD_OPTIONS.items()
}

# dtype, head dimensions, banded, how bias and mask are read, pairs written at once, options, what is written, summed, tiles
OF_BATCH, OF_QUERIES, OF_KEYS = (True, False, False, False, False), (True, False, True, True, False), (True, False, False, False, True)
DBIAS = {
    "dbias sm90 64": ("bfloat16", 64, 64, False, PAIRS, True, BIAS, "bfloat16", OF_BATCH, DBIAS_TILES),
    "dbias sm90 128": ("bfloat16", 128, 128, True, PAIRS, True, BIAS, "bfloat16", OF_BATCH, DBIAS_TILES),
    "dbias sm90 64 shares": ("bfloat16", 64, 64, False, PAIRS, True, BIAS, "float32", OF_BATCH, DBIAS_TILES),
    "dbias sm90 64 of keys": ("bfloat16", 64, 64, False, PAIRS, True, BIAS, "bfloat16", OF_QUERIES, DBIAS_TILES),
    "dbias sm90 64 lengths": ("bfloat16", 64, 64, True, PAIRS, True, replace(LENGTHS, bias="bfloat16"), "bfloat16", OF_BATCH, DBIAS_TILES),
    "dbias sm90 64 softcap": ("bfloat16", 64, 64, False, PAIRS, True, replace(BIAS, softcap=1.0), "bfloat16", OF_BATCH, DBIAS_TILES),
    "dbias sm90 128 mask": ("bfloat16", 128, 128, False, ONES, False, replace(BIAS, mask=True), "bfloat16", OF_BATCH, DBIAS_TILES),
    "dbias sm90 64 bias of float32": ("float16", 64, 64, True, PAIRS, True, BIAS_32, "float32", OF_BATCH, CROWDED),
    "dbias sm90 72, 40 everything": ("float16", 72, 40, True, ONES, False, EVERYTHING, "float32", OF_KEYS, CROWDED),
}
DBIAS = {
    name: BiasGradientConfig(dtype, d, dv, banded, options, first(tiles, d, dv), out, summed, wide, vectors)
    for name, (dtype, d, dv, banded, vectors, wide, options, out, summed, tiles) in DBIAS.items()
}

# dtype, head dimensions, summed, options, what is written, batch elements
DBIAS_ROWS = {
    "dbias sm90 64 rows": ("bfloat16", 64, 64, OF_BATCH, BIAS, "bfloat16", 4),
    "dbias sm90 64 rows of three": ("float16", 64, 64, OF_BATCH, BIAS_16, "float16", 3),
    "dbias sm90 40, 64 rows of each": ("float16", 40, 64, (False,) * 5, BIAS, "bfloat16", 1),
}
DBIAS_ROWS = {
    name: BiasGradientConfig(*sizes, False, options, ROWS_TILES[elements], out, summed, stage=RESIDENT_QUERIES)
    for name, (*sizes, summed, options, out, elements) in DBIAS_ROWS.items()
}


def loop_of(tile) -> str:
    """Builder of the backward loop that has such a tile."""
    if isinstance(tile, WideTile):
        return "sm90.backward.backward_wide.build"
    return "sm90.fp16x2.backward_planes.build" if tile.planes > 1 else "sm90.backward.backward.build"


EARLY = ROW_THREADS, False, True  # the last arguments of the kernel before a loop that may begin early


def preprocess(*config) -> Kernel:
    return Kernel("passes.preprocess.build", (PreprocessConfig(*config),))


def around(name: str, options: Options) -> dict[str, Kernel]:
    """What is done once per query before and after the backward loop."""
    tile = backward_tile(96, 72)
    sizes = tile.block_m, 4 * DQ_PART * tile.consumers
    return {
        f"preprocess{name}": preprocess("bfloat16", 72, True, *sizes, True, True, RAISED_BASE_2, options, *EARLY),
        f"preprocess{name}, zeros": preprocess("float16", 72, False, *sizes, False, True, RAISED_BASE_2, options, *EARLY),
        f"postprocess{name}": Kernel("sm90.dq.postprocess.build", ("bfloat16", 96, options, tile, ())),
    }


AROUND = {**around("", PLAIN), **around(" lengths", LENGTHS), **around(" packed", PACKED)}

# dtype, head dimension, banded, stored through a map, options
DQ = {
    "dq 256": ("bfloat16", 256, False, True, PLAIN),
    "dq packed, 136": ("float16", 136, True, False, PACKED),
    "dq lengths, 192": ("bfloat16", 192, True, True, LENGTHS),
}
DQ = {name: (*config, WIDE_DQ_TILE) for name, config in DQ.items()}
DQ_LISTS = {
    "dq 128 lists": ("float16", 128, False, True, BLOCK_SPARSE),
    "dq 72 lists, lengths": ("bfloat16", 72, True, True, LISTED_LENGTHS),
}
DQ |= {name: (*config, DQ_TILE) for name, config in DQ_LISTS.items()}
DQ = {name: DqConfig(*config) for name, config in DQ.items()}

SPLIT_BACKWARD_64, SPLIT_BACKWARD_128 = (row.tile for row in BACKWARD_SPLIT_TILES)
BACKWARD_SPLIT = {  # head dimensions, banded, ordered, options, tile
    "backward float32 64": (64, 64, False, True, PLAIN, SPLIT_BACKWARD_64),
    "backward float32 40, 64, packed": (40, 64, True, False, PACKED, SPLIT_BACKWARD_64),
    "backward float32 128": (128, 128, False, True, PLAIN, SPLIT_BACKWARD_128),
    "backward float32 72, 96, packed": (72, 96, True, False, PACKED, SPLIT_BACKWARD_128),
}
BACKWARD_SPLIT = {
    name: BackwardConfig("float32", d, dv, banded, False, ordered, options, tile)
    for name, (d, dv, banded, ordered, options, tile) in BACKWARD_SPLIT.items()
}
AROUND |= {
    "postprocess float32": Kernel("sm90.dq.postprocess.build_split", (64, PLAIN, SPLIT_BACKWARD_64)),
    "postprocess float32 96": Kernel("sm90.dq.postprocess.build_split", (96, PLAIN, SPLIT_BACKWARD_128)),
    "preprocess float32": preprocess("float32", 64, False, 64, 8 * DQ_PART, True, True, BASE_E, PLAIN, ROW_THREADS),
}

OF_MASK = first(BACKWARD_OPTION_TILES[False], 96, 96)
AROUND["postprocess under a mask"] = Kernel("sm90.dq.postprocess.build", ("bfloat16", 96, MASK, OF_MASK, ("tiles", "order")))

AROUND["slots of dS"] = Kernel("sm90.dq.ds_slots.build", (SLOT_THREADS,))
OF_TILES = Options(mask=True, blocks=BlockSize(128, 128))
OF_TILES_LENGTHS = replace(LENGTHS, mask=True, blocks=BlockSize(128, 128))
AROUND["both lists"] = Kernel("work.block_lists.build_both", (OF_TILES, 128, 128, WARPS_OF_LISTS))
AROUND["both lists, lengths"] = Kernel("work.block_lists.build_both", (OF_TILES_LENGTHS, 128, 128, WARPS_OF_LISTS))

COMBINE = {
    "combine": Kernel("passes.combine.build", ("bfloat16", 128, False, 5, ROWS)),
    "combine with lse": Kernel("passes.combine.build", ("bfloat16", 128, True, 5, ROWS)),
}

KERNELS = {
    **{name: Kernel("sm90.forward.forward.build", (config,)) for name, config in (FORWARD | FORWARD_OPTIONS).items()},
    **{name: Kernel("sm90.resident_bias.forward_resident.build", (config,)) for name, config in FORWARD_KEPT.items()},
    **{name: Kernel("sm90.resident_bias.dq_dbias_resident.build", (config,)) for name, config in DQ_DBIAS_KEPT.items()},
    **{name: Kernel("sm90.resident_bias.dk_dv_resident.build", (config,)) for name, config in DK_DV_KEPT.items()},
    **{name: Kernel("sm90.fp16x2.forward_planes.build", (config,)) for name, config in FORWARD_SPLIT.items()},
    **{name: Kernel(loop_of(config.tile), (config,)) for name, config in (BACKWARD | BACKWARD_OPTIONS).items()},
    **{name: Kernel(loop_of(config.tile), (config,)) for name, config in BACKWARD_SPLIT.items()},
    **{name: Kernel("sm90.bias_gradient.dbias.build", (config,)) for name, config in DBIAS.items()},
    **{name: Kernel("sm90.bias_gradient.dbias.build", (config,)) for name, config in DBIAS_ROWS.items()},
    **AROUND,
    **{name: Kernel("sm90.dq.dq.build", (config,)) for name, config in DQ.items()},
    **COMBINE,
}
