"""What goes wrong on a GPU on purpose: machine code damaged on disk, no memory in the middle of a call, a function that changes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numba_flash
from numba_flash import call, reference

pytestmark = pytest.mark.gpu

HEADS, LENGTH, HEAD_DIM = 2, 150, 64


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


def normal(cp, dtype, seed, d=HEAD_DIM):
    return cp.asarray(np.random.default_rng(seed).standard_normal((HEADS, LENGTH, d)).astype(dtype))


class Allocator:
    """CuPy's pool, out of memory at the allocation number `fail`."""

    def __init__(self, cp, fail: int):
        self.cp, self.fail, self.count = cp, fail, 0

    def __call__(self, size):
        self.count += 1
        if self.count == self.fail:
            raise self.cp.cuda.memory.OutOfMemoryError(size, 0, 0)
        return self.cp.get_default_memory_pool().malloc(size)


@pytest.mark.parametrize("prepared", [False, True], ids=["new", "prepared"])
@pytest.mark.parametrize(("dtype", "d", "options"), [
    ("float16", 64, {}),
    ("float16", 64, {"out": True}),
    ("float16", 192, {}),
    ("float32", 64, {"bias_grad": True}),
])  # fmt: skip
def test_no_memory_in_the_middle_of_a_call(cp, dtype, d, options, prepared):
    """Whichever allocation fails, the error names an array, nothing else is harmed, and the same call later gives the same bits."""
    q, k, v, do = (normal(cp, dtype, seed, d) for seed in range(4))
    more = {"bias": cp.zeros((HEADS, LENGTH, 1), dtype)} if "bias_grad" in options else {}
    gradients = {"bias_grad": True} if more else {}
    # results that no tensor map can describe go by way of others, which must be allocated, too
    outs = [cp.zeros((HEADS, LENGTH, d + 1), dtype)[..., 1:] for _ in range(4)] if "out" in options else None
    before, after = ({"out": outs[0]}, {"out": tuple(outs[1:])}) if outs else ({}, {})

    def both():
        o, lse = numba_flash.forward(q, k, v, return_lse=True, **more, **before)
        return o, lse, *numba_flash.backward(do, q, k, v, o, lse, **more, **gradients, **after)

    on_host = lambda: [x.get() for x in both()]  # which may allocate, too
    expected, fail, said = on_host(), 0, []
    while True:
        if not prepared:
            call._prepared.clear()
        allocator = Allocator(cp, fail := fail + 1)
        with cp.cuda.using_allocator(allocator):
            try:
                both()
            except MemoryError as error:
                said.append(str(error))
        if allocator.count < fail:
            break  # there are no more allocations
        assert all(map(np.array_equal, on_host(), expected))
    assert len(said) >= 3
    assert all(": cannot allocate " in message for message in said), said


COMPUTE = """
import sys
import cupy
import numpy as np
import numba_flash
x = np.random.default_rng(0).standard_normal((2, 150, 64)).astype("float16")
np.save(sys.argv[1], numba_flash.forward(*(cupy.asarray(x) for _ in range(3))).get())
"""


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "emptied":
        data = b""
    else:
        data[len(data) // 2] ^= 16
    file.write_bytes(data)


def test_damaged_machine_code_is_never_loaded(cp, tmp_path):
    """Cut, emptied or with one bit flipped: it is compiled again, and the result is right."""
    environment = os.environ | {"NUMBA_FLASH_CACHE_DIR": str(tmp_path / "cache")}
    x = np.random.default_rng(0).standard_normal((2, 150, 64)).astype("float16")
    ref = reference.forward(x, x, x)
    for how in (None, "flipped", "cut", "emptied"):
        files = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
        if how is not None:
            assert files
            for file in files:
                damage(file, how)
        result = tmp_path / f"{how}.npy"
        subprocess.run([sys.executable, "-c", COMPUTE, str(result)], env=environment, check=True, timeout=120)
        assert np.linalg.norm(np.load(result) - ref) < 1e-3 * np.linalg.norm(ref)


SLOPE = 0.1


def linear(score, b, h, i, j):
    return score - SLOPE * abs(i - j)


def test_a_score_mod_whose_global_changes_is_compiled_anew(cp, monkeypatch):
    q, k, v = (normal(cp, "float32", seed) for seed in range(3))
    distance = abs(cp.arange(LENGTH)[:, None] - cp.arange(LENGTH)).astype("float32")
    for slope in (0.1, 1.5, 0.1):
        monkeypatch.setitem(globals(), "SLOPE", slope)
        with_function = numba_flash.forward(q, k, v, score_mod=linear)
        with_bias = numba_flash.forward(q, k, v, bias=-slope * distance)
        assert cp.allclose(with_function, with_bias, atol=1e-5)
