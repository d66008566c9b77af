"""Mistakes that one could make in the gradient of a bias on Hopper, as those of `mutants`."""

from ptx_machine.mutants.anchors import Mutant

MUTANTS_DBIAS = (
    # ---- who may touch which shared memory when
    Mutant("no wait for K of a part", "add_part start", "pipeline.wait_ready(w.smem, KEYS, m)", "", "bias gradient"),
    Mutant("Q before it is there", "sm90 add_step", "pipeline.wait_ready(w.smem, QUERIES, step.n)", "pass", "bias gradient"),
    Mutant("scores before S is complete", "sm90 add_part", "ptx.wgmma_wait(w.s, w.s, ONE, SCORES, NONE)", "pass", "bias gradient"),
    Mutant("no wait for V of a part", "sm90 add_part", "pipeline.wait_ready(smem, KEYS, v_tile)", "", "bias gradient"),
    Mutant("delta before it is there", "add_step", "if step.begins: pipeline.wait_ready(w.smem, QUERIES, do_tile)", "", "bias gradient"),
    Mutant(
        "Q free when one consumer has read it",
        "sm90 build",
        "Arrivals((QUERIES,), 1, CONSUMERS * WARP_GROUP), Arrivals((KEYS,), ...)",
        "Arrivals((QUERIES,), 1, WARP_GROUP), Arrivals((KEYS,), ...)",
        "bias gradient",
    ),
    Mutant("parts of V overwritten", "build_load_keys load_keys", "pipeline.wait_free(smem, KEYS, m)", "", "bias gradient, D128"),
    Mutant(
        "V where K is", "sm90 build_loads", "(build_load_keys(3, head_dim_v), 1)", "(build_load_keys(3, head_dim_v), 0)", "bias gradient"
    ),
    Mutant(
        "steps that nobody has read", "sm90 build", "CONSUMERS * WARP_GROUP + LOADERS", "CONSUMERS * WARP_GROUP", "bias gradient, causal"
    ),
    Mutant("no step between tiles", "store_run_inside", "part * PART_KEYS + key_of(n)", "key_of(n)", "bias gradient"),
    Mutant("steps overwritten", "note_step", "pipeline.wait_free(smem, NOTES, item_n)", "", "bias gradient, causal"),
    Mutant("fewer bytes than come", "build_load_rows", "tile.block_m, BYTES", "tile.block_m", "bias gradient"),
    Mutant(
        "rows beyond the last of memory",
        "sm90 load_rows",
        "min(i32(place.row + chunk * CHUNK), last)",
        "i32(place.row + chunk * CHUNK)",
        "bias gradient, D128",
    ),
    Mutant("sums over those of the tile before", "cuda store", "add_all(t); meet()", "add_all(t)", "bias gradient, keys"),
    # ---- the sum
    Mutant("a sum that goes on", "add_part consume", "zero(acc)", "", "bias gradient"),
    Mutant(
        "the bias of the first tile for all", "own_at exponents", "fetch_part(part, (w, next_at(w, x.item_n)))", "pass", "bias gradient"
    ),
    Mutant("the bias of this tile again", "next_at", "NOTE.next_row0", "NOTE.row0", "bias gradient"),
    Mutant("the bias of no tile", "build_walk leave", "has_steps(x)", "True", "bias gradient, causal"),
    Mutant("the lse of the other query", "own_at exponents", "e // 2 % 2", "e % 2", "bias gradient"),
    Mutant("dS of what was dropped", "sm90 differentiate", "slope if weight > f32(0) else f32(0)", "slope", "bias gradient, dropout"),
    Mutant("dP beyond the last key", "sm90 differentiate", "slope if weight != f32(0) else f32(0)", "slope", "bias gradient, lengths"),
    Mutant(
        "the rows of the other consumer",
        "add_part consume",
        "u32(smem + u32(QUERIES.tiles) + u32(me * MINE))",
        "u32(smem + u32(QUERIES.tiles))",
        "bias gradient",
    ),
    Mutant("the first part of K for all", "build_load_keys load_keys", "i32(keys.row + part * PART)", "keys.row", "bias gradient"),
    # ---- the walk
    Mutant(
        "a step too few", "cuda share_of", "steps * (share + 1) // shares", "steps * (share + 1) // shares - 1", "bias gradient, shares"
    ),
    Mutant("the first head of k for all", "cuda place_of", "u32(at.head) // u32(space.group)", "0", "bias gradient, heads"),
    Mutant(
        "tiles of a mask as whole",
        "own_at read_part",
        "x.kind & i32(KIND.whole) != 0",
        "x.kind & i32(KIND.whole) == 0",
        "bias gradient, tiles of a mask",
    ),
    Mutant("shares that nobody adds", "Shares run", "self._sum_shares(out, dbias)", "", "bias gradient, shares"),
    Mutant("keys of the lane before", "cuda place", "lane % 4 * LANE_KEYS", "lane % 4", "bias gradient, keys"),
    Mutant(
        "the query of the row above",
        "cuda place",
        "m * WARP_ROWS + lane // 4 + query_of(n)",
        "m * WARP_ROWS + lane // 4",
        "bias gradient, queries",
    ),
)
