"""Mistakes that one could make in the loops of a bias that is the only option, as those for Hopper in `mutants`."""

from ptx_machine.mutants.anchors import Mutant

BOTH, HIDDEN, DLSE, D24 = (f"mma, dq and bias gradient{more}" for more in ("", ", hidden", ", dlse", ", D24"))

MUTANTS_BIAS = (
    # ---- who may touch which shared memory when
    Mutant(
        "the next head in the slot that is read",
        "sm80 go",
        "while number < x.space.stop: ...; cuda.syncthreads(); ...",
        "while number < x.space.stop: ...; ...",
        BOTH,
    ),
    Mutant(
        "dQ before all warps' is there",
        "sm80 go",
        "cuda.syncthreads()\nif before != u64(0): add_last(x, before)",
        "if before != u64(0): add_last(x, before)",
        BOTH,
    ),
    Mutant("dQ in the place of another that is read", "sm80 step", "cuda.syncthreads", "cuda.syncwarp", BOTH),
    Mutant("the next head in the slot of this one", "sm80 step", "u32(t.slot ^ u32(1))", "t.slot", BOTH),
    Mutant("queries before they are there", "sm80 go", "ptx.copy_wait(); cuda.syncthreads()", "cuda.syncthreads()", BOTH),
    Mutant("gradients in the place of queries that are read", "dk_dv_sm80", "cuda.syncthreads()", "", BOTH),
    # ---- which numbers
    Mutant("delta of rows as if of columns", "given", "[x, x, y, y]", "[x, y, x, y]", BOTH),
    Mutant("dP that begins with delta", "sm80 begin", "ptx.multiply_up(lse, ...), -total", "ptx.multiply_up(lse, ...), total", BOTH),
    Mutant("rows of queries the wrong way round", "half", "start[2 * j], shift[2 * j + 1]", "shift[2 * j + 1], start[2 * j]", BOTH),
    Mutant("delta of some columns", "sm80 begin", "range(FOLDS)", "range(1)", BOTH),
    Mutant("dlse of neighbours", "sm80 copy", "x.dlse.strides[3]", "4", DLSE),
    Mutant("no dlse", "sm80 begin", "start += dlse", "start += f32(0)", DLSE),
    Mutant("columns of dQ that no warp adds", "sm80 build_add_dq", "-(-VECTORS // WARPS_N)", "VECTORS // WARPS_N", BOTH),
    Mutant("columns of dQ that there are not", "sm80 add", "n >= VECTORS", "n > VECTORS + 9", BOTH),
    Mutant("dQ of the first warp's keys alone", "sm80 add", "range(1, WARPS_N)", "range(1, 1)", BOTH),
    Mutant(
        "columns of dQ beyond those of a head",
        "sm80 build_add_dq add",
        "row = ...\nif column < HEAD_DIM: ...",
        "row = ...\nif column <= HEAD_DIM: ...",
        D24,
    ),
    Mutant("dQ of every half from 0", "half", "number == 0", "number >= 0", BOTH),
    Mutant("the bias of a half for both", "sm80 four", "number // 2 * WORDS + 8 * m + number % 2 * 2", "number // 2 * WORDS + 8 * m", BOTH),
    Mutant("the bias of the first key for all of a lane's", "half", "words[x // 2]", "words[0]", BOTH),
    Mutant("keys beyond the last one are seen", "sm80 keep", "... >= t.keys", "... >= t.keys + 1000", HIDDEN),
    Mutant("the first queries of a head again", "sm80 go", "i32(0), u32(0)", "i32(-64), u32(0)", BOTH),
    Mutant("chunks of the first column", "sm80 copy", "2 * column + chunk * CHUNK_BYTES", "chunk * CHUNK_BYTES", BOTH),
    # ---- scores that are hidden, whatever they are
    Mutant(
        "hidden scores that overflow, in dQ",
        "sm80 build",
        "ALL_HELD = ...; ...; halves = (... for hidden in (False, True))",
        "ALL_HELD = ...; ...; halves = (... for hidden in (False, False))",
        HIDDEN,
    ),
    Mutant(
        "hidden scores that overflow, in dK",
        "sm80 build",
        "K, V, (D, DV) = ...; ...; halves = (... for hidden in (False, True))",
        "K, V, (D, DV) = ...; ...; halves = (... for hidden in (False, False))",
        HIDDEN,
    ),
    Mutant("nobody says that the bias hides", "dq_dbias_sm80", "i32(1) if hidden else i32(0)", "i32(0)", HIDDEN),
)
