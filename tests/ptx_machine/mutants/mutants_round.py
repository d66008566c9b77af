"""Mistakes in the Hopper backward where the main kernel rounds dQ."""

from ptx_machine.mutants.anchors import Mutant

ROUNDED, D128, UPWARD, FEW = (f"gradients, rounded{name}" for name in ("", ", D128", ", upward", ", few"))

MUTANTS_ROUND = (
    # ---- who waits for whom
    Mutant("rounded when the first have added", "is_complete", "read(smem, WORD.blocks)", "i32(1)", ROUNDED),
    Mutant("rounded before the last has added", "begin_tile", "after + i32(1)", "after", UPWARD),
    Mutant(
        "sums that nobody has waited for",
        "is_complete",
        "pipeline.uniform(ptx.load_flag(flag)) == read(smem, WORD.blocks)",
        "True",
        ROUNDED,
    ),
    Mutant("sums before they are there", "sm90 build", "SUM_SLOTS - 1", "SUM_SLOTS", ROUNDED),
    Mutant("rounded where it has not left", "sm90 build", "ROUNDED_SLOTS - 1", "ROUNDED_SLOTS", ROUNDED),
    Mutant("no fence before what is rounded leaves", "round_part", "ptx.fence_proxy_async()", "", ROUNDED),
    Mutant("the end before all is stored", "write_and_round", "if is_first(): ptx.bulk_wait()", "", ROUNDED),
    Mutant("what others have not written down", "write_and_round", "part = ...; ...; cuda.syncwarp()", "part = ...; ...", UPWARD),
    Mutant(
        "claims that wait for a tile of dQ",
        "may_claim",
        "pipeline.is_ready(smem, FETCHED, u32(item_n - u32(1)))",
        "i32(0) * pipeline.is_ready(smem, FETCHED, u32(item_n - u32(1)))",
        UPWARD,
    ),
    # ---- which tile, and where it goes
    Mutant("rounded again while there is work", "may_claim", "item_n != u32(0), read(smem, WORD.left) != i32(0)", "item_n != u32(0)", FEW),
    Mutant("fewer tiles than there are", "sm90 parts", "tiles + u32(grid - u32(1))", "tiles", ROUNDED),
    Mutant("a block's tiles beside each other", "sm90 next_tile", "cuda.gridDim.x", "1", ROUNDED),
    Mutant("a head for every tile", "begin_tile", "u32(pair - u32(b * heads))", "pair", D128),
    Mutant("columns of the part after", "store_part", "part % u32(PARTS)", "part // u32(PARTS)", ROUNDED),
    Mutant("sums of another head", "begin_tile", "u32(pair * blocks) + u32(at)", "u32(at)", ROUNDED),
    Mutant(
        "sums of the first part",
        "round_part",
        "u32(read(smem, WORD.number)) * u32(ALL) + part",
        "u32(read(smem, WORD.number)) * u32(ALL)",
        ROUNDED,
    ),
    Mutant("the next chunk but one", "round_part", "(chunk + SUM_SLOTS) * CHUNK_BYTES", "(chunk + 2) * CHUNK_BYTES", D128),
    Mutant(
        "no chunk of the last part", "round_part", "ALL - (chunk + SUM_SLOTS) // CHUNKS", "ALL - 1 - (chunk + SUM_SLOTS) // CHUNKS", D128
    ),
    Mutant("a slot of another chunk", "round_part", "part * u32(CHUNKS) % u32(SUM_SLOTS)", "part % u32(2)", ROUNDED),
    Mutant("chunks behind the last", "round_part", "part < u32(ALL - (chunk + SUM_SLOTS) // CHUNKS)", "True", D128),
    Mutant("slots beyond the last", "round_part", "if at == u32(sums + u32(SUM_SLOTS * CHUNK_BYTES)): at = sums", "", D128),
    Mutant("rows of a swizzle of another width", "round_part", "row // u32(2)", "row", ROUNDED),
    Mutant("chunks where others are", "round_part", "u32(to ^ u32(16 * chunk))", "to", ROUNDED),
    Mutant("the same rows twice", "round_part", "32 * half", "0 * half", ROUNDED),
    Mutant("columns of the part before", "store_part", "part * u32(COLUMNS)", "part // u32(2) * u32(COLUMNS)", D128),
    Mutant("rows of the consumer before", "store_part", "part // u32(PARTS)", "part // u32(4)", ROUNDED),
    # ---- what it is
    Mutant("dQ that is rounded without its scale", "round_rows", "x[0] * scale", "x[0]", ROUNDED),
    Mutant("rows of fragments exchanged", "round_rows", "pack2(x[2] * scale, x[3] * scale)", "pack2(x[3] * scale, x[2] * scale)", ROUNDED),
    Mutant("the same work item again", "write_and_round", "read(smem, WORD.item_n) + i32(1)", "read(smem, WORD.item_n)", ROUNDED),
)
