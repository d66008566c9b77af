"""Mistakes that one could make in the gradient of a bias on Hopper, as those of `mutants`."""

from mutants import Mutant

DBIAS, LOAD, HOST = "cuda/sm90/dbias.py", "cuda/sm90/load_dbias.py", "cuda/prepare_dbias.py"
WALK, STORE, SOFTMAX = "cuda/walk_dbias.py", "cuda/store_dbias.py", "cuda/sm90/softmax_dbias.py"

MUTANTS_DBIAS = (
    # ---- who may touch which shared memory when
    Mutant("no wait for K of a part", DBIAS, "        pipeline.wait_ready(smem, KEY_TILES, k_tile)\n", "", "bias gradient"),
    Mutant("no wait for V of a part", DBIAS, "        pipeline.wait_ready(smem, KEY_TILES, v_tile)\n", "", "bias gradient"),
    Mutant("delta before it is there", DBIAS, "        pipeline.wait_ready(t.smem, QUERIES, following)\n", "", "bias gradient"),
    Mutant(
        "Q free when one consumer has read it", DBIAS, "QUERIES, 1, CONSUMERS * WARP_GROUP)", "QUERIES, 1, WARP_GROUP)", "bias gradient"
    ),
    Mutant(
        "parts of V overwritten",
        LOAD,
        "                        pipeline.wait_free(smem, RING, m)\n",
        "",
        "bias gradient, D128",
    ),
    Mutant("V where K is", LOAD, "build_load_keys(1, head_dim_v)", "build_load_keys(0, head_dim_v)", "bias gradient"),
    Mutant(
        "steps that nobody has read",
        DBIAS,
        "CONSUMERS * WARP_GROUP + LOADERS)",
        "CONSUMERS * WARP_GROUP)",
        "bias gradient, causal",
    ),
    Mutant("no step between tiles", STORE, "(part * PART_KEYS + key_of(n)))", "key_of(n))", "bias gradient"),
    Mutant(
        "steps overwritten",
        LOAD,
        "        pipeline.wait_free(smem, NOTES, turn)\n        for word",
        "        for word",
        "bias gradient, causal",
    ),
    Mutant("fewer bytes than come", LOAD, "tile.block_m, BYTES)", "tile.block_m)", "bias gradient"),
    Mutant(
        "rows beyond the last of memory",
        LOAD,
        "min(i32(place.row + chunk * CHUNK), last)",
        "i32(place.row + chunk * CHUNK)",
        "bias gradient, D128",
    ),
    Mutant("sums over those of the tile before", STORE, "        meet()  # what was there has been read\n", "", "bias gradient, keys"),
    # ---- the sum
    Mutant("a sum that goes on", DBIAS, "            zero(acc)\n", "", "bias gradient"),
    Mutant(
        "the bias of the first tile for all", DBIAS, "            fetch_part(part, bias_next(t))\n", "            pass\n", "bias gradient"
    ),
    Mutant("the bias of this tile again", DBIAS, "read(t, NOTE.next_row0), read", "read(t, NOTE.row0), read", "bias gradient"),
    Mutant("the bias of no tile", DBIAS, "            fetched = there\n", "            fetched = True\n", "bias gradient, causal"),
    Mutant("the lse of the other query", SOFTMAX, "f32(LOG2E) - lse[e // 2 % 2])", "f32(LOG2E) - lse[e % 2])", "bias gradient"),
    Mutant("dS of what was dropped", SOFTMAX, "slope if weight > f32(0) else f32(0)\n", "slope\n", "bias gradient, dropout"),
    Mutant("dP beyond the last key", SOFTMAX, "slope = slope if weight != f32(0) else f32(0)", "slope = slope", "bias gradient, lengths"),
    Mutant("the rows of the other consumer", DBIAS, "u32(me * MINE)", "u32(0)", "bias gradient"),
    Mutant("the first part of K for all", LOAD, "i32(col0 + part * PART)", "col0", "bias gradient"),
    # ---- the walk
    Mutant("a step too few", WALK, "i32(steps * (share + 1) // shares)", "i32(steps * (share + 1) // shares - 1)", "bias gradient, shares"),
    Mutant(
        "the first head of k for all",
        WALK,
        "kv_head = i32(u32(at.head) // u32(space.group)) if SUM_H",
        "kv_head = i32(0) if SUM_H",
        "bias gradient, heads",
    ),
    Mutant("tiles of a mask as whole", DBIAS, "i32(KIND.whole) != 0", "i32(KIND.whole) == 0", "bias gradient, tiles of a mask"),
    Mutant("shares that nobody adds", HOST, "        self._sum_shares(out, dbias)\n", "", "bias gradient, shares"),
    Mutant("keys of the lane before", STORE, "key_of(run) + lane % 4 * LANE_KEYS", "key_of(run) + lane % 4", "bias gradient, keys"),
    Mutant("the query of the row above", STORE, "lane // 4 + query_of(n)), k", "lane // 4), k", "bias gradient, queries"),
)
