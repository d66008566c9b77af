"""Mistakes that one could make in the loop that keeps a bias in shared memory, as those for Hopper in `mutants`."""

from mutants import Mutant

FORWARD, LOAD, BIAS, UNITS = (f"cuda/{name}.py" for name in ("sm90/forward_kept", "sm90/load_kept", "kept_bias", "units"))
DQ, DK_DV, ROWS, COLUMNS, GIVEN, BEGIN = (
    f"cuda/sm90/{name}.py" for name in ("dq_dbias_kept", "dk_dv_kept", "keep_rows", "keep_columns", "load_gradients", "begin_rows")
)
WGMMA = "cuda/ptx/wgmma.py"
KEPT, HALVES, STRANGE = "kept bias", "kept bias of 16 bits", "kept bias, hidden"
GRADIENTS, HIDDEN = "kept bias, gradients", "kept bias, hidden, gradients"

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
    Mutant("a product that always adds", WGMMA, 'first = "add" if add else 0', "first = 1", STRANGE),
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
    # ---- gradients: who may touch which shared memory when
    Mutant(
        "keys of the next unit that are there too early",
        DK_DV,
        "                    if more:\n                        pipeline.wait_ready(smem, KV, turn)\n",
        "",
        GRADIENTS,
    ),
    Mutant(
        "queries of keys that are there too early",
        DK_DV,
        "                    pipeline.wait_ready(smem, Q, n)\n",
        "",
        GRADIENTS,
    ),
    Mutant("keys that are free while they are read", DK_DV, "if t == TILES - 1:", "if t == 0:", GRADIENTS),
    Mutant("queries that are free while they are read", DK_DV, "                if t > 1:\n", "                if t > 6:\n", GRADIENTS),
    Mutant("rows of queries that are there too early", DQ, "        pipeline.wait_ready(x.smem, NOTES, n)\n", "", GRADIENTS),
    Mutant("parts of dQ that are there too early", DQ, "        pipeline.wait_ready(x.smem, DQ, n)\n", "", GRADIENTS),
    Mutant("parts of dQ in the place of those that are read", DQ, "        pipeline.wait_free(x.smem, DQ, n)\n", "", GRADIENTS),
    Mutant("keys of dQ that are there too early", DQ, "        pipeline.wait_ready(x.smem, KV, n)\n", "", GRADIENTS),
    Mutant("rows that are made too early", BEGIN, "            pipeline.wait_ready(smem, Q, n)\n", "", GRADIENTS),
    Mutant("rows in the place of those that are read", BEGIN, "            pipeline.wait_free(smem, NOTES, n)\n", "", GRADIENTS),
    Mutant("keys that nobody waits for", GIVEN, "        pipeline.wait_free(smem, KV, turn)\n", "", GRADIENTS),
    # ---- gradients: which numbers
    Mutant("dK without the scale", DK_DV, "scaled[r] = f32(LOWERED), scale", "scaled[r] = f32(LOWERED), f32(1)", GRADIENTS),
    Mutant(
        "deltas of two queries the wrong way round",
        DK_DV,
        "(lse_1, delta_1) if c else (lse_0, delta_0)",
        "(lse_1, delta_0) if c else (lse_0, delta_1)",
        GRADIENTS,
    ),
    Mutant(
        "biases of two keys the wrong way round", DK_DV, "element(words[2 * half + r], c)", "element(words[2 * half + 1 - r], c)", GRADIENTS
    ),
    Mutant(
        "the bias of the first head for all keys",
        DK_DV,
        "                    if more and x.b1 == 0:\n",
        "                    if False:\n",
        GRADIENTS,
    ),
    Mutant("scores that a key hides overflow", DK_DV, "score = f32(NEG_INF) if bias == f32(NEG_INF) else score", "score = score", HIDDEN),
    Mutant("dK of the first values", DK_DV, "u32(keys + u32(V))", "keys", GRADIENTS),
    Mutant("queries of a word the wrong way round", COLUMNS, "one | other << u32(16)", "other | one << u32(16)", GRADIENTS),
    Mutant("nobody says that the bias of a key hides", COLUMNS, "            f.hides[0] = u32(1)\n", "            pass\n", HIDDEN),
    Mutant("dQ of the first consumer's keys alone", DQ, "dq[4 * j + e] += part[e]", "dq[4 * j + e] += f32(0)", GRADIENTS),
    Mutant("dQ of a head in that of the next", DQ, "            zero(w.dq_acc)\n", "", GRADIENTS),
    Mutant("a bias of gradients in base e", ROWS, "        return bias * f32(LOG2E)\n", "        return bias\n", GRADIENTS),
    Mutant("keys beyond the last one have a gradient", ROWS, "        if i32(n // 2 * 8 + x) >= k.keys:\n", "        if False:\n", HIDDEN),
    Mutant("the first consumer's keys for both", ROWS, "i32(me * KEYS + chunk * CHUNK", "i32(chunk * CHUNK", GRADIENTS),
    Mutant("the first chunk of keys for all", DQ, "u32(chunk * PART))", "u32(0 * PART))", GRADIENTS),
    Mutant("nobody says that the bias of a query hides", ROWS, "            k.hides[0] = u32(1)\n", "            pass\n", HIDDEN),
    Mutant("gradients of the lse with the other sign", BEGIN, "total - more", "total + more", HIDDEN),
    Mutant("the lse in base e", BEGIN, "fma_up(value, f32(LOG2E), f32(-RAISED))", "fma_up(value, f32(1), f32(-RAISED))", GRADIENTS),
    Mutant("chunks of a row that lie elsewhere", BEGIN, "(c ^ swizzle) * CHUNK_BYTES", "(c ^ swizzle ^ c % 2) * CHUNK_BYTES", GRADIENTS),
    Mutant("rows of the first queries for all", GIVEN, "index(x.head), index(row0)]", "index(x.head), index(i32(0))]", GRADIENTS),
    Mutant("the first keys for all consumers", GIVEN, "row, mine = i32(part * KEYS)", "row, mine = i32(0)", GRADIENTS),
    Mutant("rows that shift what is swizzled", "cuda/sm90/gradient_tiles.py", "// PATTERN) * PATTERN", "// 1) * 1", GRADIENTS),
    Mutant("dO in the place of O", GIVEN, "load_box(u32(to + u32(O)), maps[4]", "load_box(u32(to + u32(O)), maps[0]", GRADIENTS),
)
