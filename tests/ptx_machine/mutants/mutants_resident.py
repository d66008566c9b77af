"""Mistakes that one could make in the loop that keeps a bias in shared memory, as those for Hopper in `mutants`."""

from ptx_machine.mutants.anchors import Mutant

KEPT, HALVES, STRANGE = "kept bias", "kept bias of 16 bits", "kept bias, hidden"
GRADIENTS, HIDDEN = "kept bias, gradients", "kept bias, hidden, gradients"

MUTANTS_RESIDENT = (
    # ---- who may touch which shared memory when
    Mutant("keys that are there too early", "consume", "pack(p, s); ...; pipeline.wait_ready(smem, K, n)", "pack(p, s); ...", KEPT),
    Mutant(
        "values that are there too early", "consume", "pack(p, s); ...; pipeline.wait_ready(smem, V, u32(n - 1))", "pack(p, s); ...", KEPT
    ),
    Mutant(
        "queries that are there too early",
        "consume",
        "if t == TILES: ...; pipeline.wait_ready(smem, Q, item_n)",
        "if t == TILES: ...",
        KEPT,
    ),
    Mutant("queries that are free a tile too early", "row_of consume", "TILES - 1", "0", KEPT),
    Mutant(
        "values that are never free",
        "consume",
        "if n > u32(0): pipeline.release_group(smem, V, u32(n - 1))",
        "if n > u32(1): pipeline.release_group(smem, V, u32(n - 1))",
        KEPT,
    ),
    Mutant("tiles that nobody waits for", "sm90 load", "pipeline.wait_free(smem, RING, n)", "", KEPT),
    Mutant("bytes of a wide panel", "sm90 build_load", "rows * NARROW_ROW_BYTES", "rows * 128", KEPT),
    # ---- which numbers
    Mutant("the bias of the first head for all", "row_of consume", "x.b1 == 0", "x.b1 < 0", KEPT),
    Mutant(
        "o of the unit that follows",
        "consume",
        "finish(me, before, acc, m_i, l_i, o, lse, unit_before); zero(acc)",
        "finish(me, x, acc, m_i, l_i, o, lse, unit_before); zero(acc)",
        KEPT,
    ),
    Mutant(
        "sums that are never emptied",
        "consume",
        "if t == 0 and n > u32(0): ...; softmax.reset(m_i, l_i)",
        "if t == 0 and n > u32(0): ...",
        KEPT,
    ),
    Mutant("a bias that is not divided", "cuda fill", "divide(smem, me, inverse)", "pass", KEPT),
    Mutant("the first consumer's bias for both", "cuda place", "me * TILES + t", "t", KEPT),
    Mutant("the bias of the first keys for all", "build_resident fill", "i32(key + t * KEYS)", "key", KEPT),
    Mutant("keys beyond the last one have a bias", "cuda look", "bias * f32(FACTOR) if there else f32(NEG_INF)", "bias", KEPT),
    Mutant("keys beyond the last one are seen, in 16 bits", "cuda word", "i32(n // 2 * 8) >= filled.keys", "False", HALVES),
    Mutant("an odd key beyond the last one is seen", "cuda word", "i32(n // 2 * 8 + 1) >= filled.keys", "False", HALVES),
    Mutant("halves of a word the wrong way round", "begin_words", "element(words[e // 2], e)", "element(words[e // 2], e + 1)", HALVES),
    Mutant("products that begin with a bias that is added", "cuda fill", "return u32(0)", "return u32(1)", STRANGE),
    Mutant("a bias that is added to raw products", "cuda plus", "s[e] * scale", "s[e]", STRANGE),
    Mutant(
        "hidden scores that overflow",
        "cuda plus",
        "f32(NEG_INF) if bias == f32(NEG_INF) else s[e] * scale + bias",
        "s[e] * scale + bias",
        STRANGE,
    ),
    Mutant(
        "scores in base e as if they were raw",
        "consume",
        "scales.scale_log2 if begins != u32(0) else f32(LOG2E)",
        "scales.scale_log2",
        STRANGE,
    ),
    Mutant("a product that always adds", "ptx codegen", '"add" if add else 0', "1", STRANGE),
    Mutant("the next 16 columns of Q in the place of 32", "ptx codegen", "2 * count, 2 * step", "2 * count, 0", KEPT),
    Mutant(
        "rows of V as wide as others",
        "wgmma_registers_narrow",
        "_times_rows(..., NARROW_HIGH, NARROW_ROWS_16)",
        "_times_rows(..., NARROW_HIGH, ROWS_16)",
        KEPT,
    ),
    Mutant(
        "batch elements of a bias that is another's",
        "unit_of",
        "(u32(number) // u32(sizes.b1), u32(number) % u32(sizes.b1))",
        "(u32(number) % u32(sizes.b1), u32(number) // u32(sizes.b1))",
        KEPT,
    ),
    # ---- gradients: who may touch which shared memory when
    Mutant("keys of the next unit that are there too early", "consume", "if more: pipeline.wait_ready(smem, KV, item_n)", "", GRADIENTS),
    Mutant(
        "queries of keys that are there too early", "consume", "if more: pipeline.wait_ready(smem, Q, n); ...", "if more: ...", GRADIENTS
    ),
    Mutant("keys that are free while they are read", "sm90 add consume", "TILES - 1", "0", GRADIENTS),
    Mutant("queries that are free while they are read", "consume", "if t > 1: ...", "if t > 6: ...", GRADIENTS),
    Mutant("rows of queries that are there too early", "note_rows", "pipeline.wait_ready(x.smem, NOTES, n)", "", GRADIENTS),
    Mutant("parts of dQ that are there too early", "add_parts", "pipeline.wait_ready(x.smem, DQ, n)", "", GRADIENTS),
    Mutant("parts of dQ in the place of those that are read", "put_part", "pipeline.wait_free(x.smem, DQ, n)", "", GRADIENTS),
    Mutant("keys of dQ that are there too early", "start_first", "pipeline.wait_ready(x.smem, KV, n)", "", GRADIENTS),
    Mutant("rows that are made too early", "make_rows", "pipeline.wait_ready(smem, Q, n)", "", GRADIENTS),
    Mutant("rows in the place of those that are read", "make_rows", "pipeline.wait_free(smem, NOTES, n)", "", GRADIENTS),
    Mutant("keys that nobody waits for", "sm90 load_keys", "pipeline.wait_free(smem, KV, item_n)", "", GRADIENTS),
    # ---- gradients: which numbers
    Mutant("dK without the scale", "sm90 finish", "(f32(LOWERED), scale)", "(f32(LOWERED), f32(1))", GRADIENTS),
    Mutant(
        "deltas of two queries the wrong way round",
        "weigh_vector",
        "(lse_1, delta_1) if c else (lse_0, delta_0)",
        "(lse_1, delta_0) if c else (lse_0, delta_1)",
        GRADIENTS,
    ),
    Mutant("biases of two keys the wrong way round", "weigh_vector", "2 * half + r", "2 * half + 1 - r", GRADIENTS),
    Mutant("the bias of the first head for all keys", "consume", "more and x.b1 == 0", "False", GRADIENTS),
    Mutant("scores that a key hides overflow", "weigh_vector", "f32(NEG_INF) if bias == f32(NEG_INF) else score", "score", HIDDEN),
    Mutant("dK of the first values", "build start", "u32(keys + u32(V))", "keys", GRADIENTS),
    Mutant("queries of a word the wrong way round", "sm90 word", "one | other << u32(16)", "other | one << u32(16)", GRADIENTS),
    Mutant("nobody says that the bias of a key hides", "sm90 word", "f.special[0] = u32(1)", "pass", HIDDEN),
    Mutant("dQ of the first consumer's keys alone", "add_parts", "dq[4 * j + e] += part[e]", "dq[4 * j + e] += f32(0)", GRADIENTS),
    Mutant("dQ of a head in that of the next", "sm90 go", "zero(x.dq_acc)", "", GRADIENTS),
    Mutant(
        "a bias of gradients in base e", "sm90 build", "build_floats(options, LOG2E, hides)", "build_floats(options, 1.0, hides)", GRADIENTS
    ),
    Mutant("keys beyond the last one have a gradient", "cuda look", "i32(n // 2 * 8 + x) < filled.keys", "True", HIDDEN),
    Mutant(
        "the first consumer's keys for both",
        "sm90 consume",
        "i32(me * KEYS + fragment.first_column())",
        "fragment.first_column()",
        GRADIENTS,
    ),
    Mutant("the first chunk of keys for all", "sm90 keys_of", "chunk * PART", "0 * PART", GRADIENTS),
    Mutant("nobody says that the bias of a query hides", "cuda look", "filled.special[0] = u32(1)", "pass", HIDDEN),
    Mutant("gradients of the lse with the other sign", "make_rows", "total - more", "total + more", HIDDEN),
    Mutant("the lse in base e", "make_rows", "f32(LOG2E)", "f32(1)", GRADIENTS),
    Mutant("chunks of a row that lie elsewhere", "make_rows", "c ^ swizzle", "c ^ swizzle ^ c % 2", GRADIENTS),
    Mutant("rows of the first queries for all", "sm90 load_queries", "index(row0)", "index(i32(0))", GRADIENTS),
    Mutant("the first keys for all consumers", "sm90 load_keys", "part * KEYS", "0", GRADIENTS),
    Mutant(
        "rows that shift what is swizzled",
        "sm90 layout",
        "up_to(self.queries * ROW_BYTES, PATTERN)",
        "up_to(self.queries * ROW_BYTES, 1)",
        GRADIENTS,
    ),
    Mutant(
        "dO in the place of O",
        "sm90 load_queries",
        "load_box(u32(to + u32(O)), maps[4], ...)",
        "load_box(u32(to + u32(O)), maps[0], ...)",
        GRADIENTS,
    ),
)
