"""Mistakes that one could make where few queries are packed into tiles whose keys warps share, as those of `mutants`."""

from mutants import Mutant

FEW, FORWARD, BLOCK, COMBINE = "cuda/sm80/few.py", "cuda/sm80/forward.py", "cuda/sm80/block.py", "cuda/combine.py"
FRAGMENT, MODIFY, FETCH = "cuda/fragment.py", "cuda/modify.py", "cuda/fetch.py"

MUTANTS_FEW = (
    # ---- who may touch which shared memory when
    Mutant("zeros of the next tile over sums", FORWARD, "ptx.copy_wait()  # also zeros", "pass  # also zeros", "few, D128"),
    Mutant("sums over tiles that others read", FEW, "        cuda.syncthreads()  # all tiles have been read\n", "", "few"),
    Mutant("maxima of warps before they are there", FEW, "        cuda.syncthreads()  # m and l of all warps are there\n", "", "few"),
    Mutant("rows of warps before they are there", FEW, "        cuda.syncthreads()  # rows of all warps are there\n", "", "few"),
    Mutant(
        "maxima of parts before they are there",
        COMBINE,
        "        cuda.syncthreads()  # the first warp's are of all\n",
        "",
        "few, parts",
    ),
    Mutant("sums of parts before they are there", COMBINE, "        cuda.syncthreads()  # all sums are there\n", "", "few, parts"),
    # ---- keys of warps, and their results made one
    Mutant("the same keys for all warps", FORWARD, "i32(key_warp * WARP_N)  # of", "i32(0)  # of", "few"),
    Mutant("values of the first warp for all", FORWARD, "u32(V_BYTES) + u32(key0 * PITCH_V)", "u32(V_BYTES)", "few"),
    Mutant("O of warps with shifts of their own", FORWARD, "inverse[r] *= factor_of_warp[r]", "inverse[r] *= f32(1)", "few"),
    Mutant("l of warps with shifts of their own", FEW, "total += ptx.ex2((m - shift) * scale_log2) * l", "total += l", "few"),
    Mutant("parts with shifts of their own", COMBINE, "math.exp(lse_parts[part, b1, h, i] - shift)", "ACC(1)", "few, parts"),
    # ---- rows, queries and heads
    Mutant("queries of the first head for all", FEW, "own = x[index(head_of(i32(first + row)))]", "own = x[index(0)]", "few"),
    Mutant("the group's number for its first head", BLOCK, "h = i32(h * GROUP)", "h = i32(h)", "few"),
    Mutant("the last query of a block left out", FRAGMENT, "i32(query_of(i32(row - 1)) + 1) if", "query_of(row) if", "few, causal"),
    Mutant(
        "a row for a query",
        FORWARD,
        "i = query_of(i32(row + (r // 2 * 16 + r % 2 * 8)))",
        "i = i32(row + (r // 2 * 16 + r % 2 * 8))",
        "few, causal",
    ),
    Mutant(
        "queries counted from the first row",
        MODIFY,
        "i32(query_of_row(i32(t.first + row)) - query_of_row(t.first))",
        "query_of_row(row)",
        "few, options",
    ),
    Mutant("bits of the first head for all", MODIFY, "u32(w.head + u32(head_of_row(row)))", "w.head", "few, options"),
    Mutant("a bias of the first head for all", FETCH, "i64(head_of_row(i)) * x.head + ", "", "few, options"),
)
