"""Prepared calls: a checked problem on arrays of known layouts, found again by a key, allocates its results and runs."""

from functools import partial
from typing import Any, NamedTuple

from numba_flash import arrays, checks, plan, scoremod
from numba_flash.arrays import Layout
from numba_flash.options import is_state
from numba_flash.plan import choose, tier
from numba_flash.problem import Prepared, Problem, check_out_layout, check_values

_prepared: dict[tuple, "_Call"] = {}
_PREPARED_LIMIT = 4096
_STATE = object()  # in the place of a state of the generator, which prepared calls do not depend on


class Given(NamedTuple):
    """Arguments of a call that are not arrays, as the user gave them; but `precision` is `precisions.resolved`."""

    scale: Any
    causal: Any
    window: Any
    q_start: Any
    softcap: Any
    dropout: Any
    rng: Any
    score_mod: Any
    score_mod_grad: Any
    precision: Any


class Wanted(NamedTuple):
    """A result: the name of the input that it resembles, its shape, and its dtype; None for that input's."""

    like: str
    shape: tuple[int, ...]
    dtype: str | None = None


def find(kind: str, inputs: tuple, outs: tuple, given: Given, others: tuple):
    """Key of everything that a prepared call depends on but addresses and the generator's state, and that call, if there is one.

    Both are None if `bind` is about to complain. Types are part of the key because 1 == 1.0 == True. Functions of the user are part of it
    with all that they reach now, and keep their own prepared calls, which are forgotten with them.
    """
    if given.rng is not None and is_state(given.rng):
        given = given._replace(rng=_STATE)
    prepared = _prepared
    try:
        if given.score_mod is not None:
            score_mod = scoremod.find(given.score_mod, given.score_mod_grad)
            given, prepared = given._replace(score_mod=score_mod, score_mod_grad=None), score_mod.prepared
        inner = () if given.window is given.rng is None else [tuple(map(type, x)) for x in given if isinstance(x, tuple)]
        key = (kind, *map(arrays.layout, inputs), *map(arrays.layout, outs), given, *map(type, given), *inner, others)
        return key, prepared.get(key)
    except (AttributeError, TypeError):
        return None, None


def remember(key, call):
    """Keep a prepared call under its key, if it has one."""
    if key is not None:
        score_mod = call.problem.options.score_mod
        prepared = _prepared if score_mod is None else score_mod.prepared
        if len(prepared) >= _PREPARED_LIMIT:
            prepared.clear()
        prepared[key] = call
    return call


def prepare(kind: str, problem: Problem, backend: str | None, inputs, wanted, **settings) -> "_Call":
    """Choose a backend and bind it to the layouts of `inputs`.

    Parameters
    ----------
    kind : str
        ``"forward"`` or ``"backward"``.
    problem : Problem
        What is to be computed.
    backend : str or None
        Demanded by the user.
    inputs : ForwardInputs or BackwardInputs
        Arrays, None where absent.
    wanted : ForwardResults or BackwardResults
        What is `Wanted`, or None where a result is not.
    **settings
        What the backend's ``prepare_forward`` or ``prepare_backward`` takes besides.
    """
    check_values(problem, inputs)
    with_dbias = {"dbias": True} if getattr(wanted, "dbias", None) is not None else {}
    chosen = choose(problem, inputs, backend, kind, **with_dbias).backend
    for name, what in wanted._asdict().items():
        if what is not None:
            arrays.check_size(name, getattr(inputs, what.like), what.shape, what.dtype)
    module = tier(chosen)
    bound = partial(plan.prepare, chosen, kind, problem, **settings)
    through_gpu = arrays.library(inputs.q) == "numpy" and not module.takes_numpy()
    return (_CallThroughGpu if through_gpu else _Call)(bound, problem, inputs, wanted)


def _layouts(named):
    """The layouts of a named tuple of arrays."""
    return type(named)(*map(Layout.of, named))


def _place(allocate, out):
    """Where a result goes: to `out`, or into a new array; None if nobody wants it."""
    return out if out is not None or allocate is None else allocate()


class _Call:
    """A checked problem on arrays of known layouts: allocate the results, run, return them.

    Parameters
    ----------
    prepare : callable
        ``prepare(inputs, results)`` returns `Prepared` for all arrays of these layouts.
    problem : Problem
        What is computed.
    inputs, wanted : named tuples
        See `prepare`.
    """

    def __init__(self, prepare, problem: Problem, inputs, wanted):
        self._prepare, self.problem, self._run = prepare, problem, None
        self._wanted, self._of_wanted = wanted, tuple(wanted._asdict().items())
        self._allocators = tuple(
            None if what is None else arrays.allocator(name, getattr(inputs, what.like), what.shape, what.dtype)
            for name, what in self._of_wanted
        )
        self._reaches, self._device = None, arrays.device_id(inputs.q)
        self._current = None if self._device < 0 else arrays.cupy().cuda.runtime.getDevice
        self._has_lengths, self._draws = problem.options.sequences, bool(problem.options.dropout)
        self._labels = ("out",) if "o" in wanted._fields else tuple(f"out[{i}]" for i in range(len(wanted)))
        lengths = [name for name in ("q_lengths", "kv_lengths", "page_table") if getattr(inputs, name, None) is not None]
        on_gpu = arrays.library(inputs.q) == "cupy"
        self._host_lengths = [name for name in lengths if on_gpu and arrays.library(getattr(inputs, name)) == "numpy"]

    def __call__(self, inputs, outs: tuple, rng: tuple[int, ...] | None):
        if self._current is not None and self._current() != self._device:
            with inputs.q.device:  # where results and what is kept between kernels have to be
                return self(inputs, outs, rng)
        if self._has_lengths:
            inputs = self._check_lengths(inputs)
        results = self._allocate(inputs, outs)
        self._execute(inputs, results, (tuple(map(int, rng)),) if self._draws else ())
        return results

    def _check_lengths(self, inputs):
        """The inputs, with lengths and a table that came from the host beside q."""
        check_values(self.problem, inputs)
        if not self._host_lengths:
            return inputs
        with inputs.q.device:
            return inputs._replace(**{name: arrays.to_gpu(name, getattr(inputs, name)) for name in self._host_lengths})

    def _allocate(self, inputs, outs: tuple):
        """The user's `outs`, checked, and new arrays in the place of those that are None."""
        for out in outs:
            if out is not None:
                self._check_outs(inputs, outs)
                break
        return self._wanted._make(map(_place, self._allocators, outs))

    def _check_outs(self, inputs, outs: tuple) -> None:
        called = getattr(inputs, "CALLED", inputs._fields)
        named = [(name, x) for name, x in zip((*called, *self._labels), (*inputs, *outs), strict=False) if x is not None]
        if self._reaches is None:  # later calls have the same layouts
            others = {name: x for name, x in zip(called, inputs, strict=True) if x is not None}
            for label, what, out in zip(self._labels, self._wanted, outs, strict=False):
                if out is not None:
                    check_out_layout(label, out, what.dtype or getattr(inputs, what.like).dtype.name, what.shape, others)
                    others[label] = out
            self._reaches = [arrays.Reach.of(x) for _, x in named]
        checks.outs_memory(named, self._reaches, sum(x is not None for x in outs))

    def _execute(self, inputs, results, state: tuple) -> None:
        if self._run is None:
            prepared: Prepared = self._prepare(_layouts(inputs), _layouts(results))
            self._run = prepared.run
        self._run(inputs, results, *state)


class _CallThroughGpu(_Call):
    """The same for NumPy arrays on a machine with a GPU: they go over and come back, through the device that was current at first."""

    def __init__(self, prepare, problem: Problem, inputs, wanted):
        super().__init__(prepare, problem, inputs, wanted)
        self._gpu = arrays.current_gpu()

    def _execute(self, inputs, results, state: tuple) -> None:
        with self._gpu:
            self._execute_on_gpu(inputs, results, state)

    def _execute_on_gpu(self, inputs, results, state: tuple) -> None:
        on_gpu = inputs._make(None if x is None else arrays.to_gpu(name, x) for name, x in inputs._asdict().items())
        there = results._make(
            None if x is None else arrays.empty(name, getattr(on_gpu, what.like), what.shape, what.dtype)
            for (name, what), x in zip(self._of_wanted, results, strict=True)
        )
        super()._execute(on_gpu, there, state)
        for name, x, result in zip(self._wanted._fields, there, results, strict=True):
            if x is not None:
                arrays.to_host(name, x, result)
