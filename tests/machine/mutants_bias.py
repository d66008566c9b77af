"""Mistakes that one could make in the loops of a bias that is the only option, as those for Hopper in `mutants`."""

from mutants import Mutant

DQ_DBIAS, DK_DV, KEEP_BIAS = (f"cuda/sm80/{name}.py" for name in ("dq_dbias", "dk_dv", "keep_bias"))
STORE_DQ, LOAD, MMA = "cuda/sm80/store_dq.py", "cuda/sm80/load_dq_dbias.py", "cuda/ptx/mma.py"
BOTH, HIDDEN = "mma, dq and bias gradient", "mma, dq and bias gradient, hidden"

MUTANTS_BIAS = (
    # ---- who may touch which shared memory when
    Mutant(
        "the next head in the slot that is read",
        DQ_DBIAS,
        "            cuda.syncthreads()  # this tile is there; the one before, and its dQ, have been read\n",
        "",
        BOTH,
    ),
    Mutant("dQ before all warps' is there", DQ_DBIAS, "            cuda.syncthreads()  # dQ of all keys is there\n", "", BOTH),
    Mutant("the next head in the slot of this one", DQ_DBIAS, "load(smem, u32(slot ^ u32(1)),", "load(smem, slot,", BOTH),
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
    Mutant("dP that begins with delta", DQ_DBIAS, "start[r] = -ptx", "start[r] = ptx", BOTH),
    Mutant("dP that begins with delta, of queries", DK_DV, "= lse[c], -delta[c]", "= lse[c], delta[c]", BOTH),
    Mutant("dQ of the first warp's keys alone", STORE_DQ, "for w in range(WARPS_N):", "for w in range(1):", BOTH),
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
