"""Mistakes that one could make where dS of wide heads goes to memory on `sm80`, as those for Hopper in `mutants`."""

from mutants import Mutant

DQ, SLOTS = (f"cuda/sm80/{name}.py" for name in ("dq", "ds_slots"))
WIDE, WINDOW = "mma, gradients, wide", "mma, gradients, wide, window"

MUTANTS_WIDE = (
    # ---- who may touch which shared memory when
    Mutant(
        "dQ of a tile that is not there",
        DQ,
        "            cuda.syncthreads()  # this tile is there; the one before has been read\n",
        "",
        WIDE,
    ),
    Mutant("one tile of dS too many on its way", DQ, "ptx.copy_wait_but(STAGES - 2)", "ptx.copy_wait_but(STAGES - 1)", WIDE),
    Mutant("rows of dQ over tiles that are read", DQ, "        cuda.syncthreads()  # the last tile has been read\n", "", WIDE),
    Mutant("rows of dQ before they are there", DQ, "        cuda.syncthreads()  # all rows are there\n", "", WIDE),
    # ---- which tiles
    Mutant("tiles beyond the last key that a row block sees", DQ, " and first < seen.stop and", " and", WIDE),
    Mutant("tiles before the first key that a row block sees", DQ, " and first + BLOCK_N > seen.start", "", WINDOW),
    Mutant("the slots of the upper row block twice", DQ, "u64(first_slots + u64(of_row_block))", "first_slots", WIDE),
    Mutant("the slots of another head", DQ, "i64(number) * i64(halves)", "i64(kv_head) * i64(halves)", WIDE),
    Mutant("one slot for all blocks of keys", SLOTS, "i32(item.row0 // BLOCK_N))", "i32(0))", WIDE),
    Mutant("rows of dS on top of each other", SLOTS, "source + u32(step * STEP * PITCH)", "source", WIDE),
    Mutant("the keys of another head", DQ, "k[index(b0), index(b1), index(kv_head)]", "k[index(b0), index(b1), index(0)]", WIDE),
    # ---- products
    Mutant(
        "keys in another order than those of dS",
        DQ,
        "build_load(BLOCK_N, shape.head_dim, THREADS, place, ",
        "build_load(BLOCK_N, shape.head_dim, THREADS, None, ",
        WIDE,
    ),
    Mutant("dQ without its scale", DQ, "factor[r] = scale", "factor[r] = f32(1)", WINDOW),
)
