"""Mistakes in float32 on Hopper's wgmma."""

from mutants import FORWARD_SPLIT, PIPELINE, STORE, WGMMA, Mutant

BACKWARD_SPLIT, GRADIENTS = "cuda/sm90/backward_split.py", "wgmma, gradients"
BACKWARD_WIDE, WIDE, ITEM = "cuda/sm90/backward_split_wide.py", "wgmma, gradients, D128", "cuda/sm90/item_split.py"
INSTRUCTIONS, HOST = "cuda/ptx/wgmma.py", "cuda/sm90/prepare_forward_split.py"

MUTANTS_SPLIT = (
    # ---- planes
    Mutant("low planes that are the high ones", PIPELINE, "plane * COLUMNS + ", "", "wgmma"),
    Mutant(
        "high planes of K and V in the place of low ones",
        INSTRUCTIONS,
        "(count, 0, b_plane, False)",
        "(count, 0, 0, False)",
        "wgmma",
    ),
    Mutant("high planes of Q and P in the place of low ones", INSTRUCTIONS, "(count, a_plane, 0, True)", "(count, 0, 0, True)", "wgmma"),
    Mutant("low sums that begin twice", INSTRUCTIONS, "(count, a_plane, 0, True)", "(count, a_plane, 0, False)", "wgmma"),
    Mutant("low scores as large as they are kept", WGMMA, "block_n // 2, 0, 1 / ptx.LOW", "block_n // 2, 0, 1.0", "wgmma"),
    Mutant("low sums of O as large as they are kept", WGMMA, "panel * PANEL // 2, 1 / ptx.LOW", "panel * PANEL // 2, 1.0", "wgmma"),
    Mutant("the first panel of V twice", WGMMA, "AT, FIRST, LOWERED = panel * PANEL_BYTES", "AT, FIRST, LOWERED = 0", "wgmma, D128"),
    Mutant("the first columns of O twice", WGMMA, "acc[FIRST + e] += high[e]", "acc[e] += high[e]", "wgmma, D128"),
    Mutant("products with high planes of V alone", WGMMA, "V_PLANE = panels(columns) * PANEL_BYTES // UNIT", "V_PLANE = 0", "wgmma"),
    # ---- powers of two, and centres
    Mutant("scores with the power of K", FORWARD_SPLIT, "scale_log2 *= factor_of(smem, turn, extras, 1)", "pass", "wgmma"),
    Mutant("scores with the power of Q", FORWARD_SPLIT, "scale * factor_of(smem, turn, extras, 0)", "scale", "wgmma"),
    Mutant("the factors of the first head", PIPELINE, "index(b1), index(head), which]", "index(b1), 0, which]", "wgmma, heads"),
    Mutant("P's powers of two in the lse", FORWARD_SPLIT, "ptx.lg2(l * f32(LOWERED))", "ptx.lg2(l)", "wgmma"),
    Mutant("O in the units of V's planes", FORWARD_SPLIT, "ptx.rcp(l) * factor", "ptx.rcp(l)", "wgmma"),
    Mutant("an lse of centred keys", FORWARD_SPLIT, "value += extras.shifts[", "value += 0 * extras.shifts[", "wgmma, offset"),
    Mutant(
        "O of centred values",
        FORWARD_SPLIT,
        "build_put_floats(head_dim_v, CENTRED.values)",
        "build_put_floats(head_dim_v, False)",
        "wgmma, offset",
    ),
    Mutant("a centre where nothing was seen", STORE, "if CENTRED and factor[r] != f32(0):", "if CENTRED:", "wgmma, offset"),
    Mutant(
        "columns of the centre next to each other",
        STORE,
        "centre[index(8 * j + first_column())]",
        "centre[index(j)]",
        "wgmma, offset",
    ),
    # ---- who may touch what when
    Mutant("no wait for a tile of K", FORWARD_SPLIT, "        pipeline.wait_ready(smem, K, n)\n", "", "wgmma"),
    Mutant("no wait for a tile of V", FORWARD_SPLIT, "                pipeline.wait_ready(smem, V, n)\n", "", "wgmma"),
    Mutant("S before it is there", WGMMA, "COUNT, NONE, LOWERED = block_n // 2, 0,", "COUNT, NONE, LOWERED = block_n // 2, 1,", "wgmma"),
    Mutant("sums of O before they are there", WGMMA, "N // 2 if planes > 1 else 0, 0", "N // 2 if planes > 1 else 0, 1", "wgmma"),
    Mutant(
        "K before its product",
        FORWARD_SPLIT,
        "        wait_scores(s, low)\n        pipeline.release_group(smem, K, n)\n",
        "        pipeline.release_group(smem, K, n)\n        wait_scores(s, low)\n",
        "wgmma",
    ),
    Mutant("Q for one tile", FORWARD_SPLIT, "if t == item.count - 1:", "if t == 0:", "wgmma"),
    Mutant("a tile of V that one consumer has left", FORWARD_SPLIT, "V, 1, CONSUMERS)", "V, 1, 1)", "wgmma"),
    Mutant("no fence behind mbarriers of planes", FORWARD_SPLIT, "            ptx.fence_mbarrier_init()\n", "", "wgmma"),
    Mutant("P in the units of scores", FORWARD_SPLIT, "                raise_shifts(s, acc, m_i, l_i, scale_log2)\n", "", "wgmma"),
    Mutant("no fence between P and its products", INSTRUCTIONS, "b32 low; wgmma.fence.sync.aligned;", "b32 low;", "wgmma"),
    # ---- backward
    Mutant("the power of one's own warp", ITEM, "            largest = ptx.maximum(largest, other)\n", "", GRADIENTS),
    Mutant(
        "dQ with the power of dS", BACKWARD_SPLIT, "put_dq(smem, me, n, high, power.down)", "put_dq(smem, me, n, high, f32(1))", GRADIENTS
    ),
    Mutant("dK with the power of dS", BACKWARD_SPLIT, "add_dk(dk_acc, high, power.down)", "add_dk(dk_acc, high, f32(1))", GRADIENTS),
    Mutant("the high plane of dS twice", BACKWARD_SPLIT, "p, plane * PAIRS)", "p, 0)", GRADIENTS),
    Mutant("powers before they are there", ITEM, "pipeline.meet_warp_group(me)  # theirs", "pass  # theirs", GRADIENTS),
    Mutant("dS of other warps before it is there", BACKWARD_SPLIT, "pipeline.meet_warp_group(me)  # dS", "pass  # dS", GRADIENTS),
    Mutant("no fence before dQ", BACKWARD_SPLIT, "ptx.fence_proxy_async()\n                step", "step", GRADIENTS),
    Mutant("dQ from the keys of one consumer", "cuda/sm90/postprocess_split.py", "range(1, PARTS)", "range(1, 1)", GRADIENTS),
    Mutant("dK without the power of V", ITEM, "acc[e] *= of_dp", "acc[e] *= factor_of(smem, turn, extras, 3)", GRADIENTS),
    # ---- backward, consumers that share keys
    Mutant("the power of dS lost on its way", BACKWARD_WIDE, "ptx.as_uint32(power.down)", "ptx.as_uint32(power.up)", WIDE),
    Mutant("the left columns of dQ twice", BACKWARD_WIDE, "smem, K, turn) + u32(HALF)", "smem, K, turn) + u32(0)", WIDE),
    Mutant("P of the other consumer before it is there", BACKWARD_WIDE, "        pipeline.wait_ready(smem, P, n)\n", "", WIDE),
    Mutant("P over what has not been read", BACKWARD_WIDE, "        pipeline.wait_free(smem, P, n)\n", "", WIDE),
    Mutant("dS over what has not been read", BACKWARD_WIDE, "        pipeline.wait_free(smem, MADE, n)\n", "", WIDE),
    Mutant("dS before it is there", BACKWARD_WIDE, "        pipeline.wait_ready(smem, MADE, n)\n        down", "        down", WIDE),
    Mutant("dS of other warps", BACKWARD_WIDE, "pipeline.wait_ready(smem, MADE, n)\n                start", "start", WIDE),
    Mutant(
        "no fence between dS and dQ",
        BACKWARD_WIDE,
        "        ptx.fence_proxy_async()\n        pipeline.commit(smem, MADE",
        "        pipeline.commit(smem, MADE",
        WIDE,
    ),
    Mutant("dK without the power of dS", BACKWARD_WIDE, "smem, Q, n), power.down)", "smem, Q, n), f32(1))", WIDE),
    Mutant(
        "no dQ of the last tile",
        BACKWARD_WIDE,
        "            make_left(smem, turn, u32(n - u32(1)), high, low)\n            commit_dq",
        "            pipeline.release(smem, MADE, u32(n - u32(1)))\n            commit_dq",
        WIDE,
    ),
    Mutant("dO before its product", BACKWARD_WIDE, "                wait_do(smem, turn, 0, n, step)\n", "", WIDE),
    Mutant(
        "the left columns of dQ for the right ones",
        "cuda/sm90/postprocess_split.py",
        "x = ptx.load_global_four(u64(sums + u64(2048 * j)))",
        "x = ptx.load_global_four(u64(sums + u64(2048 * (j % 8))))",
        WIDE,
    ),
    Mutant(
        "the second panel of K in the place of its low plane",
        BACKWARD_WIDE,
        "panels(D) * panel_bytes(BLOCK_N)",
        "panel_bytes(BLOCK_N)",
        "wgmma, gradients, D72, lengths",
    ),
    # ---- the host
    Mutant("boxes of Q as high as those of K", HOST, "(made.q, tile.block_m)", "(made.q, tile.block_n)", "wgmma, D128"),
)
