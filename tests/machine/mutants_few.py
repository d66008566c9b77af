"""Mistakes that one could make where few queries are packed into tiles whose keys warps share, as those of `mutants`."""

from mutants import Mutant

FEW, FORWARD, BLOCK, COMBINE = "cuda/sm80/few.py", "cuda/sm80/forward_few.py", "cuda/sm80/block.py", "cuda/combine.py"
GRADIENTS, SCHEDULE = "cuda/sm80/backward_few.py", "cuda/row_blocks.py"
JOIN, LOAD, LANE = "cuda/sm80/few_join.py", "cuda/sm80/load.py", "cuda/sm80/lane.py"
LANES, LANES_ROWS, FEW_LANES = "cuda/simt/lanes.py", "cuda/simt/lanes_rows.py", "cuda/simt/few_lanes.py"
PRODUCTS, MMA, SEQUENCE = "cuda/sm80/products.py", "cuda/ptx/mma.py", "cuda/sequence.py"
FRAGMENT, MODIFY, FETCH = "cuda/fragment.py", "cuda/modify.py", "cuda/fetch.py"

MUTANTS_FEW = (
    # ---- who may touch which shared memory when
    Mutant("a group too few is waited for", FORWARD, "ptx.copy_wait_but(2 * STAGES - 1)", "ptx.copy_wait_but(2 * STAGES)", "few, D128"),
    Mutant(
        "Q of other warps before it is there", FORWARD, "            cuda.syncthreads()  # Q of all threads is there\n", "", "few, apart"
    ),
    Mutant("the first warp's keys for all", LOAD, "            thread = i32(thread % WARP)\n", "            pass\n", "few, apart"),
    Mutant("sums over tiles that others read", FEW, "        cuda.syncthreads()  # all tiles have been read\n", "", "few, apart"),
    Mutant("maxima of warps before they are there", FEW, "        cuda.syncthreads()  # m and l of all warps are there\n", "", "few"),
    Mutant("rows of warps before they are there", FEW, "        cuda.syncthreads()  # rows of all warps are there\n", "", "few"),
    Mutant(
        "maxima of parts before they are there",
        COMBINE,
        "        cuda.syncthreads()  # the first warp's are of all\n",
        "",
        "few, many parts",
    ),
    Mutant("sums of parts before they are there", COMBINE, "        cuda.syncthreads()  # all sums are there\n", "", "few, many parts"),
    Mutant("parts joined before all are there", JOIN, "ptx.count_arrival(counter, u32(parts - 1)) == u32(parts - 1)", "1", "few, parts"),
    Mutant(
        "an arrival before all threads have written",
        JOIN,
        "        cuda.syncthreads()  # all threads have written; shared memory has been read\n",
        "",
        "few, parts",
    ),
    Mutant(
        "an arrival that tells nothing", "cuda/ptx/memory.py", "atom.acq_rel.gpu.global.inc", "atom.relaxed.gpu.global.inc", "few, parts"
    ),
    Mutant(
        "counts that do not begin anew", JOIN, "count_arrival(counter, u32(parts - 1))", "count_arrival(counter, u32(parts))", "few, parts"
    ),
    Mutant("weights before they are there", JOIN, "            cuda.syncthreads()  # all weights are there\n", "", "few, parts"),
    # ---- keys of warps, and their results made one
    Mutant("the same keys for all warps", FORWARD, "i32(i32(cuda.threadIdx.x // 32) * WARP_N)  # of", "i32(0)  # of", "few"),
    Mutant("values of the first warp for all", FORWARD, "u32(smem + u32(V_SMEM) + u32(key0 * PITCH_V))", "u32(smem + u32(V_SMEM))", "few"),
    Mutant("O of warps with shifts of their own", FORWARD, "inverse[r] *= factor_of_warp[r]", "inverse[r] *= f32(1)", "few"),
    Mutant("l of warps with shifts of their own", FEW, "total += ptx.ex2((m - shift) * scale_log2) * l", "total += l", "few"),
    Mutant("parts with shifts of their own", COMBINE, "math.exp(lse_parts[part, b1, h, i] - shift)", "ACC(1)", "few, many parts"),
    Mutant("joined parts with shifts of their own", JOIN, "math.exp(powers[n * TURNS + turn] - shift)", "f32(1)", "few, parts"),
    Mutant(
        "the last part once more",
        JOIN,
        "i32(first + n)\n            if part < parts:\n",
        "i32(first + n)\n            if True:\n",
        "few, six parts",
    ),
    # ---- lines of shared memory
    Mutant("chunks of a line in their order", LOAD, "            chunk = i32(chunk ^ (row & 7))\n", "            pass\n", "few, D128"),
    Mutant("rows below turned as the first", LOAD, "u32(address ^ u32((rows & 7) * (2 * CHUNK)))", "address", "few, D128"),
    Mutant("chunks of keys in their order", LANE, "(lane // 8 % 2 ^ lane % 8) * 16", "lane // 8 % 2 * 16", "few, D128"),
    Mutant("chunks of values in their order", LANE, "(lane // 16 ^ lane % 8) * 16", "lane // 16 * 16", "few, D128"),
    Mutant("steps that are not turned", MMA, "builder.xor(address, ir.Constant(I32, turned))", "address", "few, D128"),
    Mutant("columns beyond a line in the first", MMA, "* (tile if operand.transposed else step) % LINE", "* step % LINE", "few, D128"),
    # ---- lengths that are numbers
    Mutant(
        "the length of the first sequence for all", SEQUENCE, "pick(extras.kv_lengths, b1)", "pick(extras.kv_lengths, 0)", "few, lengths"
    ),
    Mutant("the other half of all lengths", SEQUENCE, "high if i & HALF else low", "low if i & HALF else high", "few, lengths"),
    # ---- rows, queries and heads
    Mutant("queries of the first head for all", FEW, "own = x[index(head_of(i32(first + row)))]", "own = x[index(0)]", "few"),
    Mutant("the group's number for its first head", BLOCK, "h = i32(kv_head * GROUP)", "h = i32(kv_head)", "few"),
    Mutant("the last query of a block left out", FRAGMENT, "i32(query_of(i32(row - 1)) + 1) if", "query_of(row) if", "few, causal"),
    Mutant(
        "a row for a query",
        FORWARD,
        "i = query_of(i32(row + (r // 2 * 16 + r % 2 * 8)))",
        "i = i32(row + (r // 2 * 16 + r % 2 * 8))",
        "few, causal",
    ),
    Mutant(
        "queries counted from the first row",
        MODIFY,
        "i32(query_of_row(i32(t.first + row)) - query_of_row(t.first))",
        "query_of_row(row)",
        "few, options",
    ),
    Mutant("bits of the first head for all", MODIFY, "u32(w.head + u32(head_of_row(row)))", "w.head", "few, options"),
    Mutant("a bias of the first head for all", FETCH, "i64(head_of_row(i)) * x.head + ", "", "few, options"),
    Mutant("the batch element of another head", SCHEDULE, "head = u32(pair - u32(b * heads))", "head = u32(b)", "few, heads"),
    # ---- parts that are on their way while weights are made
    Mutant(
        "parts of the elements before",
        JOIN,
        "place = place_of(number, x)\n                if",
        "pass\n                if",
        "few, parts, D128",
    ),
    # ---- gradients
    Mutant("a tile too few is waited for", GRADIENTS, "ptx.copy_wait_but(STAGES - 1)", "ptx.copy_wait_but(STAGES)", "few, gradients"),
    Mutant(
        "Q and dO before they are there", GRADIENTS, "ptx.copy_wait_but(STAGES)", "ptx.copy_wait_but(STAGES + 1)", "few, gradients, short"
    ),
    Mutant("rows before they are there", GRADIENTS, "        cuda.syncthreads()  # rows of all threads are there\n", "", "few, gradients"),
    Mutant(
        "dS of few before it is there",
        GRADIENTS,
        "            meet()  # dS^T of all lanes is there, and V has been read\n",
        "",
        "few, gradients",
    ),
    Mutant(
        "dK in the place of K that is read",
        GRADIENTS,
        "            meet()  # dV of all lanes is there, and K and dS^T have been read\n",
        "",
        "few, gradients",
    ),
    Mutant("dK before it is there", GRADIENTS, "            meet()  # dK of all lanes is there\n", "", "few, gradients"),
    Mutant("sums over keys that are read", GRADIENTS, "        cuda.syncthreads()  # all tiles have been read\n", "", "few, gradients"),
    Mutant("dQ of the last tile alone", GRADIENTS, "PITCH_DS, PITCH_K, fresh=False", "PITCH_DS, PITCH_K, fresh=True", "few, gradients"),
    Mutant(
        "a row for a query of gradients",
        GRADIENTS,
        "i = query_of(i32(first_column()",
        "i = i32(i32(first_column()",
        "few, gradients, causal",
    ),
    Mutant("the second half of keys hidden as the first", GRADIENTS, "j = key + 8 * r", "j = key", "few, gradients, causal"),
    Mutant(
        "nobody's queries",
        GRADIENTS,
        "there = index(head_of(row)), index(query_of(row)), row < queries",
        "there = index(head_of(row)), index(query_of(row)), True",
        "few, gradients, short",
    ),
    Mutant(
        "keys before the window", GRADIENTS, "if key0 + WARP_N > keys.start else", "if key0 > keys.start else", "few, gradients, window"
    ),
    Mutant("keys of the part before", GRADIENTS, "first = min(i32(x.part * share), count)", "first = i32(0)", "few, gradients"),
    Mutant(
        "keys beyond the sequence",
        GRADIENTS,
        "load_k(k_tile, x.k, key0, stop)",
        "load_k(k_tile, x.k, key0, i32(key0 + WARP_N))",
        "few, gradients, lengths",
    ),
    # ---- lanes that share the columns of keys
    Mutant("a step too few is waited for", FEW_LANES, "ptx.copy_wait_but(STAGES - 1)", "ptx.copy_wait_but(STAGES)", "lanes"),
    Mutant("a step in the place of another", FEW_LANES, "u32(ring + u32(slot * STEP_BYTES))", "u32(ring)", "lanes"),
    Mutant(
        "weights of lanes before they are there", FEW_LANES, "            cuda.syncwarp()  # those of all lanes are there\n", "", "lanes"
    ),
    Mutant("O that keeps its old shift", FEW_LANES, "                rescale(acc, alpha)\n", "", "lanes"),
    Mutant("l that keeps its old shift", FEW_LANES, "                l_i *= alpha\n", "", "lanes"),
    Mutant("shifts of one key of several", FEW_LANES, "largest = over_keys(score, True)", "largest = score", "lanes"),
    Mutant("the same steps for all warps", FEW_LANES, "i32(first * STEP_N + warp * WARP_N)", "i32(first * STEP_N)", "lanes"),
    Mutant("keys of the first half for both", FEW_LANES, "ahead = i32(lane // LANES * KEYS)", "ahead = i32(0)", "lanes, short"),
    Mutant("keys beyond the last", LANES, "there = n < left\n", "there = True\n", "lanes, short"),
    Mutant("columns beyond the last", LANES, "there = there and lane + h * LANES < CHUNKS", "pass", "lanes, causal"),
    Mutant("halves that lanes keep, given", LANES, "kept = high if upper else low", "kept = low if upper else high", "lanes"),
    Mutant("values of hidden keys", FEW_LANES, "hidden = j < start or j >= stop", "hidden = j >= stop", "lanes, window"),
    Mutant("a key too many", FEW_LANES, "hidden = j < start or j >= stop", "hidden = j < start or j > stop", "lanes, causal"),
    Mutant("the other half's keys left out", LANES_ROWS, "        if TWO:  # the others' keys\n", "        if False:\n", "lanes, short"),
    Mutant("the second chunk where the first is", LANES_ROWS, "h * (CHUNK * LANES)", "0 * (CHUNK * LANES)", "lanes, float64"),
    Mutant("sums over steps that others read", LANES_ROWS, "        cuda.syncthreads()  # all steps have been read\n", "", "lanes"),
    Mutant("m and l before they are there", LANES_ROWS, "        cuda.syncthreads()  # m and l of all warps are there\n", "", "lanes"),
    Mutant("rows of lanes before they are there", LANES_ROWS, "        cuda.syncthreads()  # rows of all warps are there\n", "", "lanes"),
    Mutant("l of warps as if shifts were equal", LANES_ROWS, "total += power(m - shift) * l", "total += l", "lanes"),
    Mutant("steps of the part before", LANES_ROWS, "before = min(i32(x.part * share), count)", "before = i32(0)", "lanes, short"),
    Mutant("rows beyond the sequence's", LANES_ROWS, "if SEQUENCES and i >= x.queries:", "if False:", "lanes, lengths"),
)
