"""Mistakes that one could make where a mask has an element for each block of pairs, as those of `mutants`."""

from mutants import ADD_DQ, Mutant

LISTS, MASK, FETCH = "cuda/block_lists.py", "block_mask.py", "cuda/fetch.py"
LOAD_FORWARD, LOAD_BACKWARD, SUM = "cuda/sm90/load_forward.py", "cuda/sm90/load_backward.py", "cuda/sm80/sum_dq.py"
BACKWARD_OPTIONS, HOST = "cuda/sm90/backward_options.py", "cuda/sm90/prepare_backward_options.py"
BACKWARD, P_AND_DS, ROWS = "cuda/sm90/backward.py", "cuda/sm90/softmax_backward.py", "cuda/sm90/rows.py"
TILE_LISTS, WALK = "cuda/tile_lists.py", "cuda/sm90/walk_backward.py"
SLOTS, DQ_LISTED, LISTED = "cuda/sm90/ds_slots.py", "cuda/sm90/dq_listed.py", "cuda/sm90/backward_listed.py"
HOST_LISTED = "cuda/sm90/prepare_backward_listed.py"

MUTANTS_BLOCKS = (
    Mutant("a list that nobody has", LISTS, "if b0 < u32(tiles.shape[0]):", "if True:", "mma, blocks"),
    Mutant(
        "lists of queries that begin with the second",
        LISTS,
        "u32(number - u32(first))",
        "u32(number - u32(first) + 1)",
        "gradients, blocks",
    ),
    Mutant("lists of keys for blocks of queries", LISTS, "block_m, block_n, False)", "block_m, block_n, True)", "gradients, blocks"),
    Mutant("a queue that nobody makes", SLOTS, "            tile_lists.put_in_queue(tiles, queue, number)\n", "", "gradients, blocks"),
    Mutant(
        "the row of blocks of a column",
        LISTS,
        "i32(row_of(row0)), i32(column_of(col0))",
        "i32(row_of(col0)), i32(column_of(col0))",
        "mma, blocks",
    ),
    Mutant(
        "the last block of a tile left out",
        LISTS,
        "i32(column_of(i32(col1 - 1))) + 1)",
        "i32(column_of(i32(col1 - 1))))",
        "mma, blocks that do not fit",
    ),
    Mutant(
        "whole where one block is visible", LISTS, "every = every if seen else i32(1)", "every = i32(every)", "mma, blocks that do not fit"
    ),
    Mutant(
        "whole where the band hides",
        LISTS,
        "kind = kind if clear else min(kind, i32(1))",
        "kind = i32(kind)",
        "mma, blocks that do not fit",
    ),
    Mutant("a tile in several blocks", MASK, "% queries == 0 and self", "% queries == 0 or self", "mma, blocks that do not fit"),
    Mutant("the block of a query for its key", FETCH, "row_of(i), column_of(j)", "row_of(i), column_of(i)", "mma, blocks that do not fit"),
    Mutant(
        "b1 that nobody writes down",
        LOAD_FORWARD,
        "options.modifies_or_lists",
        "options.modifies_beyond_softcap",
        "wgmma, blocks",
    ),
    Mutant(
        "turns at sums of tiles that are hidden",
        SUM,
        "ORDERED, SHARE, MASKED = ordered, tile.share, options.tiled",
        "ORDERED, SHARE, MASKED = ordered, tile.share, options.mask",
        "mma, gradients, blocks",
    ),
    Mutant(
        "tiles that nobody counts",
        LOAD_BACKWARD,
        "OPTIONS, MASKED = options.modifies_or_lists, options.tiled",
        "OPTIONS, MASKED = options.modifies_beyond_softcap, options.tiled",
        "gradients, blocks",
    ),
    Mutant(
        "tiles of queries that are hidden",
        LOAD_BACKWARD,
        "MASKED, OPTIONS = options.tiled",
        "MASKED, OPTIONS = options.mask",
        "gradients, many blocks",
    ),
    Mutant(
        "sums of tiles that are hidden",
        ADD_DQ,
        "may_go_upward(ordered, options), options.tiled",
        "may_go_upward(ordered, options), options.mask",
        "gradients, many blocks",
    ),
    Mutant("dK without its scale", BACKWARD_OPTIONS, "factor[r] * scale", "factor[r] * f32(1)", "gradients, blocks that do not fit"),
    Mutant("lists of keys for each query", HOST, "transposed=True", "transposed=False", "gradients, many blocks"),
    Mutant(
        "neighbours in two blocks",
        FETCH,
        "blocks and blocks.keys % WIDTH == 0",
        "blocks and blocks.keys % WIDTH != WIDTH",
        "gradients, blocks that do not fit",
    ),
    Mutant(
        "what lies before an empty list", ROWS, "if item.keys > 0 else i32(-1)", "if item.keys > 0 else i32(-2)", "wgmma, blocks, window"
    ),
    Mutant("tiles of a list from the last one up", ROWS, "listed(last, i32(-t))", "listed(last, i32(t))", "wgmma, blocks, window"),
    Mutant("the same first item for all", LOAD_FORWARD, "number = i32(cuda.blockIdx.x)", "number = i32(0)", "wgmma, blocks, window"),
    Mutant(
        "an item that nobody takes",
        LOAD_FORWARD,
        "tile_lists.take(extras.queue) + i32(cuda.gridDim.x)",
        "tile_lists.take(extras.queue) + i32(cuda.gridDim.x + 1)",
        "wgmma, blocks",
    ),
    Mutant("a queue from which one item is taken", TILE_LISTS, "index(blocks)] = i32(0)", "index(blocks)] = i32(1)", "wgmma, blocks"),
    Mutant("blocks of equal lists in one place", TILE_LISTS, "count == own and other < block", "count == own and False", "wgmma, blocks"),
    Mutant("the bits of a block eight before", TILE_LISTS, "index(first + n), word]", "index(n), word]", "gradients, many blocks"),
    Mutant(
        "queries of a range of tiles",
        P_AND_DS,
        "        if NOTED:\n            step = i32(u32(row0_of(smem, me, n, step)) // u32(BLOCK_M))\n",
        "",
        "gradients, blocks, window",
    ),
    Mutant(
        "as many tiles as the band leaves",
        BACKWARD,
        "            if LISTED:\n                tiles",
        "            if False:\n                tiles",
        "gradients, many blocks",
    ),
    Mutant(
        "sections that are all the first",
        SLOTS,
        "i32(section * i32(numbers.room) + before % whole)",
        "i32(before % whole)",
        "gradients, blocks, sections",
    ),
    Mutant(
        "heads of a group in the same slots",
        SLOTS,
        "slot = i32(slot + length_of(tiles, which.b0, which.b1, head, which.block))",
        "slot = i32(slot)",
        "gradients, blocks, sections",
    ),
    Mutant(
        "items that the other kernel has taken",
        SLOTS,
        "i32(1 + kind * i32(sizes.parts) + i32(sizes.first_block))",
        "i32(1 + i32(sizes.first_block))",
        "gradients, blocks",
    ),
    Mutant("items of a section to come", SLOTS, "== u32(sizes.first_block)", ">= u32(sizes.first_block)", "gradients, blocks, sections"),
    Mutant("the first slot of a block of keys for all", DQ_LISTED, "return i32(place + rank)", "return i32(place)", "gradients, blocks"),
    Mutant(
        "a sum that begins in each section",
        DQ_LISTED,
        "begins=i32(1 if run.start == 0 else 0)",
        "begins=i32(1)",
        "gradients, blocks, sections",
    ),
    Mutant(
        "keys beyond the end of the last tile",
        DQ_LISTED,
        "first=i32(run.last - (tiles - 1))",
        "first=i32(0)",
        "gradients, blocks, lengths",
    ),
    Mutant("dS of a tile that has no slot", LISTED, "if slot >= 0:", "if slot >= -1:", "gradients, blocks, lengths"),
    Mutant(
        "dS in the place of what is copied",
        LISTED,
        "        if first:\n            ptx.bulk_wait_read()\n        pipeline.meet_warp_group(me)  # all of",
        "        pipeline.meet_warp_group(me)  # all of",
        "gradients, blocks, D128",
    ),
    Mutant("V that is kept", LISTED, "if u32(n + u32(1)) == end:", "if n == end:", "gradients, blocks"),
    Mutant(
        "one half of the queries of a tile",
        WALK,
        "entry.at * SHARE + number % SHARE",
        "entry.at * SHARE",
        "gradients, blocks, D128",
    ),
    Mutant(
        "K in the place of dK that is copied",
        LISTED,
        "            ptx.bulk_wait_read()\n            if turn",
        "            if turn",
        "gradients, blocks, lengths",
    ),
    Mutant("a slot before its tile's", WALK, "SHARE + listing.count - 1)", "SHARE + listing.count - 2)", "gradients, blocks"),
    Mutant("dS of another section", DQ_LISTED, "if sections > 1:", "if sections > 9:", "gradients, blocks, sections"),
    Mutant(
        "the last section left out",
        SLOTS,
        "sections(places, sizes) > i32(sizes.first_block)",
        "sections(places, sizes) > i32(sizes.first_block + 1)",
        "gradients, blocks, sections",
    ),
    Mutant(
        "rows of smaller blocks",
        HOST_LISTED,
        "preprocess_launch(this, DQ_TILE.block_m)",
        "preprocess_launch(this)",
        "gradients, blocks, D128",
    ),
)
