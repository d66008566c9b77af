"""Mistakes that one could make in the gradient of a bias on Hopper, as those of `mutants`."""

from anchors import Mutant

MUTANTS_DBIAS = (
    # ---- who may touch which shared memory when
    Mutant("no wait for K of a part", "sm90 weigh_and_add", "pipeline.wait_ready(smem, KEY_TILES, k_tile)", "", "bias gradient"),
    Mutant("no wait for V of a part", "sm90 weigh_and_add", "pipeline.wait_ready(smem, KEY_TILES, v_tile)", "", "bias gradient"),
    Mutant("delta before it is there", "add_step", "pipeline.wait_ready(t.smem, QUERIES, following)", "", "bias gradient"),
    Mutant(
        "Q free when one consumer has read it",
        "rings_of",
        "(QUERIES,), 1, tile.consumers * WARP_GROUP",
        "(QUERIES,), 1, WARP_GROUP",
        "bias gradient",
    ),
    Mutant("parts of V overwritten", "sm90 load_keys", "pipeline.wait_free(smem, RING, m)", "", "bias gradient, D128"),
    Mutant("V where K is", "sm90 build_loads", "build_load_keys(1, head_dim_v)", "build_load_keys(0, head_dim_v)", "bias gradient"),
    Mutant(
        "steps that nobody has read",
        "rings_of",
        "tile.consumers * WARP_GROUP + LOADERS",
        "tile.consumers * WARP_GROUP",
        "bias gradient, causal",
    ),
    Mutant("no step between tiles", "store_run_inside", "part * PART_KEYS + key_of(n)", "key_of(n)", "bias gradient"),
    Mutant("steps overwritten", "note_step", "pipeline.wait_free(smem, NOTES, turn)", "", "bias gradient, causal"),
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
    Mutant("a sum that goes on", "weigh_and_add consume", "zero(acc)", "", "bias gradient"),
    Mutant("the bias of the first tile for all", "sm90 weigh_and_add", "fetch_part(part, bias_next(t))", "pass", "bias gradient"),
    Mutant("the bias of this tile again", "bias_next", "NOTE.next_row0", "NOTE.row0", "bias gradient"),
    Mutant("the bias of no tile", "consume", "fetched = there", "fetched = True", "bias gradient, causal"),
    Mutant("the lse of the other query", "sm90 recompute_p", "e // 2 % 2", "e % 2", "bias gradient"),
    Mutant("dS of what was dropped", "sm90 differentiate", "slope if weight > f32(0) else f32(0)", "slope", "bias gradient, dropout"),
    Mutant("dP beyond the last key", "sm90 differentiate", "slope if weight != f32(0) else f32(0)", "slope", "bias gradient, lengths"),
    Mutant("the rows of the other consumer", "sm90 rows_of", "me * MINE", "0", "bias gradient"),
    Mutant("the first part of K for all", "sm90 load_keys", "i32(col0 + part * PART)", "col0", "bias gradient"),
    # ---- the walk
    Mutant("a step too few", "cuda begin", "steps * (share + 1) // shares", "steps * (share + 1) // shares - 1", "bias gradient, shares"),
    Mutant("the first head of k for all", "cuda place_of", "u32(at.head) // u32(space.group)", "0", "bias gradient, heads"),
    Mutant(
        "tiles of a mask as whole",
        "sm90 weigh_and_add",
        "t.kind & i32(KIND.whole) != 0",
        "t.kind & i32(KIND.whole) == 0",
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
