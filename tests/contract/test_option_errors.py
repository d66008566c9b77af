"""Every bad option gets its exception and a message that names it, what came and what was expected; nothing is computed."""

import re
from dataclasses import fields

import numpy as np
import pytest
from test_errors import assert_raises, call_backward, call_forward, call_plan, good, nothing_is_computed  # noqa: F401

import numba_flash
from numba_flash import BlockMask, call
from numba_flash.arguments.options import NAMES, PLAIN, Options
from numba_flash.arguments.problem import bind

everywhere = pytest.mark.parametrize("caller", [call_forward, call_backward, call_plan], ids=["forward", "backward", "plan"])


@pytest.fixture(autouse=True)
def nothing_is_allocated(monkeypatch):
    monkeypatch.setattr(call.arrays, "allocator", lambda *_: lambda: pytest.fail("a result was allocated"))


def four(score, b, h, i):
    return score


def boolean(score, b, h, i, j):
    return score > 0


def does_not_compile(score, b, h, i, j):
    return score + "the line of the user"


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


FINE = {"score_mod": lambda score, b, h, i, j: score, "score_mod_grad": lambda score, b, h, i, j: 1.0}

# good() has q (2, 2, 3, 4), k (2, 2, 4, 4)
BAD = {
    "bias: shape": (
        {"bias": ones(2, 3, 3, 4)},
        ValueError,
        r"^bias\.shape \(2, 3, 3, 4\) must be broadcastable to \(\.\.\., Hq, Nq, Nk\) \(2, 2, 3, 4\)",
    ),
    "bias: rank": ({"bias": ones(1, 2, 2, 3, 4)}, ValueError, r"^bias\.shape \(1, 2, 2, 3, 4\) must be broadcastable to"),
    "bias: transposed": ({"bias": ones(4, 3)}, ValueError, r"^bias\.shape \(4, 3\) must be broadcastable to"),
    "bias: integers": ({"bias": ones(4, dtype=np.int32)}, TypeError, r"^bias\.dtype \(int32\) must be q\.dtype \(float32\) or float32"),
    "bias: booleans": ({"bias": ones(4, dtype=bool)}, TypeError, r"^bias\.dtype \(bool\) must be"),
    "bias: another float": (
        {"bias": ones(4, dtype=np.float64)},
        TypeError,
        r"^bias\.dtype \(float64\) must be q\.dtype \(float32\) or float32",
    ),
    "bias: a list": ({"bias": [1.0]}, TypeError, r"^bias must be a NumPy or CuPy array, .*; got list"),
    "bias: byte order": ({"bias": ones(4, dtype=">f4")}, ValueError, r"^bias must be in native byte order"),
    "mask: shape": ({"mask": ones(5, dtype=bool)}, ValueError, r"^mask\.shape \(5,\) must be broadcastable to"),
    "mask: floats": ({"mask": ones(3, 4)}, TypeError, r"^mask\.dtype \(float32\) must be bool; what is added to scores is a bias"),
    "mask: bytes": ({"mask": ones(3, 4, dtype=np.uint8)}, TypeError, r"^mask\.dtype \(uint8\) must be bool"),
    "mask: None of it": ({"mask": True}, TypeError, r"^mask must be a NumPy or CuPy array, .*; got bool"),
    "blocks: of pairs": (
        {"mask": BlockMask(np.ones((3, 4), bool), 2)},
        ValueError,
        r"^mask\.blocks\.shape \(3, 4\) must be broadcastable to \(\.\.\., Hq, ceil\(Nq / 2\), ceil\(Nk / 2\)\) \(2, 2, 2, 2\)",
    ),
    "blocks: turned": ({"mask": BlockMask(np.ones((4, 2), bool), (2, 1))}, ValueError, r"^mask\.blocks\.shape \(4, 2\) .* \(2, 2, 2, 4\)"),
    "blocks: heads": ({"mask": BlockMask(np.ones((3, 2, 2), bool), 2)}, ValueError, r"^mask\.blocks\.shape \(3, 2, 2\) must be broad"),
    "blocks: a pair": ({"mask": (np.ones((2, 2), bool), 2)}, TypeError, r"^mask must be a NumPy or CuPy array, .*; got tuple"),
    "lengths: too long": (
        {"kv_lengths": np.array([4, 5])},
        ValueError,
        r"^kv_lengths must lie between 0 and k\.shape\[-2\] \(4\); kv_lengths\[1\] is 5",
    ),
    "lengths: negative": (
        {"q_lengths": np.array([-1, 2])},
        ValueError,
        r"^q_lengths must lie between 0 and q\.shape\[-2\] \(3\); q_lengths\[0\] is -1",
    ),
    "lengths: shape": ({"q_lengths": np.array([1, 2, 3])}, ValueError, r"^q_lengths\.shape \(3,\) must equal q\.shape\[:-3\] \(2,\)"),
    "lengths: floats": ({"kv_lengths": np.array([1.0, 2.0])}, TypeError, r"^kv_lengths\.dtype \(float64\) must be an integer dtype"),
    "lengths: a list of floats": ({"kv_lengths": [1, 2.5]}, TypeError, r"^kv_lengths\.dtype \(float64\) must be an integer dtype"),
    "lengths: a list of flags": ({"kv_lengths": [True, False]}, TypeError, r"^kv_lengths\.dtype \(bool\) must be an integer dtype"),
    "lengths: a list of lists": ({"q_lengths": [[1], [2]]}, ValueError, r"^q_lengths\.shape \(2, 1\) must equal q\.shape\[:-3\] \(2,\)"),
    "lengths: a ragged list": (
        {"kv_lengths": [[1], [2, 3]]},
        ValueError,
        r"^kv_lengths must be an array, or lists of integers of one length",
    ),
    "softcap: zero": ({"softcap": 0.0}, ValueError, r"^softcap must be positive, or None; got 0\.0"),
    "softcap: negative": ({"softcap": -3}, ValueError, r"^softcap must be positive, or None; got -3"),
    "softcap: NaN": ({"softcap": float("nan")}, ValueError, r"^softcap must be finite; got nan"),
    "softcap: beyond float32": (
        {"softcap": 3.5e38},
        ValueError,
        r"^softcap must lie between 1\.18e-38 and 8\.51e\+37, computed in float32; got 3\.5e\+38",
    ),
    "softcap: no inverse in float32": ({"softcap": 1e-46}, ValueError, r"^softcap must lie between 1\.18e-38 and .*; got 1e-46"),
    "softcap: True": ({"softcap": True}, TypeError, r"^softcap must be a real number; got True"),
    "dropout: one": ({"dropout": 1.0, "rng": (0, 0)}, ValueError, r"^dropout must be in \[0, 1\); got 1\.0"),
    "dropout: negative": ({"dropout": -0.1, "rng": (0, 0)}, ValueError, r"^dropout must be in \[0, 1\); got -0\.1"),
    "dropout: text": ({"dropout": "0.1"}, TypeError, r"^dropout must be a real number; got '0\.1'"),
    "dropout: None": ({"dropout": None}, TypeError, r"^dropout must be a real number; got None"),
    "dropout: no rng": (
        {"dropout": 0.1},
        ValueError,
        r"^rng must be a tuple \(seed, offset\) when dropout > 0; got rng=None with dropout=0\.1",
    ),
    "rng: a number": ({"dropout": 0.1, "rng": 3}, TypeError, r"^rng must be a tuple \(seed, offset\) or \(.*\); got 3"),
    "rng: three": ({"rng": (1, 2, 3)}, TypeError, r"^rng must be a tuple \(seed, offset\) or .*; got \(1, 2, 3\)"),
    "rng: first query": ({"rng": (1, 2, 2**30, 0)}, ValueError, r"^rng\[2\] \(the first query\) must be in \[0, 2\*\*30\); got 1073741824"),
    "rng: first key": ({"rng": (1, 2, 3, 12)}, ValueError, r"^rng\[3\] \(the first key\) must be a multiple of 8, .*; got 12"),
    "rng: float": ({"rng": (1.0, 2)}, TypeError, r"^rng\[0\] must be an integer; got 1\.0"),
    "rng: negative": ({"rng": (-1, 2)}, ValueError, r"^rng\[0\] \(the seed\) must be in \[0, 2\*\*64\); got -1"),
    "rng: offset": ({"rng": (1, 2**32)}, ValueError, r"^rng\[1\] \(the offset\) must be in \[0, 2\*\*32\); got 4294967296"),
    "score_mod: no function": ({"score_mod": 3}, TypeError, r"^score_mod must be a function of \(score, b, h, i, j\); got 3"),
    "score_mod: a builtin": ({"score_mod": max}, TypeError, r"^score_mod must be a Python function, so that it can be compiled"),
    "score_mod: parameters": (
        {"score_mod": four},
        TypeError,
        r"^score_mod must take \(score, b, h, i, j\); it has the signature \(score, b, h, i\)",
    ),
    "score_mod: boolean": ({"score_mod": boolean}, TypeError, r"^score_mod must return a real number; it returns bool"),
    "score_mod_grad: boolean": (
        FINE | {"score_mod_grad": boolean},
        TypeError,
        r"^score_mod_grad must return a real number; it returns bool",
    ),
    "score_mod_grad alone": (
        {"score_mod_grad": FINE["score_mod_grad"]},
        ValueError,
        r"^score_mod_grad needs a score_mod; got score_mod=None",
    ),
}


@pytest.mark.parametrize(
    ("blocks", "size", "error", "pattern"),
    [
        (ones(2, 2), 2, TypeError, r"^mask\.blocks\.dtype \(float32\) must be bool"),
        (ones(2, dtype=bool), 2, ValueError, r"^mask\.blocks must have 2 to 5 dimensions \(.*\); got shape \(2,\)"),
        (ones(1, 1, 1, 1, 2, 2, dtype=bool), 2, ValueError, r"^mask\.blocks must have 2 to 5 dimensions"),
        ([[True]], 2, TypeError, r"^mask\.blocks must be a NumPy or CuPy array, .*; got list: pass np\.asarray\(mask\.blocks\)"),
        (ones(2, 2, dtype=bool), 0, ValueError, r"^mask\.block_size must lie between 1 and 1073741824; got 0"),
        (ones(2, 2, dtype=bool), (2, -1), ValueError, r"^mask\.block_size must lie between 1 and 1073741824; got \(2, -1\)"),
        (ones(2, 2, dtype=bool), (2, 2**31), ValueError, r"^mask\.block_size must lie between"),
        (ones(2, 2, dtype=bool), 2.0, TypeError, r"^mask\.block_size must be an integer; got 2\.0"),
        (ones(2, 2, dtype=bool), True, TypeError, r"^mask\.block_size must be an integer; got True"),
        (
            ones(2, 2, dtype=bool),
            (2, 2, 2),
            TypeError,
            r"^mask\.block_size must be an integer or a tuple \(queries, keys\); got \(2, 2, 2\)",
        ),
        (ones(2, 2, dtype=bool), [2, 2.0], TypeError, r"^mask\.block_size must be an integer"),
    ],
)
def test_block_mask(blocks, size, error, pattern):
    with pytest.raises(error) as caught:
        BlockMask(blocks, size)
    assert re.search(pattern, str(caught.value)), str(caught.value)


@everywhere
@pytest.mark.parametrize("name", BAD)
def test_options(caller, name):
    options, error, pattern = BAD[name]
    assert_raises(error, pattern, caller, good(), **options)


@everywhere
def test_a_function_that_does_not_compile_shows_the_line_of_the_user(caller):
    with pytest.raises(TypeError, match=r"^score_mod does not compile: ") as caught:
        caller(good(), score_mod=does_not_compile)
    message = re.sub(r"\x1b\[[0-9;]*m", "", str(caught.value))
    assert 'return score + "the line of the user"' in message
    assert "test_option_errors.py" in message


def test_lengths_are_checked_at_every_call(monkeypatch):
    """The second call is served by the prepared one, whose key does not hold the values."""
    monkeypatch.undo()
    q, k, v = (good()[name] for name in "qkv")
    numba_flash.forward(q, k, v, kv_lengths=np.array([1, 4]), backend="cpu")
    with pytest.raises(ValueError, match=r"kv_lengths\[1\] is 5"):
        numba_flash.forward(q, k, v, kv_lengths=np.array([1, 5]), backend="cpu")


LOOK_ALIKES = [
    ({"softcap": 1.0}, {"softcap": True}, "softcap"),
    ({"rng": (1, 0)}, {"rng": (True, 0)}, "rng"),
    ({"rng": (1, 0)}, {"rng": (1.0, 0)}, "rng"),
    ({"dropout": 0.0}, {"dropout": False}, "dropout"),
]


@pytest.mark.parametrize(("fine", "bad", "name"), LOOK_ALIKES)
def test_look_alikes_of_prepared_options(monkeypatch, fine, bad, name):
    """1 == 1.0 == True: a call that was prepared for one must not serve the other."""
    monkeypatch.undo()
    call_forward(good(), **fine)
    with pytest.raises(TypeError, match=name):
        call_forward(good(), **bad)


# ---- backward ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "pattern"),
    [
        ({"bias_grad": True}, ValueError, r"^bias_grad needs a bias; got bias_grad=True with bias=None"),
        ({"bias": ones(4), "bias_grad": 1}, TypeError, r"^bias_grad must be True or False; got 1"),
        ({"deterministic": 1}, TypeError, r"^deterministic must be True or False; got 1"),
        ({"score_mod": lambda score, b, h, i, j: score}, ValueError, r"^score_mod_grad must be the derivative of score_mod .* got None"),
        ({"dlse": ones(2, 2, 4)}, ValueError, r"^dlse\.shape \(2, 2, 4\) must be \(2, 2, 3\)"),
        ({"dlse": ones(2, 2, 3, dtype=np.float64)}, TypeError, r"^dlse\.dtype \(float64\) must be float32"),
        ({"dlse": 1.0}, TypeError, r"^dlse must be a NumPy or CuPy array, .*; got float"),
        ({"bias": ones(4), "bias_grad": True, "out": (None,) * 3}, TypeError, r"^out must be a tuple \(dq, dk, dv, dbias\); got 3 of them"),
        ({"bias": ones(4), "out": (None,) * 4}, TypeError, r"^out must be a tuple \(dq, dk, dv\); got 4 of them"),
    ],
)
def test_backward(options, error, pattern):
    assert_raises(error, pattern, call_backward, good(), **options)


def test_out_of_the_gradient_of_a_bias_is_checked(monkeypatch):
    monkeypatch.undo()
    bias = ones(3, 4)
    out = (None, None, None, np.empty((4, 3), np.float32))
    assert_raises(ValueError, r"^out\[3\]\.shape \(4, 3\) must be \(3, 4\)", call_backward, good(), bias=bias, bias_grad=True, out=out)
    assert_raises(
        ValueError, r"^out\[3\] must not overlap bias", call_backward, good(), bias=bias, bias_grad=True, out=(None, None, None, bias)
    )


# ---- packed ----------------------------------------------------------------------------------------------------------------------------


def packed(**changes):
    arguments = {
        "q": ones(5, 2, 4),
        "k": ones(6, 2, 4),
        "v": ones(6, 2, 3),
        "q_offsets": np.array([0, 2, 5]),
        "k_offsets": np.array([0, 6, 6]),
    }
    return numba_flash.forward_packed(**(arguments | changes), backend="cpu")


@pytest.mark.parametrize(
    ("changes", "error", "pattern"),
    [
        ({"q_offsets": np.array([0, 4, 2, 5])}, ValueError, r"^k_offsets\.shape \(3,\) must equal q_offsets\.shape \(4,\)"),
        ({"q_offsets": np.array([0, 6, 5])}, ValueError, r"^q_offsets must not decrease; q_offsets\[1\] is 6, q_offsets\[2\] is 5"),
        ({"q_offsets": np.array([1, 2, 5])}, ValueError, r"^q_offsets must go from 0 to q\.shape\[0\] \(5\); it goes from 1 to 5"),
        ({"k_offsets": np.array([0, 2, 5])}, ValueError, r"^k_offsets must go from 0 to k\.shape\[0\] \(6\); it goes from 0 to 5"),
        ({"k_offsets": np.array([0.0, 2, 6])}, TypeError, r"^k_offsets\.dtype \(float64\) must be an integer dtype"),
        ({"k_offsets": [0, 2, 5]}, ValueError, r"^k_offsets must go from 0 to k\.shape\[0\] \(6\); it goes from 0 to 5"),
        ({"k_offsets": {0: 6}}, TypeError, r"^k_offsets must be a NumPy or CuPy array, .*; got dict"),
        ({"k_offsets": np.array([[0, 2, 6]])}, ValueError, r"^k_offsets must have shape \(sequences \+ 1,\); got \(1, 3\)"),
        ({"q_offsets": np.array([], int)}, ValueError, r"^q_offsets must have shape \(sequences \+ 1,\); got \(0,\)"),
        ({"q": ones(1, 5, 2, 4)}, ValueError, r"^q must have 3 dimensions \(tokens, heads, head_dim\); got shape \(1, 5, 2, 4\)"),
        ({"q": ones(5, 3, 4)}, ValueError, r"the number of heads q\.shape\[-2\] \(3\) must be a multiple of k\.shape\[-2\] \(2\)"),
        ({"k": ones(6, 1, 4)}, ValueError, r"^v\.shape\[:-1\] \(6, 2\) must equal k\.shape\[:-1\] \(6, 1\)"),
        ({"softcap": -1.0}, ValueError, r"^softcap must be positive"),
    ],
)
def test_packed(changes, error, pattern):
    with pytest.raises(error) as caught:
        packed(**changes)
    assert re.search(pattern, str(caught.value)), str(caught.value)


def test_packed_lse_has_heads_first():
    x, lse = ones(5, 2, 4), ones(5, 2)
    with pytest.raises(ValueError, match=r"^lse\.shape \(5, 2\) must be \(2, 5\)"):
        numba_flash.backward_packed(x, x, x, x, x, lse, np.array([0, 5]), np.array([0, 5]), backend="cpu")


@pytest.mark.parametrize(
    ("dlse", "error", "pattern"),
    [
        (ones(5, 2), ValueError, r"^dlse\.shape \(5, 2\) must be \(2, 5\)"),
        (ones(2, 5).astype(np.float64), TypeError, r"^dlse\.dtype \(float64\) must be float32"),
        (ones(2, 5).astype(">f4"), ValueError, r"^dlse must be in native byte order"),
    ],
    ids=["shape", "dtype", "byte order"],
)
def test_packed_gradients_of_lse(dlse, error, pattern):
    x, offsets = ones(5, 2, 4), np.array([0, 5])
    with pytest.raises(error, match=pattern):
        numba_flash.backward_packed(x, x, x, x, x, ones(2, 5), offsets, offsets, dlse=dlse, backend="cpu")


# ---- pages -----------------------------------------------------------------------------------------------------------------------------


def in_pages(function=numba_flash.forward_paged, **changes):
    arguments = {
        "q": ones(2, 4, 1, 8),
        "k_pages": ones(5, 2, 3, 8),
        "v_pages": ones(5, 2, 3, 6),
        "page_table": np.array([[0, 4, -1], [2, -1, 9]]),
        "kv_lengths": np.array([6, 1]),
    }
    return function(**(arguments | changes), backend="cpu")


def planned(q, k_pages, v_pages, **options):
    options.pop("out", None), options.pop("return_lse", None)
    return numba_flash.plan(q, k_pages, v_pages, **options)


@pytest.mark.parametrize("function", [numba_flash.forward_paged, planned])
@pytest.mark.parametrize(
    ("changes", "error", "pattern"),
    [
        ({"q": [1.0]}, TypeError, r"^q must be a NumPy or CuPy array"),
        ({"q": ones(2, 4, 1, 8, dtype=np.int32)}, TypeError, r"^q\.dtype must be one of float16, .*; got int32"),
        ({"q": ones(2, 3, 1, 8)}, ValueError, r"^the number of heads q\.shape\[-3\] \(3\) must be a multiple of k_pages\.shape\[1\] \(2\)"),
        ({"k_pages": [1.0]}, TypeError, r"^k_pages must be a NumPy or CuPy array"),
        ({"k_pages": ones(5, 2, 3, 8, dtype=np.float16)}, TypeError, r"^k_pages\.dtype \(float16\) must equal q\.dtype \(float32\)"),
        ({"v_pages": ones(2, 5, 2, 3, 6)}, ValueError, r"^v_pages must have 4 dimensions \(pages, heads, .*; got shape \(2, 5, 2, 3, 6\)"),
        ({"k_pages": ones(5, 2, 3, 7)}, ValueError, r"^k_pages\.shape\[-1\] \(7\) must equal q\.shape\[-1\] \(8\)"),
        ({"v_pages": ones(6, 2, 3, 6)}, ValueError, r"^v_pages\.shape\[:-1\] \(6, 2, 3\) must equal k_pages\.shape\[:-1\] \(5, 2, 3\)"),
        ({"k_pages": ones(5, 2, 0, 8), "v_pages": ones(5, 2, 0, 6)}, ValueError, r"^k_pages\.shape\[2\] \(0\), .* must be at least 1"),
        ({"v_pages": ones(5, 2, 3, 300)}, ValueError, r"^v_pages\.shape\[-1\] \(300\) must be between 1 and 256"),
        ({"page_table": [[0, 1, 1], [5, 0, 0]]}, ValueError, r"page_table\[1, 0\] is 5"),
        ({"page_table": "0"}, TypeError, r"^page_table must be a NumPy or CuPy array, .*; got str"),
        ({"page_table": np.zeros((2, 3), np.uint32)}, TypeError, r"^page_table\.dtype \(uint32\) must be int32 or int64"),
        (
            {"page_table": np.zeros((3, 3), int)},
            ValueError,
            r"^page_table\.shape \(3, 3\) must be q\.shape\[:-3\] \(2,\) and the most pages",
        ),
        ({"page_table": np.zeros(2, int)}, ValueError, r"^page_table\.shape \(2,\) must be q\.shape\[:-3\] \(2,\) and the most pages"),
        (
            {"page_table": np.broadcast_to(0, (2, 2**30))},
            ValueError,
            r"^page_table\.shape\[-1\] \* k_pages\.shape\[2\] \(3221225472\) must be at most",
        ),
        (
            {"page_table": np.array([[0, -1, 1], [2, 0, 0]])},
            ValueError,
            r"^page_table must name one of the 5 pages wherever a sequence has keys; page_table\[0, 1\] is -1",
        ),
        ({"page_table": np.array([[0, 1, 1], [5, 0, 0]])}, ValueError, r"page_table\[1, 0\] is 5"),
        (
            {"mask": numba_flash.BlockMask(np.ones((1, 2), bool), 8)},
            TypeError,
            r"^mask must be an array, of pairs, where keys are in pages; got BlockMask$",
        ),
        ({"kv_lengths": None}, TypeError, r"^kv_lengths must be a NumPy or CuPy array, .*; got NoneType"),
        ({"kv_lengths": np.array([6.0, 1])}, TypeError, r"^kv_lengths\.dtype \(float64\) must be an integer dtype"),
        ({"kv_lengths": np.array([6])}, ValueError, r"^kv_lengths\.shape \(1,\) must equal q\.shape\[:-3\] \(2,\)"),
        (
            {"kv_lengths": np.array([10, 1])},
            ValueError,
            r"^kv_lengths must lie between 0 and page_table\.shape\[-1\] \* k_pages\.shape\[2\] \(9\); kv_lengths\[0\] is 10",
        ),
        ({"q_lengths": np.array([2, 1])}, ValueError, r"^q_lengths must lie between 0 and q\.shape\[-2\] \(1\)"),
        ({"bias": ones(1, 8)}, ValueError, r"^bias\.shape \(1, 8\) must be broadcastable to .* \(2, 4, 1, 9\)"),
        ({"mask": ones(9)}, TypeError, r"^mask\.dtype \(float32\) must be bool"),
        ({"softcap": -1.0}, ValueError, r"^softcap must be positive"),
        ({"score_mod": four}, TypeError, r"^score_mod must take \(score, b, h, i, j\)"),
    ],
)
def test_pages(function, changes, error, pattern):
    with pytest.raises(error) as caught:
        in_pages(function, **changes)
    assert re.search(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "pattern"),
    [
        ({"return_lse": 1}, TypeError, r"^return_lse must be True or False; got 1"),
        ({"out": ones(2, 4, 1, 5)}, ValueError, r"^out\.shape \(2, 4, 1, 5\) must be \(2, 4, 1, 6\)"),
        ({"out": ones(2, 4, 1, 6, dtype=np.float64)}, TypeError, r"^out\.dtype \(float64\) must be float32"),
        ({"dropout": 0.1}, TypeError, r"unexpected keyword argument 'dropout'"),
    ],
)
def test_pages_and_results(monkeypatch, changes, error, pattern):
    monkeypatch.undo()
    with pytest.raises(error) as caught:
        in_pages(**changes)
    assert re.search(pattern, str(caught.value)), str(caught.value)


def test_out_must_not_overlap_pages(monkeypatch):
    monkeypatch.undo()
    v_pages = ones(5, 2, 3, 6)
    with pytest.raises(ValueError, match=r"^out must not overlap v_pages; they share memory"):
        in_pages(v_pages=v_pages, out=v_pages.reshape(-1)[:48].reshape(2, 4, 1, 6))


def test_tables_are_checked_at_every_call(monkeypatch):
    """The second call is served by the prepared one, whose key does not hold the values."""
    monkeypatch.undo()
    in_pages()
    with pytest.raises(ValueError, match=r"page_table\[1, 0\] is -1"):
        in_pages(page_table=np.array([[0, 4, -1], [-1, -1, 9]]))
    with pytest.raises(ValueError, match=r"page_table\[0, 2\] is -1"):
        in_pages(kv_lengths=np.array([7, 1]))


# ---- the rest --------------------------------------------------------------------------------------------------------------------------


def test_an_option_that_there_is_not():
    q, k, v = (good()[name] for name in "qkv")
    with pytest.raises(TypeError, match=r"^softkap is not an option; the options are scale, causal, window, q_start, precision, bias, "):
        bind(q, k, v, softkap=3.0)


@pytest.mark.parametrize(
    ("arguments", "error", "pattern"),
    [
        ((ones(2, 3), ones(3), ones(2, 3), ones(2)), ValueError, r"^lse1\.shape \(3,\) must be \(2,\), as o1\.shape is \(2, 3\)"),
        ((ones(2, 3), ones(2), ones(2, 4), ones(2)), ValueError, r"^o2\.shape \(2, 4\) must be \(2, 3\)"),
        ((ones(2, 3), ones(2), ones(2, 3), ones(1)), ValueError, r"^lse2\.shape \(1,\) must be \(2,\)"),
        (
            (ones(2, 3), ones(2, dtype=np.float16), ones(2, 3), ones(2)),
            TypeError,
            r"^lse1\.dtype \(float16\) must be one of float32, float64",
        ),
        ((ones(2, 3, dtype=int), ones(2), ones(2, 3), ones(2)), TypeError, r"^o1\.dtype \(int64\) must be one of float16"),
        (([1.0], ones(2), ones(2, 3), ones(2)), TypeError, r"^o1 must be a NumPy or CuPy array, .*; got list"),
    ],
)
def test_merge(arguments, error, pattern):
    with pytest.raises(error) as caught:
        numba_flash.merge(*arguments)
    assert re.search(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("shape", "options", "error", "pattern"),
    [
        (3, {}, TypeError, r"^shape must be a tuple \(\.\.\., Hq, Nq, Nk\); got 3"),
        ((2,), {}, ValueError, r"^shape must be a tuple \(\.\.\., Hq, Nq, Nk\) of at least two sizes; got \(2,\)"),
        ((2.0, 3), {}, TypeError, r"^shape\[0\] must be an integer; got 2\.0"),
        ((-2, 3), {}, ValueError, r"^shape must hold sizes >= 0; got \(-2, 3\)"),
        ((2, 3), {"dropout": 2.0}, ValueError, r"^dropout must be in \[0, 1\); got 2\.0"),
        ((2, 3), {"rng": None}, ValueError, r"^rng must be a tuple \(seed, offset\) when dropout > 0"),
    ],
)
def test_dropout_mask(shape, options, error, pattern):
    with pytest.raises(error) as caught:
        numba_flash.dropout_mask(shape, **({"dropout": 0.5, "rng": (0, 0)} | options))
    assert re.search(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("shape", [(3,), (2, 4)])
def test_relative_position(shape):
    with pytest.raises(ValueError, match=r"^table must have shape \(Hq, 2 R \+ 1\); got "):
        numba_flash.relative_position(np.zeros(shape))


def test_every_option_can_be_refused_by_name():
    """A tier refuses the options that it does not serve by what they are called: one that were not would be ignored."""
    how = {"packed", "follows", "generator", "blocks", "block_sparse", "relative"}  # parts of others
    assert {field.name for field in fields(Options)} - how == set(NAMES)
    assert set(Options(softcap=1.0, mask=True, kv_lengths="int64").used) == {"softcap", "mask", "kv_lengths"}
    assert PLAIN.used == ()
