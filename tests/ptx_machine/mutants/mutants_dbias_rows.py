"""Mistakes that one could make in the gradient of a bias whose queries stay in shared memory, as those of `mutants`."""

from ptx_machine.mutants.anchors import Mutant

MUTANTS_DBIAS_ROWS = (
    # ---- who may touch which shared memory when
    Mutant("keys of a step before they are there", "add_part start", "pipeline.wait_ready(w.smem, KEYS, m)", "", "bias gradient, rows"),
    Mutant(
        "dO of a run before it is there",
        "add_step",
        "if step.begins: pipeline.wait_ready(w.smem, QUERIES, do_tile)",
        "",
        "bias gradient, rows",
    ),
    Mutant(
        "Q of a run before it is there",
        "sm90 start_next",
        "pipeline.wait_ready(w.smem, QUERIES, step.next_n)",
        "pass",
        "bias gradient, rows",
    ),
    Mutant("keys overwritten", "load_rows load_keys", "pipeline.wait_free(smem, KEYS, m)", "", "bias gradient, rows"),
    Mutant(
        "rows free when one consumer has read them",
        "sm90 build",
        "Arrivals((QUERIES,), 1, CONSUMERS * WARP_GROUP), Arrivals((KEYS,), ...)",
        "Arrivals((QUERIES,), 1, WARP_GROUP), Arrivals((KEYS,), ...)",
        "bias gradient, rows",
    ),
    Mutant("a bias where a tile of the gradient still leaves from", "release_slot", "ptx.bulk_wait_read()", "", "bias gradient, rows"),
    Mutant(
        "a tile of the gradient that leaves before it is there",
        "sm90 store",
        "ptx.fence_proxy_async(); cuda.syncwarp()",
        "",
        "bias gradient, rows",
    ),
    # ---- the sum
    Mutant("a bias that hides nothing", "run_at take", "least != f32(NEG_INF)", "least == least", "bias gradient, rows, hidden"),
    Mutant("a sum over two tiles", "add_part consume", "zero(acc)", "", "bias gradient, rows"),
    Mutant("a bias in base e", "run_at take", "value * f32(LOG2E)", "value", "bias gradient, rows"),
    Mutant("the lse of the query below", "run_at exponents", "e // 2 % 2", "e % 2", "bias gradient, rows"),
    Mutant(
        "K in the place of V", "sm90 add_part", "u32(keys_of(w, k_tile) + u32(V_BEHIND_K))", "keys_of(w, k_tile)", "bias gradient, rows"
    ),
    Mutant(
        "keys of the first element for all",
        "sm90 load_keys",
        "element(x.own, i32(b), given.extent)",
        "element(x.own, i32(0), given.extent)",
        "bias gradient, rows",
    ),
    Mutant("keys of the first tile for all", "sm90 load_keys", "i32(x.col0 + tile * BLOCK_N)", "x.col0", "bias gradient, rows"),
    Mutant("queries of the first element for all", "sm90 element", "i32(own.b1 + walk.b1)", "walk.b1", "bias gradient, rows of each"),
    Mutant(
        "the next key head for each query head",
        "run_of",
        "kv_head=i32(u32(own.head) // u32(group))",
        "kv_head=i32(u32(own.head) % u32(extent.kv_heads))",
        "bias gradient, rows, heads",
    ),
    # ---- a bias that is read ahead, also where it has no gradient
    Mutant("pairs of the next item ahead", "sm90 weigh", "AHEAD and more", "AHEAD", "copied bias"),
    Mutant("pairs of the first tile of an item for all", "sm90 weigh", "u32(n + 1)", "n", "copied bias"),
    Mutant("a bias of the next item ahead", "take_first", "COPIES and n != end", "COPIES", "gradients, copied bias"),
    Mutant(
        "the bias of a tile's first part again",
        "read_next",
        "take_bias(held.bias_mask, held.box, smem, me, n, u32(part + 1))",
        "take_bias(held.bias_mask, held.box, smem, me, n, part)",
        "gradients, copied bias",
    ),
)
