"""Mistakes that one could make where few queries are packed into tiles whose keys warps share, as those of `mutants`."""

from ptx_machine.mutants.anchors import Mutant

MUTANTS_FEW = (
    # ---- who may touch which shared memory when
    Mutant("a group too few is waited for", "sm80 build", "2 * STAGES - 1", "2 * STAGES", "few, D128"),
    Mutant("Q of other warps before it is there", "forward_few", "cuda.syncthreads()", "", "few, apart"),
    Mutant("the first warp's keys for all", "sm80 load", "thread = i32(thread % WARP)", "pass", "few, apart"),
    Mutant(
        "sums over tiles that others read",
        "sm80 gather",
        "first_lane = cuda.threadIdx.x % 4 == 0; cuda.syncthreads()",
        "first_lane = cuda.threadIdx.x % 4 == 0",
        "few, apart",
    ),
    Mutant(
        "maxima of warps before they are there",
        "sm80 gather",
        "cuda.syncthreads(); ...; cuda.syncthreads()",
        "cuda.syncthreads(); ...",
        "few",
    ),
    Mutant("rows of warps before they are there", "sm80 store", "cuda.syncthreads()", "", "few"),
    Mutant(
        "maxima of parts before they are there",
        "combine_many",
        "if warp == 0: ...\ncuda.syncthreads()",
        "if warp == 0: ...",
        "few, many parts",
    ),
    Mutant(
        "sums of parts before they are there", "combine_many", "cuda.syncthreads(); total = ACC(0)", "total = ACC(0)", "few, many parts"
    ),
    Mutant(
        "parts joined before all are there", "sm80 join", "ptx.count_arrival(counter, u32(parts - 1)) == u32(parts - 1)", "1", "few, parts"
    ),
    Mutant(
        "an arrival before all threads have written",
        "sm80 join",
        "parts, last = i32(parts), 0; cuda.syncthreads()",
        "parts, last = i32(parts), 0",
        "few, parts",
    ),
    Mutant("an arrival that tells nothing", "ptx", "'atom.acq_rel.gpu.global.inc'", "'atom.relaxed.gpu.global.inc'", "few, parts"),
    Mutant("counts that do not begin anew", "sm80 join", "counter, u32(parts - 1)", "counter, u32(parts)", "few, parts"),
    Mutant(
        "weights before they are there",
        "sm80 join",
        "cuda.syncthreads()\nwhile number < stop: ...",
        "while number < stop: ...",
        "few, parts",
    ),
    # ---- keys of warps, and their results made one
    Mutant("the same keys for all warps", "forward_few", "i32(cuda.threadIdx.x // 32) * WARP_N", "0", "few"),
    Mutant("values of the first warp for all", "forward_few", "smem + u32(V_SMEM) + u32(key0 * PITCH_V)", "smem + u32(V_SMEM)", "few"),
    Mutant("O of warps with shifts of their own", "forward_few", "factor_of_warp[r]", "f32(1)", "few"),
    Mutant("l of warps with shifts of their own", "sm80 gather", "ptx.ex2((m - shift) * scale_log2) * l", "l", "few"),
    Mutant("parts with shifts of their own", "combine_many", "math.exp(lse_parts[part, b1, h, i] - shift)", "ACC(1)", "few, many parts"),
    Mutant("joined parts with shifts of their own", "weigh_row", "math.exp(powers[n * TURNS + turn] - shift)", "f32(1)", "few, parts"),
    Mutant("the last part once more", "sm80 add", "part < parts", "True", "few, six parts"),
    # ---- lines of shared memory
    Mutant("chunks of a line in their order", "place_chunk", "chunk = i32(chunk ^ (row & 7))", "pass", "few, D128"),
    Mutant("rows below turned as the first", "below", "u32(address ^ u32((rows & 7) * (2 * CHUNK)))", "address", "few, D128"),
    Mutant("chunks of keys in their order", "below", "lane // 8 % 2 ^ lane % 8", "lane // 8 % 2", "few, D128"),
    Mutant("chunks of values in their order", "sm80 beside", "lane // 16 ^ lane % 8", "lane // 16", "few, D128"),
    Mutant("steps that are not turned", "_load_tile", "builder.xor(address, ir.Constant(I32, turned))", "address", "few, D128"),
    Mutant("columns beyond a line in the first", "_load_tile", "tile if operand.transposed else step", "step", "few, D128"),
    # ---- lengths that are numbers
    Mutant(
        "the length of the first sequence for all", "sequence", "pick(extras.kv_lengths, b1)", "pick(extras.kv_lengths, 0)", "few, lengths"
    ),
    Mutant("the other half of all lengths", "pick", "high if i & HALF else low", "low if i & HALF else high", "few, lengths"),
    # ---- rows, queries and heads
    Mutant("queries of the first head for all", "sm80 load", "head_of(i32(first + row))", "0", "few"),
    Mutant("the group's number for its first head", "sm80 block_of", "kv_head * GROUP", "kv_head", "few"),
    Mutant("the last query of a block left out", "stop_of", "i32(query_of(i32(row - 1)) + 1)", "query_of(row)", "few, causal"),
    Mutant(
        "a row for a query",
        "sm80 hide",
        "query_of(i32(row + (r // 2 * 16 + r % 2 * 8)))",
        "i32(row + (r // 2 * 16 + r % 2 * 8))",
        "few, causal",
    ),
    Mutant(
        "queries counted from the first row",
        "cuda hide",
        "i32(query_of_row(i32(t.first + row)) - query_of_row(t.first))",
        "query_of_row(row)",
        "few, options",
    ),
    Mutant("bits of the first head for all", "cuda words_of", "u32(w.head + u32(head_of_row(row)))", "w.head", "few, options"),
    Mutant(
        "a bias of the first head for all",
        "cuda address",
        "i64(head_of_row(i)) * x.head + i64(query_of_row(i)) * x.row",
        "i64(query_of_row(i)) * x.row",
        "few, options",
    ),
    Mutant("the batch element of another head", "row_block_of_few", "pair - u32(b * heads)", "b", "few, heads"),
    # ---- parts that are on their way while weights are made
    Mutant(
        "parts of the elements before",
        "sm80 join",
        "while number < stop: ...; place = place_of(number, x); ...",
        "while number < stop: ...; pass; ...",
        "few, parts, D128",
    ),
    # ---- gradients
    Mutant("a tile too few is waited for", "sm80 build", "ptx.copy_wait_but(STAGES - 1)", "ptx.copy_wait_but(STAGES)", "few, gradients"),
    Mutant(
        "Q and dO before they are there",
        "sm80 build",
        "ptx.copy_wait_but(STAGES)",
        "ptx.copy_wait_but(STAGES + 1)",
        "few, gradients, short",
    ),
    Mutant("rows before they are there", "backward_few", "commit(); ...; cuda.syncthreads()", "commit(); ...", "few, gradients"),
    Mutant("dS of few before it is there", "backward_few", "put_ds(ds, p); meet()", "put_ds(ds, p)", "few, gradients"),
    Mutant(
        "dK in the place of K that is read", "backward_few", "ds_q(dk_acc, p, q_tile); meet()", "ds_q(dk_acc, p, q_tile)", "few, gradients"
    ),
    Mutant(
        "dK before it is there",
        "backward_few",
        "store_dv(v_tile, dv_head, key0, nk); meet()",
        "store_dv(v_tile, dv_head, key0, nk)",
        "few, gradients",
    ),
    Mutant(
        "sums over keys that are read",
        "backward_few",
        "cuda.syncthreads(); ...; cuda.syncthreads()",
        "cuda.syncthreads(); ...",
        "few, gradients",
    ),
    Mutant(
        "dQ of the last tile alone",
        "sm80 build",
        "products.build_tn(..., PITCH_K, fresh=False)",
        "products.build_tn(..., PITCH_K, fresh=True)",
        "few, gradients",
    ),
    Mutant("a row for a query of gradients", "build_hide hide", "query_of(i32(...))", "i32(i32(...))", "few, gradients, causal"),
    Mutant("the second half of keys hidden as the first", "sm80 hide", "key + 8 * r", "key", "few, gradients, causal"),
    Mutant("nobody's queries", "sm80 put", "row < queries", "True", "few, gradients, short"),
    Mutant("keys before the window", "sm80 load", "key0 + WARP_N", "key0", "few, gradients, window"),
    Mutant("keys of the part before", "sm80 keys_of", "min(i32(x.part * share), count)", "i32(0)", "few, gradients"),
    Mutant("keys beyond the sequence", "sm80 load", "x.k, key0, stop", "x.k, key0, i32(key0 + WARP_N)", "few, gradients, lengths"),
    # ---- lanes that share the columns of keys
    Mutant("a step too few is waited for", "simt build", "ptx.copy_wait_but(STAGES - 1)", "ptx.copy_wait_but(STAGES)", "lanes"),
    Mutant("a step in the place of another", "few_lanes", "ring + u32(slot * STEP_BYTES)", "ring", "lanes"),
    Mutant("weights of lanes before they are there", "few_lanes", "cuda.syncwarp(); ...; cuda.syncwarp()", "cuda.syncwarp(); ...", "lanes"),
    Mutant("O that keeps its old shift", "few_lanes", "rescale(acc, alpha)", "", "lanes"),
    Mutant("l that keeps its old shift", "few_lanes", "l_i *= alpha", "", "lanes"),
    Mutant("shifts of one key of several", "few_lanes", "over_keys(score, True)", "score", "lanes"),
    Mutant("the same steps for all warps", "few_lanes", "first * STEP_N + warp * WARP_N", "first * STEP_N", "lanes"),
    Mutant("keys of the first half for both", "few_lanes", "lane // LANES * KEYS", "0", "lanes, short"),
    Mutant("keys beyond the last", "simt copy", "there = n < left", "there = True", "lanes, short"),
    Mutant("columns beyond the last", "simt copy", "there = there and lane + h * LANES < CHUNKS", "pass", "lanes, causal"),
    Mutant("halves that lanes keep, given", "simt fold", "high if upper else low", "low if upper else high", "lanes"),
    Mutant("values of hidden keys", "few_lanes", "j < start or j >= stop", "j >= stop", "lanes, window"),
    Mutant("a key too many", "few_lanes", "j >= stop", "j > stop", "lanes, causal"),
    Mutant("the other half's keys left out", "simt finish", "if TWO: ...", "if False: ...", "lanes, short"),
    Mutant("the second chunk where the first is", "simt put_rows", "h * (CHUNK * LANES)", "0 * (CHUNK * LANES)", "lanes, float64"),
    Mutant("sums over steps that others read", "simt finish", "if TWO: ...\ncuda.syncthreads()", "if TWO: ...", "lanes"),
    Mutant("m and l before they are there", "simt gather", "cuda.syncthreads()", "", "lanes"),
    Mutant(
        "rows of lanes before they are there",
        "simt finish",
        "cuda.syncthreads(); ...; cuda.syncthreads()",
        "cuda.syncthreads(); ...",
        "lanes",
    ),
    Mutant("l of warps as if shifts were equal", "simt gather", "power(m - shift) * l", "l", "lanes"),
    Mutant("steps of the part before", "steps_of", "min(i32(x.part * share), count)", "i32(0)", "lanes, short"),
    Mutant("rows beyond the sequence's", "simt gather", "SEQUENCES and i >= x.queries", "False", "lanes, lengths"),
)
