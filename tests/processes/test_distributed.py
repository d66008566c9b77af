"""`numba_flash.distributed`: who has which part is nothing but a way to compute the same."""

import inspect
import re
import threading
from collections import Counter

import numpy as np
import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SIMULATED, ieee_sums, named, random_inputs, same_bits

if SIMULATED:
    pytest.skip("parts are computed as anywhere", allow_module_level=True)

from support.mpi_group import PROCESSES, mpi
from support.thread_group import together

import numba_flash
import numba_flash.distributed as nd
from numba_flash import api
from numba_flash.distributed import agreement, carriers, communicators, layouts

LAYOUTS, ALGORITHMS = layouts.LAYOUTS, ("ring", "gather")
LENGTHS = np.array([25, 40])
GIVEN = {"layout": "contiguous", "causal": False, "dropout": 0.0}
GIVEN |= dict.fromkeys(("scale", "window", "q_start", "q_lengths", "kv_lengths", "softcap", "rng", "precision", "backend"))
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "window": {"window": (5, 3), "q_start": -4},
    "causal window": {"window": (9, 0), "q_start": 2},
    "softcap": {"softcap": 1.5, "causal": True},
    "lengths": {"kv_lengths": LENGTHS, "q_lengths": LENGTHS, "causal": True},
    "lengths of keys": {"kv_lengths": LENGTHS, "window": (8, 8), "q_start": 0},
}


def parts_of(comm, layout, algorithm, inputs, dlse=None, **options):
    """o, lse, dq, dk, dv of one process."""
    given = {"comm": comm, "layout": layout}
    do, q, k, v = (nd.shard(x, **given) for x in inputs)
    dlse = None if dlse is None else nd.shard(dlse, axis=-1, **given)
    given |= {"algorithm": algorithm, **options}
    o, lse = nd.forward(q, k, v, return_lse=True, **given)
    return (o, lse, *nd.backward(do, q, k, v, o, lse, dlse=dlse, **given))


def whole(comm, layout, results):
    """The same of all."""
    return [nd.unshard(x, comm=comm, layout=layout, axis=-1 if x.ndim == 3 else -2) for x in results]


def problem(nq=40, nk=40, dtype="float64", seed=0):
    q, k, v, do = random_inputs(batch=(2,), hq=4, hk=2, nq=nq, nk=nk, d=8, dtype=dtype, seed=seed)
    return do, q, k, v


def alone(inputs, dlse=None, **options):
    """The same in one process."""
    do, q, k, v = inputs
    o, lse = numba_flash.forward(q, k, v, return_lse=True, **options)
    return [o, lse, *numba_flash.backward(do, q, k, v, o, lse, dlse=dlse, **options)]


def check(size, layout, algorithm, inputs, **options):
    expected = alone(inputs, **options)
    results = together(size, lambda comm: whole(comm, layout, parts_of(comm, layout, algorithm, inputs, **options)))
    for of_process in results:
        if isinstance(of_process, Exception):
            raise of_process
        for x, y in zip(of_process, expected, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("options", named(OPTIONS, ("causal", "lengths")))
def test_processes_compute_what_one_does(layout, algorithm, options):
    check(3, layout, algorithm, problem(), **OPTIONS[options])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_of_lse(layout, algorithm):
    """Of each row, of more heads than one and of fewer rows in a piece than a process has."""
    inputs = problem(40, 24)
    dlse = np.random.default_rng(4).standard_normal(inputs[0].shape[:-1])
    check(2, layout, algorithm, inputs, dlse=dlse, causal=True, q_start=-10)


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 6), layout=st.sampled_from(LAYOUTS), algorithm=st.sampled_from((*ALGORITHMS, None)),
    nq=st.integers(0, 70), nk=st.integers(0, 70), causal=st.booleans(), left=st.integers(-1, 40), right=st.integers(-1, 40),
    q_start=st.none() | st.integers(-50, 50),
)  # fmt: skip
def test_any_sizes(size, layout, algorithm, nq, nk, causal, left, right, q_start):
    inputs = problem(nq, nk, seed=nq)
    dlse = np.random.default_rng(nk).standard_normal(inputs[0].shape[:-1])
    check(size, layout, algorithm, inputs, dlse=dlse, causal=causal, window=(left, right), q_start=q_start)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("state", [(3, 4), (3, 4, 5, 8)])
def test_dropout_has_the_bits_of_one_process(layout, algorithm, state):
    check(2, layout, algorithm, problem(36, 48), dropout=0.4, rng=state, window=(30, -1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_contiguous_parts_of_any_sizes(algorithm):
    inputs, cuts = problem(40, 40), ([0, 3, 30, 40], [0, 20, 20, 40])
    expected = alone(inputs, causal=True)

    def run(comm):
        own = [x[..., cut[comm.rank] : cut[comm.rank + 1], :] for x, cut in zip(inputs, (cuts[0], cuts[0], cuts[1], cuts[1]), strict=True)]
        o, lse = nd.forward(*own[1:], comm=comm, algorithm=algorithm, causal=True, return_lse=True)
        return whole(comm, "contiguous", (o, lse, *nd.backward(*own, o, lse, comm=comm, algorithm=algorithm, causal=True)))

    for results in together(3, run):
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_calls_give_equal_bits(algorithm):
    inputs = problem(dtype="float32")
    first, second = (together(4, lambda comm: parts_of(comm, "zigzag", algorithm, inputs, causal=True)) for _ in range(2))
    assert all(same_bits(x, y) for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parts_are_merged_unrounded(dtype):
    """Results of eight processes are as good as those of one; in float32, whose error in one depends on the CPU's matrix products, as good
    as IEEE sums one term after the other.
    """
    inputs = problem(64, 512, dtype)
    exact = alone([x.astype(np.float64) for x in inputs])[0]
    error = lambda o: np.sqrt(np.mean((o.astype(np.float64) - exact) ** 2))
    spread = together(8, lambda comm: whole(comm, "contiguous", parts_of(comm, "contiguous", "ring", inputs)))[0][0]
    assert spread.dtype == dtype
    if dtype == "float16":
        assert error(spread) <= 1.05 * error(alone(inputs)[0])
    else:
        _, q, k, v = inputs
        in_order = [[ieee_sums.forward(q[b, h], k[b, h // 2], v[b, h // 2])[0] for h in range(4)] for b in range(2)]
        assert error(spread) <= error(np.array(in_order))


# ---- who has what, and who does what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 7, 64, 101])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_position_belongs_to_one_process(n, size, layout):
    own = together(size, lambda comm: nd.positions(n, comm=comm, layout=layout))
    assert sorted(np.concatenate(own).tolist()) == [*range(n)]
    assert max(map(len, own)) - min(map(len, own)) <= (15 if layout == "contiguous" else 30)  # a counter, and what is left
    x = np.random.default_rng(n).standard_normal((3, n, 2))
    for axis, y in ((-2, x), (0, x.swapaxes(0, 1)), (2, x.swapaxes(1, 2))):
        parts = together(size, lambda comm, axis=axis, y=y: nd.shard(y, comm=comm, layout=layout, axis=axis))
        assert all(np.array_equal(part, y.take(at, axis)) for part, at in zip(parts, own, strict=True))
        again = together(size, lambda comm, axis=axis, parts=parts: nd.unshard(parts[comm.rank], comm=comm, layout=layout, axis=axis))
        assert all(np.array_equal(z, y) for z in again)


@pytest.mark.parametrize(("more", "expected"), [(0, "Gather"), (-1, "Ring")])
def test_the_size_of_k_and_v_decides_how_they_come(more, expected, monkeypatch):
    """Of all processes, and of their own heads, of which q has more."""
    inputs = problem()
    _, _, k, v = inputs
    monkeypatch.setattr(carriers, "GATHERED", k.nbytes + v.nbytes + more)
    made = []
    for name in ("Ring", "Gather"):
        carrier = getattr(carriers, name)
        monkeypatch.setattr(carriers, name, lambda *given, _name=name, _made=carrier: (made.append(_name), _made(*given))[1])
    check(2, "contiguous", None, inputs)
    assert made == [expected] * 4  # of two processes, both passes


def test_a_zigzag_balances_causal_work():
    seen = together(4, lambda comm: int((nd.positions(832, comm=comm, layout="zigzag") + 1).sum()))
    assert max(seen) == min(seen)
    alone = together(4, lambda comm: int((nd.positions(832, comm=comm, layout="contiguous") + 1).sum()))
    assert max(alone) > 6 * min(alone)


@pytest.mark.parametrize(
    ("layout", "options", "calls"),
    [
        ("contiguous", {}, [4, 4, 4, 4]),
        ("contiguous", {"causal": True}, [1, 2, 3, 4]),
        ("contiguous", {"window": (10, 0)}, [1, 2, 2, 2]),  # a part has 16 rows
        ("zigzag", {}, [4, 4, 4, 4]),
        ("zigzag", {"causal": True}, [6, 6, 6, 6]),  # three of its own keys, one of each other process's
    ],
)
def test_what_is_hidden_is_not_computed(layout, options, calls, monkeypatch):
    forward, made = api.forward, Counter()

    def counted(*x, **given):
        made[threading.current_thread().name] += 1
        return forward(*x, **given)

    monkeypatch.setattr(api, "forward", counted)
    together(4, lambda comm: parts_of(comm, layout, "ring", problem(64, 64), **options))
    assert [made[f"process {rank}"] for rank in range(4)] == calls


def test_keys_go_no_further_than_they_are_seen():
    """With a window of less than a part each process sends K and V to the next one, and a gradient comes back."""
    inputs, members = problem(64, 64), []
    run = lambda comm, **options: (members.append(comm), parts_of(comm, "contiguous", "ring", inputs, **options))
    together(4, lambda comm: run(comm, window=(10, 0)))
    together(4, run)
    near, far = (sum(comm.sent for comm in some) for some in (members[:4], members[4:]))
    assert near < far / 2


def test_short_sequences_are_gathered():
    """Up to 1 MiB of K and V of all processes, unless one says otherwise."""
    kind = {"ring": carriers.Ring, "gather": carriers.Gather}

    def chosen(comm, n, algorithm):
        x = np.empty((2, n // comm.size, 64), np.float32)
        call = agreement.agree(nd.forward, comm, {"q": x, "k": x, "v": x}, {**GIVEN, "algorithm": algorithm}, {})
        return type(carriers.carrier(call, x, x))

    for n, algorithm, expected in ((1024, None, "gather"), (1026, None, "ring"), (1024, "ring", "ring"), (1026, "gather", "gather")):
        assert together(2, lambda comm, n=n, algorithm=algorithm: chosen(comm, n, algorithm)) == [kind[expected]] * 2


# ---- errors ----------------------------------------------------------------------------------------------------------------------------


def test_one_set_of_options_serves_both_passes():
    """Numbers are the same, in whatever form each process has them."""
    inputs = problem()
    forms = {"window": ((5, 3), [5, 3]), "q_start": (-4, np.array(-4)), "scale": (0.5, np.array(0.5)), "kv_lengths": (LENGTHS, [25, 40])}

    def call(comm):
        both = {name: form[comm.rank] for name, form in forms.items()} | {"dlse": None, "return_lse": True, "comm": comm}
        do, q, k, v = (nd.shard(x, comm=comm) for x in inputs)
        o, lse = nd.forward(q, k, v, **both)
        return whole(comm, "contiguous", (o, lse, *nd.backward(do, q, k, v, o, lse, **both)))

    expected = alone(inputs, **{name: form[0] for name, form in forms.items()})
    for results in together(2, call):
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def errors(size, call) -> list:
    """What each process raises."""
    results = together(size, call)
    assert all(isinstance(x, Exception) for x in results), results
    return results


DIFFERENT = {
    "k.shape": (
        lambda x, rank: x | ({"k": x["k"][..., :7], "q": x["q"][..., :7]} if rank else {}),
        "q must be the same .* float64 .2, 4, N, 8.* in",
    ),
    "dtype": (lambda x, rank: {name: y.astype("float32") for name, y in x.items()} if rank == 2 else x, "in process 2"),
    "causal": (
        lambda x, rank: x | {"causal": rank == 1},
        "causal must be the same in all processes; got False in process 0 and True in process 1",
    ),
    "lengths": (lambda x, rank: x | {"kv_lengths": [np.array([3, 3 + rank])][0]}, "kv_lengths must be the same"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_processes_that_differ(case):
    change, message = DIFFERENT[case]

    def call(comm):
        q, k, v = (nd.shard(x, comm=comm) for x in problem()[1:])
        return nd.forward(**change({"q": q, "k": k, "v": v}, comm.rank), comm=comm)

    for error in errors(3, call):
        assert isinstance(error, ValueError), error
        assert re.search(message, str(error)), error


@pytest.mark.parametrize("has", [0, 1])
def test_what_only_one_process_has(has):
    """The first or another one: an array that may be absent must be there in all of them, or in none."""
    do, q, k, v = problem()

    def call(comm):
        own = [nd.shard(x, comm=comm) for x in (do, q, k, v, do)]
        of_rows = own[0][..., 0]
        return nd.backward(*own, of_rows, comm=comm, **({"dlse": of_rows} if comm.rank == has else {}))

    for error in errors(2, call):
        assert isinstance(error, ValueError), error
        assert re.search("^dlse must be the same in all processes; got (None|float64 .*) in process 0", str(error)), error


def test_default_precisions_that_differ():
    def call(comm):
        x = np.ones((1, 16, 8), np.float32)
        with numba_flash.use_precision("ieee" if comm.rank == 1 else "float32"):
            return nd.forward(x, x, x, comm=comm)

    for error in errors(3, call):
        assert re.search("^precision must be the same in all processes; got float32 in process 0 and ieee in process 1", str(error)), error


WRONG = {
    "an array": ({"v": 3}, TypeError, "^v must be a NumPy or CuPy array"),
    "a layout": ({"layout": "ring"}, ValueError, "^layout must be one of 'contiguous', 'zigzag'; got 'ring'"),
    "an algorithm": ({"algorithm": "tree"}, ValueError, "^algorithm must be one of 'ring', 'gather', None; got 'tree'"),
    "a mask": ({"mask": np.ones((40, 40), bool)}, NotImplementedError, "^numba_flash.distributed does not take mask: each process"),
    "an option of gradients": ({"dlse": 1.0}, TypeError, "^dlse must be None in a forward pass"),
    "an option of another library": (
        {"is_causal": True},
        TypeError,
        r"^numba_flash\.distributed\.forward\(\) got .*did you mean causal=True",
    ),
    "a flag": ({"return_lse": 1}, TypeError, "^return_lse must be True or False"),
    "a tracer": (
        {"q": type("Tracer", (), {"__dlpack__": lambda *x, **y: 1 / 0, "__dlpack_device__": lambda x: (1, 0)})()},
        TypeError,
        "^q cannot",
    ),
    "no option": (
        {"colour": 1},
        TypeError,
        r"^numba_flash\.distributed\.forward\(\) got an unexpected keyword argument 'colour'; the options are comm, layout, scale, ",
    ),
    "lengths": ({"kv_lengths": np.array([1])}, ValueError, "^kv_lengths"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_process_that_is_wrong_tells_the_others(case):
    given, kind, message = WRONG[case]

    def call(comm):
        q, k, v = (nd.shard(x, comm=comm) for x in problem()[1:])
        return nd.forward(**{"q": q, "k": k, "v": v} | (given if comm.rank == 1 else {}), comm=comm)

    for rank, error in enumerate(errors(3, call)):
        assert isinstance(error, kind if rank == 1 else RuntimeError), error
        assert re.search(message if rank == 1 else f"^process 1 cannot take part: {kind.__name__}: {message[1:]}", str(error)), error


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_what_one_call_takes_is_taken_or_refused_with_a_reason(function):
    every, taken = (inspect.signature(getattr(module, function)).parameters for module in (numba_flash, nd))
    do, q, k, v = problem()
    arguments = {"q": q, "k": k, "v": v} | ({} if function == "forward" else {"do": do, "o": do, "lse": do[..., 0]})
    for name in every.keys() - taken.keys():
        (error,) = errors(1, lambda comm, name=name: getattr(nd, function)(**arguments, comm=comm, **{name: 1}))
        assert isinstance(error, NotImplementedError)
        assert re.search(f"^numba_flash.distributed does not take {name}: .{{12}}", str(error)), error


@pytest.mark.parametrize("value", [1, 0, None, "yes"], ids=repr)
def test_both_passes_check_a_flag_that_one_of_them_uses(value):
    do, q, k, v = problem()
    for pass_ in (lambda **given: nd.forward(q, k, v, **given), lambda **given: nd.backward(do, q, k, v, do, do[..., 0], **given)):
        (error,) = errors(1, lambda comm, pass_=pass_: pass_(comm=comm, return_lse=value))
        assert isinstance(error, TypeError)
        assert re.search("^return_lse must be True or False; got", str(error)), error


def test_what_is_no_communicator():
    _, q, k, v = problem()
    for call in (lambda: nd.forward(q, k, v, comm=3), lambda: nd.unshard(q, comm=3), lambda: nd.positions(5, comm=3)):
        with pytest.raises(TypeError, match=r"^comm must be a communicator of mpi4py, of NCCL .*Communicator; got int$"):
            call()


def test_other_functions_and_sizes():
    do, q, k, v = problem()
    o, lse = numba_flash.forward(q, k, v, return_lse=True)
    mixed = lambda comm: nd.backward(do, q, k, v, o, lse, comm=comm) if comm.rank else nd.forward(q, k, v, comm=comm)
    for error in errors(2, mixed):
        assert re.search("^the function must be the same in all processes; got forward in process 0 and backward in process 1", str(error))
    uneven = lambda comm: nd.forward(*(x[..., comm.rank :, :] for x in (q, k, v)), comm=comm, layout="zigzag")
    for error in errors(2, uneven):
        message = r"^q: the sizes of the parts of a zigzag must be \[39, 40\], as shard makes them; got \[40, 39\]"
        assert re.search(message, str(error)), error
    uneven = lambda comm: nd.unshard(q[..., : 3 + 9 * comm.rank, :], comm=comm, layout="zigzag")
    for error in errors(2, uneven):
        assert re.search(r"^x: the sizes of the parts of a zigzag must be \[7, 8\], as shard makes them; got \[3, 12\]", str(error)), error


def test_what_whole_sequences_do_not_allow():
    _, q, k, v = problem(40, 42)
    halves = lambda comm: [x[..., 21 * comm.rank : 21 * comm.rank + 21, :] for x in (q, k, v)]
    for error in errors(2, lambda comm: nd.forward(*halves(comm), comm=comm, dropout=0.1, rng=(1, 2))):
        assert re.search(r"^dropout needs parts of k that begin at multiples of 8; they begin at \[0, 21\]", str(error)), error
    lengths = {"kv_lengths": np.array([7, 9]), "causal": True}
    for error in errors(2, lambda comm: nd.forward(*(nd.shard(x, comm=comm) for x in (q, k, v)), comm=comm, **lengths)):
        assert isinstance(error, NotImplementedError)
        assert re.search(r"must be the same for all, or q_start given; got \[-33, -31\]", str(error)), error


def test_who_waits_looks_again_soon(monkeypatch):
    """After a tenth of the time that it has waited, no later than after `LONGEST_NAP`; and it says for how long it has waited in vain."""
    now, naps = [0.0], []

    class Clock:
        @staticmethod
        def monotonic():
            now[0] += 1e-6
            return now[0]

        @staticmethod
        def sleep(seconds):
            naps.append((now[0], seconds))
            now[0] += seconds

    monkeypatch.setattr(communicators, "time", Clock)
    assert communicators.poll(lambda: now[0] > 0.1, 1.0) is None
    assert all(0 < nap <= min(communicators.LONGEST_NAP, waited / 10) for waited, nap in naps)
    assert now[0] < 0.1 + 2 * communicators.LONGEST_NAP
    assert 1.0 < communicators.poll(lambda: False, 1.0) < 1.0 + 2 * communicators.LONGEST_NAP


# ---- MPI -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.unproven("of processes and their timing")
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4, 8))])
def test_processes(size):
    """With NumPy arrays, and in the same processes with a stand-in for CuPy's; what differs is told to all, and the next call is right."""
    programs = ("differ", "right", "late") if size in (2, 4) else ("differ", "right")
    done = mpi(size, PROCESSES, *programs)
    assert done.returncode == 0, done.stderr
    assert all(done.stdout.count(f"process {rank} is right") == len(programs) for rank in range(size)), done.stdout


@pytest.mark.unproven("of processes and their timing")
@pytest.mark.full
def test_the_program_of_the_documentation(tmp_path):
    (program,) = re.findall(r"```python\n(# spread.py.*?)```", (support.ROOT / "docs/howto/distributed.md").read_text(), re.DOTALL)
    (tmp_path / "spread.py").write_text(program)
    assert mpi(2, tmp_path / "spread.py").stdout == "True\n"


@pytest.mark.unproven("of processes and their timing")
@pytest.mark.parametrize("program", [pytest.param("dies", marks=pytest.mark.full), "dies_computing"])
def test_a_process_that_dies(program):
    """The others end with a message that names it, or the one that waits for it; so would they without the option, which keeps MPI from
    ending them first.
    """
    done = mpi(3, PROCESSES, program, options=["-disable-auto-cleanup"])
    assert done.returncode != 0
    what = r"the call that all processes make together" if program == "dies" else r"gradients of K and V, step \d"
    for rank, silent in ((2, 1), (0, 1 if program == "dies" else 2)):
        message = rf"process {rank} of 3 has waited \d+ s for process {silent} \({what}\)"
        assert re.search(message, done.stdout), done.stdout
