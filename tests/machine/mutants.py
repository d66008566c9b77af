"""Mistakes that one could make in the kernels for Hopper and on their host, each with the smallest problem that shows it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake.

    Attributes
    ----------
    name : str
        What is wrong.
    file : str
        Where, below `numba_flash`.
    old, new : str
        Text that occurs there once, and what stands in its place.
    problem : str
        Among `problems.PROBLEMS`.
    """

    name: str
    file: str
    old: str
    new: str
    problem: str


PIPELINE, WGMMA, STORE = "cuda/sm90/pipeline.py", "cuda/sm90/wgmma.py", "cuda/sm90/store.py"
FORWARD_SPLIT = "cuda/sm90/forward_split.py"
FORWARD, LOAD, ROWS = "cuda/sm90/forward.py", "cuda/sm90/load_forward.py", "cuda/sm90/rows.py"
BACKWARD, LOAD_BACKWARD, P_AND_DS = "cuda/sm90/backward.py", "cuda/sm90/load_backward.py", "cuda/sm90/softmax_backward.py"
WIDE, DQ, ADD_DQ = (f"cuda/sm90/{name}.py" for name in ("backward_wide", "dq", "add_dq"))
BEFORE, AFTER, EARLY = "cuda/preprocess.py", "cuda/sm90/postprocess.py", "cuda/early.py"
FINISH, OPTIONS, SCORES = (f"cuda/sm90/{name}.py" for name in ("finish", "forward_options", "rows_options"))
BACKWARD_OPTIONS, P_AND_DS_OPTIONS, INTERLEAVE, BIAS_TILES = (
    f"cuda/sm90/{name}.py" for name in ("backward_options", "softmax_backward_options", "interleave", "bias_tiles")
)
PAIR_TILES, WALK = "cuda/sm90/pair_tiles.py", "cuda/sm90/walk_backward.py"
HOST, HOST_BACKWARD, TEMPORARIES, ARGUMENTS = (
    f"cuda/sm90/{name}.py" for name in ("prepare_forward", "prepare_backward", "prepare_temporaries", "arguments")
)
UP, SWINGS, HEADS = "gradients, upward", "gradients, swings", "gradients, heads and a window"

MUTANTS = (
    # ---- who may touch which shared memory when
    Mutant("the phase before", PIPELINE, "(n // u32(ring.slots) + u32(before)) % u32(2)", "(n // u32(ring.slots)) % u32(2)", "plain"),
    Mutant("turns of one warp group", PIPELINE, "sync(u32(TURN + consumer), u32(2 * ", "sync(u32(TURN + consumer), u32(", "plain"),
    Mutant("a named barrier of all warp groups", PIPELINE, "u32(GROUP + consumer)", "u32(GROUP)", "steep"),
    Mutant("a named barrier for too few", PIPELINE, "u32(consumers * WARP_GROUP)", "u32(WARP_GROUP)", "gradients"),
    Mutant("bytes that nobody expects", PIPELINE, "PANELS * PANEL_BYTES + more", "PANELS * PANEL_BYTES", "gradients"),
    Mutant("the first panel twice", PIPELINE, " + panel * PANEL)", ")", "D128"),
    Mutant("a box of another head", PIPELINE, "column, row, head, b1, b0, ready", "column, row, b1, head, b0, ready", "heads"),
    Mutant("a tail that is not cleared", PIPELINE, "if keys < ROWS:", "if keys < ROWS - 1:", "lengths"),
    # ---- products and fragments
    Mutant("the other stride of a descriptor", WGMMA, "panel_stride // UNIT << 16", "panel_stride // UNIT // 2 << 16", "D128"),
    Mutant("accumulators before the wait", WGMMA, "0, 1, 0\n", "1, 1, 0\n", "plain"),
    Mutant("the transposed bit", "cuda/ptx/wgmma.py", "{int(not b_panel)}", "{int(bool(b_panel))}", "plain"),
    Mutant("matrices of stmatrix exchanged", "cuda/ptx/memory.py", "b16 [$0], {$1, $2, $3, $4};", "b16 [$0], {$1, $3, $2, $4};", "plain"),
    # ---- softmax
    Mutant("a sum that is not rescaled", "cuda/softmax.py", "l_i[r] * alpha[r] + l", "l_i[r] + l", "steep"),
    Mutant("a shift that stays", "cuda/softmax.py", "if m_new > before + ACC(LAZY) else", "if before < ACC(-1e38) else", "steeper"),
    Mutant("the state of the item before", FORWARD, "m_done, l_done)\n            reset(m_i, l_i)", "m_done, l_done)", "many items"),
    Mutant("an infinite shift of nothing", FORWARD, "build_reset(1, LEAST_FLOAT32)", "build_reset(1)", "causal, earlier queries"),
    Mutant("a key after the last", "cuda/softmax.py", "if column >= stop:", "if column > stop:", "causal"),
    Mutant("the first key hidden", "cuda/softmax.py", "if column < start:", "if column <= start:", "window"),
    Mutant("a key beyond the end", ROWS, "hides = col1 > keys or", "hides = col1 > keys + 1 or", "one key missing"),
    Mutant("one tile that hides keys", ROWS, "min(max(tiles, i32(1)), item.count)", "min(i32(1), item.count)", "causal, later queries"),
    Mutant("tiles of the last row", ROWS, "first + item.high + 1)", "first + ROWS + item.high)", "causal, later queries"),
    Mutant("rows next to each other", ROWS, "i = i32(row + 8 * r)", "i = i32(row + r)", "causal"),
    Mutant("the lse in base 2", FINISH, "(m + ptx.lg2(l)) * f32(LN2)", "m + ptx.lg2(l)", "plain"),
    Mutant("half the slope of the softcap", ARGUMENTS, "2 * LOG2E * scale / cap", "LOG2E * scale / cap", "softcap"),
    Mutant("a scale of base e", ARGUMENTS, "else (0, scale * LOG2E)", "else (0, scale)", "plain"),
    Mutant("causal and one more", ROWS, "+ i32(i + 1))", "+ i32(i + 2))", "causal"),
    # ---- kernels that begin early
    Mutant("keys of a kernel that still runs", FORWARD, "        early.begin()\n", "", "plain"),
    Mutant("dO of a kernel that still runs", BEFORE, "        if EARLY:\n            early.begin()\n", "", "gradients"),
    Mutant("dO as if it had always been there", BEFORE, "ptx.fetch(4, begins_early)", "ptx.fetch(4)", "gradients"),
    Mutant("delta of a kernel that still runs", LOAD_BACKWARD, "        early.begin()\n", "", "gradients"),
    Mutant("sums of dQ of a kernel that still runs", AFTER, "        early.begin()\n", "", "gradients"),
    Mutant("a kernel that nothing waits for", EARLY, "    ptx.griddepcontrol_wait()\n", "", "plain"),
    Mutant(
        "the next kernel before the one before",
        EARLY,
        "    ptx.griddepcontrol_wait()\n    ptx.griddepcontrol_launch_dependents()\n",
        "    ptx.griddepcontrol_launch_dependents()\n    ptx.griddepcontrol_wait()\n",
        "plain",
    ),
    Mutant(
        "lengths before the kernel before",
        AFTER,
        "        early.begin()\n        number = i64(cuda.blockIdx.x)\n        rows = rows_of(number, extras, dq.shape, nk)\n",
        "        number = i64(cuda.blockIdx.x)\n        rows = rows_of(number, extras, dq.shape, nk)\n        early.begin()\n",
        "gradients, lengths",
    ),
    # ---- the forward loop
    Mutant("no wait for K", FORWARD, 'is in flight."""\n        pipeline.wait_ready(smem, K, n)\n', '"""\n', "plain"),
    Mutant("no wait for V", FORWARD, 'as above."""\n        pipeline.wait_ready(smem, V, n)\n', '"""\n', "plain"),
    Mutant("the state of the item before, apart", FORWARD, "            reset(m_i, l_i)\n            first", "            first", "D136"),
    Mutant(
        "V is released before its last product",
        FORWARD,
        "wait_all(acc, s)\n        pipeline.release_group(smem, V, n)",
        "pipeline.release_group(smem, V, n)\n        wait_all(acc, s)",
        "D136, items",
    ),
    Mutant(
        "the item before goes on, with options", OPTIONS, "            reset(m_i, l_i)\n            more", "            more", "D136, bias"
    ),
    Mutant("Q is released a tile early", FORWARD, "if t == i32(item.count - 1):", "if t == 1:", "D136"),
    Mutant("O of the item before", FORWARD, "item.q_tile, u32(t - 1))", "item.q_tile, u32(t))", "long items"),
    Mutant("O of the item of one tile before", FORWARD, "u32(item.count - 1)", "u32(item.count)", "many items"),
    Mutant("O of the item before, with options", OPTIONS, "False, u32(t - 1))", "False, u32(t))", "copied bias"),
    Mutant("a sum of products that always goes on", "cuda/ptx/wgmma.py", "setp.ne.b32 add, ${at", "setp.eq.b32 add, ${at", "plain"),
    Mutant("a tile free when one consumer has left", FORWARD, "K, 1, CONSUMERS * RELEASES_OF_K)", "K, 1, 1)", "long items"),
    Mutant("K overwritten", LOAD, "                    pipeline.wait_free(smem, K, u32(n + t))\n", "", "long items"),
    Mutant("work items overwritten", LOAD, "        pipeline.wait_free(smem, WORK, turn)\n", "", "many items"),
    Mutant("the head within its group", LOAD, "u32(item.head) // u32(sizes.group)", "u32(item.head) % u32(sizes.group)", "heads"),
    # ---- what leaves
    Mutant("no swizzle", STORE, "(j % PANEL_CHUNKS + right) ^ (row % 8)", "j % PANEL_CHUNKS + right", "plain"),
    Mutant("O is staged on O", STORE, "ptx.bulk_wait_read()\n            meet", "pass\n            meet", "many items"),
    Mutant("O is stored before all rows are there", STORE, "            meet_warp_group(me)  # all rows are there\n", "", "plain"),
    # ---- work
    Mutant("a turn that skips an item", "cuda/schedule.py", "blocks - 1 - block if turn % 2", "blocks - block if turn % 2", "heads"),
    Mutant("parts that leave out a tile", "cuda/schedule.py", "(count + i32(sizes.parts) - 1) //", "count //", "parts"),
    Mutant("parts that weigh the same", "cuda/combine.py", "math.exp(lse_part - shift) * inverse", "inverse", "parts"),
    # ---- options
    Mutant("the bias of the row below", "cuda/fetch.py", "u64(query_of(n)) * inside.row", "inside.row", "bias"),
    Mutant("a bias of pairs where it is read", PAIR_TILES, "        pipeline.wait_free(smem, PAIRS, n)\n", "", "copied bias"),
    Mutant("a bias of pairs before it is there", PAIR_TILES, "        pipeline.wait_ready(smem, PAIRS, n)\n", "", "copied bias"),
    Mutant("pairs that one warp has read", PAIR_TILES, "RELEASES = WARP_GROUP // WARP", "RELEASES = 1", "copied bias"),
    Mutant("pairs of the first warp for all", PAIR_TILES, "me * MINE + warp * 16 * ROW_BYTES", "me * MINE", "copied bias"),
    Mutant("pairs of the first consumer for all", PAIR_TILES, "me * MINE + warp", "warp", "copied bias"),
    Mutant("a bias of pairs in other chunks", PAIR_TILES, "lane // 16 ^ lane % 8)", "lane // 16)", "copied bias"),
    Mutant("the first panel for both", PAIR_TILES, "words[panel * OF_PANEL + step * 4 + e]", "words[step * 4 + e]", "copied bias"),
    Mutant("the mask of the first keys", PAIR_TILES, "u32(place.column) // u32(PER_ELEMENT)", "u32(0)", "copied mask"),
    Mutant("the mask in other chunks", PAIR_TILES, "row * ROW_BYTES + row * CHUNK + lane", "row * ROW_BYTES + lane", "copied mask"),
    Mutant("the mask of eight keys for sixteen", PAIR_TILES, "ROW_BYTES + j % 2 * 8)", "ROW_BYTES)", "copied mask"),
    Mutant("the mask of the row above", PAIR_TILES, "u32(r * 8 * ROW_BYTES +", "u32(", "copied mask"),
    Mutant("a key ahead", "cuda/modify.py", "i32(t.ahead + i32(key_of(n) + x))", "i32(t.ahead + key_of(n))", "alibi"),
    Mutant(
        "sums that are not lowered with O",
        "cuda/sm90/softmax_options.py",
        "            l_i[r] *= alpha[r]\n        exponentials",
        "        exponentials",
        "alibi",
    ),
    Mutant("an lse of scaled scores", FINISH, "return m + (ptx", "return m * f32(LN2) + (ptx", "bias"),
    Mutant("dropped weights that count on Hopper", OPTIONS, "BFLOAT16, positive=DROPOUT)", "BFLOAT16)", "dropout"),
    Mutant("lanes that share no counter", "cuda/fragment.py", "block_n - 7, 1, register", "block_n - 7, 4, register", "dropout"),
    Mutant("V of another tile than K", LOAD, "seen, last - (t - 1), keys)", "seen, last - t, keys)", "tiles of a mask"),
    Mutant("a list that nobody made", LOAD, "        if count == 0:\n", "        if count < 0:\n", "tiles of a mask"),
    Mutant("tiles after the first as whole", SCORES, "region, x.following.whole,", "region, True,", "tiles of a mask"),
    # ---- the host of the forward pass
    Mutant("the band upside down", HOST, "low=p.low", "low=-p.high", "window"),
    Mutant(
        "strides in the wrong order",
        "cuda/packing.py",
        "x.shape, arrays.expanded_strides(x, ndim)\n",
        "x.shape, arrays.expanded_strides(x, ndim)[::-1]\n",
        "plain",
    ),
    # ---- the backward loop
    Mutant("dS before all of it is there", BACKWARD, "pipeline.meet_consumers(CONSUMERS)  # all of dS^T", "# all of dS^T", "gradients"),
    Mutant(
        "Q is released before dK",
        "cuda/sm90/begin_backward.py",
        "release_group(smem, Q, u32(n - 1))",
        "release_group(smem, Q, n)",
        "gradients, long",
    ),
    Mutant(
        "a tile of dQ that leaves before it is there",
        BACKWARD,
        "put_dq(smem, me, n, dq, f32(1))\n                if AT_ONCE",
        "commit_dq(smem, n)\n                put_dq(smem, me, n, dq, f32(1))\n                if False",
        "gradients, D128",
    ),
    Mutant("dK of P", BACKWARD, "start_dk_of(dk_acc, dsT, q_columns)", "start_dk_of(dk_acc, pT, q_columns)", "gradients"),
    Mutant("no wait for dK and dV", BACKWARD, "        ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)\n", "", "gradients"),
    Mutant("a dK without its scale", P_AND_DS, "scaled[r] = factor[r] * scale", "scaled[r] = factor[r]", "gradients"),
    Mutant("delta's sign", P_AND_DS, "dp = dp * f32(LOWERED) - delta[i % 2]", "dp = dp * f32(LOWERED) + delta[i % 2]", "gradients"),
    Mutant("the lse of the other row", P_AND_DS, "scale_log2 - shift[i % 2]", "scale_log2 - shift[i // 2]", "gradients"),
    Mutant("the slope of another cap", P_AND_DS, "f32(1) - tanh * tanh", "f32(1) - tanh", "gradients, softcap"),
    Mutant(
        "what follows the last query", P_AND_DS, "clear_do(smem, DO, n, rest_of(smem, turn, me, n, step), me)", "pass", "gradients, lengths"
    ),
    Mutant("a query too few", P_AND_DS, "j + i32(1) + high", "j + high", "gradients, window"),
    Mutant("bounds before they are written", P_AND_DS, "bounds[i])\n        pipeline.meet_warp_group(me)", "bounds[i])", "gradients"),
    # ---- who moves data in the backward pass
    Mutant("stored, not added", ADD_DQ, "if before == 0:", "if before <= 1:", "gradients"),
    Mutant("dQ released while it is read", ADD_DQ, "ptx.bulk_wait_read()\n        pipeline.release", "pipeline.release", "gradients"),
    Mutant(
        "claimed before the tiles are asked for",
        LOAD_BACKWARD,
        "pipeline.wait_ready(smem, FETCHED, u32(turn - u32(1)))",
        "pass",
        "gradients, claims",
    ),
    Mutant(
        "shares of work items, as many for each block",
        LOAD_BACKWARD,
        "return ptx.next_number(u64(ptx.global_address(flags) + u64(4) * last))",
        "return i32(taken * cuda.gridDim.x + cuda.blockIdx.x)",
        "gradients, no room",
    ),
    Mutant("heads of the group before", LOAD_BACKWARD, "i32(kv_head * group + g)", "i32(kv_head + g)", "gradients, heads"),
    Mutant("tiles of Q overwritten", PIPELINE, "        wait_free(smem, RING, n)\n", "", "gradients, long"),
    Mutant("work items without their fourth reader", LOAD_BACKWARD, "ADDERS * ADDS_DQ + 1", "ADDERS * ADDS_DQ", "gradients, items"),
    Mutant("dQ ready when half of it is", LOAD_BACKWARD, "DQ, CONSUMERS * WARP_GROUP, 1)", "DQ, WARP_GROUP, 1)", "gradients"),
    # ---- steps through tiles and heads
    Mutant("a head too far back", P_AND_DS, "i32(heads - i32(1))", "heads", HEADS),
    Mutant("the first clear tile, not its step", P_AND_DS, "tiles_hidden * heads", "tiles_hidden", HEADS),
    Mutant("one step more that is clear", P_AND_DS, "tiles_clear * heads - i32(1)", "tiles_clear * heads", HEADS),
    Mutant("as many tiles as steps", P_AND_DS, "u32(step) // u32(bound(smem, me, BOUND.heads))", "step", HEADS),
    Mutant("heads one after the other", LOAD_BACKWARD, "(inner, outer) if TOGETHER", "(outer, inner) if TOGETHER", HEADS),
    Mutant("sums of heads one after the other", ADD_DQ, "(inner, outer) if TOGETHER", "(outer, inner) if TOGETHER", HEADS),
    Mutant(
        "a tail that counts as clear",
        P_AND_DS,
        "not TOGETHER or step > bound(smem, me, BOUND.clear_to)",
        "not TOGETHER",
        "gradients, lengths",
    ),
    Mutant("a head with one tile more", P_AND_DS, "else step\n\n", "- i32(1) else step\n\n", "gradients, D136, heads"),
    # ---- blocks of keys that go upward
    Mutant("upward behind earlier keys", ADD_DQ, "if UPWARD and last_first", "if False and last_first", UP),
    Mutant(
        "tiles fetched downward",
        LOAD_BACKWARD,
        "at = tile_at(first, t)",
        "at = tile_at(first if first < 0 else ~(first + count - 1), t)",
        UP,
    ),
    Mutant("sums added downward", ADD_DQ, "at = tile_at(first, t)", "at = tile_at(first if first < 0 else ~(first + count - 1), t)", UP),
    Mutant("rows downward", P_AND_DS, "if UPWARD and pipeline", "if False and pipeline", UP),
    Mutant("upward, earlier keys first", "cuda/schedule.py", "elif index < u32(sizes.upward) if UPWARD", "elif False if UPWARD", UP),
    Mutant("upward, one more", WALK, "number < sizes.upward", "number <= sizes.upward", UP),
    Mutant(
        "blocks beyond the last key",
        WALK,
        "min(min((number + 1) * block_m, queries) - low, keys) - 1",
        "min((number + 1) * block_m, queries) - low - 1",
        UP,
    ),
    Mutant(
        "blocks that only queries beyond the last would see",
        WALK,
        "min((number + 1) * block_m, queries)",
        "(number + 1) * block_m",
        "gradients, upward, more keys",
    ),
    Mutant("swings, all downward", WALK, "% i32(2) == i32(1)", "% i32(2) == i32(2)", SWINGS),
    Mutant("swings, all with the first block first", "cuda/schedule.py", "if UPWARD and sizes.swing > 0", "if UPWARD and False", SWINGS),
    Mutant(
        "swings, upward with the last block first",
        "cuda/schedule.py",
        "if number % types.uint32(2) == types.uint32(1):",
        "if number % types.uint32(2) == types.uint32(2):",
        SWINGS,
    ),
    Mutant(
        "a last swing as long as the others",
        "cuda/schedule.py",
        "min(types.uint32(begin + swing), blocks)",
        "types.uint32(begin + swing)",
        SWINGS,
    ),
    Mutant("a swing that waits for later ones", ADD_DQ, "keys = min(keys, i32(begin + swing * BLOCK_N))", "pass", SWINGS),
    Mutant("a swing that does not wait for earlier ones", ADD_DQ, "block // swing * swing * BLOCK_N", "block // swing * 0", SWINGS),
    Mutant("swings, in the order of none", ADD_DQ, "upward == (swing > i32(0))", "not upward", SWINGS),
    # ---- the backward loop with options
    Mutant("keys in their own order", INTERLEAVE, "first = place(row), i32", "first = row, i32", "gradients, dropout"),
    Mutant(
        "V beyond the last key", INTERLEAVE, "if row < keys else u32(0)", "if row < ROWS * 2 else u32(0)", "gradients, dropout, lengths"
    ),
    Mutant("no fence after keys have moved", INTERLEAVE, "        ptx.fence_proxy_async()\n", "", "gradients, bias"),
    Mutant("dK and dV in the order of places", STORE, "row, right = key_of(i32(", "row, right = (i32(", "gradients, bias"),
    Mutant("bias of the keys of places", P_AND_DS_OPTIONS, "thread % 32 // 4 * 2)", "thread % 32 // 4)", "gradients, bias of many queries"),
    Mutant(
        "dS where another warp reads the bias",
        BIAS_TILES,
        "        pipeline.meet_warp_group(me)  # all of it has read the box\n",
        "",
        "gradients, copied bias",
    ),
    Mutant("a bias where dS is read", BIAS_TILES, "        pipeline.wait_free(smem, BIAS, n)\n", "", "gradients, copied bias, D128"),
    Mutant("a bias before it is there", BIAS_TILES, "        pipeline.wait_ready(smem, BIAS, n)\n", "", "gradients, copied bias"),
    Mutant("the bias of the first consumer", BIAS_TILES, "place.column + j * KEYS", "place.column", "gradients, copied bias"),
    Mutant("the bias of the first queries", BIAS_TILES, "place.row + i * KEYS", "place.row", "gradients, copied bias"),
    Mutant("the bias of the part before", BIAS_TILES, "box[e] = box[e + RUNS]", "box[e] = box[e]", "gradients, copied bias, D128"),
    Mutant(
        "the bias of the tile before",
        BACKWARD_OPTIONS,
        "fetch_first(bias_mask, smem, turn, me, following,",
        "fetch_first(bias_mask, smem, turn, me, n,",
        "gradients, bias of many queries",
    ),
    Mutant("dP of what was dropped", P_AND_DS_OPTIONS, "dp = dp if w > f32(0) else f32(0)", "dp = dp", "gradients, dropout"),
    Mutant(
        "dV of kept weights alone", BACKWARD_OPTIONS, "factor[r] *= f32(parameters.keep_scale)", "factor[r] *= f32(1)", "gradients, dropout"
    ),
    Mutant("bits of the part before", P_AND_DS_OPTIONS, "NOTE.row0) + part * COLUMNS)", "NOTE.row0))", "gradients, dropout"),
    Mutant("dO of the part before", BACKWARD_OPTIONS, "(do_rows + behind, u32(0))", "(do_rows, u32(0))", "gradients, dropout"),
    Mutant("a slope of 1 under a cap", P_AND_DS_OPTIONS, "dpT[e] *= slope[e]", "dpT[e] *= f32(1)", "gradients, dropout, softcap"),
    Mutant("notes overwritten", WALK, "        pipeline.wait_free(smem, Q, n)\n        to", "        to", "gradients, tiles of a mask"),
    Mutant("dQ of tiles that are not listed", ADD_DQ, "at = listed(listing, t).at", "at = i32(t)", "gradients, tiles of a mask"),
    Mutant("added before others, under a mask", ADD_DQ, "tile_lists.count_before(order)", "i32(0)", "gradients, tiles of a mask"),
    Mutant("V beside the first head alone", LOAD_BACKWARD, "if n == begin if MASKED else g", "if g", "gradients, tiles of a mask"),
    Mutant("keys that nobody sees", LOAD_BACKWARD, "if tiles == 0:", "if tiles < 0:", "gradients, tiles of a mask"),
    Mutant("dQ of queries that see nothing", AFTER, "[after_all, at]) == 0", "[after_all, at]) < 0", "gradients, tiles of a mask"),
    # ---- before and after
    Mutant("an lse of base e", BEFORE, "fma_up(shift, f32(UNIT), f32(-RAISED))", "fma_up(shift, f32(1), f32(-RAISED))", "gradients"),
    Mutant("a dQ without its scale", AFTER, "rows.invalid else scale", "rows.invalid else f32(1)", "gradients"),
    Mutant("dQ read before it is written", AFTER, "        cuda.syncthreads()  # all rows are there\n", "", "gradients"),
    # ---- head dimensions beyond 128
    Mutant("a sum that begins anew", DQ, "i32(1 if start == item.first else 0)", "i32(1)", "gradients, D136, parts"),
    Mutant(
        "dS is released before its product",
        DQ,
        "ptx.wgmma_wait(acc, acc, NONE, OUTPUTS, NONE)\n                pipeline.release_group(smem, TILES, n)",
        "pipeline.release_group(smem, TILES, n)\n                ptx.wgmma_wait(acc, acc, NONE, OUTPUTS, NONE)",
        "gradients, D136",
    ),
    # ---- the host of the backward pass
    Mutant(
        "the band of queries", HOST_BACKWARD, "low=-p.high,\n        high=-p.low", "low=p.low,\n        high=p.high", "gradients, causal"
    ),
    Mutant("no counter behind the flags", TEMPORARIES, "math.prod(row_blocks) + 1", "math.prod(row_blocks)", "gradients"),
    Mutant("room for one consumer's dQ", TEMPORARIES, "tile.consumers * DQ_PART)", "DQ_PART)", "gradients"),
    Mutant("only the first part", HOST_BACKWARD, "range(0, parts * blocks, blocks)", "range(0, blocks, blocks)", "gradients, D136, parts"),
    # ---- what leaves the bits as they are, in most orders or in all
    Mutant("no fence before O is stored", STORE, "inverse)\n            ptx.fence_proxy_async()", "inverse)", "plain"),
    Mutant("no fence behind zeros", PIPELINE, "ptx.fence_proxy_async()\n            meet_warp_group(\n", "meet_warp_group(\n", "lengths"),
    Mutant("zeros of other warps", PIPELINE, "meet_warp_group(\n                consumer\n            )", "pass", "lengths"),
    Mutant("a tail is cleared before it comes", PIPELINE, "wait_ready(smem, ring, n)\n            first", "first", "lengths"),
    Mutant(
        "K is released before its product",
        FORWARD,
        "wait_scores(s)\n        release_k(smem, K, n)",
        "release_k(smem, K, n)\n        wait_scores(s)",
        "long items",
    ),
    Mutant(
        "dO is released before dV",
        WIDE,
        "ptx.wgmma_wait(dv_acc, dv_acc, ONE, OUTPUTS_V, NONE)\n                pipeline.release_group(smem, DO, n)",
        "pipeline.release_group(smem, DO, n)\n                ptx.wgmma_wait(dv_acc, dv_acc, ONE, OUTPUTS_V, NONE)",
        "gradients, D136",
    ),
    Mutant("dQ overwritten", STORE, "pipeline.wait_free(smem, DQ, u32(n + u32(1)))  # tile", "# tile", "gradients, long"),
    Mutant("added before its turn", ADD_DQ, "load_flag(flag) != before", "load_flag(flag) > before", "gradients, long"),
    Mutant("dS overwritten while it is copied", WIDE, "await_store()\n                ptx", "ptx", "gradients, D136"),
    Mutant("no fence behind mbarriers", FORWARD, "            ptx.fence_mbarrier_init()\n", "", "plain"),
    Mutant("no fence before dQ is added", STORE, "ptx.fence_proxy_async()\n        pipeline", "pipeline", "gradients"),
    Mutant("no fence between dS and its products", BACKWARD, "ptx.fence_proxy_async()\n                step", "step", "gradients"),
    Mutant(
        "no fence between registers and their product",
        "cuda/ptx/wgmma.py",
        '{at + 4 * steps + 1}, 0;")\n        lines.append("wgmma.fence.sync.aligned;")',
        '{at + 4 * steps + 1}, 0;")',
        "plain",
    ),
    Mutant("a flag without release", "cuda/ptx/memory.py", "red.release.gpu", "red.relaxed.gpu", "gradients"),
    Mutant("a flag without acquire", "cuda/ptx/memory.py", "ld.acquire.gpu", "ld.relaxed.gpu", "gradients"),
    Mutant(
        "a flag when the sum has been read",
        ADD_DQ,
        "ptx.bulk_wait()\n            ptx.add",
        "ptx.bulk_wait_read()\n            ptx.add",
        "gradients",
    ),
    Mutant("a counter that nobody sets", BEFORE, "if own == 0:", "if own < 0:", "gradients"),
    Mutant(
        "a work item is read after its release",
        DQ,
        "Place(0, row0, h, b1, b0)",
        "Place(0, row0, pipeline.read(smem, WORK, turn, WORD.head), b1, b0)",
        "gradients, D136, items",
    ),
    Mutant("a store that no group has", WIDE, "u32(K_PANEL))\n            ptx.bulk_commit()", "u32(K_PANEL))", "gradients, D136"),
    Mutant("shared memory goes while O is read", FORWARD, "ptx.bulk_wait_read()  # shared", "pass  # shared", "plain"),
)
