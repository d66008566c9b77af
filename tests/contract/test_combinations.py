"""Everything composes: random combinations of all options on every backend, against the oracle; and gradients against differences."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DTYPES, LAYOUTS, SIMULATED, random_inputs
from support.naive import check, oracle, run

import numba_flash

LONGEST = 7 if SIMULATED else 150
HEAD_DIMS = [(2, 3)] if SIMULATED else [(16, 16), (24, 40)]


def tilt(score, b, h, i, j):
    return np.float32(0.5) * score + (b - h + (i - 2 * j) % 7) * np.float32(0.1)


def tilt_grad(score, b, h, i, j):
    return np.float32(0.5)


def bend(score, b, h, i, j):
    return score / (1 + abs(score)) if (i + j) % 5 else -np.inf


def bend_grad(score, b, h, i, j):
    return 1 / (1 + abs(score)) ** 2


SCORE_MODS = [
    {"score_mod": tilt, "score_mod_grad": tilt_grad},
    {"score_mod": bend, "score_mod_grad": bend_grad},
    {},  # alibi, for as many heads as there are
]


def draw_optional(draw, options: list, name: str, strategy):
    if draw(st.booleans()):
        options.append({name: draw(strategy)})


@st.composite
def broadcast_shapes(draw, shape):
    """A shape that broadcasts to this one."""
    kept = draw(st.integers(0, len(shape)))
    return tuple(n if draw(st.booleans()) else 1 for n in shape[len(shape) - kept :])


@st.composite
def masks(draw, rng, scores, share):
    """An element for each pair, a `share` of them True."""
    return np.array(rng.random(draw(broadcast_shapes(scores))) < share)


@st.composite
def block_masks(draw, rng, scores, share):
    """An element for each block."""
    size = draw(st.sampled_from([1, 2, (1, 3), (4, 2)] if SIMULATED else [1, 16, 64, 100, 128, (16, 128), (70, 1), (1, 33)]))
    rows, columns = (-(-n // each) for n, each in zip(scores[-2:], size if isinstance(size, tuple) else (size, size), strict=True))
    lead = draw(broadcast_shapes(scores[:-2]))
    whole = [1 if draw(st.booleans()) and draw(st.booleans()) else n for n in (rows, columns)]
    return numba_flash.BlockMask(rng.random((*lead, *whole)) < share, size)


@st.composite
def problems(draw, dtypes):
    """Inputs, layouts and options of a random problem."""
    length = st.integers(0, LONGEST) | st.sampled_from([1, LONGEST])
    hk, batch = draw(st.integers(1, 2 - SIMULATED)), draw(st.sampled_from([(), (2,)] if SIMULATED else [(), (1,), (3,), (2, 2)]))
    hq, nq, nk = hk * draw(st.integers(1, 2)), draw(length), draw(length)
    (d, dv), dtype = draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(dtypes))
    inputs = random_inputs(batch=batch, hq=hq, hk=hk, nq=nq, nk=nk, d=d, dv=dv, dtype=dtype, seed=draw(st.integers(0, 2**32 - 1)))
    rng, scores = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), (*batch, hq, nq, nk)
    side = st.just(-1) | st.integers(0, LONGEST // 2)
    options = [{"causal": draw(st.booleans())}]
    draw_optional(draw, options, "scale", st.floats(-1, 1, width=32, allow_subnormal=False))
    draw_optional(draw, options, "window", st.none() | st.tuples(side, side))
    draw_optional(draw, options, "q_start", st.none() | st.integers(-LONGEST, LONGEST))
    draw_optional(draw, options, "softcap", st.floats(0.5, 30))
    if draw(st.booleans()):
        bias = np.array(rng.standard_normal(draw(broadcast_shapes(scores))), DTYPES[draw(st.sampled_from([dtype, "float32"]))])
        if draw(st.booleans()):
            bias[rng.random(bias.shape) < 0.2] = -np.inf
        options.append({"bias": bias, "bias_grad": draw(st.booleans())})
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.05, 0.7]))
        options.append({"mask": draw(block_masks(rng, scores, share) if draw(st.booleans()) else masks(rng, scores, share))})
    for name, n in (("q_lengths", nq), ("kv_lengths", nk)):
        if draw(st.booleans()):
            integer = draw(st.sampled_from([np.int32, np.int64, np.uint8]))
            options.append({name: rng.integers(0, n + 1, batch).astype(integer).reshape(batch)})
    if draw(st.booleans()):
        options.append(
            {"dropout": draw(st.sampled_from([0.1, 0.5])), "rng": (draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1)))}
        )
    if draw(st.booleans()):
        chosen = draw(st.sampled_from(SCORE_MODS))
        options.append(chosen or {"score_mod": numba_flash.alibi(np.linspace(0.1, 1.0, hq))})
    if draw(st.booleans()):
        options.append({"dlse": rng.standard_normal((*batch, hq, nq)).astype(np.float64 if dtype == "float64" else np.float32)})
    return inputs, draw(st.tuples(*[st.sampled_from(list(LAYOUTS))] * 4)), {name: x for option in options for name, x in option.items()}


QUICK = [(0, ("float32",))]
FULL = [pytest.param(seed, tuple(DTYPES), marks=pytest.mark.full) for seed in range(1, 4 if SIMULATED else 10)]


@pytest.mark.simulator(full=True)
@pytest.mark.parametrize(("seed", "dtypes"), [*QUICK, *FULL])
def test_any_combination(backend, seed, dtypes):
    if backend.refuses:
        pytest.skip("this backend refuses some problems; random ones that it serves are among its own tests")

    @settings(
        max_examples=5 if SIMULATED else 12 if backend.name == "cpu" else 6,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(problem=problems(dtypes))
    def agrees_with_the_oracle(problem):
        inputs, layouts, options = problem
        options.setdefault("score_mod_grad", getattr(options.get("score_mod"), "score_mod_grad", None))
        check(backend, *inputs, layouts=layouts, **options)

    agrees_with_the_oracle._hypothesis_internal_use_seed = seed
    agrees_with_the_oracle()


# ---- gradients against differences -----------------------------------------------------------------------------------------------------

N = 4


def everything(rng) -> dict:
    return {
        "bias": rng.standard_normal((2, 1, N, 1 + N)),
        "bias_grad": True,
        "mask": rng.random((1, 2, N, 1 + N)) < 0.8,
        "q_lengths": np.array([N, N - 1]),
        "kv_lengths": np.array([N, N + 1]),
        "softcap": 2.0,
        "dropout": 0.3,
        "rng": (5, 6),
        "score_mod": tilt,
        "score_mod_grad": tilt_grad,
        "causal": True,
    }


ONE_BY_ONE = {
    "plain": lambda rng: {},
    "bias": lambda rng: {"bias": rng.standard_normal((2, N, 1)), "bias_grad": True},
    "score_mod": lambda rng: {"score_mod": bend, "score_mod_grad": bend_grad},
    "softcap": lambda rng: {"softcap": 1.5},
    "everything": everything,
}


def losses(backend, inputs, weights, options):
    """``sum(do * o) + sum(dlse * lse)`` of a backend, or of the oracle (None)."""
    q, k, v, bias = inputs
    do, dlse = weights
    options = {name: x for name, x in options.items() if name != "bias_grad"} | ({} if bias is None else {"bias": bias})
    if backend is None:
        results = oracle(q, k, v, do, **options)
    else:
        results = run(backend, q, k, v, do, **options)
    return np.sum(do * results["o"]) + np.sum(np.where(np.isinf(results["lse"]), 0, dlse * results["lse"]))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.simulator(full=True)) for name in ONE_BY_ONE])
def test_gradients_equal_central_differences(backend, name):
    """The backend's gradients in float64 against differences of the oracle's loss, and of its own along a random direction."""
    rng = np.random.default_rng(3)
    *inputs, do = random_inputs(batch=(2,), hq=2, hk=1, nq=N, nk=N + 1, d=3, dv=2, dtype="float64", seed=4)
    options, dlse, step = ONE_BY_ONE[name](rng), rng.standard_normal((2, 2, N)), 1e-5
    inputs.append(options.get("bias"))
    results = run(backend, *inputs[:3], do, dlse=dlse, **options)
    for at, gradient in enumerate(("dq", "dk", "dv", "dbias")):
        if inputs[at] is None:
            continue
        difference = np.zeros_like(inputs[at])
        for element in np.ndindex(inputs[at].shape):
            moved = [x if x is None else x.copy() for x in inputs]
            moved[at][element] += step
            above = losses(None, moved, (do, dlse), options)
            moved[at][element] -= 2 * step
            difference[element] = (above - losses(None, moved, (do, dlse), options)) / (2 * step)
        np.testing.assert_allclose(results[gradient], difference, rtol=0, atol=1e-7 * np.abs(difference).max(), err_msg=gradient)
    if SIMULATED:
        return
    direction = [None if x is None else rng.standard_normal(x.shape) for x in inputs]
    along = lambda t: losses(backend, [x if x is None else x + t * y for x, y in zip(inputs, direction, strict=True)], (do, dlse), options)
    expected = sum(np.sum(results[n] * y) for n, y in zip(("dq", "dk", "dv", "dbias"), direction, strict=True) if y is not None)
    assert abs((along(step) - along(-step)) / (2 * step) - expected) <= 1e-7 * max(1, abs(expected))
