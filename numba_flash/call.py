"""Prepared calls: a checked problem on arrays of known layouts, found again by a key, allocates its results and runs."""

from functools import partial
from typing import Any, NamedTuple

from numba_flash import plan
from numba_flash.arguments import arrays, checks
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.axes import TURNED, USUAL, Axes
from numba_flash.arguments.option_checks import is_state
from numba_flash.arguments.problem import Prepared, Problem, check_out_layout, check_values
from numba_flash.plan import choose, tier
from numba_flash.scoremod import functions as scoremod

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


given = partial(tuple.__new__, Given)  # of a tuple: in half the time of the class itself


class Wanted(NamedTuple):
    """A result: the name of the input that it resembles, its shape, and its dtype; None for that input's."""

    like: str
    shape: tuple[int, ...]
    dtype: str | None = None


def computed(prepare_call, names: tuple[str, ...], inputs, outs: tuple, given: Given, more: tuple):
    """What a public function computes, prepared once for all calls with arguments like these.

    Parameters
    ----------
    prepare_call : callable
        ``prepare_call(inputs, outs, given, *more)`` returns what `prepare` does; a function for each public one.
    names : tuple of str
        What errors call the inputs.
    inputs : named tuple
        Arrays, as the user gave them; None where absent.
    outs : tuple
        The user's places for the results, None where there is none.
    given : Given
        The other arguments that all functions have.
    more : tuple
        Those that they do not.
    """
    key, call = find(prepare_call, inputs, outs, given, more)
    if call is None:
        inputs, outs = inputs._make(map(checks.adopt, names, inputs)), tuple(map(checks.adopt, labels(outs), outs))
        given = Given(**checks.plain_numbers(given._asdict()))
        key, call = find(prepare_call, inputs, outs, given, more)
        if call is None:
            call = remember(key, prepare_call(inputs, outs, given, *more))
    return call.run(inputs, outs, given.rng)


def labels(outs: tuple) -> tuple[str, ...]:
    """What errors call places for results: those of gradients are a tuple, `forward` has one."""
    return ("out", "lse") if len(outs) == 2 else tuple(f"out[{i}]" for i in range(len(outs)))


class Found(NamedTuple):
    """Key of everything that a prepared call depends on but addresses and the generator's state, and that call, if there is one."""

    key: tuple | None
    call: Any


NOTHING = Found(None, None)


def find(prepare_call, inputs, outs: tuple, given: Given, more: tuple) -> Found:
    """What is prepared for these arguments. What a public function found last lies ready under its `prepare_call`.

    There is no key if an array is not plain, or `bind` is about to complain. Types are part of the key because 1 == 1.0 == True. Functions
    of the user are part of it with all that they reach now, and keep their own prepared calls, which are forgotten with them.
    """
    prepared = _prepared
    window, rng, function = given.window, given.rng, given.score_mod  # once, as each takes a while
    if rng is not None and is_state(rng):
        given = given._replace(rng=_STATE)
    try:
        if function is not None:
            score_mod = scoremod.find(function, given.score_mod_grad)
            given, prepared = given._replace(score_mod=score_mod, score_mod_grad=None), score_mod.prepared
        inner = () if window is rng is None else [tuple(map(type, x)) for x in given if isinstance(x, tuple)]
        settings = given + more
        # types first: what has those of a call that was prepared can be compared with its values
        key = (prepare_call, *map(type, settings), *inner, settings, *arrays.layouts(inputs + outs))
        last = prepared.get(prepare_call)
        if last is not None and last.key == key:  # in half the time that it takes to look it up
            return last
        found = Found(key, prepared.get(key))
        if found.call is not None and prepared is _prepared:
            prepared[prepare_call] = found
        return found
    except (AttributeError, TypeError):
        return NOTHING


def remember(key, call):
    """Keep a prepared call under its key, if it has one."""
    if key is not None:
        score_mod = call.problem.options.score_mod
        prepared = _prepared if score_mod is None else score_mod.prepared
        if len(prepared) >= _PREPARED_LIMIT:
            prepared.clear()
        prepared[key] = call
    return call


def prepare(kind: str, problem: Problem, backend: str | None, inputs, outs: tuple, wanted, **settings) -> "_Call":
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
    outs : tuple
        Places for results, None where there is none.
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
            arrays.check_size(name, getattr(inputs, what.like), _axes(inputs, name).shape(what.shape), what.dtype)
    module = tier(chosen)
    bound = partial(plan.prepare, chosen, kind, problem, **settings)
    through_gpu = arrays.library(inputs.q) == "numpy" and not module.takes_numpy()
    return (_CallThroughGpu if through_gpu else _Call)(bound, problem, inputs, outs, wanted)


def _axes(inputs, name: str) -> Axes:
    """Those that the user has of the result with that name."""
    return inputs.AXES if name in TURNED else USUAL


def _layouts(named):
    """The layouts of a named tuple of arrays."""
    return type(named)(*map(Layout.of, named))


class _Call:
    """A checked problem on arrays of known layouts: allocate the results, run, return them.

    Parameters
    ----------
    prepare : callable
        ``prepare(inputs, results)`` returns `Prepared` for all arrays of these layouts.
    problem : Problem
        What is computed.
    inputs, outs, wanted
        See `prepare`.
    """

    def __init__(self, prepare, problem: Problem, inputs, outs: tuple, wanted):
        self._prepare, self.problem, self._execute = prepare, problem, self._execute_first
        self._wanted, self._named = wanted, partial(tuple.__new__, type(wanted))
        self._new = [  # results to be allocated, by number
            (number, arrays.allocator(getattr(inputs, what.like), what.shape, what.dtype))
            for number, (what, out) in enumerate(zip(wanted, outs, strict=True))
            if what is not None and out is None
        ]
        self._outs = sum(out is not None for out in outs)
        self._meetings, self._device = None, arrays.device_id(inputs.q)
        self._current = None if self._device < 0 else arrays.cupy().cuda.runtime.getDevice
        self._draws = bool(problem.options.dropout)
        values = (name for name in ("q_lengths", "kv_lengths", "page_table") if hasattr(inputs, name))
        self._on_host = [name for name in values if arrays.library(getattr(inputs, name)) == "numpy"]
        self._sends, self._send = bool(self._on_host) and self._device >= 0, None

    def run(self, inputs, outs: tuple, rng: tuple[int, ...] | None):
        """The results, as a named tuple; `rng` is the generator's state."""
        if self._current is not None and self._current() != self._device:
            with inputs.q.device:  # where results and what is kept between kernels have to be
                return self.run(inputs, outs, rng)
        if self._outs:
            self._check_outs(inputs, outs)
        if self._on_host:
            inputs = self._checked(inputs)
        results, number = [*outs], 0
        try:
            for number, new in self._new:
                results[number] = new()
        except MemoryError as error:
            raise self._no_room(number, inputs) from error
        results = self._named(results)
        if self._draws:
            self._execute(inputs, results, tuple(map(int, rng)))
        else:
            self._execute(inputs, results)
        return results

    def _checked(self, inputs):
        """Inputs of which lengths and a table on the host have been looked at, and brought to the GPU that is current, if that is used."""
        if not self._sends:
            check_values(self.problem, inputs)
            return inputs
        if self._send is None:
            from numba_flash.cuda.work import prepare_lengths

            self._send = prepare_lengths.sender(self.problem, inputs, self._on_host, self._device)
        return self._send(inputs)

    def _no_room(self, number: int, inputs) -> MemoryError:
        """For that result."""
        name, what = self._wanted._fields[number], self._wanted[number]
        return arrays.memory_error(name, _axes(inputs, name).shape(what.shape), what.dtype or getattr(inputs, what.like).dtype)

    def _check_outs(self, inputs, outs: tuple) -> None:
        """That results may go to `outs`."""
        if self._sends:  # memory of the host, which no result shares
            inputs = inputs._replace(**dict.fromkeys(self._on_host))
        xs = [x for x in inputs + outs if x is not None]
        if self._meetings is None:  # later calls have the same layouts
            called = getattr(inputs, "CALLED", inputs._fields)
            others = {name: x for name, x in zip(called, inputs, strict=True) if x is not None}
            for label, (name, what), out in zip(labels(outs), self._wanted._asdict().items(), outs, strict=True):
                if out is not None:
                    dtype = what.dtype or getattr(inputs, what.like).dtype.name
                    check_out_layout(label, out, dtype, what.shape, others, _axes(inputs, name))
                    others[label] = out
            self._names, self._meetings = tuple(others), checks.meetings(xs, self._outs)
        checks.outs_memory(self._names, xs, self._meetings, self._outs, self._device < 0)

    def _execute_first(self, inputs, results, *state) -> None:
        """Prepare what runs from now on, and run it."""
        self._execute = self._prepare(_layouts(inputs), _layouts(results)).run
        self._execute(inputs, results, *state)


class _CallThroughGpu(_Call):
    """The same for NumPy arrays on a machine with a GPU: they go over and come back, through the device that was current at first."""

    def __init__(self, prepare, problem: Problem, inputs, outs: tuple, wanted):
        super().__init__(lambda inputs, results: Prepared(self._execute_on_gpu), problem, inputs, outs, wanted)
        self._gpu, self._prepare_on_gpu, self._there = arrays.current_gpu(), prepare, None

    def _execute_on_gpu(self, inputs, results, *state) -> None:
        with self._gpu:
            on_gpu = inputs._make(None if x is None else arrays.to_gpu(name, x) for name, x in inputs._asdict().items())
            there = results._make(
                None if x is None else arrays.empty(name, getattr(on_gpu, what.like), what.shape, what.dtype)
                for (name, x), what in zip(results._asdict().items(), self._wanted, strict=True)
            )
            if self._there is None:
                self._there = self._prepare_on_gpu(_layouts(on_gpu), _layouts(there))
            self._there.run(on_gpu, there, *state)
            for name, x, result in zip(results._fields, there, results, strict=True):
                if x is not None:
                    arrays.to_host(name, x, result)
