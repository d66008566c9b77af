"""What users bring along: options of both passes in one set, names of other libraries, lists from JSON, arrays of one number."""

import inspect
import itertools
import pydoc
import re
from difflib import SequenceMatcher

import numpy as np
import pytest
from support import random_inputs, same_bits

import numba_flash
from numba_flash import api, call, reference
from numba_flash.arguments import advice, elsewhere, signatures

SIZES = {"hq": 4, "hk": 2, "nq": 5, "nk": 7, "d": 16, "dtype": "float64"}
Q, K, V, DO = random_inputs(batch=(2,), **SIZES)
OFFSETS = np.array([0, 2, 5])
TOKENS = np.random.default_rng(0).standard_normal((5, 2, 8))


def same_results(xs, ys) -> bool:
    xs, ys = (x if isinstance(x, tuple) else (x,) for x in (xs, ys))
    return len(xs) == len(ys) and all(map(same_bits, xs, ys))


# ---- one set of options for both passes --------------------------------------------------------------------------------------------------


def test_one_set_of_options_serves_forward_and_backward():
    both = {"causal": True, "bias": np.zeros((5, 7)), "backend": "cpu"}
    both |= {"dlse": None, "bias_grad": True, "deterministic": False, "return_lse": True}
    o, lse = numba_flash.forward(Q, K, V, **both)
    gradients = numba_flash.backward(DO, Q, K, V, o, lse, **both)
    assert [x.shape for x in gradients] == [Q.shape, K.shape, V.shape, (5, 7)]
    without = numba_flash.forward(Q, K, V, causal=True, bias=np.zeros((5, 7)), return_lse=True, backend="cpu")
    assert same_results((o, lse), without)


def test_one_set_of_options_serves_packed_sequences():
    both = {"dlse": None, "deterministic": False, "return_lse": True, "causal": True, "backend": "cpu"}
    arrays = TOKENS, TOKENS, TOKENS
    o, lse = numba_flash.forward_packed(*arrays, OFFSETS, OFFSETS, **both)
    gradients = numba_flash.backward_packed(o, *arrays, o, lse, OFFSETS, OFFSETS, **both)
    assert same_results(gradients, numba_flash.backward_packed(o, *arrays, o, lse, OFFSETS, OFFSETS, causal=True, backend="cpu"))


@pytest.mark.parametrize(("forward", "backward"), [("forward", "backward"), ("forward_packed", "backward_packed")])
def test_both_take_the_same_names(forward, backward):
    names = [
        {n for n, p in inspect.signature(getattr(numba_flash, f)).parameters.items() if p.kind is p.KEYWORD_ONLY}
        for f in (forward, backward)
    ]
    assert names[0] == names[1]


OF_THE_OTHER = [
    ("forward", {"deterministic": 1}, TypeError, "deterministic must be True or False; got 1"),
    ("forward", {"bias_grad": "yes"}, TypeError, "bias_grad must be True or False; got 'yes'"),
    ("forward", {"bias_grad": True}, ValueError, "bias_grad needs a bias; got bias_grad=True with bias=None"),
    (
        "forward",
        {"dlse": np.zeros((2, 4, 5))},
        TypeError,
        "dlse must be None in a forward pass, which returns lse, not takes its gradient; got ndarray",
    ),
    ("backward", {"return_lse": 1}, TypeError, "return_lse must be True or False; got 1"),
    ("forward_packed", {"deterministic": None}, TypeError, "deterministic must be True or False; got None"),
    ("forward_packed", {"dlse": 1.0}, TypeError, "dlse must be None in a forward pass"),
    ("backward_packed", {"return_lse": None}, TypeError, "return_lse must be True or False; got None"),
]


def called(name: str, **options):
    """One of the functions with good arguments and these options."""
    lse, tokens_lse = np.zeros((2, 4, 5)), np.zeros((2, 5))
    pages = np.zeros((3, 2, 4, 16))
    arrays = {
        "forward": (Q, K, V),
        "backward": (DO, Q, K, V, DO, lse),
        "vjp": (Q, K, V),
        "plan": (Q, K, V),
        "forward_packed": (TOKENS, TOKENS, TOKENS, OFFSETS, OFFSETS),
        "backward_packed": (TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, tokens_lse, OFFSETS, OFFSETS),
        "forward_paged": (Q, pages, pages, np.array([[0, 1], [2, 0]]), np.array([5, 1])),
    }
    return getattr(numba_flash, name)(*arrays[name], **options)


@pytest.mark.parametrize(("name", "options", "error", "message"), OF_THE_OTHER)
def test_options_of_the_other_pass_are_checked(name, options, error, message):
    """Also after a call that was prepared without them."""
    called(name, backend="cpu")
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        called(name, backend="cpu", **options)


@pytest.mark.parametrize("value", [0, 1, None, "", (), 0.0, np.int64(0)], ids=repr)
@pytest.mark.parametrize(
    ("name", "flag"),
    [
        *itertools.product(("forward", "backward", "forward_packed", "backward_packed"), ("causal", "return_lse", "deterministic")),
        *itertools.product(("forward", "backward"), ("bias_grad",)),
    ],
)
def test_flags_are_true_or_false(name, flag, value):
    """Nothing that is as true or as false as one, in either pass."""
    with pytest.raises(TypeError, match=f"^{flag} must be True or False; got "):
        called(name, backend="cpu", **{flag: value})


# ---- arguments that a function does not have ---------------------------------------------------------------------------------------------

FUNCTIONS = ("forward", "backward", "vjp", "plan", "forward_packed", "backward_packed", "forward_paged")
SAID = [
    (
        "attn_mask",
        "; did you mean mask, of booleans, or bias, which is added to the scores? In a mask True takes part, as in PyTorch and JAX",
    ),
    (
        "is_causal",
        "; did you mean causal=True, q_start=0? There the first query meets the first key; causal=True alone aligns the last ones",
    ),
    (
        "dropout_p",
        "; did you mean dropout, with rng=(seed, offset)? Its bits are a function of these two numbers, not of a global generator",
    ),
    ("enable_gqa", ": leave it out; the number of heads of q may be any multiple of that of k and v"),
    ("sm_scale", "; did you mean scale? The default is the same, 1 / sqrt(D)"),
    (
        "window_size",
        "; did you mean window=(left, right)? Both are inclusive and the last query meets the last key, as there; no limit is -1, not None",
    ),
    (
        "key_value_seq_lengths",
        "; did you mean kv_lengths? It has the shape q.shape[:-3]; with causal, the last query of each sequence meets its last key",
    ),
    ("layout", '; did you mean axes="bhnd" or axes="bnhd"? The default is (batch, heads, length, head dimension)'),
    ("causl", "; did you mean causal?"),
    ("is_causl", "; did you mean causal=True, q_start=0?"),
    ("return_lsee", "; did you mean return_lse?"),
    ("colour", "; the options are scale, causal, window, q_start, bias, mask, "),
    ("page_table", ": keys in pages go to numba_flash.forward_paged(q, k_pages, v_pages, page_table, kv_lengths)"),
]


@pytest.mark.parametrize("function", ["forward", "backward", "vjp"])
@pytest.mark.parametrize(("name", "message"), SAID)
def test_what_there_is_in_the_place_of_an_argument(function, name, message):
    start = f"{function}() got an unexpected keyword argument {name!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(start + message)}"):
        called(function, **{name: True})


ABSENT = [
    ("forward_packed", "axes", ": packed sequences are (tokens, heads, head dimension) in any case"),
    ("backward_packed", "axes", ": packed sequences are (tokens, heads, head dimension) in any case"),
    (
        "forward_paged",
        "axes",
        ": pages are (pages, heads, keys of a page, head dimension), and q is (..., heads, length, head dimension), in any case",
    ),
    ("forward_packed", "bias", ": packed sequences take no bias, as each has rows and columns of its own; "),
    ("backward_packed", "bias_grad", ": packed sequences take no bias"),
    ("forward_packed", "attn_mask", ", which is mask or bias of forward: packed sequences take no mask, "),
    ("forward_packed", "seqused_k", ", which is kv_lengths of forward: k_offsets says where sequences begin and end"),
    ("forward_paged", "deterministic", ": forward_paged has no gradient, so it takes no options of training"),
    ("forward_paged", "dropout_p", ", which is dropout or rng of forward: forward_paged has no gradient"),
    ("forward_paged", "block_size", "; the options are scale, causal, "),
]


@pytest.mark.parametrize(("function", "name", "message"), ABSENT)
def test_what_only_other_functions_take(function, name, message):
    start = f"{function}() got an unexpected keyword argument {name!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(start + message)}"):
        called(function, **{name: True})


def test_each_unknown_argument_has_a_line():
    with pytest.raises(TypeError) as caught:
        called("forward", attn_mask=None, dropout_p=0.1, causl=True)
    lines = str(caught.value).splitlines()
    assert [re.search(r"argument '(\w+)'", line)[1] for line in lines] == ["attn_mask", "dropout_p", "causl"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_unknown_argument_is_refused_before_and_after_a_prepared_call(function):
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument 'sofcap'; did you mean softcap\?$"):
            called(function, backend="cpu", sofcap=3.0)
        called(function, backend="cpu")


def test_dropout_mask_says_it_too():
    with pytest.raises(
        TypeError, match=r"^dropout_mask\(\) got an unexpected keyword argument 'seed'; did you mean rng=\(seed, offset\)\?"
    ):
        numba_flash.dropout_mask((2, 3), dropout=0.5, rng=(0, 0), seed=1)


@pytest.mark.parametrize("name", elsewhere.NAMES)
def test_names_of_other_libraries_lead_to_options_that_there_are(name):
    options, said = inspect.signature(numba_flash.forward).parameters, elsewhere.NAMES[name]
    assert name not in options
    assert set(said.options) <= set(options)
    assert said.options == () or said.advice.startswith("; did you mean ")
    for function in re.findall(r"numba_flash\.([\w.]+)", said.advice):
        home, _, last = function.rpartition(".")
        assert hasattr(__import__(f"numba_flash.{home}", fromlist=["_"]) if home else numba_flash, last)


@pytest.mark.parametrize("name", ["sliding_window", "sliding_window_length"])
def test_a_sliding_window_has_the_positions_that_it_has_elsewhere(name):
    """A query's own and those before it, as many as the number says: what the sentence says to pass, tried."""
    (said,) = re.findall(r"window=(\(.*?, 0\))", elsewhere.NAMES[name].advice)
    n = np.arange(20)
    for size in (1, 2, 7):
        distance = n[:, None] - n
        expected = (distance >= 0) & (distance < size)
        x = np.eye(20, dtype=np.float32)
        o = reference.forward(x, x, x, window=eval(said, {name: size}))
        np.testing.assert_array_equal(o > 0, expected)


def test_a_misspelled_option_is_taken_for_itself():
    """Names of other libraries that resemble options do not stand in their way."""
    options = [name for name in inspect.signature(numba_flash.forward).parameters if len(name) > 3]
    for name in options:
        for slip in {name + "s", name[:-1], name[0] + name[2:], name.replace("_", "")} - {*options, *elsewhere.NAMES}:
            with pytest.raises(TypeError) as caught:
                called("forward", **{slip: None})
            if max(SequenceMatcher(None, slip, other).ratio() for other in elsewhere.NAMES) < signatures.LIKELY:
                assert str(caught.value).endswith(f"did you mean {name}?"), slip


# ---- lists, and arrays of one number -----------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch):
    """How many calls of `forward` were prepared."""
    counts, prepare = [], api._prepare_forward
    monkeypatch.setattr(call, "_prepared", {})
    monkeypatch.setattr(api, "_prepare_forward", lambda *x: (counts.append(1), prepare(*x))[1])
    return counts


AS_BROUGHT = [
    ({"window": [3, 1]}, {"window": (3, 1)}),
    ({"window": [np.array(3), 1]}, {"window": (3, 1)}),
    ({"window": (np.array(3), np.int64(1))}, {"window": (3, 1)}),
    ({"scale": np.array(0.5)}, {"scale": 0.5}),
    ({"scale": np.array(0.5, np.float32)}, {"scale": 0.5}),
    ({"scale": np.array(2)}, {"scale": 2}),
    ({"softcap": np.array(3.0)}, {"softcap": 3.0}),
    ({"causal": True, "q_start": np.array(1)}, {"causal": True, "q_start": 1}),
    ({"dropout": np.array(0.25), "rng": [1, 2]}, {"dropout": 0.25, "rng": (1, 2)}),
    ({"dropout": 0.25, "rng": (np.array(1), np.array(2))}, {"dropout": 0.25, "rng": (1, 2)}),
    ({"dropout": 0.25, "rng": [1, 2, 3, 8]}, {"dropout": 0.25, "rng": (1, 2, 3, 8)}),
    ({"kv_lengths": [3, 4]}, {"kv_lengths": np.array([3, 4])}),
    ({"q_lengths": (3, 4), "kv_lengths": [7, 0]}, {"q_lengths": np.array([3, 4]), "kv_lengths": np.array([7, 0])}),
    ({"mask": numba_flash.BlockMask(np.eye(2, dtype=bool), [4, 4])}, {"mask": numba_flash.BlockMask(np.eye(2, dtype=bool), (4, 4))}),
]


@pytest.mark.parametrize(("brought", "usual"), AS_BROUGHT, ids=lambda x: " ".join(x))
def test_lists_and_arrays_of_one_number_are_taken(prepared, brought, usual):
    for _ in range(3):
        o, lse = numba_flash.forward(Q, K, V, return_lse=True, backend="cpu", **brought)
    assert len(prepared) == 1
    assert same_results((o, lse), numba_flash.forward(Q, K, V, return_lse=True, backend="cpu", **usual))
    gradients = numba_flash.backward(DO, Q, K, V, o, lse, backend="cpu", **brought)
    assert same_results(gradients, numba_flash.backward(DO, Q, K, V, o, lse, backend="cpu", **usual))
    assert same_results(reference.forward(Q, K, V, **brought), reference.forward(Q, K, V, **usual))
    assert same_bits(numba_flash.vjp(Q, K, V, backend="cpu", **brought)[0], o)
    assert numba_flash.plan(Q, K, V, backend="cpu", **brought).problem == numba_flash.plan(Q, K, V, backend="cpu", **usual).problem


def test_other_numbers_in_lists_are_another_preparation(prepared):
    for right in (3, 2, 3):
        o = numba_flash.forward(Q, K, V, window=[0, right], backend="cpu")
        np.testing.assert_allclose(o, reference.forward(Q, K, V, window=(0, right)), rtol=1e-12)
    assert len(prepared) == 2


def test_offsets_and_tables_may_be_lists():
    offsets, table, lengths = [0, 2, 5], [[0, 1], [2, 0]], [5, 1]
    packed = [
        numba_flash.forward_packed(TOKENS, TOKENS, TOKENS, x, x, return_lse=True, backend="cpu") for x in (offsets, np.array(offsets))
    ]
    assert same_results(*packed)
    gradients = [numba_flash.backward_packed(TOKENS, TOKENS, TOKENS, TOKENS, *packed[0], x, x, backend="cpu") for x in (offsets, OFFSETS)]
    assert same_results(*gradients)
    pages = np.random.default_rng(0).standard_normal((3, 2, 4, 16))
    paged = [numba_flash.forward_paged(Q, pages, pages, f(table), f(lengths), backend="cpu") for f in (list, np.array)]
    assert same_results(*paged)


def test_lists_of_an_empty_batch():
    x = np.zeros((0, 2, 3, 8))
    assert numba_flash.forward(x, x, x, kv_lengths=[], backend="cpu").shape == x.shape


def test_shapes_and_seeds_of_a_dropout_mask_may_be_lists():
    expected = numba_flash.dropout_mask((2, 3, 4), dropout=0.5, rng=(1, 2))
    assert same_bits(numba_flash.dropout_mask([2, 3, 4], dropout=np.array(0.5), rng=[1, 2]), expected)


@pytest.mark.parametrize("name", ["v", "do"])
def test_the_copy_that_an_error_asks_for_is_taken(name):
    arrays = {"do": DO, "q": Q, "k": K, "v": V, "o": DO, "lse": np.zeros((2, 4, 5))}
    memory = np.zeros(arrays[name].nbytes + 8, np.uint8)
    unaligned = memory[3 : 3 + arrays[name].nbytes].view(np.float64).reshape(arrays[name].shape)
    with pytest.raises(
        ValueError, match=rf"^{name} must be aligned .*; it begins at address {unaligned.ctypes.data:#x}: pass {name}\.copy\(\)$"
    ):
        numba_flash.backward(**arrays | {name: unaligned}, backend="cpu")
    numba_flash.backward(**arrays | {name: unaligned.copy()}, backend="cpu")


def test_a_place_for_results_is_not_to_be_copied():
    memory = np.zeros(DO.nbytes + 8, np.uint8)
    out = memory[4 : 4 + DO.nbytes].view(np.float64).reshape(DO.shape)
    with pytest.raises(ValueError, match=r"^out must be aligned .*; it begins at address 0x[0-9a-f]+$"):
        numba_flash.forward(Q, K, V, out=out, backend="cpu")


# ---- masks and biases that lack an axis --------------------------------------------------------------------------------------------------

LACKING = {
    "keys": ((2, 7), "[:, None, None, :]"),
    "pairs": ((2, 5, 7), "[:, None]"),
    "pairs for all queries": ((2, 1, 7), "[:, None]"),
    "heads and keys": ((2, 4, 7), "[:, :, None, :]"),
    "queries": ((2, 5), "[:, None, :, None]"),
    "something else": ((3, 7), None),
}


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize(("shape", "index"), LACKING.values(), ids=LACKING)
def test_a_mask_that_lacks_axes_is_told_which(name, shape, index):
    x = np.ones(shape, bool if name == "mask" else np.float64)
    with pytest.raises(ValueError, match=rf"^{name}\.shape .* must be broadcastable to ") as caught:
        numba_flash.forward(Q, K, V, **{name: x}, backend="cpu")
    assert str(caught.value).endswith("(2, 4, 5, 7)" if index is None else f": pass {name}{index}")
    if index is not None:
        numba_flash.forward(Q, K, V, **{name: eval(f"x{index}")}, backend="cpu")


def test_axes_of_more_and_of_fewer_leading_dimensions():
    assert advice.of_shape("mask", (2, 3, 7), (2, 3, 4, 5, 7)) == ": pass mask[:, :, None, None, :]"
    assert advice.of_shape("mask", (2, 3, 5, 7), (2, 3, 4, 5, 7)) == ": pass mask[:, :, None]"
    assert advice.of_shape("mask", (4, 7), (4, 5, 7)) == ": pass mask[:, None, :]"
    assert advice.of_shape("mask", (4, 7), (5, 7)) == ""


PAGED = [
    (
        (4, 2, 16),
        (4, 2),
        (4,),
        "q (B, Hq, Nq, D) goes with page_table (B, most pages) and kv_lengths (B,), and q (Hq, Nq, D) with (most pages,) and ()",
    ),
    ((4, 2, 16), (4, 2), (4,), "; pass q[:, :, None] if q is (B, Hq, D)"),
    (
        (4, 2, 1, 16),
        (2,),
        (),
        "page_table.shape (2,) must be q.shape[:-3] (4,) and the most pages of a sequence: q (B, Hq, Nq, D) goes with ",
    ),
]


@pytest.mark.parametrize(("q", "table", "lengths", "message"), PAGED)
def test_shapes_that_belong_together_in_a_paged_call(q, table, lengths, message):
    pages, table, lengths = np.zeros((3, 2, 4, 16)), np.zeros(table, int), np.ones(lengths, int)
    with pytest.raises(ValueError, match=re.escape(message)):
        numba_flash.forward_paged(np.zeros(q), pages, pages, table, lengths, backend="cpu")


def test_a_query_of_each_sequence_has_an_axis_of_its_own():
    """As the error says."""
    q, pages, table, lengths = np.zeros((4, 2, 16)), np.zeros((3, 2, 4, 16)), np.zeros((4, 2), int), np.ones(4, int)
    assert numba_flash.forward_paged(q[:, :, None], pages, pages, table, lengths, backend="cpu").shape == (4, 2, 1, 16)


# ---- what help() shows -------------------------------------------------------------------------------------------------------------------

SHOWN = {
    "forward": "forward(q: Array, k: Array, v: Array, *, scale=None, causal=False, window=None, q_start=None, bias=None, ",
    "backward": "backward(do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, scale=None, causal=False, ",
    "forward_packed": "forward_packed(q: Array, k: Array, v: Array, q_offsets: Integers, k_offsets: Integers, *, scale=None, ",
    "backward_packed": "backward_packed(do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, q_offsets: Integers, ",
    "forward_paged": "forward_paged(q: Array, k_pages: Array, v_pages: Array, page_table: Integers, kv_lengths: Integers, *, ",
    "merge": "merge(o1: Array, lse1: Array, o2: Array, lse2: Array) -> tuple[Array, Array]",
    "dropout_mask": "dropout_mask(shape: tuple[int, ...] | list[int], *, dropout: float, rng: State) -> NDArray[np.bool_]",
    "alibi": "alibi(slopes: ArrayLike, q_start=0)",
    "relative_position": "relative_position(table: ArrayLike, q_start=0)",
    "dask.forward": "forward(q: da.Array, k: da.Array, v: da.Array, *, scale=None, causal=False, ",
    "distributed.backward": "backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, comm: Any, layout='contiguous', ",
    "distributed.positions": "positions(n: int, *, comm: Any, layout='contiguous') -> Any",
}


def public(name: str):
    """The function of that name."""
    home, _, last = name.rpartition(".")
    if home == "dask":
        pytest.importorskip("dask")
    return getattr(__import__(f"numba_flash.{home}", fromlist=["_"]) if home else numba_flash, last)


@pytest.mark.parametrize("name", SHOWN)
def test_help_begins_with_a_signature_that_a_person_can_read(name):
    text, last = pydoc.render_doc(public(name), renderer=pydoc.plaintext), name.rpartition(".")[-1]
    signature = re.search(rf"^(?: \|  )?{last}\(.*?\)( -> [^\n]*)?$", text, re.MULTILINE | re.DOTALL)[0]
    line = " ".join(signature.replace("|  ", "").split()).replace("( ", "(").replace(" )", ")")  # of newer Pythons
    assert line.startswith(SHOWN[name])
    assert len(line) < 500
    assert not re.search("DLPackArray|Union|Literal|typing|unknown|others|numba_flash", line)


@pytest.mark.parametrize(
    "name", [name for name in numba_flash.__all__ if name != "reference"] + ["reference.forward", "reference.backward"]
)
def test_no_signature_that_help_shows_is_long(name):
    (shown,) = re.findall(
        rf"^(?: \|  )?({name.rpartition('.')[-1]}\(.*)$", pydoc.render_doc(public(name), renderer=pydoc.plaintext), re.MULTILINE
    )[:1]
    assert len(shown) < 420
    assert not re.search("DLPackArray|Union|_typing|unknown|others", shown)


@pytest.mark.parametrize("name", [name for name in SHOWN if name not in ("alibi", "relative_position")])
def test_signatures_can_be_called_as_they_are_shown(name):
    """What is shown are the arguments of the function, with their defaults."""
    function = public(name)
    code, shown = function.__code__, inspect.signature(function).parameters
    assert list(shown) == list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    assert {n: p.default for n, p in shown.items() if p.default is not p.empty} == (function.__kwdefaults__ or {})
