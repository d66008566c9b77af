"""Keys and values in pages on tensor cores: tiles of few queries and of many, against the oracle on what the pages stand for."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import SIMULATED, random_inputs, same_bits

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import HOPPER, SM80, machine
from support.naive import compare
from support.pages import Paged, forward, paged
from test_contract import AMPERE, SMALL, TURING

pytestmark = pytest.mark.machine

MANY = 8  # multiprocessors: enough for several parts of the keys
OPTIONS = np.random.default_rng(0)


class Case(NamedTuple):
    """A problem in pages of `size` keys; of (batch, query heads, key heads), so many queries, and lengths of each sequence's keys.

    Attributes
    ----------
    layouts : tuple of str
        Of q, and of pages of keys and values, see `support.LAYOUTS`.
    more : dict
        What else `pages.paged` is told.
    """

    size: int
    heads: tuple[int, int, int]
    nq: int
    lengths: tuple[int, ...]
    d: int = 64
    dv: int = 64
    dtype: str = "float16"
    options: dict = {}  # noqa: RUF012
    capability: tuple[int, int] = AMPERE
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    more: dict = {}  # noqa: RUF012


CASES = {
    "one query": Case(16, (2, 4, 1), 1, (300, 77), dtype="bfloat16"),
    "page of 1": Case(1, (2, 4, 2), 1, (150, 3)),
    "page of 1, D128": Case(1, (1, 4, 1), 2, (140,), d=128, dv=128, capability=HOPPER, options={"causal": True}),
    "page of 7": Case(7, (2, 6, 2), 3, (150, 64), dtype="bfloat16", options={"causal": True}),
    "page of 48": Case(48, (1, 4, 2), 2, (200,), d=128, dv=128, capability=HOPPER),
    "page of a tile": Case(128, (2, 4, 2), 1, (300, 128), options={"window": (100, 0)}),
    "page of two tiles": Case(256, (2, 2, 1), 4, (300, 511), options={"causal": True}),
    "int64, shared": Case(16, (3, 4, 2), 2, (130, 200, 40), more={"dtype": np.int64, "shared": 4, "more": 3}),
    "no keys": Case(16, (3, 4, 2), 2, (0, 16, 17)),
    "D256": Case(16, (1, 4, 1), 2, (150,), d=256, dv=256, capability=HOPPER),
    "D13, 7": Case(16, (2, 4, 2), 2, (70, 33), d=13, dv=7),
    "any strides": Case(5, (2, 4, 2), 3, (130, 64), d=72, dv=40, layouts=("strided", "reversed", "transposed")),
    "heads last": Case(16, (2, 4, 2), 3, (130, 64), layouts=("heads last",) * 3),
    "Turing": Case(16, (2, 4, 2), 2, (150, 31), capability=TURING),
    "little memory": Case(16, (2, 4, 2), 2, (150, 31), d=128, dv=128, capability=SMALL),
    "many queries": Case(16, (2, 4, 2), 70, (150, 90), options={"causal": True}),
    "many queries, D128": Case(12, (1, 2, 1), 90, (150,), d=128, dv=128, options={"window": (70, 0)}),
    "many queries, q_lengths": Case(16, (2, 2, 1), 70, (150, 90), options={"causal": True, "q_lengths": np.array([3, 70])}),
    "many queries, mask": Case(
        16,
        (2, 2, 2),
        70,
        (140, 96),
        options={"mask": OPTIONS.random((2, 2, 70, 144)) < 0.05, "bias": OPTIONS.standard_normal(144, np.float32)},
    ),
    "mask and bias": Case(
        16, (1, 4, 2), 3, (170,), options={"mask": OPTIONS.random((3, 176)) < 0.5, "bias": OPTIONS.standard_normal((4, 3, 176), np.float32)}
    ),
    "softcap": Case(16, (1, 4, 2), 3, (170,), options={"softcap": 2.0, "causal": True, "q_start": 120}),
}
AGAIN = ("one query", "many queries")


def arrays_of(case: Case, seed: int = 0) -> tuple[Paged, np.ndarray]:
    """What the functions get, and a gradient of o, which `naive.compare` takes."""
    batch, hq, hk = case.heads
    nk = max((*case.lengths, 1))
    q, k, v, do = random_inputs(batch=(batch,), hq=hq, hk=hk, nq=case.nq, nk=nk, d=case.d, dv=case.dv, dtype=case.dtype, seed=seed)
    return paged(q, k, v, np.array(case.lengths), case.size, seed=seed, **case.more), do


def run(case: Case, arrays: Paged, seed: int = 0, multiprocessors: int = MANY, resident: int | None = None) -> dict:
    with machine(seed, multiprocessors, resident, capability=case.capability):
        return forward(SM80, arrays, case.layouts, **case.options)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_pages(name):
    """Some in two orders of warps, copies and blocks, which give the same bits."""
    case = CASES[name]
    arrays, do = arrays_of(case)
    results = run(case, arrays)
    compare(results, arrays.q, arrays.k, arrays.v, do, kv_lengths=arrays.kv_lengths, **case.options)
    if name in AGAIN:
        again = run(case, arrays, seed=100, resident=3)
        assert all(same_bits(x, again[key]) for key, x in results.items())


@pytest.mark.full
def test_a_page_that_does_not_exist_gives_nan(monkeypatch):
    """For all of its sequence, whichever part of the keys would read it, and no other; nothing is read."""
    from numba_flash import call

    monkeypatch.setattr(call, "check_values", lambda *_: None)  # the machine's arrays are NumPy's, whose values could be checked
    case = CASES["one query"]
    arrays, _ = arrays_of(case)
    right = run(case, arrays)
    for t, page in ((0, -1), (18, len(arrays.k_pages))):
        table = arrays.page_table.copy()
        table[0, t] = page
        results = run(case, arrays._replace(page_table=table))
        for name, x in results.items():
            assert np.isnan(x[0].astype(np.float64)).all()
            assert same_bits(x[1], right[name][1])


@pytest.mark.full
def test_a_page_that_does_not_exist_in_64_bits(monkeypatch):
    """Its lower word alone would be a page; rows that do not see it are NaN too."""
    from numba_flash import call

    monkeypatch.setattr(call, "check_values", lambda *_: None)
    case = CASES["many queries"]._replace(more={"dtype": np.int64})
    arrays, _ = arrays_of(case)
    arrays.page_table[0, 8] += 2**32
    results = run(case, arrays)
    assert [[bool(np.isnan(x[b]).all()) for b in range(2)] for x in results.values()] == [[True, False]] * 2


@pytest.mark.full
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    *(st.sampled_from((1, 3, 16, 64)), st.integers(1, 16), st.lists(st.integers(0, 300), min_size=1, max_size=3)),
    *(st.one_of(st.none(), st.tuples(st.integers(-1, 200), st.integers(-1, 20))), st.integers(0, 3), st.integers(1, 9)),
)
def test_random_pages(size, nq, lengths, window, shared, multiprocessors):
    """Of one kernel for each size, so that few are compiled."""
    case = Case(size, (len(lengths), 6, 2), nq, tuple(lengths), options={"window": window or (5, 5)}, more={"shared": shared})
    arrays, do = arrays_of(case, seed=sum(lengths))
    results = run(case, arrays, multiprocessors=multiprocessors)
    compare(results, arrays.q, arrays.k, arrays.v, do, kv_lengths=arrays.kv_lengths, **case.options)
