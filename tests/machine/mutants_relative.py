"""Mistakes that one could make where sums begin with what a function of the score adds for each distance, and under a softcap, as those in
`mutants`.
"""

from mutants import Mutant

KERNEL, HOST = "cuda/relative.py", "cuda/prepare_relative.py"
ROWS, BEGIN, FORWARD, PIPELINE = (f"cuda/sm90/{name}.py" for name in ("rows", "begin_backward", "forward", "pipeline"))
LOAD, LOAD_BACKWARD = "cuda/sm90/load_forward.py", "cuda/sm90/load_backward.py"
ADDED, FORWARD_80, SOFTCAP = "cuda/sm80/load_added.py", "cuda/sm80/forward.py", "cuda/softcap.py"

MUTANTS_RELATIVE = (
    Mutant("distances of queries to keys", KERNEL, "distance = i32(x - distances // 2)", "distance = i32(distances // 2 - x)", "relative"),
    Mutant("numbers of the first head", KERNEL, "u64(i64(head) * distances + first)", "u64(first)", "relative"),
    Mutant("numbers in units of scores", HOST, "np.float32(1 / p.scale)", "np.float32(1)", "relative"),
    Mutant("the row above", ROWS, "+ u32(4 * c) - u32(32)))", "+ u32(4 * c)))", "relative"),
    Mutant("the first column for all", ROWS, "BLOCK_M - row + fragment.first_column()", "BLOCK_M - row", "relative"),
    Mutant("numbers where one warp has read them", FORWARD, "WARP_GROUP // pipeline.WARP if RELATIVE", "1 if RELATIVE", "relative"),
    Mutant("numbers of the first slot", PIPELINE, "u32(NUMBERS) + n % u32(RING.slots) * u32(BYTES)", "u32(NUMBERS)", "relative"),
    Mutant("keys of the arrays", LOAD, "row0, i32(key_k - k0))", "row0, i32(key_k + 1 - k0))", "relative"),
    Mutant("the key above", BEGIN, "u32(at + u32(32) - u32(4 * c))", "u32(at - u32(4 * c))", "gradients, relative"),
    Mutant("keys of the first consumer", BEGIN, "i32(me * KEYS + wgmma", "i32(wgmma", "gradients, relative"),
    Mutant(
        "numbers of another tile of queries", LOAD_BACKWARD, "head, i32(at * BLOCK_M), col0)", "head, i32(0), col0)", "gradients, relative"
    ),
    Mutant("a row's numbers for all rows", ADDED, "key_of(n) + x - query_of(n)", "key_of(n) + x", "mma, relative"),
    Mutant("sums that begin with nothing", FORWARD_80, "BEGIN, DROPOUT, not options.relative", "BEGIN, DROPOUT, True", "mma, relative"),
    Mutant("numbers in the slot of these", FORWARD_80, "load_added(smem, slot ^ u32(1),", "load_added(smem, slot,", "mma, relative"),
    Mutant("tanh of raw products", SOFTCAP, "ptx.tanh(t.s[e] * t.share)", "ptx.tanh(t.s[e])", "mma, softcap"),
    Mutant("powers that are not lowered", SOFTCAP, "unit * factor - factor if POWERS", "unit * factor if POWERS", "mma, softcap"),
    Mutant(
        "a slope of half tanh",
        SOFTCAP,
        "unit = ptx.tanh(t.s[e] * t.share)\n",
        "unit = ptx.tanh(t.s[e] * t.share) * f32(0.9)\n",
        "mma, gradients, softcap",
    ),
    Mutant("sums of the last tile alone", SOFTCAP, "l_i[r] += l", "l_i[r] = l", "mma, softcap, hidden"),
    Mutant("tanh of half the product", SOFTCAP, "f32(0.5 / LOG2E)", "f32(0.25 / LOG2E)", "softcap of bfloat16"),
    Mutant("an lse without the cap", FORWARD_80, "m_i[r] = f32(parameters.softcap) if rough", "m_i[r] = f32(0) if rough", "mma, softcap"),
)
