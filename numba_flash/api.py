"""`forward`, `backward`, `plan`: check, choose a backend, allocate, run, return."""

from functools import partial
from typing import Any, TypeAlias

from numba_flash import arrays, spec
from numba_flash.plan import Plan, choose, tier

Array: TypeAlias = Any
"""NumPy or CuPy array, or an object with ``__dlpack__`` or ``__cuda_array_interface__``."""

_prepared: dict[tuple, Any] = {}
_PREPARED_LIMIT = 4096


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_start: int | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Exact attention ``softmax(scale * q k^T + mask) v`` without the N x N matrix.

    FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1: tiles of keys and values stream past a block of queries whose running row
    maximum m and sum l rescale the output (online softmax).

    Parameters
    ----------
    q : array, shape (..., Hq, Nq, D)
        Queries; 2 to 5 dimensions, ``(N, D)`` means one head. float16, bfloat16 (ml_dtypes), float32 or float64; any strides, read in
        place. NumPy, CuPy, or any object with ``__dlpack__`` or ``__cuda_array_interface__``. 1 <= D <= 256.
    k : array, shape (..., Hk, Nk, D)
        Keys. Hq must be a multiple of Hk: query head h reads key head ``h // (Hq // Hk)`` (grouped-query attention).
    v : array, shape (..., Hk, Nk, Dv)
        Values; 1 <= Dv <= 256.
    scale : float, optional
        Factor of ``q . k``; default ``1 / sqrt(D)``.
    causal : bool
        Query i sees key j iff ``j <= i + q_start``.
    window : (int, int), optional
        Query i sees key j iff ``i + q_start - left <= j <= i + q_start + right``; -1 is no limit.
    q_start : int, optional
        Position of query 0 among the keys; default ``Nk - Nq`` (the last query is aligned with the last key). 0 aligns the first ones.
    return_lse : bool
        Also return the log-sum-exp of each row, which `backward` needs.
    out : array, shape (..., Hq, Nq, Dv), optional
        Written in place and returned; must not overlap an input.
    backend : str, optional
        Demand "simt" or "cpu" instead of the fastest that can run.

    Returns
    -------
    o : array, shape (..., Hq, Nq, Dv)
        In q's dtype, library and device. Rows that see no key are 0.
    lse : array, shape (..., Hq, Nq)
        Only with `return_lse`: natural logarithm of the row's sum of exponentials, float32 (float64 for float64); -inf where no key
        is seen.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or value; nothing was computed.
    NotImplementedError
        No backend, or not the one demanded, can run this; the message holds each one's reason.
    MemoryError
        Naming the array that could not be allocated.

    Notes
    -----
    Work on CuPy arrays goes onto CuPy's current stream and is not waited for. NumPy arrays are computed on the GPU where there is one.
    Equal inputs give equal bits.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> q = k = v = np.eye(4, dtype=np.float32)
    >>> numba_flash.forward(q, k, v, causal=True).round(2)
    array([[1.  , 0.  , 0.  , 0.  ],
           [0.38, 0.62, 0.  , 0.  ],
           [0.27, 0.27, 0.45, 0.  ],
           [0.22, 0.22, 0.22, 0.35]], dtype=float32)
    """
    q, k, v = arrays.adopt(q), arrays.adopt(k), arrays.adopt(v)
    key, call = _find((q, k, v), (out,), scale, causal, window, q_start, (backend, return_lse))
    if call is None:
        options = {"scale": scale, "causal": causal, "window": window, "q_start": q_start, "backend": backend}
        call = _remember(key, _prepare_forward(q, k, v, options, return_lse))
    o, lse = call((q, k, v), (out, None))
    return (o, lse) if return_lse else o


def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_start: int | None = None,
    out: tuple[Array, Array, Array] | None = None,
    backend: str | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of attention with respect to q, k and v; the probabilities are recomputed, tile by tile, from q, k and lse.

    FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2.

    Parameters
    ----------
    do : array, shape (..., Hq, Nq, Dv)
        Gradient with respect to o, in q's dtype.
    q, k, v, scale, causal, window, q_start, backend
        As given to `forward`.
    o, lse : array
        As returned by `forward` with ``return_lse=True``.
    out : tuple of three arrays, optional
        (dq, dk, dv), written in place and returned; must not overlap an input or each other.

    Returns
    -------
    dq, dk, dv : array
        In the shapes and dtype of q, k and v. Deterministic: every sum has one fixed order.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, MemoryError
        As `forward`.
    """
    inputs = tuple(map(arrays.adopt, (do, q, k, v, o, lse)))
    if out is None:
        out = (None, None, None)
    elif not isinstance(out, tuple) or len(out) != 3:
        raise TypeError(f"out must be a tuple (dq, dk, dv); got {type(out).__name__}")
    key, call = _find(inputs, out, scale, causal, window, q_start, (backend, None))
    if call is None:
        options = {"scale": scale, "causal": causal, "window": window, "q_start": q_start, "backend": backend}
        call = _remember(key, _prepare_backward(*inputs, options))
    return call(inputs, out)


def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_start: int | None = None,
    backend: str | None = None,
) -> Plan:
    """Which backend `forward` and `backward` will use for these arguments, and why every faster one was refused.

    Parameters are those of `forward`; nothing is computed, and the same errors are raised.

    Returns
    -------
    Plan
        Prints as a few readable lines.
    """
    q, k, v = map(arrays.adopt, (q, k, v))
    problem = spec.bind(q, k, v, scale=scale, causal=causal, window=window, q_start=q_start)
    return choose(problem, q, backend)


def _find(inputs: tuple, outs: tuple, scale, causal, window, q_start, others: tuple):
    """Key of everything that a prepared call depends on but the addresses, and that call, if there is one.

    Both are None if `bind` is about to complain. Types are part of the key because 1 == 1.0 == True.
    """
    try:
        values = (scale, causal, window, q_start, type(scale), type(causal), type(q_start), window and tuple(map(type, window)))
        key = (*map(arrays.layout, inputs), *map(arrays.layout, outs), values, others)
        return key, _prepared.get(key)
    except (AttributeError, TypeError):
        return None, None


def _remember(key, call):
    if key is not None:
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        _prepared[key] = call
    return call


def _prepare_forward(q, k, v, options: dict, return_lse: bool):
    problem, chosen = _choose(spec.bind, (q, k, v), options)
    shape = (*q.shape[:-1], problem.dv)
    results = {"o": (0, shape, None), "lse": (0, shape[:-1], problem.lse_dtype) if return_lse else None}
    return _call("prepare_forward", problem, chosen, {"q": q, "k": k, "v": v}, results)


def _prepare_backward(do, q, k, v, o, lse, options: dict):
    problem, chosen = _choose(spec.bind_backward, (do, q, k, v, o, lse), options)
    results = {"dq": (1, q.shape, None), "dk": (2, k.shape, None), "dv": (3, v.shape, None)}
    return _call("prepare_backward", problem, chosen, {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}, results)


def _choose(bind, inputs: tuple, options: dict):
    """The canonical problem and the name of the backend for it."""
    options = options.copy()
    backend = options.pop("backend")
    problem = bind(*inputs, **options)
    return problem, choose(problem, inputs[1], backend).backend


def _call(prepare: str, problem, backend: str, inputs: dict, results: dict):
    for name, what in results.items():
        if what is not None:
            arrays.check_size(name, inputs["q"], what[1], what[2])
    module = tier(backend)
    prepare = partial(getattr(module, prepare), problem)
    through_gpu = arrays.library(inputs["q"]) == "numpy" and not module.takes_numpy()
    return (_CallThroughGpu if through_gpu else _Call)(prepare, tuple(inputs), results)


class _Call:
    """A checked problem on arrays of known layouts: allocate the results, run, return them.

    Parameters
    ----------
    prepare : callable
        ``prepare(*inputs, *results)`` returns ``run(*inputs, *results)`` for all arrays of the same layouts.
    names : tuple of str
        Names of the inputs.
    results : dict
        Name: (index of the input that it resembles, shape, dtype or None for that input's), or None where a result is not wanted.
    """

    def __init__(self, prepare, names: tuple[str, ...], results: dict):
        self._prepare, self._names, self._results, self._run = prepare, names, results, None
        self._labels = ("out",) if "o" in results else tuple(f"out[{i}]" for i in range(3))

    def __call__(self, inputs: tuple, outs: tuple) -> tuple:
        results = self._allocate(inputs, outs)
        self._execute(inputs, results)
        return results

    def _allocate(self, inputs: tuple, outs: tuple) -> tuple:
        """The user's `outs`, checked, and new arrays in the place of those that are None."""
        others = dict(zip(self._names, inputs, strict=True))
        for label, what, out in zip(self._labels, self._results.values(), outs, strict=False):
            if out is not None:
                if self._run is None:  # later calls have the same layouts
                    spec.check_out_layout(label, out, inputs[what[0]].dtype.name, what[1], others)
                spec.check_out_memory(label, out, others)
                others[label] = out
        results = []
        for (name, what), out in zip(self._results.items(), outs, strict=True):
            if what is None or out is not None:
                results.append(out)
            else:
                results.append(arrays.empty(name, inputs[what[0]], what[1], what[2]))
        return tuple(results)

    def _execute(self, inputs: tuple, results: tuple) -> None:
        if self._run is None:
            self._run = self._prepare(*inputs, *results)
        self._run(*inputs, *results)


class _CallThroughGpu(_Call):
    """The same for NumPy arrays on a machine with a GPU: they go over and come back, through the device that was current at first."""

    def __init__(self, prepare, names: tuple[str, ...], results: dict):
        super().__init__(prepare, names, results)
        self._gpu = arrays.current_gpu()

    def _execute(self, inputs: tuple, results: tuple) -> None:
        with self._gpu:
            self._execute_on_gpu(inputs, results)

    def _execute_on_gpu(self, inputs: tuple, results: tuple) -> None:
        on_gpu = tuple(arrays.to_gpu(name, x) for name, x in zip(self._names, inputs, strict=True))
        there = tuple(
            None if x is None else arrays.empty(name, on_gpu[what[0]], what[1], what[2])
            for (name, what), x in zip(self._results.items(), results, strict=True)
        )
        super()._execute(on_gpu, there)
        for x, result in zip(there, results, strict=True):
            if x is not None:
                result[...] = x.get()
