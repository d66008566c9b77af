"""Which backend runs a problem, and why every faster one does not."""

import importlib
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from numba_flash import arrays
from numba_flash.arrays import Layout
from numba_flash.problem import BackwardResults, ForwardResults, Prepared, Problem

Backend: TypeAlias = Literal["sm90", "sm80", "simt", "cpu"]  # fastest first
BACKENDS: tuple[Backend, ...] = get_args(Backend)
LEFT_TO: Backend = "simt"  # knows every number


@dataclass(frozen=True, repr=False)
class Plan:
    """The backend that will run, how it computes, and the reason of each faster one that will not; shown as a few readable lines.

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
        Kernels of a forward call, and rows x columns of the score matrix that each computes at a time.
    """

    backend: Backend
    problem: Problem
    algorithm: str
    refused: tuple[tuple[str, str], ...]
    tiles: tuple[tuple[str, tuple[int, int]], ...] = ()

    def __repr__(self) -> str:
        tiles = ", ".join(f"{kernel} {rows} x {columns}" for kernel, (rows, columns) in self.tiles)
        runs = f"runs on {self.backend}{' in tiles of ' * bool(tiles)}{tiles}: {self.algorithm}"
        return "\n".join([runs, *(f"  not {backend}: {reason}" for backend, reason in self.refused)])


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
        ``gpu``, if not the one that the arrays are on (see `numba_flash.cuda.launch.Gpu`); ``dbias``, True if the gradient of a bias is
        wanted.

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
            return Plan(name, problem, tier(name).algorithm(problem), tuple(refused))
        refused.append((name, reason))
    raise NotImplementedError("; ".join(f"backend {name}: {reason}" for name, reason in refused))


def tiles_of(backend: Backend, kind: str, problem: Problem, inputs, gpu=None) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Kernels of a call that compute scores, and rows and columns of their tiles; a `gpu` is that of `choose`."""
    device = arrays.device_id(inputs.q)
    if device < 0 and gpu is None and not tier(backend).takes_numpy():
        device = arrays.current_gpu().id  # where they will be copied
    there = lambda layout: layout and layout._replace(device=device)
    x = type(inputs)(*(there(Layout.of(each)) for each in inputs))
    like = lambda shape, dtype: there(Layout.compact(shape, dtype))
    if kind == "forward":
        results = ForwardResults(like((*x.q.shape[:-1], problem.dv), x.q.dtype), like(x.q.shape[:-1], problem.lse_dtype))
    else:
        results = BackwardResults(*(like(each.shape, each.dtype) for each in (x.q, x.k, x.v)))
    place = {} if gpu is None else {"gpu": gpu}
    prepared = prepare(backend, kind, problem, x, results, **place)
    return prepared.tiles or tuple(each.scores for each in prepared.launches if each.scores)


def prepare(backend: Backend, kind: str, problem: Problem, inputs, results, **settings) -> Prepared:
    """What a tier makes of a problem and layouts; the heads that it leaves, which it knows when it has run, are computed by `LEFT_TO`.

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
    first = getattr(tier(backend), f"prepare_{kind}")(problem, inputs, results, **settings)
    if first.left is None or 0 in first.left.shape:
        return first
    rest = getattr(tier(LEFT_TO), f"prepare_{kind}")(problem, inputs, results, left=first.left, **settings)

    def run(inputs, results, *state):
        rest.run(inputs, results, *state, left=first.run(inputs, results, *state))

    return Prepared(run, (*first.launches, *rest.launches))
