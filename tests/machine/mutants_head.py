"""Mistakes in kernels that have all keys of a head of float32 in shared memory."""

from mutants import Mutant

PLANES, FORWARD, LOAD, STORE = (f"cuda/sm80/{name}.py" for name in ("head_planes", "forward_head", "load_head", "store_pairs"))
DQ_DBIAS, DK_DV, TILES = (f"cuda/sm80/{name}.py" for name in ("dq_dbias_split", "dk_dv_split", "head_tiles"))
SPLIT_HEADS, WRITE, MMA = "cuda/sm80/split_heads.py", "cuda/sm80/write_planes.py", "cuda/ptx/mma.py"
SHORT, PLAIN, GRADIENTS = "short heads", "short heads, plain", "short heads, gradients"

MUTANTS_HEAD = (
    # ---- planes
    Mutant(
        "low planes of keys without their scale", PLANES, "ptx.pack_float16(y * f32(LOW), z * f32(LOW))", "ptx.pack_float16(y, z)", PLAIN
    ),
    Mutant(
        "low planes of queries that are 0",
        PLANES,
        "ptx.pack_float16(x, y)\n\n    return load",
        "u32(0)\n\n    return load",
        PLAIN,
    ),
    Mutant("low planes of P that are 0", PLANES, "high, ptx.pack_float16(x * f32(LOW), y * f32(LOW))", "high, u32(0)", PLAIN),
    Mutant("one power for rows of queries", PLANES, "factor = up[number // (4 * STEPS) * 2 + number % 2]", "factor = up[0]", PLAIN),
    Mutant("a centre that nobody takes out", PLANES, "(x[0] - c[0]) * power, (x[1] - c[1]) * power", "x[0] * power, x[1] * power", SHORT),
    # ---- forward
    Mutant("keys before they are there", FORWARD, "        ptx.copy_wait()\n        cuda.syncthreads()  # K and V are there\n", "", SHORT),
    Mutant("planes before they are there", FORWARD, "        cuda.syncthreads()  # planes are there\n", "", SHORT),
    Mutant(
        "keys beyond the last one are seen, of short heads",
        FORWARD,
        "if i32(col0 + COLUMNS) > nk:",
        "if i32(col0 + COLUMNS) > nk + 1000:",
        PLAIN,
    ),
    Mutant("the bias of the keys before", FORWARD, "i32(column + col0 + COLUMNS), nq", "i32(column + col0), nq", SHORT),
    Mutant("an lse of centred keys, of short heads", FORWARD, "* f32(LN2) + shift[r]", "* f32(LN2)", SHORT),
    Mutant("a centre of values where nothing was seen", STORE, "if CENTRED and factor != f32(0):", "if CENTRED:", SHORT),
    Mutant(
        "rows of the first head of keys",
        FORWARD,
        "load_keys(smem, k, v, at, kv_head)\n        q_head",
        "load_keys(smem, k, v, at, i32(0))\n        q_head",
        SHORT,
    ),
    # ---- gradients
    Mutant(
        "chunks before they are there",
        DQ_DBIAS,
        "        wait()\n        cuda.syncthreads()  # this chunk",
        "        cuda.syncthreads()  # this chunk",
        GRADIENTS,
    ),
    Mutant(
        "a chunk in the place of one that is read",
        DQ_DBIAS,
        "            load_keys(x.smem, before, x.tensors, t.next,",
        "            load_keys(x.smem, slot, x.tensors, t.next,",
        GRADIENTS,
    ),
    Mutant("the next queries while these are read", DQ_DBIAS, "if number == 1 and t.more:", "if number == 0 and t.more:", GRADIENTS),
    Mutant("queries that nobody waits for", TILES, "LEAST_CHUNKS = 5", "LEAST_CHUNKS = 4", GRADIENTS),
    Mutant("dQ of the first warp's keys alone, of short heads", STORE, "(x[2 * r] + y[2 * r]) * factor", "x[2 * r] * factor", GRADIENTS),
    Mutant("dQ of the head before, too", DQ_DBIAS, "            zero(w.dq_acc)\n", "", GRADIENTS),
    Mutant(
        "dQ before all warps' is there, of short heads",
        DQ_DBIAS,
        "        cuda.syncthreads()  # dQ of the last head is there\n",
        "",
        GRADIENTS,
    ),
    Mutant("the gradient of the bias in units of planes", DQ_DBIAS, "delta * w.up[r], down * vdo", "delta * w.up[r], down", GRADIENTS),
    Mutant("the bias of a half for both, of short heads", LOAD, "+ number % 2 * 4)", ")", GRADIENTS),
    Mutant(
        "keys beyond the last one, in dQ",
        LOAD,
        "(f32(-INF), f32(-INF), f32(-INF), f32(-INF))",
        "(f32(0), f32(0), f32(0), f32(0))",
        GRADIENTS,
    ),
    Mutant("dK without dS's powers", DK_DV, "factor[0] = power[1]", "factor[0] = f32(1)", GRADIENTS),
    Mutant(
        "queries before they are there, of short heads",
        DK_DV,
        "        ptx.copy_wait()\n        cuda.syncthreads()  # Q, dO",
        "        cuda.syncthreads()  # Q, dO",
        GRADIENTS,
    ),
    Mutant(
        "the bias of the queries before", DK_DV, "i32(row0 + query), key, nq, nk)", "i32(row0 - COLUMNS + query), key, nq, nk)", GRADIENTS
    ),
    # ---- planes of gradients
    Mutant("no low plane of A", MMA, "            add(step, planes.a, high[step])\n", "", GRADIENTS),
    Mutant("joined columns of the tile before", MMA, "(2 * (m * n_tiles + first) + rest)", "(2 * m * n_tiles + rest)", GRADIENTS),
    Mutant(
        "K in the place of V that is read",
        SPLIT_HEADS,
        "        cuda.syncthreads()  # V has been read\n        hear_most",
        "        hear_most",
        GRADIENTS,
    ),
    Mutant(
        "delta of half a row",
        WRITE,
        "STEPS, FOLDS, BOUNDS = -(-rows // STEP), (CHUNKS - 1)",
        "STEPS, FOLDS, BOUNDS = -(-rows // STEP), (CHUNKS // 2 - 1)",
        GRADIENTS,
    ),
    Mutant("numbers of dS that are too large", SPLIT_HEADS, "- (14 - MARGIN)", "- (30 - MARGIN)", GRADIENTS),
    Mutant("a weight that is not raised", DK_DV, "* f32(LOG2E)) * f32(HIGHER)", "* f32(LOG2E))", GRADIENTS),
    Mutant("rows of lse in the place of delta", LOAD, "which, chunk = i32(u32(n) // u32(COPIES))", "which, chunk = i32(0)", GRADIENTS),
)
