"""Names of arguments in PyTorch, JAX, FlashAttention and others, and what to pass here; and of those that only some functions take."""

from typing import NamedTuple


class Instead(NamedTuple):
    """What there is here in the place of an argument of another library.

    Attributes
    ----------
    options : tuple of str
        The options of `numba_flash.forward` that do the same; empty if there is nothing to say.
    advice : str
        The end of a sentence about the argument: what to pass, and how it differs.
    """

    options: tuple[str, ...]
    advice: str


def _meant(options: str, passed: str = "", difference: str = "") -> Instead:
    names = tuple(options.split())
    return Instead(names, f"; did you mean {passed or names[0]}?{f' {difference}' if difference else ''}")


def _needless(reason: str) -> Instead:
    return Instead((), f": leave it out; {reason}")


_SCALE = _meant("scale", "", "The default is the same, 1 / sqrt(D)")
_DROPOUT = _meant(
    "dropout rng", "dropout, with rng=(seed, offset)", "Its bits are a function of these two numbers, not of a global generator"
)
_RNG = _meant("rng", "rng=(seed, offset)", "The bits of dropout are a function of these two numbers")
_TOP_LEFT = _meant(
    "causal q_start", "causal=True, q_start=0", "There the first query meets the first key; causal=True alone aligns the last ones"
)
_MASK = _meant("mask bias", "mask, of booleans, or bias, which is added to the scores", "In a mask True takes part, as in PyTorch and JAX")
_MASK_OF_KEYS = _meant(
    "mask kv_lengths", "mask, of shape (B, 1, 1, Nk), or kv_lengths", "True takes part: for (B, Nk) pass x[:, None, None, :]"
)
_BIAS = _meant("bias", "", "It is added to the scores after the scale; an array that broadcasts to (..., Hq, Nq, Nk)")
_CAP = _meant("softcap", "", "None, not 0, is no cap")
_LSE = _meant("return_lse", "return_lse=True", "It is the natural logarithm, of shape (..., Hq, Nq)")
_AXES = _meant("axes", 'axes="bhnd" or axes="bnhd"', "The default is (batch, heads, length, head dimension)")
_BACKEND = _meant("backend", "", 'It demands "sm90", "sm80", "simt" or "cpu"; numba_flash.plan says which is used')
_Q_LENGTHS = _meant("q_lengths", "", "It has the shape q.shape[:-3]; what lies behind is padding")
_KV_LENGTHS = _meant(
    "kv_lengths", "", "It has the shape q.shape[:-3]; with causal, the last query of each sequence meets its last key, unless q_start=0"
)
_PACKED = Instead((), ": sequences that lie one after the other go to numba_flash.forward_packed(q, k, v, q_offsets, k_offsets)")
_PAGED = Instead((), ": keys in pages go to numba_flash.forward_paged(q, k_pages, v_pages, page_table, kv_lengths)")
_GROUPED = _needless("the number of heads of q may be any multiple of that of k and v")
_LONGEST = _needless("nothing has to know the longest sequence")
_TILES = _needless("tiles and splits are chosen for each call, see numba_flash.plan")
_WEIGHTS = _needless("the matrix of weights is never stored; numba_flash.reference computes with all of it")

NAMES = {
    # PyTorch: scaled_dot_product_attention, MultiheadAttention, flex_attention, varlen_attn
    "attn_mask": _MASK,
    "key_padding_mask": _meant(
        "mask kv_lengths", "mask=~key_padding_mask[:, None, None, :], or kv_lengths", "In PyTorch's True is ignored, here True takes part"
    ),
    "is_causal": _TOP_LEFT,
    "dropout_p": _DROPOUT,
    "enable_gqa": _GROUPED,
    "need_weights": _WEIGHTS,
    "batch_first": _AXES,
    "block_mask": _meant("mask", "mask=numba_flash.BlockMask(blocks, 128)", "An array has an element for each block; True takes part"),
    "mask_mod": _meant("causal window mask score_mod", "causal, window, mask, or a score_mod that returns -inf for what is hidden"),
    "return_aux": _LSE,
    "kernel_options": _TILES,
    "cu_seq_q": _PACKED,
    "cu_seq_k": _PACKED,
    "max_q": _LONGEST,
    "max_k": _LONGEST,
    # JAX: dot_product_attention; its kernels
    "query_seq_lengths": _Q_LENGTHS,
    "key_value_seq_lengths": _KV_LENGTHS,
    "local_window_size": _meant(
        "window q_start",
        "window=(left, right), q_start=0",
        "Both are inclusive; w alone is (w, w), and there the first query meets the first key",
    ),
    "implementation": _BACKEND,
    "return_residual": _LSE,
    "logits_soft_cap": _CAP,
    "attn_logits_soft_cap": _CAP,
    "segment_ids": _meant(
        "mask",
        "mask=q_ids[:, None, :, None] == k_ids[:, None, None, :]",
        "numba_flash.forward_packed needs none: segments lie one after the other",
    ),
    # FlashAttention 2, 3, 4
    "softmax_scale": _SCALE,
    "window_size": _meant(
        "window", "window=(left, right)", "Both are inclusive and the last query meets the last key, as there; no limit is -1, not None"
    ),
    "alibi_slopes": _meant(
        "score_mod", "score_mod=numba_flash.alibi(slopes, q_start=Nk - Nq)", "q_start is where query 0 stands among the keys"
    ),
    "return_attn_probs": _LSE,
    "return_softmax_lse": _LSE,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "cu_seqlens": _PACKED,
    "max_seqlen_q": _LONGEST,
    "max_seqlen_k": _LONGEST,
    "max_seqlen": _LONGEST,
    "seqused_q": _Q_LENGTHS,
    "seqused_k": _KV_LENGTHS,
    "cache_seqlens": _KV_LENGTHS,
    "block_table": _PAGED,
    "k_cache": _PAGED,
    "v_cache": _PAGED,
    "num_splits": _TILES,
    "pack_gqa": _TILES,
    # xFormers, Triton, FlashInfer, cuDNN, Keras, Transformers, ONNX
    "attn_bias": _BIAS,
    "p": _DROPOUT,
    "op": _BACKEND,
    "sm_scale": _SCALE,
    "attn_scale": _SCALE,
    "logits_scale": _SCALE,
    "scale_factor": _SCALE,
    "scaling": _SCALE,
    "dropout_rate": _DROPOUT,
    "attention_dropout": _DROPOUT,
    "seed": _RNG,
    "dropout_seed": _RNG,
    "dropout_rng": _RNG,
    "generator": _RNG,
    "attention_mask": _MASK_OF_KEYS,
    "padding_mask": _MASK_OF_KEYS,
    "custom_mask": _MASK,
    "attention_bias": _BIAS,
    "use_causal_mask": _TOP_LEFT,
    "window_left": _meant("window", "window=(window_left, -1), with causal=True", "Both sizes are inclusive; -1 is no limit"),
    "sliding_window": _meant("window", "window=(sliding_window - 1, 0)", "There a query's own position counts, here it does not"),
    "sliding_window_length": _meant(
        "window", "window=(sliding_window_length - 1, 0)", "There a query's own position counts, here it does not"
    ),
    "logit_cap": _CAP,
    "seq_len_q": _Q_LENGTHS,
    "seq_len_kv": _KV_LENGTHS,
    "layout": _AXES,
    "qkv_format": _AXES,
    "qkv_layout": _AXES,
    "kv_layout": _AXES,
    "tensor_layout": _AXES,
    "input_layout": _AXES,
    "output_attentions": _WEIGHTS,
    # here, of other functions
    "page_table": _PAGED,
    "k_pages": _PAGED,
    "v_pages": _PAGED,
    "q_offsets": _PACKED,
    "k_offsets": _PACKED,
    "comm": Instead((), ": numba_flash.distributed.forward and backward take the processes"),
}

_PACKED_HAVE = {
    "bias": "packed sequences take no bias, as each has rows and columns of its own; a score_mod may add it, or forward with lengths",
    "bias_grad": "packed sequences take no bias",
    "mask": "packed sequences take no mask, as each has rows and columns of its own: causal, window and score_mod hide keys of each",
    "q_lengths": "q_offsets says where sequences begin and end",
    "kv_lengths": "k_offsets says where sequences begin and end",
    "axes": "packed sequences are (tokens, heads, head dimension) in any case",
}
_OF_TRAINING = "forward_paged has no gradient, so it takes no options of training"
_PAGED_HAVE = {
    **dict.fromkeys(("dropout", "rng", "score_mod_grad", "dlse", "bias_grad", "deterministic"), _OF_TRAINING),
    "axes": "pages are (pages, heads, keys of a page, head dimension), and q is (..., heads, length, head dimension), in any case",
}
_OF_THE_ORACLE = {"out": "results of the oracle are float64 arrays of their own"}
ABSENT = {
    "forward_packed": _PACKED_HAVE,
    "backward_packed": _PACKED_HAVE,
    "forward_paged": _PAGED_HAVE,
    "numba_flash.reference.forward": _OF_THE_ORACLE,
    "numba_flash.reference.backward": _OF_THE_ORACLE,
    "plan": {"out": "a plan computes nothing"},
    "vjp": {"out": "results and gradients are arrays of their own; forward and backward write where they are told to"},
}
"""By function: options of others that it does not take, and why."""
