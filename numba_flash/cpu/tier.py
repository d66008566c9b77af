"""FlashAttention-2 on the CPU: how the kernels of `numba_flash.cpu.kernels` are run.

Results do not depend on the number of threads that run them (`numba_flash.cpu.pool`).
"""

import math
from functools import partial

import numpy as np
from numba import typeof, types

from numba_flash.arguments import arrays
from numba_flash.arguments.block_mask import BlockSize
from numba_flash.arguments.options import dropout_threshold
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, Prepared
from numba_flash.cpu import scratch
from numba_flash.cpu.arguments import Cache, Extras, Parameters
from numba_flash.cpu.kernels import (
    BACKWARD_BLOCK_M,
    BACKWARD_BLOCK_N,
    BLOCK_M,
    BLOCK_N,
    backward_items,
    dbias_items,
    delta_items,
    dq_items,
    forward_items,
)
from numba_flash.cpu.pool import runner
from numba_flash.cpu.row_function import row_function_address
from numba_flash.cpu.sequences import pieces
from numba_flash.files import notice

ROW_GRAIN = 1024  # rows that are worth a block
# And operations: with less, waking another thread takes up to as long as the work itself. Measured: docs/lab/cpu.md, `GRAIN_FLOP`.
GRAIN_FLOP = 2**22


SCORES = {forward_items: (BLOCK_M, BLOCK_N), **dict.fromkeys((backward_items, dbias_items), (BACKWARD_BLOCK_M, BACKWARD_BLOCK_N))}
# No bias has the dtype that one most likely would have: then the same compiled kernels serve both.
NO_BIAS, NO_MASK = {dtype: np.empty((0,) * 5, dtype) for dtype in ("float32", "float64")}, np.empty((0,) * 5, np.uint8)

_entries = {}


# ---- running them -------------------------------------------------------------------------------------------------------------------


def _run(dispatcher, items: int, grain: int, *args) -> None:
    """Run a kernel over work items ``[0, items)``, at least `grain` of them at a time."""
    entry, largest = _entry(dispatcher, args), SCORES.get(dispatcher, (1, args[0].shape[-1]))
    accumulator = next(a.dtype for a in args if isinstance(a, np.ndarray) and a.dtype.kind == "f")
    with arrays.named(f"tiles of a thread in {dispatcher.__name__}, such as that of scores", largest, accumulator):
        runner(entry, items, grain, *args)


def _zeros(name: str, shape: tuple[int, ...], dtype):
    """Array of zeros that are one in memory; MemoryError naming it if there is no room."""
    with arrays.named(name, shape, dtype):
        return np.broadcast_to(np.zeros((), dtype), shape)


def _entry(dispatcher, args):
    """The kernel compiled for arrays of these dtypes, whatever their layout (the dispatcher would compile it for each layout)."""
    key = (dispatcher, *(a.dtype.char for a in args if isinstance(a, np.ndarray)), *(_kinds(a) for a in args if isinstance(a, tuple)))
    if key not in _entries:
        with notice.if_compiled(dispatcher):
            _entries[key] = dispatcher.compile((types.int64, types.int64, *map(_numba_type, args)))
    return _entries[key]


def _kinds(extras: tuple) -> str:
    """What the type of `extras` depends on."""
    return "".join(a.dtype.char for a in extras if isinstance(a, np.ndarray))


def _numba_type(x):
    if isinstance(x, np.ndarray):
        return types.Array(typeof(x).dtype, x.ndim, "A")
    if isinstance(x, tuple):
        kinds = [_numba_type(item) for item in x]
        return types.NamedTuple(kinds, type(x)) if kinds else types.Tuple(())
    return typeof(x)


def _bits(x):
    """The array as kernels see it: float16 as int16, bfloat16 as uint16; pages likewise."""
    if isinstance(x, Cache):
        return x._replace(pages=_bits(x.pages))
    return x.view({"float16": np.int16, "bfloat16": np.uint16}.get(x.dtype.name, x.dtype))


def why_not(kind: str, problem, inputs, demanded: bool, gpu=None, dbias=False) -> str | None:
    """Reason why this backend cannot run on such arrays, or None; it knows every dtype and option."""
    return None if isinstance(inputs.q, np.ndarray) else "CuPy arrays live on a GPU; copy them to NumPy to compute on the CPU"


def algorithm(problem) -> str:
    """How products and sums are computed: 16-bit floats become float32, exactly, before that."""
    if problem.dtype in ("float32", "float64"):
        return "IEEE products and sums"
    return "products and sums in float32"


def takes_numpy() -> bool:
    """True: kernels read NumPy arrays in place."""
    return True


def prepare_forward(problem, inputs, results) -> Prepared:
    """``run(inputs, results, rng)`` on arrays of 2 to 5 dimensions; `rng` is left out if there is no dropout."""
    if results.lse is None:
        scratch.foretell(problem, "forward")
    return Prepared(partial(_forward, problem), tiles=(("forward", (BLOCK_M, BLOCK_N)),))


def prepare_backward(problem, inputs, results, deterministic=True) -> Prepared:
    """``run(inputs, results, rng)`` likewise; always `deterministic`."""
    scratch.foretell(problem, "backward")
    sums = None if results.dbias is None else scratch.of_bias(problem, results.dbias)
    return Prepared(partial(_backward, problem, sums), tiles=(("backward", (BACKWARD_BLOCK_M, BACKWARD_BLOCK_N)),))


def _forward(problem, inputs, results, rng=None):
    problem = problem.with_state(rng)
    q, o = _five(problem, inputs.q, results.o)
    keys_of = _keys_of(problem, inputs)
    lse = None if results.lse is None else arrays.expand(results.lse, 4)
    bias, mask = _scores_like(problem, inputs.bias), _mask_blocks(problem, inputs.mask)
    for piece in pieces(problem, inputs.q_lengths, inputs.kv_lengths):
        rows = piece.queries(o), None if lse is None else piece.queries(lse)
        forward(piece.problem, piece.queries(q), *keys_of(piece), *rows, _extras(piece, bias, mask))
        piece.clear_queries(o, 0)
        if lse is not None:
            piece.clear_queries(lse, -np.inf)


def _backward(problem, sums, inputs, results, rng=None):
    problem, dbias = problem.with_state(rng), results.dbias
    do, q, k, v, o = _five(problem, inputs.do, inputs.q, inputs.k, inputs.v, inputs.o)
    dq, dk, dv = _five(problem, results.dq, results.dk, results.dv)
    lse = arrays.expand(inputs.lse, 4)
    dlse = None if inputs.dlse is None else arrays.expand(inputs.dlse, 4)
    bias, mask = _scores_like(problem, inputs.bias), _mask_blocks(problem, inputs.mask)
    if dbias is not None:
        (dbias_sum,) = sums.beside(dbias)
        dbias_sum.fill(0)
    for piece in pieces(problem, inputs.q_lengths, inputs.kv_lengths):
        own = BackwardInputs(
            piece.queries(do),
            piece.queries(q),
            piece.keys(k),
            piece.keys(v),
            piece.queries(o),
            piece.queries(lse),
            None if dlse is None else piece.queries(dlse),
        )
        gradients = BackwardResults(piece.queries(dq), piece.keys(dk), piece.keys(dv), None if dbias is None else piece.bias(dbias_sum))
        backward(piece.problem, own, gradients, _extras(piece, bias, mask))
        piece.clear_queries(dq, 0)
        piece.clear_keys(dk, 0)
        piece.clear_keys(dv, 0)
    if dbias is not None:
        with np.errstate(over="ignore"):
            dbias[...] = dbias_sum.reshape(dbias.shape)


def _five(problem, *operands) -> list:
    """Views with all five dimensions, heads before tokens."""
    return [arrays.expand(x.swapaxes(0, 1) if problem.options.packed else x, 5) for x in operands]


def _keys_of(problem, inputs):
    """``keys_of(piece)``: k and v of a sequence, views or pages."""
    if not problem.options.paged:
        k, v = _five(problem, inputs.k, inputs.v)
        return lambda piece: (piece.keys(k), piece.keys(v))
    tables = arrays.expand(inputs.page_table, 3)

    def keys_of(piece):
        b0, b1 = piece.batch
        table = tables[b0.start, b1.start, : -(-piece.problem.nk // problem.options.paged.size)].astype(np.int64)
        return Cache(inputs.k, table, piece.problem.nk), Cache(inputs.v, table, piece.problem.nk)

    return keys_of


def _scores_like(problem, x):
    """View of a bias with the shape of the scores."""
    return None if x is None else np.broadcast_to(x, (*problem.batch, problem.hq, problem.nq, problem.nk))


def _mask_blocks(problem, x):
    """View of a mask with an element for each of its blocks."""
    counts = _mask_size(problem).counts(problem.nq, problem.nk)
    return None if x is None else np.broadcast_to(x, (*problem.batch, problem.hq, *counts))


def _mask_size(problem) -> BlockSize:
    """Of its blocks."""
    return problem.options.blocks or BlockSize(1, 1)


def _extras(piece, bias, mask) -> Extras | tuple[()]:
    """The options as kernels see them."""
    problem, o = piece.problem, piece.problem.options
    if not o.modifies:
        return ()
    number = types.float64 if problem.dtype == "float64" else types.float32
    parameters = Parameters(
        softcap=float(o.softcap),
        score_mod=0 if o.score_mod is None else row_function_address(o.score_mod, number),
        keep_scale=1 / (1 - o.dropout),
        seed=np.uint64(o.generator.seed),
        offset=np.uint64(o.generator.offset),
        threshold=np.uint64(dropout_threshold(o.dropout)),
        first_query=o.generator.first_query,
        first_key=o.generator.first_key,
        batch0=piece.number,
        query0=0,
        mask_queries=_mask_size(problem).queries,
        mask_keys=_mask_size(problem).keys,
    )
    bias = NO_BIAS["float64" if problem.dtype == "float64" else "float32"] if bias is None else _bits(piece.scores(bias))
    mask = NO_MASK if mask is None else mask[piece.batch].view(np.uint8)
    return Extras(bias, mask, parameters)


def forward(problem, q, k, v, o, lse, extras=()):
    """Attention by Algorithm 1 of FlashAttention-2 (arXiv:2307.08691).

    Parameters
    ----------
    problem : numba_flash.arguments.problem.Problem
        What to compute.
    q, k, v : numpy.ndarray
        Inputs (b0, b1, heads, n, d), of any strides; k and v may be a `Cache` each.
    o : numpy.ndarray
        Receives the result (b0, b1, hq, nq, dv).
    lse : numpy.ndarray or None
        Receives the logarithm of the softmax denominators (b0, b1, hq, nq); float32, or float64 for float64 inputs.
    extras : Extras or empty tuple
        The options; without, this is plain attention.
    """
    if lse is None:
        (lse,) = scratch.of_forward(problem).beside(o)
    items = math.prod(o.shape[:3]) * -(-problem.nq // BLOCK_M)
    grain = _grain(problem, min(problem.nq, BLOCK_M), problem.nk)
    arguments = *map(_bits, (q, k, v, o)), lse, extras, float(problem.scale), problem.low, problem.high
    runner.call(lambda: _run(forward_items, items, grain, *arguments))


def backward(problem, inputs, results, extras=()):
    """Gradients of attention by Algorithm 2 of FlashAttention-2 (arXiv:2307.08691), deterministic.

    Parameters
    ----------
    problem : numba_flash.arguments.problem.Problem
        What was computed.
    inputs : numba_flash.arguments.problem.BackwardInputs
        The gradient of o, and what `forward` received and wrote, of five dimensions (lse of four); dlse may be None.
    results : numba_flash.arguments.problem.BackwardResults
        dq, dk, dv receive the gradients, with the shapes of q, k and v. The gradient of the bias is added to dbias (b0, b1, hq, nq, nk),
        if there is one, summed over its axes of size 1; in the dtype of lse.
    extras : Extras or empty tuple
        The options; without, this is plain attention.
    """
    dq, dk, dv, dbias = results
    if 0 in (inputs.q.size, inputs.k.size):
        for gradient in (dq, dk, dv):
            gradient[...] = 0
        return
    do, q, k, v, o = map(_bits, (inputs.do, inputs.q, inputs.k, inputs.v, inputs.o))
    lse, dlse = inputs.lse, inputs.dlse
    p, units, group, waves = problem, math.prod(k.shape[:3]), problem.hq // problem.hk, scratch.Waves.of(problem)
    chunks, panel, wave, round_sums = waves.chunks, waves.panel, waves.heads, waves.rounds(p)
    grain = _grain(p, max(16, group * panel), -(-p.nk // chunks))  # keys are packed for one query, too
    buffer, delta, *sums = scratch.of_backward(p, waves).beside(lse)
    dlse = _zeros("dlse", lse.shape, lse.dtype) if dlse is None else dlse
    sums = [_for_each_head(own, x) if round_sums else _bits(x) for own, x in zip(sums, (dk, dv), strict=True)]

    def passes():
        _run(delta_items, delta.size, ROW_GRAIN, do, o, delta, dlse)
        for unit in range(0, units, wave):
            heads = min(wave, units - unit)
            for i0 in range(0, p.nq, panel):
                i = slice(i0, min(i0 + panel, p.nq))
                dq_partial = buffer[:heads, :, :, : i.stop - i0]
                rows = do[:, :, :, i], q[:, :, :, i], k, v, lse[..., i], delta[..., i]
                more = _panel(extras, i), float(p.scale), p.low + i0, p.high + i0, unit, i0 > 0
                _run(backward_items, heads * chunks, grain, *rows, dq_partial, *sums, *more)
                _run(dq_items, heads * group * (i.stop - i0), ROW_GRAIN, dq_partial, _bits(dq)[:, :, :, i], unit, extras)
            if round_sums:
                head = np.unravel_index(unit, k.shape[:3])
                with np.errstate(over="ignore"):
                    dk[head], dv[head] = sums[0][head], sums[1][head]
        if dbias is not None:
            sizes = (*p.batch, p.hq, -(-p.nq // BACKWARD_BLOCK_M), -(-p.nk // BACKWARD_BLOCK_N))
            items = math.prod(1 if n == 1 else size for n, size in zip(dbias.shape, sizes, strict=True))
            _run(dbias_items, items, 1, do, q, k, v, lse, delta, dbias, extras, float(p.scale), p.low, p.high)

    runner.call(passes)


def _grain(problem, rows: int, keys: int) -> int:
    """Work items of so many scores that are worth a block of their own, and so waking a thread for it."""
    return max(1, GRAIN_FLOP // max(1, 2 * rows * keys * (problem.d + problem.dv)))


def _panel(extras, i: slice):
    """The options for the queries `i` alone."""
    if not extras:
        return extras
    parameters = extras.parameters._replace(query0=i.start)
    return Extras(extras.bias[:, :, :, i], extras.mask, parameters)


def _for_each_head(head, x):
    """One head in the place of all those of `x`: where its panels add up without being rounded."""
    return np.lib.stride_tricks.as_strided(head, x.shape, (0, 0, 0, *head.strides))
