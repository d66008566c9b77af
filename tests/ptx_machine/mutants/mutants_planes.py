"""Mistakes in float32 on Hopper's wgmma."""

from ptx_machine.mutants.anchors import Mutant

GRADIENTS, WIDE = "wgmma, gradients", "wgmma, gradients, D128"

MUTANTS_PLANES = (
    # ---- planes
    Mutant("low planes that are the high ones", "sm90 load", "place.column + plane * COLUMNS", "place.column", "wgmma"),
    Mutant("high planes of K and V in the place of low ones", "_planes_terms", "count, 0, b_plane, False", "count, 0, 0, False", "wgmma"),
    Mutant("high planes of Q and P in the place of low ones", "_planes_terms", "count, a_plane, 0, True", "count, 0, 0, True", "wgmma"),
    Mutant("low sums that begin twice", "_planes_terms", "(count, a_plane, 0, True)", "(count, a_plane, 0, False)", "wgmma"),
    Mutant("low scores as large as they are kept", "build_planes_scores", "1 / ptx.LOW", "1.0", "wgmma"),
    Mutant("low sums of O as large as they are kept", "build_panel", "1 / ptx.LOW", "1.0", "wgmma"),
    Mutant("the first panel of V twice", "build_panel", "panel * PANEL_BYTES", "0", "wgmma, D128"),
    Mutant("the first columns of O twice", "sm90 one", "FIRST + e", "e", "wgmma, D128"),
    Mutant("products with high planes of V alone", "build_planes_values", "panels(columns) * PANEL_BYTES // UNIT", "0", "wgmma"),
    # ---- powers of two, and centres
    Mutant("scores with the power of K", "consume", "scale_log2 *= factor_of(smem, item_n, extras, 1)", "pass", "wgmma"),
    Mutant("scores with the power of Q", "consume", "scale * factor_of(smem, item_n, extras, 0)", "scale", "wgmma"),
    Mutant("the factors of the first head", "sm90 factor_of", "index(head)", "0", "wgmma, heads"),
    Mutant("P's powers of two in the lse", "sm90 log_sum", "l * f32(LOWERED)", "l", "wgmma"),
    Mutant("O in the units of V's planes", "sm90 finish", "ptx.rcp(l) * to_o", "ptx.rcp(l)", "wgmma"),
    Mutant("an lse of centred keys", "sm90 finish", "extras.shifts[...]", "0 * extras.shifts[...]", "wgmma, offset"),
    Mutant("O of centred values", "sm90 build_finish", "Centred.of(options)", "(True, False)", "wgmma, offset"),
    Mutant("a centre where nothing was seen", "put_floats", "CENTRED and factor[r] != f32(0)", "CENTRED", "wgmma, offset"),
    Mutant("columns of the centre next to each other", "put_floats", "index(8 * j + first_column())", "index(j)", "wgmma, offset"),
    # ---- ends
    Mutant("values beyond an end", "consume", "item.keys - col", "item.keys", "wgmma, an end in a second tile"),
    # ---- who may touch what when
    Mutant("no wait for a tile of K", "sm90 scores", "pipeline.wait_ready(smem, K, n)", "", "wgmma"),
    Mutant("no wait for a tile of V", "consume", "pipeline.wait_ready(smem, V, n)", "", "wgmma"),
    Mutant("S before it is there", "build_planes_scores", "0, 1 / ptx.LOW", "1, 1 / ptx.LOW", "wgmma"),
    Mutant(
        "sums of O before they are there",
        "build_panel",
        "(N // 2, N // 2 if planes > 1 else 0, 0)",
        "(N // 2, N // 2 if planes > 1 else 0, 1)",
        "wgmma",
    ),
    Mutant(
        "K before its product",
        "sm90 scores",
        "wait_scores(s, low); pipeline.release_group(smem, K, n)",
        "pipeline.release_group(smem, K, n); wait_scores(s, low)",
        "wgmma",
    ),
    Mutant("Q for one tile", "consume", "t == item.count - 1", "t == 0", "wgmma"),
    Mutant(
        "a tile of V that one consumer has left",
        "rings_of",
        "(layout.v, CONSUMERS)",
        "(layout.v, 1)",
        "wgmma",
    ),
    Mutant("no fence behind mbarriers of planes", "hopper_kernel", "ptx.fence_mbarrier_init()", "", "wgmma"),
    Mutant("P in the units of scores", "consume", "raise_shifts(s, acc, m_i, l_i, scale_log2)", "", "wgmma"),
    Mutant("no fence between P and its products", "ptx codegen", "'low; wgmma.fence.sync.aligned;'", "'low;'", "wgmma"),
    # ---- backward
    Mutant("the power of one's own warp", "common_power", "largest = ptx.maximum(largest, other)", "", GRADIENTS),
    Mutant("dQ with the power of dS", "consume", "n, high, power.down", "n, high, f32(1)", GRADIENTS),
    Mutant("dK with the power of dS", "consume", "add_dk(dk_acc, high, power.down)", "add_dk(dk_acc, high, f32(1))", GRADIENTS),
    Mutant("the high plane of dS twice", "put_planes", "plane * PAIRS", "0", GRADIENTS),
    Mutant("powers before they are there", "common_power", "pipeline.meet_warp_group(me)", "pass", GRADIENTS),
    Mutant("dS of other warps before it is there", "consume", "pipeline.meet_warp_group(me)", "pass", GRADIENTS),
    Mutant("no fence before dQ", "consume", "item.split(p, sT); ...; ptx.fence_proxy_async()", "item.split(p, sT); ...", GRADIENTS),
    Mutant("dQ from the keys of one consumer", "postprocess_planes", "range(1, PARTS)", "range(1, 1)", GRADIENTS),
    Mutant("dK without the power of V", "store_dk", "acc[e] *= of_dp", "acc[e] *= factor_of(smem, item_n, extras, 3)", GRADIENTS),
    # ---- backward, consumers that share keys
    Mutant("the power of dS lost on its way", "hand_ds", "power.down", "power.up", WIDE),
    Mutant("the left columns of dQ twice", "consume_gradients", "u32(HALF)", "u32(0)", WIDE),
    Mutant("P of the other consumer before it is there", "take_p", "pipeline.wait_ready(smem, P, n)", "", WIDE),
    Mutant("P over what has not been read", "hand_p", "pipeline.wait_free(smem, P, n)", "", WIDE),
    Mutant("dS over what has not been read", "hand_ds", "pipeline.wait_free(smem, MADE, n)", "", WIDE),
    Mutant("dS before it is there", "make_left", "pipeline.wait_ready(smem, MADE, n)", "", WIDE),
    Mutant("dS of other warps", "consume_gradients", "pipeline.wait_ready(smem, MADE, n)", "", WIDE),
    Mutant("no fence between dS and dQ", "hand_ds", "ptx.fence_proxy_async()", "", WIDE),
    Mutant(
        "dK without the power of dS",
        "consume_gradients",
        "pipeline.tile(smem, Q, n), power.down",
        "pipeline.tile(smem, Q, n), f32(1)",
        WIDE,
    ),
    Mutant(
        "no dQ of the last tile",
        "consume_scores",
        "while True: ...; make_left(smem, item_n, u32(n - u32(1)), high, low); ...",
        "while True: ...; pipeline.release(smem, MADE, u32(n - u32(1))); ...",
        WIDE,
    ),
    Mutant("dO before its product", "consume_scores", "scores.wait_do(smem, item_n, 0, n, step)", "", WIDE),
    Mutant("the left columns of dQ for the right ones", "postprocess_planes", "u64(2048 * j)", "u64(2048 * (j % 8))", WIDE),
    Mutant(
        "the second panel of K in the place of its low plane",
        "build_keys_shared",
        "panels(D) * panel_bytes(BLOCK_N)",
        "panel_bytes(BLOCK_N)",
        "wgmma, gradients, D72, lengths",
    ),
    # ---- the host
    Mutant(
        "boxes of Q as high as those of K",
        "sm90 _maps",
        "(tile.block_m, tile.block_n, tile.block_n)",
        "(tile.block_n, tile.block_n, tile.block_n)",
        "wgmma, D128",
    ),
)
