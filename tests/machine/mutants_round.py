"""Mistakes in the Hopper backward where the main kernel rounds dQ."""

from mutants import Mutant

ROUND = "cuda/sm90/round_dq.py"
ROUNDED, D128, UPWARD, FEW = (f"gradients, rounded{name}" for name in ("", ", D128", ", upward", ", few"))
FIRST = "        if is_first():\n"

MUTANTS_ROUND = (
    # ---- who waits for whom
    Mutant("rounded when the first have added", ROUND, "(flag)) == read(smem, WORD.blocks)", "(flag)) == i32(1)", ROUNDED),
    Mutant("rounded before the last has added", ROUND, "after + i32(1))", "after)", UPWARD),
    Mutant("sums that nobody has waited for", ROUND, "pipeline.uniform(ptx.load_flag(flag)) == read(smem, WORD.blocks)", "True", ROUNDED),
    Mutant("sums before they are there", ROUND, "ptx.copy_wait_but(SUM_SLOTS - 1)", "ptx.copy_wait_but(SUM_SLOTS)", ROUNDED),
    Mutant("rounded where it has not left", ROUND, "bulk_wait_read_but(ROUNDED_SLOTS - 1)", "bulk_wait_read_but(ROUNDED_SLOTS)", ROUNDED),
    Mutant("no fence before what is rounded leaves", ROUND, "        ptx.fence_proxy_async()\n", "", ROUNDED),
    Mutant("the end before all is stored", ROUND, FIRST + "            ptx.bulk_wait()\n", "", ROUNDED),
    Mutant("what others have not written down", ROUND, "ptx.nap(u32(NAP))\n            cuda.syncwarp()\n", "ptx.nap(u32(NAP))\n", UPWARD),
    Mutant("claims that wait for a tile of dQ", ROUND, "there = pipeline.is_ready(", "there = i32(0) * pipeline.is_ready(", UPWARD),
    # ---- which tile, and where it goes
    Mutant("rounded again while there is work", ROUND, " and read(smem, WORD.left) != i32(0):", ":", FEW),
    Mutant("fewer tiles than there are", ROUND, "u32(tiles + u32(grid - u32(1)) - block)", "u32(tiles - block)", ROUNDED),
    Mutant("a block's tiles beside each other", ROUND, "WORD.place)) + u32(cuda.gridDim.x))", "WORD.place)) + u32(1))", ROUNDED),
    Mutant("a head for every tile", ROUND, "u32(pair - u32(b * heads))", "pair", D128),
    Mutant("columns of the part after", ROUND, "i32(i32(part % u32(PARTS)) * COLUMNS)", "i32(i32(part // u32(PARTS)) * COLUMNS)", ROUNDED),
    Mutant("sums of another head", ROUND, "u32(pair * blocks) + u32(at)", "u32(at)", ROUNDED),
    Mutant("sums of the first part", ROUND, "* u32(ALL) + part))", "* u32(ALL)))", ROUNDED),
    Mutant("the next chunk but one", ROUND, "u64((chunk + SUM_SLOTS) * CHUNK_BYTES)", "u64((chunk + 2) * CHUNK_BYTES)", D128),
    Mutant("no chunk of the last part", ROUND, "part < u32(ALL - (chunk", "part < u32(ALL - 1 - (chunk", D128),
    Mutant("a slot of another chunk", ROUND, "part * u32(CHUNKS) % u32(SUM_SLOTS)", "part % u32(2)", ROUNDED),
    Mutant("chunks behind the last", ROUND, "if part < u32(ALL - (chunk + SUM_SLOTS) // CHUNKS):", "if True:", D128),
    Mutant(
        "slots beyond the last",
        ROUND,
        "            if at == u32(sums + u32(SUM_SLOTS * CHUNK_BYTES)):\n                at = sums\n",
        "",
        D128,
    ),
    Mutant("rows of a swizzle of another width", ROUND, "row // u32(2) % u32(4)", "row % u32(4)", ROUNDED),
    Mutant("chunks where others are", ROUND, "u32(to ^ u32(16 * chunk))", "to", ROUNDED),
    Mutant("the same rows twice", ROUND, "u32(32 * half * ROW_BYTES)", "u32(0 * half * ROW_BYTES)", ROUNDED),
    Mutant(
        "columns of the part before",
        ROUND,
        "row0, column = read(smem, WORD.row0), i32(part * ",
        "row0, column = read(smem, WORD.row0), i32(part // u32(2) * ",
        D128,
    ),
    Mutant("rows of the consumer before", ROUND, "row0 + i32(part // u32(PARTS)) * KEYS", "row0 + i32(part // u32(4)) * KEYS", ROUNDED),
    # ---- what it is
    Mutant("dQ that is rounded without its scale", ROUND, "pack2(x[0] * scale,", "pack2(x[0],", ROUNDED),
    Mutant("rows of fragments exchanged", ROUND, "pack2(x[2] * scale, x[3] * scale)", "pack2(x[3] * scale, x[2] * scale)", ROUNDED),
    Mutant("the same work item again", ROUND, "WORD.turn, read(smem, WORD.turn) + i32(1)", "WORD.turn, read(smem, WORD.turn)", ROUNDED),
)
