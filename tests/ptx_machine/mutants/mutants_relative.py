"""Mistakes that one could make where sums begin with what a function of the score adds for each distance, and under a softcap, as those in
`mutants`.
"""

from ptx_machine.mutants.anchors import Mutant

MUTANTS_RELATIVE = (
    Mutant("distances of queries to keys", "relative", "x - distances // 2", "distances // 2 - x", "relative"),
    Mutant("numbers of the first head", "cuda address_of", "i64(head) * distances + first", "first", "relative"),
    Mutant("numbers in units of scores", "cuda __init__", "1 / p.scale", "1", "relative"),
    Mutant("the row above", "sm90 begin_sums", "at + u32(4 * c) - u32(32)", "at + u32(4 * c)", "relative"),
    Mutant("the first column for all", "sm90 begin_sums", "BLOCK_M - row + fragment.first_column()", "BLOCK_M - row", "relative"),
    Mutant("numbers where one warp has read them", "sm90 build", "WARP_GROUP // pipeline.WARP", "1", "relative"),
    Mutant(
        "numbers of the first slot",
        "load_numbers",
        "smem + u32(NUMBERS) + n % u32(RING.slots) * u32(BYTES)",
        "smem + u32(NUMBERS)",
        "relative",
    ),
    Mutant("keys of the arrays", "produce", "row0, i32(key_k - k0)", "row0, i32(key_k + 1 - k0)", "relative"),
    Mutant("the key above", "sm90 begin_sums", "at + u32(32)", "at", "gradients, relative"),
    Mutant("keys of the first consumer", "sm90 begin_sums", "me * KEYS + wgmma.first_row()", "wgmma.first_row()", "gradients, relative"),
    Mutant("numbers of another tile of queries", "produce", "i32(at * BLOCK_M), col0", "i32(0), col0", "gradients, relative"),
    Mutant("a row's numbers for all rows", "sm80 begin_sums", "key_of(n) + x - query_of(n)", "key_of(n) + x", "mma, relative"),
    Mutant("sums that begin with nothing", "sm80 build", "not options.relative", "True", "mma, relative"),
    Mutant("numbers in the slot of these", "forward_sm80", "slot ^ u32(1), extras", "slot, extras", "mma, relative"),
    Mutant("tanh of raw products", "roughly", "t.s[e] * t.share", "t.s[e]", "mma, softcap"),
    Mutant("powers that are not lowered", "roughly", "unit * factor - factor", "unit * factor", "mma, softcap"),
    Mutant(
        "a slope of half tanh", "roughly", "ptx.tanh(t.s[e] * t.share)", "ptx.tanh(t.s[e] * t.share) * f32(0.9)", "mma, gradients, softcap"
    ),
    Mutant(
        "sums of the last tile alone", "cuda powers", "l = f32(0); ...; l_i[r] += l", "l = f32(0); ...; l_i[r] = l", "mma, softcap, hidden"
    ),
    Mutant("tanh of half the product", "cuda tanh", "0.5 / LOG2E", "0.25 / LOG2E", "softcap of bfloat16"),
    Mutant(
        "an lse without the cap",
        "forward_sm80",
        "f32(parameters.softcap) if rough else m_i[r]",
        "f32(0) if rough else m_i[r]",
        "mma, softcap",
    ),
)
