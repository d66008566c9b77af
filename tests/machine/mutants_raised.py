"""Mistakes in weights of float16, which are raised so that small ones are not lost, and in sections of a backward pass; as those for Hopper
in `mutants`.
"""

from mutants import Mutant

SOFTMAX, FRAGMENT, BEFORE = (f"cuda/{name}.py" for name in ("softmax", "fragment", "preprocess"))
FORWARD, OPTIONS, KEPT, FINISH = (f"cuda/sm90/{name}.py" for name in ("forward", "forward_options", "forward_kept", "finish"))
P_AND_DS, P_AND_DS_OPTIONS, P_AND_DBIAS = (f"cuda/sm90/softmax_{name}.py" for name in ("backward", "backward_options", "dbias"))
BACKWARD_OPTIONS, DK_DV_KEPT, DQ_KEPT = (f"cuda/sm90/{name}.py" for name in ("backward_options", "dk_dv_kept", "dq_dbias_kept"))
BEGIN, HOST = "cuda/sm90/begin_rows.py", "cuda/sm90/prepare_backward.py"
MMA, FEW, FEW_BACKWARD = (f"cuda/sm80/{name}.py" for name in ("forward", "forward_few", "backward_few"))
MODIFY, SCORE, SECTIONS = "cuda/modify.py", "cuda/score.py", "sections.py"
ENDS, GRADIENTS = "ends of float16", "kept bias, gradients"
DROPPED, BY_BATCH = "gradients, dropout, sections", "gradients, score_mod, sections"

MUTANTS_RAISED = (
    # ---- weights that are lost, or too large
    Mutant("weights that are not raised", FORWARD, "softmax.raised(BFLOAT16, softmax.LAZY)", "0.0", ENDS),
    Mutant(
        "weights that are not raised, with options",
        OPTIONS,
        "softmax.raised(BFLOAT16, softmax.LAZIER if CHANGES else softmax.LAZY)",
        "0.0",
        f"{ENDS}, bias",
    ),
    Mutant("weights that are not raised beside a bias", KEPT, "softmax.raised(BFLOAT16, MOST)", "0.0", f"{ENDS}, kept bias"),
    Mutant("weights of mma that are not raised", MMA, 'softmax.raised(dtype == "bfloat16", LAZY)', "0.0", f"{ENDS}, mma"),
    Mutant("weights of few that are not raised", FEW, 'softmax.raised(dtype == "bfloat16", LAZY)', "0.0", f"{ENDS}, few"),
    Mutant("weights raised to the end of float16", SOFTMAX, "TOP_OF_P = 15", "TOP_OF_P = 16", ENDS),
    Mutant("as far with options as without", OPTIONS, "softmax.LAZIER if CHANGES else softmax.LAZY", "softmax.LAZY", f"{ENDS}, bias"),
    Mutant("as far beside a bias as without", KEPT, "raised(BFLOAT16, MOST)", "raised(BFLOAT16, softmax.LAZY)", f"{ENDS}, kept bias"),
    Mutant(
        "as far in mma with options as without",
        MMA,
        'raised(dtype == "bfloat16", LAZY)',
        'raised(dtype == "bfloat16", softmax.LAZY)',
        f"{ENDS}, mma, bias",
    ),
    Mutant(
        "as far for few with options as without",
        FEW,
        'raised(dtype == "bfloat16", LAZY)',
        'raised(dtype == "bfloat16", softmax.LAZY)',
        f"{ENDS}, few, bias",
    ),
    Mutant("shifts rounded to nearest", "cuda/ptx/scalar.py", '"mul.rp.f32 ', '"mul.rn.f32 ', "large scores"),
    Mutant("shifts that are not lowered", SOFTMAX, "ptx.fma_up(shift, scale_log2, ACC(-UP))", "shift * scale_log2", "mma"),
    Mutant("differences that are not raised", SOFTMAX, "exp2(x + ACC(UP) if UP > 0 else x)", "exp2(x)", "far bias"),
    Mutant("products far from 0", SOFTMAX, "differ_first or abs(m_i[r]) >= ACC(FAR)", "differ_first", "far bias"),
    # ---- the lse
    Mutant(
        "powers of two that stay in the lse of options", FINISH, "(ptx.lg2(l) - f32(RAISED)) * f32(LN2)", "ptx.lg2(l) * f32(LN2)", "bias"
    ),
    Mutant(
        "powers of two that stay in the lse beside a bias",
        KEPT,
        "(ptx.lg2(l) - f32(RAISED)) * f32(LN2)",
        "ptx.lg2(l) * f32(LN2)",
        "kept bias",
    ),
    Mutant("powers of two that stay in the lse of few", FEW, "ptx.lg2(l) - f32(RAISED)", "ptx.lg2(l)", "few"),
    # ---- gradients
    Mutant("weights that are not raised in a backward pass", SOFTMAX, "raised(bfloat16, LAZY)", "0.0", "gradients, tiny weights"),
    Mutant("an lse that is not lowered", BEFORE, "f32(UNIT), f32(-RAISED)", "f32(UNIT), f32(0)", "gradients"),
    Mutant("an lse that is not lowered beside a bias", BEGIN, "f32(LOG2E), f32(-RAISED)", "f32(LOG2E), f32(0)", GRADIENTS),
    Mutant("rows as if weights were not raised", HOST, "True, RAISED_BASE_2, p", 'True, "base 2", p', "gradients"),
    Mutant("a delta that is not lowered", BEFORE, "delta *= ACC(LOWERED)", "delta *= ACC(1)", "gradients"),
    Mutant("a delta that is not lowered beside a bias", BEGIN, "(total - more) * f32(LOWERED)", "total - more", GRADIENTS),
    Mutant("dP that is not lowered", P_AND_DS, "dp = dp * f32(LOWERED) -", "dp = dp -", "gradients"),
    Mutant("dP that is not lowered under a cap", P_AND_DS, "dp = dpT[e] * f32(LOWERED) -", "dp = dpT[e] -", "gradients, softcap"),
    Mutant(
        "dP that is not lowered, with options", P_AND_DS_OPTIONS, "w * (dp * f32(LOWERED) - delta)", "w * (dp - delta)", "gradients, bias"
    ),
    Mutant("dP that is not lowered, with dropout", P_AND_DS_OPTIONS, "keep_scale) * f32(LOWERED)", "keep_scale)", "gradients, dropout"),
    Mutant("dP that is not lowered for dbias", P_AND_DBIAS, "slope * f32(LOWERED) - delta", "slope - delta", "bias gradient"),
    Mutant("dP that is not lowered in dK", DK_DV_KEPT, "t.dp[e] * f32(LOWERED) - delta", "t.dp[e] - delta", GRADIENTS),
    Mutant("dP that is not lowered in dQ", DQ_KEPT, "w.dp[e] * f32(LOWERED) - w.delta", "w.dp[e] - w.delta", GRADIENTS),
    Mutant("dV that is not lowered", P_AND_DS, "            factor[r] *= f32(LOWERED)\n", "", "gradients"),
    Mutant("dV that is not lowered, with options", BACKWARD_OPTIONS, "            factor[r] *= f32(LOWERED)\n", "", "gradients, bias"),
    Mutant("dV that is not lowered beside a bias", DK_DV_KEPT, "scaled[r] = f32(LOWERED), scale", "scaled[r] = f32(1), scale", GRADIENTS),
    Mutant("dV of few that is not lowered", FEW_BACKWARD, "x.invalid else f32(2.0**-RAISED)", "x.invalid else f32(1)", "few, gradients"),
    Mutant(
        "weights that are lowered alone",
        FRAGMENT,
        "x[2 * j] * f32(TIMES), x[2 * j + 1] * f32(TIMES)",
        "x[2 * j], x[2 * j + 1]",
        "few, gradients",
    ),
    Mutant("dS of few raised as P", FEW_BACKWARD, "            pack(p, dpT)\n", "            pack_raised(p, dpT)\n", "few, gradients"),
    # ---- sections
    Mutant("random bits of the first section for all", MODIFY, "(at.batch + i32(parameters.first_batch))", "at.batch", DROPPED),
    Mutant(
        "a score_mod of the first section for all", SCORE, "i32(i32(at.batch) + i32(parameters.first_batch))", "i32(at.batch)", BY_BATCH
    ),
    Mutant("sections that are all the first batch element", SECTIONS, "p.first_batch + first)", "p.first_batch)", DROPPED),
)
