"""What a call hands to each kernel is what the kernel was prepared for: as many arrays, none smaller, and numbers of the same kinds.

A kernel that gets others reads beyond its arguments, and no driver says so. Random problems, on paper: nothing is compiled, nothing runs.
"""

import math

import numpy as np
import pytest
import random_problems
from support import SIMULATED

if SIMULATED:
    pytest.skip("its kernels get the arrays themselves", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the machine's stand-ins know what it compiles")

from kernels import in_place_of_launches

import numba_flash
from numba_flash.cuda import packing
from numba_flash.cuda.launch import Launch

GPUS = {"sm90": [(9, 0)], "sm80": [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0)], "simt": [(7, 0), (9, 0)]}


def bytes_of(x) -> int:
    """Of an array, or of a layout; None has none."""
    return 0 if x is None else math.prod(x.shape) * np.dtype(x.dtype).itemsize


class Compared:
    """In the place of a `Launch`'s call: its arguments beside those that were prepared; `seen` counts launches."""

    seen = 0

    def __init__(self, prepared: Launch):
        self.prepared = prepared

    def __call__(self, *operands, extras=(), numbers=None) -> None:
        prepared, Compared.seen = self.prepared, Compared.seen + 1
        expected = [layout for layout, *_ in (*prepared.maps, *prepared.operands, *prepared.extras)]
        found, wanted = (list(map(bytes_of, each)) for each in ((*operands, *extras), expected))
        assert len(found) == len(wanted), prepared.builder
        assert all(x >= y and (x > 0) == (y > 0) for x, y in zip(found, wanted, strict=True)), f"{prepared.builder}: {found}, {wanted}"
        if isinstance(numbers, bytes):
            numbers = packing.unpacked(numbers, prepared.numbers)
        if numbers is not None:
            assert list(map(type, packing.flat(numbers))) == list(map(type, packing.flat(prepared.numbers))), prepared.builder


def call(inputs, options, backend: str) -> int:
    """Forward and backward, as far as the backend serves them; returns how many of the two it did."""
    q, k, v, do = inputs
    of_forward = {name: x for name, x in options.items() if name not in ("bias_grad", "dlse")}
    o, lse, done = np.zeros_like(do), np.zeros(do.shape[:-1], np.float64 if q.dtype == "float64" else np.float32), 0
    for run in (
        lambda: numba_flash.forward(q, k, v, return_lse=True, backend=backend, **of_forward),
        lambda: numba_flash.backward(do, q, k, v, o, lse, backend=backend, **options),
    ):
        try:
            run()
            done += 1
        except NotImplementedError:  # the backend says why; so do its own tests
            pass
    return done


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", GPUS)
def test_calls_hand_over_what_was_prepared(backend, count, monkeypatch):
    monkeypatch.setattr(random_problems, "MOST", 2000)  # queries or keys: enough for keys in parts
    done, Compared.seen = 0, 0
    for number, structure in enumerate(random_problems.STRUCTURES):
        for problem in range(count):
            rng = np.random.default_rng((7, number, problem))
            capability, multiprocessors = GPUS[backend][rng.integers(len(GPUS[backend]))], int(rng.choice([1, 4, 132]))
            inputs, options = random_problems.drawn(structure, rng)
            options["scale"] = abs(options["scale"])
            with in_place_of_launches(Compared, multiprocessors, capability):
                try:
                    done += call(inputs, options, backend)
                except Exception as error:
                    error.add_note(f"structure {number}, problem {problem}, {capability}, {multiprocessors}: {structure}")
                    raise
    assert done >= count * len(random_problems.STRUCTURES) / 2
    assert Compared.seen >= done
