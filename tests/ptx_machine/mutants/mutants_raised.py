"""Mistakes in weights of float16, which are raised so that small ones are not lost, and in sections of a backward pass; as those for Hopper
in `mutants`.
"""

from ptx_machine.mutants.anchors import Mutant

ENDS, GRADIENTS = "ends of float16", "kept bias, gradients"
DROPPED, BY_BATCH = "gradients, dropout, sections", "gradients, score_mod, sections"

MUTANTS_RAISED = (
    # ---- weights that are lost, or too large
    Mutant("weights that are not raised", "build_weigh", "softmax.raised(BFLOAT16, softmax.LAZY)", "0.0", ENDS),
    Mutant(
        "weights that are not raised, with options",
        "sm90 build",
        "softmax.raised(BFLOAT16, softmax.LAZIER if CHANGES else softmax.LAZY)",
        "0.0",
        f"{ENDS}, bias",
    ),
    Mutant("weights that are not raised beside a bias", "sm90 build", "softmax.raised(BFLOAT16, MOST)", "0.0", f"{ENDS}, kept bias"),
    Mutant(
        "weights of mma that are not raised",
        "sm80 build",
        "RAISED_P if FP16X2 else softmax.raised(..., LAZY)",
        "RAISED_P if FP16X2 else 0.0",
        f"{ENDS}, mma",
    ),
    Mutant(
        "weights of few that are not raised",
        "sm80 build",
        'RAISED = softmax.raised(dtype == "bfloat16", LAZY)',
        "RAISED = 0.0",
        f"{ENDS}, few",
    ),
    Mutant("weights raised to the end of float16", "cuda", "TOP_OF_P = 15", "TOP_OF_P = 16", ENDS),
    Mutant("as far with options as without", "sm90 build", "softmax.LAZIER if CHANGES else softmax.LAZY", "softmax.LAZY", f"{ENDS}, bias"),
    Mutant(
        "as far beside a bias as without",
        "sm90 build",
        "softmax.raised(BFLOAT16, MOST)",
        "softmax.raised(BFLOAT16, softmax.LAZY)",
        f"{ENDS}, kept bias",
    ),
    Mutant(
        "as far in mma with options as without",
        "sm80 build",
        "RAISED_P if FP16X2 else softmax.raised(..., LAZY)",
        "RAISED_P if FP16X2 else softmax.raised(..., softmax.LAZY)",
        f"{ENDS}, mma, bias",
    ),
    Mutant(
        "as far for few with options as without",
        "sm80 build",
        "RAISED = softmax.raised(..., LAZY)",
        "RAISED = softmax.raised(..., softmax.LAZY)",
        f"{ENDS}, few, bias",
    ),
    Mutant("shifts rounded to nearest", "ptx", "'add.rp.f32'", "'add.rn.f32'", "large scores"),
    Mutant("shifts that are not lowered", "cuda powers", "ptx.fma_up(shift, scale_log2, ACC(-UP))", "shift * scale_log2", "mma"),
    Mutant("differences that are not raised", "cuda power", "x + ACC(UP) if UP > 0 else x", "x", "far bias"),
    Mutant("products far from 0", "exponentials", "differ_first or abs(m_i[r]) >= ACC(FAR)", "differ_first", "far bias"),
    # ---- the lse
    Mutant("powers of two that stay in the lse of options", "sm90 log_sum", "ptx.lg2(l) - f32(RAISED)", "ptx.lg2(l)", "bias"),
    Mutant("powers of two that stay in the lse beside a bias", "sm90 finish", "ptx.lg2(l) - f32(RAISED)", "ptx.lg2(l)", "kept bias"),
    Mutant("powers of two that stay in the lse of few", "sm80 finish", "ptx.lg2(l) - f32(RAISED)", "ptx.lg2(l)", "few"),
    # ---- gradients
    Mutant("weights that are not raised in a backward pass", "raised_backward", "raised(bfloat16, LAZY)", "0.0", "gradients, tiny weights"),
    Mutant("an lse that is not lowered", "preprocess", "f32(-RAISED)", "f32(0)", "gradients"),
    Mutant("an lse that is not lowered beside a bias", "make_rows", "f32(-RAISED)", "f32(0)", GRADIENTS),
    Mutant(
        "rows as if weights were not raised",
        "preprocess_launch",
        "RAISED_BASE_2 if planes is None else BASE_E",
        '"base 2" if planes is None else BASE_E',
        "gradients",
    ),
    Mutant("a delta that is not lowered", "preprocess", "ACC(LOWERED)", "ACC(1)", "gradients"),
    Mutant("a delta that is not lowered beside a bias", "make_rows", "(total - more) * f32(LOWERED)", "total - more", GRADIENTS),
    Mutant("dP that is not lowered", "sm90 differentiate", "dp * f32(LOWERED)", "dp", "gradients"),
    Mutant("dP that is not lowered under a cap", "differentiate_cap", "dpT[e] * f32(LOWERED)", "dpT[e]", "gradients, softcap"),
    Mutant("dP that is not lowered, with options", "sm90 ds_of", "dp * f32(LOWERED)", "dp", "gradients, bias"),
    Mutant(
        "dP that is not lowered, with dropout",
        "sm90 ds_of",
        "f32(parameters.keep_scale) * f32(LOWERED)",
        "f32(parameters.keep_scale)",
        "gradients, dropout",
    ),
    Mutant("dP that is not lowered for dbias", "sm90 differentiate", "slope * f32(LOWERED)", "slope", "bias gradient"),
    Mutant("dP that is not lowered in dK", "weigh_vector", "t.dp[e] * f32(LOWERED)", "t.dp[e]", GRADIENTS),
    Mutant("dP that is not lowered in dQ", "weigh_vector", "w.dp[e] * f32(LOWERED)", "w.dp[e]", GRADIENTS),
    Mutant("dV that is not lowered", "note_bounds factors", "factor[r] *= f32(LOWERED)", "", "gradients"),
    Mutant("dV that is not lowered, with options", "ds_of factors", "factor[r] *= f32(LOWERED)", "", "gradients, bias"),
    Mutant("dV that is not lowered beside a bias", "sm90 add finish", "f32(LOWERED)", "f32(1)", GRADIENTS),
    Mutant(
        "dV of few that is not lowered",
        "sm80 build",
        "hide = build_hide(tile); ...; LOWERED = 2.0**-RAISED",
        "hide = build_hide(tile); ...; LOWERED = 1.0",
        "few, gradients",
    ),
    Mutant(
        "weights that are lowered alone",
        "cuda pack",
        "pack2(x[2 * j] * f32(TIMES), x[2 * j + 1] * f32(TIMES))",
        "pack2(x[2 * j], x[2 * j + 1])",
        "few, gradients",
    ),
    Mutant("dS of few raised as P", "backward_decode", "pack(p, dpT)", "pack_raised(p, dpT)", "few, gradients"),
    # ---- sections
    Mutant("random bits of the first section for all", "cuda drop", "at.batch + i32(parameters.first_batch)", "at.batch", DROPPED),
    Mutant("a score_mod of the first section for all", "bend", "i32(at.batch) + i32(parameters.first_batch)", "at.batch", BY_BATCH),
    Mutant("sections that are all the first batch element", "_part", "p.first_batch + first", "p.first_batch", DROPPED),
)
