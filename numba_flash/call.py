"""Prepared calls: a checked problem on arrays of known layouts, found again by a key, allocates its results and runs."""

from functools import partial

from numba_flash import arrays, scoremod, spec
from numba_flash.options import MAX_OFFSET
from numba_flash.plan import choose, tier

_prepared: dict[tuple, "_Call"] = {}
_PREPARED_LIMIT = 4096
RNG, SCORE_MOD = 6, 7  # places of rng, and of score_mod and score_mod_grad, in `given`
_STATE = object()  # in the place of a state of the generator, which prepared calls do not depend on


def find(kind: str, inputs: tuple, outs: tuple, given: tuple, others: tuple):
    """Key of everything that a prepared call depends on but addresses and the generator's state, and that call, if there is one.

    Both are None if `bind` is about to complain. Types are part of the key because 1 == 1.0 == True. Functions of the user are part of it
    with all that they reach now, and keep their own prepared calls, which are forgotten with them.
    """
    if _is_state(given[RNG]):
        given = (*given[:RNG], _STATE, *given[RNG + 1 :])
    prepared = _prepared
    try:
        if given[SCORE_MOD] is not None:
            score_mod = scoremod.find(*given[SCORE_MOD:])
            given, prepared = (*given[:SCORE_MOD], score_mod), score_mod.prepared
        inner = [tuple(map(type, x)) for x in given if isinstance(x, tuple)]
        key = (kind, *map(arrays.layout, inputs), *map(arrays.layout, outs), given, *map(type, given), *inner, others)
        return key, prepared.get(key)
    except (AttributeError, TypeError):
        return None, None


def _is_state(rng) -> bool:
    """True for what `options.bind_dropout` accepts as a tuple (seed, offset)."""
    return type(rng) is tuple and [*map(type, rng)] == [int, int] and 0 <= rng[0] < 2**64 and 0 <= rng[1] < MAX_OFFSET


def remember(key, call):
    """Keep a prepared call under its key, if it has one."""
    if key is not None:
        score_mod = call.problem.options.score_mod
        prepared = _prepared if score_mod is None else score_mod.prepared
        if len(prepared) >= _PREPARED_LIMIT:
            prepared.clear()
        prepared[key] = call
    return call


def prepare(kind: str, problem: spec.Problem, backend: str | None, inputs: dict, results: dict, **settings) -> "_Call":
    """Choose a backend and bind it to the layouts of `inputs`.

    Parameters
    ----------
    kind : str
        ``"forward"`` or ``"backward"``.
    problem : Problem
        What is to be computed.
    backend : str or None
        Demanded by the user.
    inputs : dict
        Arrays by name, None where absent.
    results : dict
        Name: (input that it resembles, shape, dtype or None for that input's), or None where a result is not wanted.
    **settings
        What the backend's ``prepare_forward`` or ``prepare_backward`` takes besides.
    """
    spec.check_lengths(problem, inputs["q_lengths"], inputs["kv_lengths"])
    chosen = choose(problem, inputs, backend, kind).backend
    for name, what in results.items():
        if what is not None:
            arrays.check_size(name, inputs[what[0]], what[1], what[2])
    module = tier(chosen)
    run = partial(getattr(module, f"prepare_{kind}"), problem, **settings)
    through_gpu = arrays.library(inputs["q"]) == "numpy" and not module.takes_numpy()
    return (_CallThroughGpu if through_gpu else _Call)(run, problem, inputs, results)


class _Call:
    """A checked problem on arrays of known layouts: allocate the results, run, return them.

    Parameters
    ----------
    prepare : callable
        ``prepare(inputs, results)`` returns ``run(inputs, results)`` for all arrays of the same layouts, with dropout
        ``run(inputs, results, rng)``.
    problem : Problem
        What is computed.
    inputs, results : dict
        See `prepare`.
    """

    def __init__(self, prepare, problem: spec.Problem, inputs: dict, results: dict):
        self._prepare, self.problem, self._run = prepare, problem, None
        self._names = tuple(inputs)
        self._results = {name: what and (self._names.index(what[0]), *what[1:]) for name, what in results.items()}
        self._labels = ("out",) if "o" in results else tuple(f"out[{i}]" for i in range(len(results)))
        lengths = [self._names.index(name) for name in ("q_lengths", "kv_lengths") if inputs[name] is not None]
        on_gpu = arrays.library(inputs["q"]) == "cupy"
        self._host_lengths = [i for i in lengths if on_gpu and arrays.library(inputs[self._names[i]]) == "numpy"]

    def __call__(self, inputs: tuple, outs: tuple, rng: tuple[int, int] | None) -> tuple:
        if self.problem.options.sequences:
            inputs = self._check_lengths(inputs)
        results = self._allocate(inputs, outs)
        self._execute(inputs, results, ((int(rng[0]), int(rng[1])),) if self.problem.options.dropout else ())
        return results

    def _check_lengths(self, inputs: tuple) -> tuple:
        """The inputs, with lengths that came from the host beside q."""
        at = self._names.index
        spec.check_lengths(self.problem, inputs[at("q_lengths")], inputs[at("kv_lengths")])
        if not self._host_lengths:
            return inputs
        inputs = list(inputs)
        with inputs[at("q")].device:
            for i in self._host_lengths:
                inputs[i] = arrays.to_gpu(self._names[i], inputs[i])
        return tuple(inputs)

    def _allocate(self, inputs: tuple, outs: tuple) -> tuple:
        """The user's `outs`, checked, and new arrays in the place of those that are None."""
        if any(out is not None for out in outs):
            self._check_outs(inputs, outs)
        results = []
        for (name, what), out in zip(self._results.items(), outs, strict=True):
            if what is None or out is not None:
                results.append(out)
            else:
                results.append(arrays.empty(name, inputs[what[0]], what[1], what[2]))
        return tuple(results)

    def _check_outs(self, inputs: tuple, outs: tuple) -> None:
        others = {name: x for name, x in zip(self._names, inputs, strict=True) if x is not None}
        for label, what, out in zip(self._labels, self._results.values(), outs, strict=False):
            if out is not None:
                if self._run is None:  # later calls have the same layouts
                    spec.check_out_layout(label, out, inputs[what[0]].dtype.name, what[1], others)
                spec.check_out_memory(label, out, others)
                others[label] = out

    def _execute(self, inputs: tuple, results: tuple, state: tuple) -> None:
        if self._run is None:
            self._run = self._prepare(inputs, results)
        self._run(inputs, results, *state)


class _CallThroughGpu(_Call):
    """The same for NumPy arrays on a machine with a GPU: they go over and come back, through the device that was current at first."""

    def __init__(self, prepare, problem: spec.Problem, inputs: dict, results: dict):
        super().__init__(prepare, problem, inputs, results)
        self._gpu = arrays.current_gpu()

    def _execute(self, inputs: tuple, results: tuple, state: tuple) -> None:
        with self._gpu:
            self._execute_on_gpu(inputs, results, state)

    def _execute_on_gpu(self, inputs: tuple, results: tuple, state: tuple) -> None:
        on_gpu = tuple(None if x is None else arrays.to_gpu(name, x) for name, x in zip(self._names, inputs, strict=True))
        there = tuple(
            None if x is None else arrays.empty(name, on_gpu[what[0]], what[1], what[2])
            for (name, what), x in zip(self._results.items(), results, strict=True)
        )
        super()._execute(on_gpu, there, state)
        for name, x, result in zip(self._results, there, results, strict=True):
            if x is not None:
                arrays.to_host(name, x, result)
