"""Mistakes that one could make in the gradient of a bias whose queries stay in shared memory, as those of `mutants`."""

from mutants import Mutant

ROWS, LOAD = "cuda/sm90/dbias_rows.py", "cuda/sm90/load_dbias_rows.py"
FORWARD, BACKWARD = "cuda/sm90/forward_options.py", "cuda/sm90/backward_options.py"

MUTANTS_DBIAS_ROWS = (
    # ---- who may touch which shared memory when
    Mutant("keys of a step before they are there", ROWS, "        pipeline.wait_ready(t.smem, KEYS, m)\n", "", "bias gradient, rows"),
    Mutant(
        "dO of a run before it is there",
        ROWS,
        "        if x.begins:\n            pipeline.wait_ready(smem, QUERIES, do_tile)\n",
        "",
        "bias gradient, rows",
    ),
    Mutant(
        "Q of a run before it is there",
        ROWS,
        "            pipeline.wait_ready(smem, QUERIES, following)\n",
        "            pass\n",
        "bias gradient, rows",
    ),
    Mutant("keys overwritten", LOAD, "                    pipeline.wait_free(smem, KEYS, m)\n", "", "bias gradient, rows"),
    Mutant(
        "rows free when one consumer has read them",
        ROWS,
        "QUERIES, 1, CONSUMERS * WARP_GROUP)",
        "QUERIES, 1, WARP_GROUP)",
        "bias gradient, rows",
    ),
    Mutant(
        "a bias where a tile of the gradient still leaves from",
        ROWS,
        "            ptx.bulk_wait_read()\n            pipeline.release(smem, PAIRS, number)\n",
        "            pipeline.release(smem, PAIRS, number)\n",
        "bias gradient, rows",
    ),
    Mutant(
        "a tile of the gradient that leaves before it is there",
        ROWS,
        "        ptx.fence_proxy_async()\n        cuda.syncwarp()  # all rows are there\n",
        "",
        "bias gradient, rows",
    ),
    # ---- the sum
    Mutant("a bias that hides nothing", ROWS, "return least != f32(NEG_INF)", "return least == least", "bias gradient, rows, hidden"),
    Mutant("a sum over two tiles", ROWS, "                zero(acc)\n", "", "bias gradient, rows"),
    Mutant("a bias in base e", ROWS, "bias[e] = value * f32(LOG2E)", "bias[e] = value", "bias gradient, rows"),
    Mutant("the lse of the query below", ROWS, "t.bias[e] - t.lse[e // 2 % 2]", "t.bias[e] - t.lse[e % 2]", "bias gradient, rows"),
    Mutant("K in the place of V", ROWS, "u32(keys_of(t, m) + u32(V_BEHIND_K))", "keys_of(t, m)", "bias gradient, rows"),
    Mutant(
        "keys of the first element for all",
        LOAD,
        "at = element(x.own, i32(b), extent)\n                    key",
        "at = element(x.own, i32(0), extent)\n                    key",
        "bias gradient, rows",
    ),
    Mutant("keys of the first tile for all", LOAD, "i32(x.col0 + tile * BLOCK_N)", "x.col0", "bias gradient, rows"),
    Mutant("queries of the first element for all", LOAD, "i32(own.b1 + walk.b1)", "walk.b1", "bias gradient, rows of each"),
    # ---- a bias that is read ahead, also where it has no gradient
    Mutant("pairs of the next item ahead", FORWARD, "        if AHEAD and more:\n", "        if AHEAD:\n", "copied bias"),
    Mutant(
        "pairs of the first tile of an item for all", FORWARD, "me, u32(n + 1))\n        online", "me, n)\n        online", "copied bias"
    ),
    Mutant(
        "a bias of the next item ahead",
        BACKWARD,
        "        if COPIES_BIAS and n != end:\n",
        "        if COPIES_BIAS:\n",
        "gradients, copied bias",
    ),
    Mutant("the bias of a tile's first part again", BACKWARD, "me, n, u32(part + 1))", "me, n, part)", "gradients, copied bias"),
)
