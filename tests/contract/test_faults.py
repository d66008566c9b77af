"""Faults, injected: threads that cannot start, blocks that fail, signals, exits, forks, limits of BLAS, no memory. See `docs/when.md`."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

import numba_flash
from numba_flash import call
from numba_flash.cpu import pool, scratch
from numba_flash.cpu import tier as cpu

ROOT = Path(numba_flash.__file__).parents[1]
BLOCKS = 8


@pytest.fixture
def runner(monkeypatch):
    """A runner of four threads, whatever the machine has, none of which has been started; the calls of the library use it, too."""
    monkeypatch.setattr(pool.runner, "threads", 4)
    monkeypatch.setattr(pool.runner, "helpers", pool.Helpers())
    return pool.runner


def blas_threads() -> list[int]:
    """As they are, not as `pool.Blas` has other threads told."""
    return [type(x).get_num_threads.__wrapped__(x) for x in ThreadpoolController().select(user_api="blas").lib_controllers]


def inputs(seed=0, n=300):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((4, n, 16), dtype=np.float32) for _ in range(3)]


# ---- threads and blocks that fail ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there_are", [0, 2])
def test_where_threads_cannot_start_a_call_is_right_and_leaves_nothing_behind(runner, there_are):
    runner.helpers.available(there_are)
    want = numba_flash.forward(*inputs(), backend="cpu")
    runner.helpers = pool.Helpers()
    runner.helpers.available(there_are)
    first, second = np.full_like(want, np.nan), np.empty_like(want)
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")) as start:
        numba_flash.forward(*inputs(), out=first, backend="cpu")
    assert start.called
    np.testing.assert_array_equal(first, want)
    first[...] = 7
    numba_flash.forward(*inputs(seed=1), out=second, backend="cpu")  # threads start again: they find nothing of the first call
    assert (first == 7).all()


def test_a_call_that_fails_writes_nothing_afterwards(runner):
    """Two of four threads fail at once; the others are in the middle of a block, which they finish before the call raises."""
    out, together = np.zeros(BLOCKS), threading.Barrier(4)
    main = threading.get_ident()

    def block(start, stop):
        if together.wait(10) == 0 or threading.get_ident() == main:
            raise ZeroDivisionError(f"block {start}")
        time.sleep(0.2)
        out[start:stop] = 1

    with pytest.raises(ZeroDivisionError, match="block"):
        runner.call(lambda: runner(block, BLOCKS, 1))
    before = out.copy()
    assert 2 <= before.sum() <= 3
    time.sleep(0.3)
    np.testing.assert_array_equal(out, before)


def test_a_score_mod_that_fails_raises_and_the_next_call_is_right(runner):
    q, k, v = inputs()
    want = numba_flash.forward(q, k, v, backend="cpu")
    with pytest.raises(ZeroDivisionError):
        numba_flash.forward(q, k, v, score_mod=lambda score, b, h, i, j: score / (i - 100), backend="cpu")
    np.testing.assert_array_equal(numba_flash.forward(q, k, v, backend="cpu"), want)


def test_interrupts_wait_for_the_blocks_that_run_and_drop_the_others(runner):
    """Several interrupts, as of an impatient user, while a helper works and the calling thread waits for it."""
    done, begun, main = [], [], threading.get_ident()

    def block(start, stop):
        begun.append(start)
        if threading.get_ident() == main:
            while len(set(begun)) < 2:
                time.sleep(0.001)
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            time.sleep(1)
        time.sleep(0.4)
        done.append(start)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def call_runner():
        try:
            runner.call(lambda: runner(block, 100, 1))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before, runner.threads = blas_threads(), 2
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            call_runner()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert len(begun) == 2, "the other blocks are dropped"
    assert len(done) == 1, "the helper's block is finished when the call raises"
    assert blas_threads() == before
    numba_flash.forward(*inputs(), backend="cpu")


# ---- calls from where there is no pool -------------------------------------------------------------------------------------------------

PRELUDE = """
import os, threading, time
import numpy as np
import numba_flash
from numba_flash.cpu import pool
from threadpoolctl import ThreadpoolController
rng = np.random.default_rng(0)
x = [rng.standard_normal((4, 300, 16), dtype=np.float32) for _ in range(3)]
call = lambda: numba_flash.forward(*x, backend="cpu")
want = call()
right = lambda: np.array_equal(call(), want)
blas = lambda: [type(c).get_num_threads.__wrapped__(c) for c in ThreadpoolController().select(user_api="blas").lib_controllers]
before = blas()
"""


def python(code: str) -> str:
    """What a new process prints that runs `code` after `PRELUDE`; it has to end by itself."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this system")
def test_a_call_in_a_signal_handler_in_the_middle_of_a_call():
    """Wherever the signal comes: for a while every few milliseconds, and once for certain while the thread holds the lock.

    In the moments when BLAS is not held to one thread, a handler's call sums in another order.
    """
    code = """
import signal
right = lambda: np.allclose(call(), want, rtol=1e-5, atol=1e-6)
results, depths = [], []
def handler(*_):
    depths.append(pool._depth.value)
    results.append(right())
    signal.setitimer(signal.ITIMER_REAL, 0.003 if time.monotonic() < stop else 0)
stop = 0
signal.signal(signal.SIGALRM, handler)
pool.runner.call(lambda: signal.raise_signal(signal.SIGALRM))
print(depths, results)
stop = time.monotonic() + 0.7
signal.setitimer(signal.ITIMER_REAL, 0.003)
while time.monotonic() < stop:
    results.append(right())
signal.setitimer(signal.ITIMER_REAL, 0)  # or it ends the process, once nobody handles it any more
print(all(results), 1 in depths[1:], blas() == before, pool.runner.lock.locked())
"""
    assert python(code).splitlines() == ["[1] [True]", "True True True False"]


def test_calls_at_exit_and_in_a_thread_that_outlives_the_main_one():
    code = """
import atexit
atexit.register(lambda: print("at exit", right(), flush=True))
def later():
    threading.main_thread().join()
    time.sleep(0.2)
    pool.runner.helpers = pool.Helpers()  # none is left, and none can be started any more
    print("outlives", right(), flush=True)
threading.Thread(target=later).start()
"""
    assert python(code).splitlines() == ["outlives True", "at exit True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_while_another_thread_calls_has_blas_as_it_was():
    code = """
import warnings
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)  # what Python 3.12 says of every such fork
inside, leave = threading.Event(), threading.Event()
def passes():
    inside.set()
    leave.wait()
thread = threading.Thread(target=lambda: pool.runner.call(passes))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    os._exit(0 if blas() == before and right() and blas() == before else 1)
status = os.waitpid(child, 0)[1]
leave.set()
thread.join()
print(os.waitstatus_to_exitcode(status), blas() == before, right())
"""
    assert python(code).split() == ["0", "True", "True"]


# ---- limits of BLAS -------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.cpu_count() < 2, reason="BLAS has one thread anyway")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("at_first", [1, 2])
@pytest.mark.parametrize(("enters", "leaves"), [("before", "during"), ("before", "after"), ("during", "during"), ("during", "after")])
def test_a_limit_that_another_thread_sets_beside_a_call(enters, leaves, at_first, threads):
    """Before, during and after the call; in the end there is what was there at first, also where that is what the call sets."""
    before = blas_threads()
    set_blas_threads([at_first] * len(before))
    try:
        set_beside_a_call(enters, leaves, threads)
    finally:
        set_blas_threads(before)


def set_blas_threads(numbers: list[int]) -> None:
    """So that any thread may set others."""
    for x, threads in zip(ThreadpoolController().select(user_api="blas").lib_controllers, numbers, strict=True):
        x.set_num_threads(threads)
        if hasattr(x, "clear_controlling_thread"):  # since threadpoolctl 3.8
            x.clear_controlling_thread()


def set_beside_a_call(enters: str, leaves: str, threads: int) -> None:
    before, seen = blas_threads(), []
    steps = {name: (threading.Event(), threading.Event()) for name in ("enter", "leave")}

    def other():
        steps["enter"][0].wait(10)
        with threadpool_limits(threads, "blas"):
            steps["enter"][1].set()
            steps["leave"][0].wait(10)
        steps["leave"][1].set()

    def take(when):
        for name, at in (("enter", enters), ("leave", leaves)):
            if at == when:
                steps[name][0].set()
                assert steps[name][1].wait(10)

    def passes():
        seen.extend(blas_threads())
        take("during")

    thread = threading.Thread(target=other)
    thread.start()
    take("before")
    pool.runner.call(passes)
    take("after")
    thread.join(10)
    assert blas_threads() == before
    assert {*seen} == {1}
    numba_flash.forward(*inputs(), backend="cpu")
    assert blas_threads() == before


# ---- no memory ------------------------------------------------------------------------------------------------------------------------

NAMED = re.compile(r"^[^:]+: cannot allocate \d+ bytes for shape \(.*\), dtype \w+$")


class FailAt:
    """`np.empty` or `np.zeros`, failing at the `number`-th call of either as NumPy does."""

    def __init__(self):
        self.number, self.calls = None, 0

    def wrap(self, allocate):
        def limited(*args, **kwargs):
            self.calls += 1
            if self.calls == self.number:
                raise MemoryError("Unable to allocate 1. GiB for an array")
            return allocate(*args, **kwargs)

        return limited


def cases() -> dict:
    q, k, v = inputs(n=40)
    half = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v)]
    bias, offsets = np.zeros((40, 40), np.float32), np.array([0, 10, 40])
    packed = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, k, v)]
    o, lse = numba_flash.forward(q, k, v, bias=bias, return_lse=True, backend="cpu")
    o_half, lse_half = numba_flash.forward(*half, return_lse=True, backend="cpu")
    o_packed, lse_packed = numba_flash.forward_packed(*packed, offsets, offsets, return_lse=True, backend="cpu")
    on_cpu = {"backend": "cpu"}
    return {
        "forward": lambda: numba_flash.forward(q, k, v, **on_cpu),
        "forward, bias, mask": lambda: numba_flash.forward(q, k, v, bias=bias, mask=bias == 0, return_lse=True, **on_cpu),
        "lengths": lambda: numba_flash.forward(q[None], k[None], v[None], kv_lengths=np.array([30]), **on_cpu),
        "backward": lambda: numba_flash.backward(o, q, k, v, o, lse, bias=bias, bias_grad=True, **on_cpu),
        "backward, panels": lambda: numba_flash.backward(o_half, *half, o_half, lse_half, **on_cpu),
        "packed": lambda: numba_flash.forward_packed(*packed, offsets, offsets, return_lse=True, **on_cpu),
        "backward, packed": lambda: numba_flash.backward_packed(o_packed, *packed, o_packed, lse_packed, offsets, offsets, **on_cpu),
    }


@pytest.mark.full
def test_a_memory_error_names_the_array_whichever_it_is(monkeypatch):
    """Every allocation of every call fails once."""
    monkeypatch.setattr(scratch, "DQ_PARTIAL_BYTES", 1)
    monkeypatch.setattr(scratch, "BACKWARD_BLOCK_M", 16)
    calls, messages, fail = cases(), set(), FailAt()
    for make in calls.values():
        make()  # prepared and compiled
    for name in ("empty", "zeros", "ones", "full"):
        monkeypatch.setattr(np, name, fail.wrap(getattr(np, name)))
    call._prepared.clear()  # what is prepared knows how to allocate
    for make in calls.values():
        fail.number = None
        make()
        for number in range(1, 1000):
            fail.number, fail.calls = number, 0
            try:
                make()
            except MemoryError as error:
                messages.add(str(error))
            if fail.calls < number:
                break
    wanted = {"o", "lse", "dq", "dk", "dv", "dbias", "delta", "shares of dq", "sum of dk", "sum of dv", "sum of dbias"}
    assert [message for message in messages if not NAMED.match(message)] == []
    assert {message.split(":")[0] for message in messages} >= wanted


def test_a_memory_error_in_a_kernel_names_its_tiles(monkeypatch, runner):
    def entry(*_):
        raise MemoryError("Allocation failed (probably too large).")

    q, k, v = inputs()
    monkeypatch.setattr(cpu, "_entry", lambda dispatcher, args: entry)
    with pytest.raises(MemoryError, match=r"^tiles of a thread in forward_items, such as that of scores: cannot allocate \d+ bytes for"):
        numba_flash.forward(q, k, v, backend="cpu")
