"""Mistakes in kernels that have all keys of a head of float32 in shared memory."""

from ptx_machine.mutants.anchors import Mutant

SHORT, PLAIN, GRADIENTS = "short heads", "short heads, plain", "short heads, gradients"

MUTANTS_SHORT_HEADS = (
    # ---- planes
    Mutant("low planes of keys without their scale", "sm80 split", "y * f32(LOW), z * f32(LOW)", "y, z", PLAIN),
    Mutant(
        "low planes of queries that are 0",
        "sm80 split",
        "words[WORDS + number] = ptx.pack_float16(x, y)",
        "words[WORDS + number] = u32(0)",
        PLAIN,
    ),
    Mutant("low planes of P that are 0", "sm80 pack", "ptx.pack_float16(x * f32(LOW), y * f32(LOW))", "u32(0)", PLAIN),
    Mutant("one power for rows of queries", "sm80 split", "number // (4 * STEPS) * 2 + number % 2", "0", PLAIN),
    Mutant(
        "a centre that nobody takes out",
        "sm80 split",
        "((x[0] - c[0]) * power, (x[1] - c[1]) * power)",
        "(x[0] * power, x[1] * power)",
        SHORT,
    ),
    # ---- forward
    Mutant("keys before they are there", "forward_head_sm80", "ptx.copy_wait(); cuda.syncthreads()", "", SHORT),
    Mutant("planes before they are there", "make", "cuda.syncthreads()", "", SHORT),
    Mutant(
        "keys beyond the last one are seen, of short heads",
        "forward_head_sm80",
        "i32(col0 + COLUMNS) > nk",
        "i32(col0 + COLUMNS) > nk + 1000",
        PLAIN,
    ),
    Mutant("the bias of the keys before", "forward_head_sm80", "column + col0 + COLUMNS", "column + col0", SHORT),
    Mutant(
        "an lse of centred keys, of short heads",
        "forward_head_sm80",
        "m_i[r] + ptx.lg2(l) * f32(LN2) + shift[r]",
        "m_i[r] + ptx.lg2(l) * f32(LN2)",
        SHORT,
    ),
    Mutant("a centre of values where nothing was seen", "sm80 put", "CENTRED and factor != f32(0)", "CENTRED", SHORT),
    Mutant(
        "rows of the first head of keys",
        "forward_head_sm80",
        "load_keys(smem, k, v, at, kv_head)",
        "load_keys(smem, k, v, at, i32(0))",
        SHORT,
    ),
    # ---- gradients
    Mutant("chunks before they are there", "chunk", "wait()", "", GRADIENTS),
    Mutant("a chunk in the place of one that is read", "chunk", "before, x.tensors, t.next", "slot, x.tensors, t.next", GRADIENTS),
    Mutant("the next queries while these are read", "chunk", "number == 1", "number == 0", GRADIENTS),
    Mutant("queries that nobody waits for", "sm80", "LEAST_CHUNKS = 5", "LEAST_CHUNKS = 4", GRADIENTS),
    Mutant("dQ of the head before, too", "sm80 go", "zero(w.dq_acc)", "", GRADIENTS),
    Mutant(
        "dQ before all warps' is there, of short heads",
        "sm80 go",
        "before, before_factor = u64(0), f32(0); ...; cuda.syncthreads()",
        "before, before_factor = u64(0), f32(0); ...",
        GRADIENTS,
    ),
    Mutant("the gradient of the bias in units of planes", "hold", "down * vdo", "down", GRADIENTS),
    Mutant(
        "the bias of a half for both, of short heads",
        "sm80 keep",
        "column + number // 2 * (WAYS * KEYS) + number % 2 * 4",
        "column + number // 2 * (WAYS * KEYS)",
        GRADIENTS,
    ),
    Mutant(
        "keys beyond the last one, in dQ",
        "sm80 keep",
        "(f32(-INF), f32(-INF), f32(-INF), f32(-INF))",
        "(f32(0), f32(0), f32(0), f32(0))",
        GRADIENTS,
    ),
    Mutant("dK without dS's powers", "dk_dv_planes_sm80", "factor[0] = power[1]", "factor[0] = f32(1)", GRADIENTS),
    Mutant("queries before they are there, of short heads", "dk_dv_planes_sm80", "ptx.copy_wait()", "", GRADIENTS),
    Mutant("the bias of the queries before", "dk_dv_planes_sm80", "i32(row0 + query)", "i32(row0 - COLUMNS + query)", GRADIENTS),
    # ---- planes of gradients
    Mutant("no low plane of A", "sums_of", "add(step, planes.a, high[step])", "", GRADIENTS),
    Mutant("joined columns of the tile before", "ptx codegen", "2 * (m * n_tiles + first)", "2 * m * n_tiles", GRADIENTS),
    Mutant(
        "K in the place of V that is read",
        "write_head_planes_sm80",
        "tell_most(most, shift); cuda.syncthreads()",
        "tell_most(most, shift)",
        GRADIENTS,
    ),
    Mutant("delta of half a row", "build_writers", "CHUNKS - 1", "CHUNKS // 2 - 1", GRADIENTS),
    Mutant("numbers of dS that are too large", "power_of_row", "14 - MARGIN", "30 - MARGIN", GRADIENTS),
    Mutant(
        "a weight that is not raised",
        "weigh_pair",
        "ptx.ex2((score - lse[c]) * f32(LOG2E)) * f32(HIGHER)",
        "ptx.ex2((score - lse[c]) * f32(LOG2E))",
        GRADIENTS,
    ),
    Mutant("rows of lse in the place of delta", "sm80 copy", "u32(n) // u32(COPIES)", "0", GRADIENTS),
)
