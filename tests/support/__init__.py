"""What the tests share: backends, random inputs, memory layouts, and the rule that says how accurate a result has to be."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import numba_flash
from numba_flash.arguments.problem import BackwardInputs, ForwardInputs, bind
from numba_flash.plan import on_paper as layouts_on_paper
from numba_flash.plan import tiles_of
from support import whole

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
MANY = 512  # queries and keys that are not few to any tier
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def named(values, quick, name=str) -> list:
    """Parameters, called by `name`; those whose name is not among the `quick` ones run with ``--full`` alone."""
    return [pytest.param(x, id=name(x), marks=() if name(x) in quick else pytest.mark.full) for x in values]


def readable(value) -> str:
    """Part of a test's id that says what a parameter is, the same in every process: without an object's address, which repr may show."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={readable(x)}" for name, x in value.items()) or "default"
    if isinstance(value, tuple | list):
        items = ", ".join(map(readable, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name}{value.shape}"
    if value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        return str(value)[:40]
    return getattr(value, "__name__", type(value).__name__)


@dataclass(frozen=True)
class Backend:
    """One way to run the library: the backend to demand, and the library whose arrays go in and come out.

    Only one that `refuses` some problems may say that it does not serve one; from the others that is an error.
    """

    name: str
    library: str
    refuses: bool = False

    @property
    def tensor_cores(self) -> bool:
        """Its products are those of 16-bit floats, in which what is hidden is multiplied by 0."""
        return self.name in ("sm90", "sm80")

    def to_device(self, x):
        if self.library == "numpy":
            return x
        if isinstance(x, numba_flash.BlockMask):
            return numba_flash.BlockMask(self.to_device(x.blocks), x.block_size)
        import cupy

        return cupy.asarray(x)

    def to_host(self, x) -> np.ndarray:
        if self.library == "numpy":
            assert isinstance(x, np.ndarray)
            return x
        import cupy

        assert isinstance(x, cupy.ndarray)
        return cupy.asnumpy(x)

    def forward(self, q, k, v, **options):
        return self._or_skip(numba_flash.forward, q, k, v, **options)

    def backward(self, do, q, k, v, o, lse, **options):
        return self._or_another(numba_flash.backward, do, q, k, v, o, lse, **options)

    def vjp(self, q, k, v, **options):
        return self._or_skip(numba_flash.vjp, q, k, v, **options)

    def forward_packed(self, *arrays, **options):
        return self._or_skip(numba_flash.forward_packed, *arrays, **options)

    def forward_paged(self, *arrays, **options):
        return self._or_skip(numba_flash.forward_paged, *arrays, **options)

    def backward_packed(self, *arrays, **options):
        return self._or_another(numba_flash.backward_packed, *arrays, **options)

    def _refused(self, error: NotImplementedError) -> bool:
        """Whether the backend says that it does not serve a problem; the machine says so of an instruction that it does not know."""
        return self.refuses and str(error).startswith("backend ")

    def _or_another(self, function, *arrays, **options):
        """The result; of a problem that this backend refuses that of the one which is then chosen: it may serve the forward pass alone."""
        try:
            return function(*arrays, backend=self.name, **options)
        except NotImplementedError as error:
            if not self._refused(error):
                raise
            return function(*arrays, **options)

    def _or_skip(self, function, *arrays, **options):
        """The result; a problem that this backend refuses is left out of the test, with its sentence as the reason."""
        try:
            return function(*arrays, backend=self.name, **options)
        except NotImplementedError as error:
            if not self._refused(error):
                raise
            pytest.skip(str(error))

    def blocks(self, kernel: str, dtype: str, d: int) -> tuple[int, int]:
        """Queries and keys per tile of ``"forward"``, ``"dkdv"`` or ``"dq"``; where these two are one kernel, of that."""
        x = np.zeros((MANY, d), DTYPES[dtype])
        if kernel == "forward":
            kind, inputs = "forward", ForwardInputs(x, x, x)
        else:
            kind, inputs = "backward", BackwardInputs(x, x, x, x, x, x[:, 0])
        tiles = dict(tiles_of(layouts_on_paper(self.name, kind, bind(x, x, x), inputs)))
        rows, columns = tiles[kernel if kernel in tiles else next(iter(tiles))]
        return (columns, rows) if kernel == "dkdv" in tiles else (rows, columns)  # its rows are keys


def no_gpu(backend: str = "simt") -> str | None:
    """The reason that `numba_flash.plan` gives for not using a tier for GPUs where it could; None if there is a GPU for it."""
    x = np.zeros((1, 64), np.float16)
    return dict(numba_flash.plan(x, x, x).refused).get(backend)


# ---- inputs -------------------------------------------------------------------------------------------------------------------------

# Several tiles along both axes for every backend; the simulator, where a block takes 0.1 s, has its own small tiles.
NQ, NK, D, BATCH = (5, 9, 5, ()) if SIMULATED else (140, 530, 16, (2,))


def random_inputs(*, batch=BATCH, hq=1, hk=1, nq=NQ, nk=NK, d=D, dv=None, dtype="float32", seed=0, draw=None):
    """Host arrays q, k, v, do. Head dimensions `hq = hk = None` leave out the head axis. `draw(rng, shape)` defaults to N(0, 1)."""
    rng = np.random.default_rng(seed)
    dv = d if dv is None else dv
    draw = draw or (lambda rng, shape: rng.standard_normal(shape))
    heads = [() if h is None else (h,) for h in (hq, hk)]
    shapes = ((*batch, *heads[0], nq, d), (*batch, *heads[1], nk, d), (*batch, *heads[1], nk, dv), (*batch, *heads[0], nq, dv))
    return tuple(np.asarray(draw(rng, shape)).astype(DTYPES[dtype]) for shape in shapes)


def _padded(x: np.ndarray) -> np.ndarray:
    """A buffer of NaN that holds x in every second row and third column, from the second of each on."""
    buffer = np.full((*x.shape[:-2], 2 * x.shape[-2] + 1, 3 * x.shape[-1] + 1), np.nan).astype(x.dtype)
    buffer[..., 1::2, 1::3] = x
    return buffer


# Name: (buffer that holds the values, view of the buffer). Both work on NumPy and on CuPy arrays, so that strides survive the way to a GPU.
LAYOUTS = {
    "contiguous": (lambda x: x, lambda b: b),
    "heads last": (lambda x: x.swapaxes(-3, -2), lambda b: b.swapaxes(-3, -2)),
    "transposed": (lambda x: x.swapaxes(-2, -1), lambda b: b.swapaxes(-2, -1)),
    "reversed": (lambda x: x[..., ::-1, ::-1], lambda b: b[..., ::-1, ::-1]),
    "strided": (_padded, lambda b: b[..., 1::2, 1::3]),
}


def laid_out(backend: Backend, x: np.ndarray, layout: str = "contiguous"):
    """Array of the backend with the values of `x`, in one of `LAYOUTS`."""
    to_buffer, view = LAYOUTS[layout if x.ndim > 2 or layout != "heads last" else "contiguous"]
    laid = view(backend.to_device(np.ascontiguousarray(to_buffer(x))))
    assert laid.shape == x.shape
    return laid


# ---- accuracy -----------------------------------------------------------------------------------------------------------------------


def dense_visible(nq, nk, causal=False, window=None, q_start=None) -> np.ndarray:
    """The definition: boolean (nq, nk) matrix of which query sees which key."""
    q_start = nk - nq if q_start is None else q_start
    left, right = (-1, -1) if window is None else window
    visible = np.ones((nq, nk), bool)
    for i in range(nq):
        for j in range(nk):
            if (causal and j > i + q_start) or (left != -1 and j < i + q_start - left) or (right != -1 and j > i + q_start + right):
                visible[i, j] = False
    return visible


def _heads(x, group, dtype):
    x = x.astype(dtype)
    return np.repeat(x if x.ndim > 2 else x[None], group, axis=-3)


def _transpose(x):
    return np.swapaxes(x, -1, -2)


def standard_attention(q, k, v, do, *, rounded, scale=None, **options):
    """Textbook attention, forward and backward, with every intermediate matrix put through `rounded`; and the size of its sums.

    Returns
    -------
    results, sizes : dict
        Results by name; and for each name the largest root of the sum of the squares of its terms, which its rounding errors scale with.
    """
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    scale = dtype(q.shape[-1] ** -0.5 if scale is None else scale)
    hk, group = (1, 1) if q.ndim == 2 else (k.shape[-3], q.shape[-3] // max(k.shape[-3], 1))
    qh, kh, vh, doh = _heads(q, 1, dtype), _heads(k, group, dtype), _heads(v, group, dtype), _heads(do, 1, dtype)
    visible = dense_visible(q.shape[-2], k.shape[-2], **options)
    per_key_head = lambda x: x.reshape(*x.shape[:-3], hk, group, *x.shape[-2:]).sum(axis=-3)
    largest = lambda x: float(np.max(np.abs(x), initial=0.0))

    def softmax(s):
        s = np.where(visible, s, -np.inf)
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(m == -np.inf, 0, m))
        l = p.sum(axis=-1, keepdims=True)
        return p / np.where(l == 0, 1, l), (m + np.log(l))[..., 0]

    with np.errstate(divide="ignore"):
        s = scale * (qh @ _transpose(kh))
        _, lse = softmax(s)
        p = rounded(softmax(rounded(s))[0])
    o = rounded(p @ vh)
    dp = rounded(doh @ _transpose(vh))
    delta = (doh * o).sum(axis=-1, keepdims=True)
    ds = rounded(p * (dp - delta))
    results = {
        "o": o.reshape(do.shape),
        "lse": lse.reshape(do.shape[:-1]),
        "dq": rounded(scale * (ds @ kh)).reshape(q.shape),
        "dk": rounded(per_key_head(scale * (_transpose(ds) @ qh))).reshape(k.shape),
        "dv": rounded(per_key_head(_transpose(p) @ doh)).reshape(v.shape),
    }
    square = lambda x: np.square(x, dtype=np.float64)
    ds = square(p) * (square(doh) @ _transpose(square(vh)) + (square(doh) * square(o)).sum(axis=-1, keepdims=True))
    s_squared = np.maximum(square(s), scale**2 * (square(qh) @ _transpose(square(kh))))
    sizes = {
        "o": largest(square(p) @ square(vh)),
        "lse": 1.0,
        "dq": largest(scale**2 * (ds @ square(kh))),
        "dk": largest(scale**2 * per_key_head(_transpose(ds) @ square(qh))),
        "dv": largest(per_key_head(_transpose(square(p)) @ square(doh))),
        "scores": largest(np.where(visible, s_squared, 0)),
    }
    return results, {name: math.sqrt(size) for name, size in sizes.items()}


def allowed_error(ref, naive, *, factor: float, noise: float = 0.0) -> float:
    """FlashAttention's rule: `factor` times the error of the naive one in the same dtype, plus twice the data's rounding, plus `noise`."""
    finite = np.isfinite(ref)
    assert np.isfinite(naive[finite]).all(), "these inputs overflow the naive computation: it cannot serve as a yardstick"
    ref, naive = ref[finite], naive[finite]
    dtype = naive.dtype
    rounded = ((ref.astype(dtype) + dtype.type(0.3)).astype(dtype) - dtype.type(0.3)).astype(np.float64)
    naive_error = np.max(np.abs(naive.astype(np.float64) - ref), initial=0.0)
    return float(factor * naive_error + 2 * np.max(np.abs(rounded - ref), initial=0.0) + noise)


def assert_within(name: str, out: np.ndarray, ref: np.ndarray, allowed: float) -> None:
    """NaN and Inf are where the oracle has them, and no other element is further away than `allowed`."""
    out = np.asarray(out).astype(np.float64)
    assert out.shape == ref.shape
    np.testing.assert_array_equal(np.isnan(out), np.isnan(ref), err_msg=f"{name}: NaN in other places than in the oracle")
    infinite = np.isinf(ref)
    np.testing.assert_array_equal(np.where(np.isinf(out), out, 0), np.where(infinite, ref, 0), err_msg=f"{name}: Inf in other places")
    finite = np.isfinite(ref)
    error = np.max(np.abs(out[finite] - ref[finite]), initial=0.0)
    assert error <= allowed, f"{name}: error {error:.3g} exceeds {allowed:.3g} (largest value {np.max(np.abs(ref[finite])):.3g})"


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_as_accurate_as_naive(name, out, ref, naive, *, factor=2.0, noise=0.0):
    """`out` obeys FlashAttention's rule (see `allowed_error`)."""
    assert_within(name, out, ref, allowed_error(ref, naive, factor=factor, noise=noise))


def oracle(q, k, v, do, **options) -> dict:
    return dict(zip(("o", "lse", "dq", "dk", "dv"), whole.everything(do, q, k, v, **options), strict=True))


def allowed_errors(q, k, v, do, *, use_naive=True, **options) -> dict:
    """Allowed error of each result: the rule, plus eps * (sqrt(terms) + 2 |scores|) * (size of its terms) in the accumulation dtype.

    The second part is what different orders of summation, and the four roundings of a score (scale, product, to base 2 and back), may
    do; it matters where the naive computation is exact by luck (one key, say), and is all there is where the naive computation
    overflows (``use_naive=False``). For float64 it counts twice, as the oracle makes such errors too.
    """
    dtype, accumulator = q.dtype, np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    rounded = (lambda x: x.astype(dtype).astype(accumulator)) if use_naive else (lambda x: x)
    naive, sizes = standard_attention(q, k, v, do, rounded=rounded, **options)
    group = 1 if q.ndim == 2 else q.shape[-3] // max(k.shape[-3], 1)
    terms = max(k.shape[-2], group * q.shape[-2]) + q.shape[-1] + v.shape[-1]
    unit = np.finfo(accumulator).eps * (np.sqrt(terms) + 2 * sizes["scores"]) * (2 if dtype == np.float64 else 1)
    ref = oracle(q, k, v, do, **options)
    allowed = {}
    for name, x in ref.items():
        stored = accumulator if name == "lse" else dtype
        yardstick = naive[name].astype(stored) if use_naive else x.astype(stored)
        factor = 2.0 if name in ("o", "lse") else 3.0
        allowed[name] = allowed_error(x, yardstick, factor=factor, noise=float(unit * sizes[name]))
    return allowed


def run(backend: Backend, q, k, v, do, layouts=("contiguous",) * 4, **options) -> dict:
    """All results of forward and backward for host arrays, by name, on the host."""
    q, k, v, do = (laid_out(backend, x, layout) for x, layout in zip((q, k, v, do), layouts, strict=True))
    return run_here(backend, q, k, v, do, **options)


def run_here(backend: Backend, q, k, v, do, **options) -> dict:
    """All results of forward and backward for arrays of the backend, by name, on the host."""
    o, lse = backend.forward(q, k, v, return_lse=True, **options)
    dq, dk, dv = backend.backward(do, q, k, v, o, lse, **options)
    results = {name: backend.to_host(x) for name, x in (("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv))}
    for name, x in results.items():
        expected = q.dtype if name != "lse" else (np.float64 if q.dtype == np.float64 else np.float32)
        assert x.dtype == expected, f"{name} has dtype {x.dtype}"
    return results


def check(backend: Backend, q, k, v, do, layouts=("contiguous",) * 4, use_naive=True, **options) -> dict:
    """Run forward and backward on host arrays and compare every result with the oracle."""
    results = run(backend, q, k, v, do, layouts, **options)
    compare(results, q, k, v, do, use_naive=use_naive, **options)
    return results


def compare(results: dict, q, k, v, do, use_naive=True, **options) -> None:
    allowed = allowed_errors(q, k, v, do, use_naive=use_naive, **options)
    for name, ref in oracle(q, k, v, do, **options).items():
        assert_within(name, results[name], ref, allowed[name])
