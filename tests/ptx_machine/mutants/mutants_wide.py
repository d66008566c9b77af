"""Mistakes that one could make where dS of wide heads goes to memory on `sm80`, as those for Hopper in `mutants`."""

from ptx_machine.mutants.anchors import Mutant

WIDE, WINDOW = "mma, gradients, wide", "mma, gradients, wide, window"

MUTANTS_WIDE = (
    # ---- who may touch which shared memory when
    Mutant("dQ of a tile that is not there", "dq_sm80", "wait(); cuda.syncthreads()", "wait()", WIDE),
    Mutant("one tile of dS too many on its way", "sm80 build", "STAGES - 2", "STAGES - 1", WIDE),
    Mutant("rows of dQ over tiles that are read", "dq_sm80", "ptx.copy_wait(); cuda.syncthreads()", "ptx.copy_wait()", WIDE),
    Mutant("rows of dQ before they are there", "dq_sm80", "cuda.syncthreads(); ...; cuda.syncthreads()", "cuda.syncthreads(); ...", WIDE),
    # ---- which tiles
    Mutant(
        "tiles beyond the last key that a row block sees",
        "load_half",
        "seen.start < seen.stop, first < seen.stop",
        "seen.start < seen.stop",
        WIDE,
    ),
    Mutant(
        "tiles before the first key that a row block sees",
        "load_half",
        "first < seen.stop, first + BLOCK_N > seen.start",
        "first < seen.stop",
        WINDOW,
    ),
    Mutant("the slots of the upper row block twice", "dq_sm80", "u64(first_slots + u64(of_row_block))", "first_slots", WIDE),
    Mutant("the slots of another head", "dq_sm80", "i64(number)", "i64(kv_head)", WIDE),
    Mutant("one slot for all blocks of keys", "sm80 slot_of", "item.row0 // BLOCK_N", "0", WIDE),
    Mutant("rows of dS on top of each other", "sm80 put", "source + u32(step * STEP * PITCH)", "source", WIDE),
    Mutant("the keys of another head", "dq_sm80", "index(kv_head)", "index(0)", WIDE),
    # ---- products
    Mutant(
        "keys in another order than those of dS",
        "sm80 build",
        "build_load(..., THREADS, place, True, D)",
        "build_load(..., THREADS, None, True, D)",
        WIDE,
    ),
    Mutant("dQ without its scale", "dq_sm80", "factor[r] = scale", "factor[r] = f32(1)", WINDOW),
)
