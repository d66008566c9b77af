"""Mistakes that one could make in the loops of a bias that is the only option, as those for Hopper in `mutants`."""

from mutants import Mutant

DQ_DBIAS, DK_DV, KEEP_BIAS = (f"cuda/sm80/{name}.py" for name in ("dq_dbias", "dk_dv", "keep_bias"))
STORE_DQ, LOAD, MMA = "cuda/sm80/store_dq.py", "cuda/sm80/load_dq_dbias.py", "cuda/ptx/mma.py"
ROWS = "cuda/sm80/begin_rows.py"
BOTH, HIDDEN, DLSE = (f"mma, dq and bias gradient{more}" for more in ("", ", hidden", ", dlse"))

MUTANTS_BIAS = (
    # ---- who may touch which shared memory when
    Mutant(
        "the next head in the slot that is read",
        DQ_DBIAS,
        "            cuda.syncthreads()  # this tile is there, and dQ of the one before, which has been read\n",
        "",
        BOTH,
    ),
    Mutant("dQ before all warps' is there", DQ_DBIAS, "        cuda.syncthreads()  # dQ of the last tile is there\n", "", BOTH),
    Mutant(
        "dQ in the place of another that is read",
        DQ_DBIAS,
        "            cuda.syncthreads()  # dQ of the tile before has been read\n",
        "            cuda.syncwarp()\n",
        BOTH,
    ),
    Mutant("the next head in the slot of this one", DQ_DBIAS, "load(x.smem, u32(t.slot ^ u32(1)),", "load(x.smem, t.slot,", BOTH),
    Mutant(
        "queries before they are there",
        DK_DV,
        "            ptx.copy_wait()\n            cuda.syncthreads()  # this tile",
        "            cuda.syncthreads()  # this tile",
        BOTH,
    ),
    Mutant(
        "gradients in the place of queries that are read", DK_DV, "        cuda.syncthreads()  # the last tile has been read\n", "", BOTH
    ),
    # ---- which numbers
    Mutant("delta of rows as if of columns", MMA, "[x, x, y, y] if by_row", "[x, y, x, y] if by_row", BOTH),
    Mutant("dP that begins with delta", ROWS, "f32(LOG2E)), -total", "f32(LOG2E)), total", BOTH),
    Mutant("rows of queries the wrong way round", DK_DV, "start[2 * j], shift[2 * j + 1]", "shift[2 * j + 1], start[2 * j]", BOTH),
    Mutant("delta of some columns", ROWS, "range(FOLDS)", "range(1)", BOTH),
    Mutant("dlse of neighbours", ROWS, "x.dlse.strides[3])", "4)", DLSE),
    Mutant("no dlse", ROWS, "                        start += dlse\n", "                        start += f32(0)\n", DLSE),
    Mutant("columns of dQ that no warp adds", STORE_DQ, "-(-VECTORS // WARPS_N)", "VECTORS // WARPS_N", BOTH),
    Mutant("columns of dQ that there are not", STORE_DQ, "n >= VECTORS:", "n > VECTORS + 9:", BOTH),
    Mutant("dQ of the first warp's keys alone", STORE_DQ, "range(1, WARPS_N):", "range(1, 1):", BOTH),
    Mutant("dQ of every half from 0", DQ_DBIAS, "if number == 0:", "if number >= 0:", BOTH),
    Mutant("the bias of a half for both", KEEP_BIAS, "8 * m + number % 2 * 2", "8 * m", BOTH),
    Mutant("the bias of the first key for all of a lane's", DK_DV, "words[x // 2]), x)", "words[0]), x)", BOTH),
    Mutant("keys beyond the last one are seen", KEEP_BIAS, ">= t.keys:", ">= t.keys + 1000:", HIDDEN),
    Mutant(
        "the first queries of a head again",
        DK_DV,
        "head, row0, slot = x.at.head, i32(0), u32(0)",
        "head, row0, slot = x.at.head, i32(-64), u32(0)",
        BOTH,
    ),
    Mutant("chunks of the first column", LOAD, "u32(2 * column + chunk", "u32(chunk", BOTH),
    # ---- scores that are hidden, whatever they are
    Mutant(
        "hidden scores that overflow, in dQ",
        DQ_DBIAS,
        "build_half(*of_half, hidden) for hidden in (False, True)",
        "build_half(*of_half, hidden) for hidden in (False, False)",
        HIDDEN,
    ),
    Mutant(
        "hidden scores that overflow, in dK",
        DK_DV,
        "build_half(*of_half, hidden) for hidden in (False, True)",
        "build_half(*of_half, hidden) for hidden in (False, False)",
        HIDDEN,
    ),
    Mutant("nobody says that the bias hides", DQ_DBIAS, "i32(1) if hidden else i32(0)", "i32(0)", HIDDEN),
)
