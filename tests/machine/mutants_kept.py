"""Mistakes that one could make in the loop that keeps a bias in shared memory, as those for Hopper in `mutants`."""

from mutants import Mutant

FORWARD, LOAD, BIAS, UNITS = (f"cuda/{name}.py" for name in ("sm90/forward_kept", "sm90/load_kept", "kept_bias", "units"))
WGMMA = "cuda/ptx/wgmma.py"
KEPT, HALVES, STRANGE = "kept bias", "kept bias of 16 bits", "kept bias, hidden"

MUTANTS_KEPT = (
    # ---- who may touch which shared memory when
    Mutant(
        "keys that are there too early",
        FORWARD,
        "            pipeline.wait_ready(smem, K, n)\n            start_scores",
        "            start_scores",
        KEPT,
    ),
    Mutant(
        "values that are there too early",
        FORWARD,
        "            pipeline.wait_ready(smem, V, u32(n - 1))\n            start_values",
        "            start_values",
        KEPT,
    ),
    Mutant(
        "queries that are there too early",
        FORWARD,
        "                pipeline.wait_ready(smem, Q, turn)\n            # (1)",
        "            # (1)",
        KEPT,
    ),
    Mutant("queries that are free a tile too early", FORWARD, "if t == TILES - 1:", "if t == 0:", KEPT),
    Mutant(
        "values that are never free", FORWARD, "if n > u32(0):\n                pipeline", "if n > u32(1):\n                pipeline", KEPT
    ),
    Mutant("tiles that nobody waits for", LOAD, "        pipeline.wait_free(smem, RING, n)\n", "", KEPT),
    Mutant("bytes of a wide panel", LOAD, "one_type(ring), rows * NARROW_ROW_BYTES", "one_type(ring), rows * 128", KEPT),
    # ---- which numbers
    Mutant("the bias of the first head for all", FORWARD, "                if x.b1 == 0:\n", "                if x.b1 < 0:\n", KEPT),
    Mutant(
        "o of the unit that follows",
        FORWARD,
        "finish(me, before, acc, m_i, l_i, o, lse, unit_before)\n                zero",
        "finish(me, x, acc, m_i, l_i, o, lse, unit_before)\n                zero",
        KEPT,
    ),
    Mutant("sums that are never emptied", FORWARD, "                softmax.reset(m_i, l_i)\n            if", "            if", KEPT),
    Mutant("a bias that is not divided", BIAS, "            divide(smem, me, inverse)\n", "            pass\n", KEPT),
    Mutant("the first consumer's bias for both", BIAS, "u32((me * TILES + t) * TILE_BYTES)", "u32(t * TILE_BYTES)", KEPT),
    Mutant("the bias of the first keys for all", BIAS, "i32(t * BLOCK_N + fragment.first_column())", "fragment.first_column()", KEPT),
    Mutant("keys beyond the last one have a bias", BIAS, "return bias if there else f32(NEG_INF)", "return bias", KEPT),
    Mutant(
        "keys beyond the last one are seen, in 16 bits", BIAS, "        if i32(n // 2 * 8) >= filled.keys:\n", "        if False:\n", HALVES
    ),
    Mutant(
        "an odd key beyond the last one is seen", BIAS, "        if i32(n // 2 * 8 + 1) >= filled.keys:\n", "        if False:\n", HALVES
    ),
    Mutant(
        "halves of a word the wrong way round",
        BIAS,
        "element(words[e // 2], e) * begun.factor",
        "element(words[e // 2], e + 1) * begun.factor",
        HALVES,
    ),
    Mutant("products that begin with a bias that is added", BIAS, "            return u32(0)\n", "            return u32(1)\n", STRANGE),
    Mutant("a bias that is added to raw products", BIAS, "s[e] * scale + bias", "s[e] + bias", STRANGE),
    Mutant(
        "hidden scores that overflow", BIAS, "f32(NEG_INF) if bias == f32(NEG_INF) else s[e] * scale + bias", "s[e] * scale + bias", STRANGE
    ),
    Mutant(
        "scores in base e as if they were raw",
        FORWARD,
        "            scale_log2 = scales.scale_log2 if begins != u32(0) else f32(LOG2E)\n",
        "            scale_log2 = scales.scale_log2\n",
        STRANGE,
    ),
    Mutant("a product that always adds", WGMMA, '1 if step else "add"', "1", STRANGE),
    Mutant(
        "the next 16 columns of Q in the place of 32",
        WGMMA,
        '_descriptor("a", 2 * count, 2 * step, NARROW_HIGH)',
        '_descriptor("a", 2 * count, 0, NARROW_HIGH)',
        KEPT,
    ),
    Mutant("rows of V as wide as others", WGMMA, "acc, a, NARROW_HIGH, NARROW_ROWS_16)", "acc, a, NARROW_HIGH, ROWS_16)", KEPT),
    Mutant(
        "batch elements of a bias that is another's",
        UNITS,
        "u32(number) // u32(sizes.b1), u32(number) % u32(sizes.b1)",
        "u32(number) % u32(sizes.b1), u32(number) // u32(sizes.b1)",
        KEPT,
    ),
)
