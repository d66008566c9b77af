"""Which backend runs a problem, and why every faster one does not."""

import importlib
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from numba_flash import ledger, sections
from numba_flash.arguments import arrays
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, Prepared, Problem

Kind: TypeAlias = Literal["forward", "backward"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Backend: TypeAlias = Literal["sm90", "sm80", "simt", "cpu"]  # fastest first
BACKENDS: tuple[Backend, ...] = get_args(Backend)
FALLBACK: Backend = "simt"  # knows every number


@dataclass(frozen=True, repr=False)
class Plan:
    """The backend that will run, how it computes, what that takes, and the reason of each faster one that will not; shown as a few lines.

    Attributes
    ----------
    backend : str
        One of `BACKENDS`.
    problem : Problem
        The canonical problem.
    algorithm : str
        How products and sums are computed: a short phrase.
    refused : tuple of (str, str)
        Backend and sentence, fastest first.
    tiles : tuple of (str, (int, int))
        Kernels of a call, and rows x columns of the score matrix that each computes at a time.
    kind : str
        ``"forward"`` or ``"backward"``.
    scratch : int or None
        Bytes that a call allocates for itself, at most, beside inputs and results, and gives back: results over parts of the keys, rows,
        sums and the like. Not in it are tiles of a fixed size, which each thread has on the CPU, and copies of NumPy arrays on a GPU.
        None where nothing was prepared.
    recipes : tuple of str
        Main loops of a call, what they do to scores, how work is listed, and where dQ goes: rows of the backend's `recipes`, as those
        of `numba_flash.cuda.sm90.recipes`. None of simt and cpu.
    """

    backend: Backend
    problem: Problem
    algorithm: str
    refused: tuple[tuple[str, str], ...]
    tiles: tuple[tuple[str, tuple[int, int]], ...] = ()
    kind: Kind = "forward"
    scratch: int | None = None
    recipes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        tiles = ", ".join(f"{kernel} {rows} x {columns}" for kernel, (rows, columns) in self.tiles)
        runs = f"runs on {self.backend}{' in tiles of ' * bool(tiles)}{tiles}: {self.algorithm}"
        runs = runs if self.kind == "forward" else f"{self.kind} {runs}"
        takes = [] if self.scratch is None else [f"  scratch memory: {in_words(self.scratch) if self.scratch else 'none'}"]
        takes += [f"  kernels: {each}" for each in self.recipes]
        return "\n".join([runs, *takes, *(f"  not {backend}: {reason}" for backend, reason in self.refused)])


def in_words(size: float) -> str:
    """A number of bytes."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


MODULES = {
    "sm90": "numba_flash.cuda.sm90.tier",
    "sm80": "numba_flash.cuda.sm80.tier",
    "simt": "numba_flash.cuda.simt.tier",
    "cpu": "numba_flash.cpu.tier",
}


def tier(backend: str):
    """Module of a backend; imported when first needed."""
    return importlib.import_module(MODULES[backend])


def check_backend(backend) -> None:
    """Raise unless a user may demand it."""
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, or None; got {backend!r}")


def check_kind(kind) -> None:
    """Raise unless it is one of `KINDS`."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be {' or '.join(KINDS)}; got {kind!r}")


def choose(problem: Problem, inputs, backend: Backend | None, kind: str = "forward", **place) -> Plan:
    """First backend that can run `problem` on arrays like `inputs`, or the one the user demands.

    Parameters
    ----------
    problem : Problem
        What is to be computed.
    inputs : ForwardInputs or BackwardInputs
        Arrays.
    backend : str or None
        One of `BACKENDS`, demanded by the user.
    kind : str
        ``"forward"`` or ``"backward"``.
    **place
        ``gpu``, if not the one that the arrays are on (see `numba_flash.cuda.runtime.launch.Gpu`); ``dbias``, True if the gradient of a
        bias is wanted.

    Raises
    ------
    ValueError
        `backend` is not a name in `BACKENDS`.
    NotImplementedError
        The demanded backend, or every backend, refuses; the message holds each one's sentence.
    """
    check_backend(backend)
    refused = []
    for name in BACKENDS if backend is None else (backend,):
        reason = tier(name).why_not(kind, problem, inputs, backend is not None, **place)
        if reason is None:
            return Plan(name, problem, tier(name).algorithm(problem), tuple(refused), kind=kind)
        refused.append((name, reason))
    raise NotImplementedError("; ".join(f"backend {name}: {reason}" for name, reason in refused))


def results_of(problem: Problem, q) -> ForwardResults:
    """Layouts of what `forward` makes of an array, or layout, q."""
    x, shape = Layout.of(q), (*q.shape[:-1], problem.dv)
    return ForwardResults(Layout.like(x, shape, x.dtype), Layout.like(x, shape[:-1], problem.lse_dtype))


def backward_inputs(problem: Problem, inputs, dlse: bool = False) -> BackwardInputs:
    """Those of a forward pass, with layouts of what its backward pass takes besides, as `forward` makes it."""
    o, lse = results_of(problem, inputs.q)
    same = {name: getattr(inputs, name) for name in ForwardInputs._fields}
    return BackwardInputs(do=o, o=o, lse=lse, dlse=lse if dlse else None, **same)


class Settings(NamedTuple):
    """What a call does besides, where nothing is computed.

    Attributes
    ----------
    lse, dbias : bool
        Whether these are wanted.
    deterministic : bool
        As in `numba_flash.backward`.
    gpu : Gpu or None
        As `choose` says.
    """

    lse: bool = True
    dbias: bool = False
    deterministic: bool = True
    gpu: Any = None


AS_USUAL = Settings()


def detailed(chosen: Plan, inputs, settings: Settings = AS_USUAL) -> Plan:
    """The same with what is known once a call on arrays like `inputs` is prepared: tiles, scratch memory and kernels."""
    prepared = on_paper(chosen.backend, chosen.kind, chosen.problem, inputs, settings)
    return replace(chosen, tiles=tiles_of(prepared), scratch=prepared.scratch, recipes=prepared.recipes)


def tiles_of(prepared: Prepared) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Kernels of a call that compute scores, and rows and columns of their tiles."""
    return prepared.tiles or tuple(each.scores for each in prepared.launches if each.scores)


def on_paper(backend: Backend, kind: Kind, problem: Problem, inputs, settings: Settings = AS_USUAL) -> Prepared:
    """What a call on arrays like `inputs` runs, with results as it allocates them."""
    device = arrays.device_id(inputs.q)
    if device < 0 and settings.gpu is None and not tier(backend).takes_numpy():
        device = arrays.current_gpu().id  # where they will be copied
    there = lambda layout: layout and layout._replace(device=device)
    x = type(inputs)(*(there(Layout.of(each)) for each in inputs))
    like = lambda layout, shape, dtype: there(Layout.like(layout, shape, dtype))
    more = {} if settings.gpu is None else {"gpu": settings.gpu}
    if kind == "forward":
        o, lse = results_of(problem, x.q)
        results = ForwardResults(there(o), there(lse) if settings.lse else None)
    else:
        wanted = (x.q, x.k, x.v, *((x.bias,) if settings.dbias else ()))
        results = BackwardResults(*(like(each, each.shape, each.dtype) for each in wanted))
        more["deterministic"] = settings.deterministic
    return prepare(backend, kind, problem, x, results, **more)


def prepare(backend: Backend, kind: str, problem: Problem, inputs, results, **settings) -> Prepared:
    """What a tier makes of a problem and layouts; the heads that it leaves, which it knows when it has run, are computed by `FALLBACK`.

    Parameters
    ----------
    backend, kind
        As `choose` says.
    problem : Problem
        What is to be computed.
    inputs, results : named tuples of Layout
        Of the arrays.
    **settings
        What the tier's ``prepare_forward`` or ``prepare_backward`` takes besides.
    """
    with ledger.opened() as noted:
        prepared = _prepare_whole(backend, kind, problem, inputs, results, settings)
    if prepared.sums > sections.room(inputs) and sections.axis_of(problem).size > 1:
        whole = lambda problem, inputs, results: prepare(backend, kind, problem, inputs, results, **settings)
        with ledger.opened() as noted:
            prepared = sections.prepare(whole, problem, inputs, results, prepared.sums)
    ledger.note(sum(noted))
    return prepared._replace(scratch=sum(noted))


def _prepare_whole(backend: Backend, kind: str, problem: Problem, inputs, results, settings: dict) -> Prepared:
    """The same, all of it at the same time."""
    first = getattr(tier(backend), f"prepare_{kind}")(problem, inputs, results, **settings)
    if first.fallback is None or 0 in first.fallback.shape:
        return first
    rest = getattr(tier(FALLBACK), f"prepare_{kind}")(problem, inputs, results, fallback=first.fallback, **settings)

    def run(inputs, results, *state):
        rest.run(inputs, results, *state, fallback=first.run(inputs, results, *state))

    return Prepared(run, (*first.launches, *rest.launches), sums=first.sums, recipes=first.recipes)
