"""What is to be computed: the frozen `Problem`, and `bind`, the only place that raises errors about a user's input."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from numba_flash.arguments import band, checks, option_checks, overlap, pages, precisions
from numba_flash.arguments.axes import HEADS_LAST, USUAL, Axes
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.options import PLAIN, Generator, Options
from numba_flash.arguments.pages import Pages
from numba_flash.arguments.precisions import Precision

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
PAGED_LENGTH = "page_table.shape[-1] * k_pages.shape[2]"
MAX_LENGTH = 2**30  # row and column indices, and their differences, stay within int32 in every kernel


class ForwardInputs(NamedTuple):
    """Arrays that `forward` reads; options that are absent are None. Packed sequences have their offsets as lengths.

    Attributes
    ----------
    AXES : Axes
        The order that the user has (see `axes.inputs_in`); here they are all in the usual one.
    """

    AXES = USUAL

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None


class ForwardResults(NamedTuple):
    """Arrays that `forward` writes; None where nobody wants one."""

    o: Any
    lse: Any


class BackwardInputs(NamedTuple):
    """Arrays that `backward` reads; options that are absent are None. Of its axes says the same."""

    AXES = USUAL

    do: Any
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    dlse: Any = None
    bias: Any = None
    mask: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None


class BackwardResults(NamedTuple):
    """Arrays that `backward` writes; None where nobody wants one."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None


class Prepared(NamedTuple):
    """What a tier makes of a problem and the layouts of its arrays.

    Attributes
    ----------
    run : callable
        ``run(inputs, results)`` on arrays of these layouts, with dropout ``run(inputs, results, rng)``.
    launches : tuple
        The kernels that it launches, each with its `builder` and `config`; they are loaded when they first run.
    fallback : Layout or None
        Of what `run` returns if another tier has to compute some heads, and add what they make of the gradient of a bias if one is
        wanted: int32 (b0, b1, heads of q), not 0 for those, the same for all that belong to one head of k.
    tiles : tuple of (str, (int, int))
        Name, rows and columns of the score tiles of what is not launched.
    sums : int
        Bytes of sums of dq among those, which have whole tiles for each head; `numba_flash.sections` bounds them.
    scratch : int
        Bytes that `run` allocates besides results, added up; `plan.prepare` fills it in.
    recipes : tuple of str
        The rows of the tier's tables that it was made by, in words (`numba_flash.cuda.recipe`); none where a tier has no tables.
    """

    run: Any
    launches: tuple = ()
    fallback: Any = None
    tiles: tuple = ()
    sums: int = 0
    scratch: int = 0
    recipes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Canonical form of one attention problem; everything below `bind` trusts it.

    Attributes
    ----------
    batch : tuple of two ints
        Leading dimensions; 1 where the arrays have fewer.
    hq, hk : int
        Query heads and key/value heads. Query head h reads key head ``h // (hq // hk)``.
    nq, nk, d, dv : int
        Queries, keys, head dimension of q and k, head dimension of v and o.
    dtype : str
        One of `DTYPES`.
    scale : float
        Factor of ``q . k``.
    low, high : int
        Query i sees key j iff ``low <= j - i <= high``; within ``[-nq, nk]`` (see `numba_flash.mask`).
    options : Options
        Everything else; `options.PLAIN` for plain attention.
    precision : str
        How accurate products of float32 arrays have to be at least, one of `precisions.PRECISIONS`; `precisions.USUAL` for other dtypes.
    first_batch : int
        Number of the first batch element, of a part of a problem whose random bits, or `score_mod`, know which one it is.
    """

    batch: tuple[int, int]
    hq: int
    hk: int
    nq: int
    nk: int
    d: int
    dv: int
    dtype: str
    scale: float
    low: int
    high: int
    options: Options = PLAIN
    precision: Precision = precisions.USUAL
    first_batch: int = 0

    @property
    def band(self) -> str:
        """Which keys the band hides from some query: ``"none"``, those ``"above"`` a diagonal, or ``"both"``, those below one, too."""
        return "both" if self.low > 1 - self.nq else "above" if self.high < self.nk - 1 else "none"

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    def with_state(self, rng: tuple[int, ...] | None) -> "Problem":
        """The same with the generator of dropout in the state `rng`, unless that is None."""
        return self if rng is None else replace(self, options=replace(self.options, generator=Generator(*rng)))


def bind(q, k, v, *, axes=USUAL, scale=None, causal=False, window=None, q_start=None, precision=None, **given) -> Problem:
    """Check the inputs of a forward pass and fold the options into a `Problem`; errors speak of the `axes` that the user has.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: not an array, arrays of different libraries, a dtype outside `DTYPES`, a non-integer option.
    ValueError
        An argument is of the right kind with a wrong value: rank, shape, byte order, alignment, range.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_array(name, x, axes)
    _check_same("k", k, "q", q)
    _check_same("v", v, "q", q)
    *batch, _, _, d = _shape(q)
    k_shape, v_shape = _shape(k), _shape(v)
    for name, shape in (("k", k_shape), ("v", v_shape)):
        if shape[:-3] != tuple(batch):
            raise ValueError(f"{name}.shape[:-3] {shape[:-3]} must equal q.shape[:-3] {tuple(batch)}")
    keys = _Keys(k_shape[-3], k_shape[-2], v_shape[-1], axes, f"k.shape[{axes.heads}]", f"k.shape[{axes.length}]", "v.shape[-1]")
    if k_shape[-1] != d:
        raise ValueError(f"k.shape[-1] ({k_shape[-1]}) must equal q.shape[-1] ({d})")
    if v_shape[-3:-1] != k_shape[-3:-1]:
        raise ValueError(f"v.shape[:-1] {axes.shape(v.shape)[:-1]} must equal k.shape[:-1] {axes.shape(k.shape)[:-1]}")
    return _fold(q, keys, scale, causal, window, q_start, precision, given)


class _Keys(NamedTuple):
    """How many heads and keys there are, columns of v, the user's axes of q, and what the user calls these numbers."""

    heads: int
    length: int
    columns: int
    axes: Axes
    of_heads: str
    of_length: str
    of_columns: str


def _fold(q, keys: _Keys, scale, causal, window, q_start, precision, given) -> Problem:
    """The problem of q and so many keys, whose arrays have been checked."""
    *batch, hq, nq, d = _shape(q)
    hk, nk, dv, axes = keys[:4]
    if hq % hk if hk else hq:
        raise ValueError(f"the number of heads q.shape[{axes.heads}] ({hq}) must be a multiple of {keys.of_heads} ({hk})")
    for name, size in (("q.shape[-1]", d), (keys.of_columns, dv)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name} ({size}) must be between 1 and {MAX_HEAD_DIM}")
    for name, size in ((f"q.shape[{axes.length}]", nq), (keys.of_length, nk)):
        if size > MAX_LENGTH:
            raise ValueError(f"{name} ({size}) must be at most {MAX_LENGTH}")
    low, high = band.bind(nq, nk, causal, window, q_start)
    scale = d**-0.5 if scale is None else checks.factor("scale", scale, q.dtype.name)
    more = option_checks.bind(q, (*q.shape[:-1], nk), given) if given else PLAIN
    more = replace(more, follows=q_start is None) if more.sequences else more
    precision = precisions.checked("precision", precisions.resolved(precision), ", or None")
    precision = precision if q.dtype.name == "float32" else precisions.USUAL
    return Problem((1,) * (2 - len(batch)) + tuple(batch), hq, hk, nq, nk, d, dv, q.dtype.name, scale, low, high, more, precision)


def bind_backward(do, q, k, v, o, lse, *, axes=USUAL, dlse=None, bias_grad=False, **given) -> Problem:
    """Check the inputs of a backward pass: those of `bind`, and the arrays of the shapes and dtypes that `forward` returns."""
    problem = bind(q, k, v, axes=axes, **given)
    _check_gradients(problem, {"do": do, "q": q, "o": o, "lse": lse, "dlse": dlse}, (*q.shape[:-1], v.shape[-1]), axes)
    check_differentiable(problem, bias_grad)
    return problem


def bind_packed(q, k, v, q_offsets, k_offsets, **given) -> Problem:
    """Check packed sequences: q (total, heads, d) and so on, and the boundaries of each sequence among the tokens."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_array(name, x, HEADS_LAST)
        if x.ndim != 3:
            raise ValueError(f"{name} must have 3 dimensions (tokens, heads, head_dim); got shape {tuple(x.shape)}")
    problem = bind(*(x.swapaxes(0, 1) for x in (q, k, v)), axes=HEADS_LAST, **given)
    for name, x in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        option_checks.check_offsets(name, x, q)
    if q_offsets.size != k_offsets.size:
        raise ValueError(f"k_offsets.shape {tuple(k_offsets.shape)} must equal q_offsets.shape {tuple(q_offsets.shape)}")
    packed = replace(
        problem.options,
        packed=True,
        follows=given.get("q_start") is None,
        q_lengths=q_offsets.dtype.name,
        kv_lengths=k_offsets.dtype.name,
    )
    return replace(problem, batch=(1, q_offsets.size - 1), options=packed)


def bind_paged(
    q, k_pages, v_pages, page_table, kv_lengths, *, scale=None, causal=False, window=None, q_start=None, precision=None, **given
) -> Problem:
    """Check keys and values in pages (pages, heads, size, d), and the table (..., most pages) of each sequence's."""
    _check_array("q", q, USUAL)
    pages.check(q, k_pages, v_pages, page_table)
    checks.layout("kv_lengths", kv_lengths)
    if isinstance(given.get("mask"), BlockMask):
        raise TypeError("mask must be an array, of pairs, where keys are in pages; got BlockMask")
    _, heads, size, _ = k_pages.shape
    length = page_table.shape[-1] * size
    keys = _Keys(heads, length, v_pages.shape[-1], USUAL, "k_pages.shape[1]", PAGED_LENGTH, "v_pages.shape[-1]")
    problem = _fold(q, keys, scale, causal, window, q_start, precision, given | {"kv_lengths": kv_lengths})
    return replace(problem, options=replace(problem.options, paged=Pages(size, page_table.dtype.name)))


def bind_packed_backward(do, q, k, v, o, lse, q_offsets, k_offsets, *, dlse=None, **given) -> Problem:
    """The same for the backward pass; lse and dlse are (heads, total)."""
    problem = bind_packed(q, k, v, q_offsets, k_offsets, **given)
    _check_gradients(problem, {"do": do, "q": q, "o": o, "lse": lse, "dlse": dlse}, (*q.shape[:-1], v.shape[-1]))
    check_differentiable(problem)
    return problem


def _check_gradients(problem, arguments: dict, o_shape: tuple[int, ...], axes: Axes = USUAL) -> None:
    """Check what backward takes beyond the inputs of forward."""
    lse_shape = o_shape[1::-1] if problem.options.packed else o_shape[:-1]
    expected = {
        "do": (problem.dtype, o_shape),
        "o": (problem.dtype, o_shape),
        "lse": (problem.lse_dtype, lse_shape),
        "dlse": (problem.lse_dtype, lse_shape),
    }
    for name, (dtype, shape) in expected.items():
        x = arguments[name]
        if name != "dlse" or x is not None:
            checks.layout(name, x)
            checks.library(name, x, "q", arguments["q"])
            checks.dtype_and_shape(name, x, dtype, shape, USUAL if "lse" in name else axes)


def check_differentiable(problem: Problem, bias_grad=False) -> None:
    """Check that there are the gradients which a backward pass of a problem makes, that of the bias if `bias_grad`."""
    if checks.flag("bias_grad", bias_grad) and problem.options.bias is None:
        raise ValueError("bias_grad needs a bias; got bias_grad=True with bias=None")
    score_mod = problem.options.score_mod
    if score_mod is not None and score_mod.gradient is None:
        raise ValueError("score_mod_grad must be the derivative of score_mod in a backward pass; got None")


def check_lengths(problem: Problem, q_lengths, kv_lengths, axes: Axes = USUAL) -> None:
    """Check the values of lengths or offsets that are NumPy arrays; those on a GPU are not looked at (see `numba_flash.forward`)."""
    if problem.options.packed:
        option_checks.check_values_of_offsets("q_offsets", q_lengths, problem.nq, "q.shape[0]")
        option_checks.check_values_of_offsets("k_offsets", kv_lengths, problem.nk, "k.shape[0]")
    else:
        option_checks.check_values_of_lengths("q_lengths", q_lengths, problem.nq, f"q.shape[{axes.length}]")
        what = PAGED_LENGTH if problem.options.paged else f"k.shape[{axes.length}]"
        option_checks.check_values_of_lengths("kv_lengths", kv_lengths, problem.nk, what)


def check_values(problem: Problem, inputs) -> None:
    """Check the values of lengths, and of a table of pages, that are NumPy arrays."""
    check_lengths(problem, inputs.q_lengths, inputs.kv_lengths, inputs.AXES)
    paged = problem.options.paged
    if paged is not None:
        pages.check_values("page_table", inputs.page_table, inputs.kv_lengths, paged.size, inputs.k.shape[0])


def check_out_layout(name: str, out: Any, dtype, shape: tuple[int, ...], inputs: dict[str, Any], axes: Axes = USUAL) -> None:
    """Check that `out` is of the kind, dtype and shape of a result, and that no element of it stands for another; `axes` as in `bind`."""
    checks.layout(name, out, copies=False)  # a copy is not what the user wants written
    checks.library(name, out, *next(iter(inputs.items())))
    checks.dtype_and_shape(name, out, dtype, shape, axes)
    if overlap.within(out):
        raise ValueError(f"{name} must not overlap itself; it has strides {axes.shape(out.strides)} for shape {axes.shape(out.shape)}")


def _shape(x) -> tuple[int, ...]:
    """Shape with the head axis present: ``(n, d)`` means one head."""
    return tuple(x.shape) if x.ndim > 2 else (1, *x.shape)


def _check_array(name: str, x, axes: Axes) -> None:
    """Raise unless `x` is an array with a supported rank and dtype."""
    checks.layout(name, x)
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{name}.dtype must be one of {', '.join(DTYPES)}; got {x.dtype.name}")
    if not axes.least <= x.ndim <= 5:
        raise ValueError(f"{name} must have {axes.least} to 5 dimensions (..., {axes.said}); got shape {axes.shape(x.shape)}")


def _check_same(name: str, x, other: str, y) -> None:
    checks.library(name, x, other, y)
    if x.dtype != y.dtype:
        raise TypeError(f"{name}.dtype ({x.dtype.name}) must equal {other}.dtype ({y.dtype.name})")
    if x.ndim != y.ndim:
        raise ValueError(f"{name}.ndim ({x.ndim}) must equal {other}.ndim ({y.ndim})")
