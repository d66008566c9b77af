"""Who runs the kernels of the CPU, and with how many threads: the calling thread and helpers, one call at a time, BLAS held to one thread.

A pass over work items is a `Job`. Whoever has time takes blocks of it until none is left, so that causal problems balance; kernels release
the GIL. A call returns, or raises, when nobody works for it any more, whatever failed or interrupted it meanwhile.
"""

import os
import threading
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, NamedTuple

import scipy.linalg.cython_blas  # noqa: F401  (the BLAS of np.dot in kernels, loaded before ThreadpoolController looks for it)
from numba import config
from threadpoolctl import ThreadpoolController

BLOCKS_PER_THREAD = 64  # that a thread takes, one by one: 2 % faster than 16, 5 to 8 % than 4


class Job:
    """Blocks of work, taken one by one.

    Parameters
    ----------
    work : callable
        ``work(start)`` does one block.
    starts : range
        The blocks.
    helpers : int
        How many besides the calling thread may take part.
    """

    def __init__(self, work, starts: range, helpers: int):
        self.work, self.blocks, self.error = work, deque(starts), None
        self.busy = [threading.Lock() for _ in range(helpers)]  # each held by a helper as long as it takes blocks

    def run(self, offer) -> None:
        """Do all of it, with those whom ``offer(function)`` finds to call the function; raises what any of them raised."""
        try:
            for busy in self.busy:
                offer(partial(self._help, busy))
            self._take()
        finally:
            try:
                self._settle()
            finally:
                self._settle()  # once more, where an interrupt came before the first line of the other
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # whose traceback leads back here

    def _take(self) -> None:
        """Work until no block is left; who fails leaves none for the others."""
        try:
            while True:
                try:
                    start = self.blocks.popleft()
                except IndexError:
                    return
                self.work(start)
        except BaseException:
            self.blocks.clear()
            raise

    def _help(self, busy) -> None:
        with busy:  # who comes after the end finds no block, and may: nothing of the job is left to write to
            try:
                self._take()
            except BaseException as error:
                self.error = error

    def _settle(self) -> None:
        """Drop the blocks that nobody has begun and wait for the others; an interrupt is raised only then."""
        try:
            self.blocks.clear()
            for busy in self.busy:
                with busy:
                    pass
        except BaseException:
            self._settle()
            raise


class Helpers:
    """Threads that wait for something to do. They are daemons: they end with the process, and still help when the main thread has ended."""

    def __init__(self):
        self.tasks, self.started = SimpleQueue(), 0

    def available(self, wanted: int) -> int:
        """How many there are, at most `wanted`, after those that are missing have been started as far as the system lets it."""
        try:
            while self.started < wanted:
                threading.Thread(target=_serve, args=(self.tasks,), name=f"numba_flash_{self.started}", daemon=True).start()
                self.started += 1
        except (RuntimeError, MemoryError):  # no more threads, or none any more: the interpreter is about to end
            pass
        return min(self.started, wanted)


class _Depth(threading.local):
    """How many calls, one within the other, the thread is in."""

    value = 0


_depth = _Depth()


def _serve(tasks: SimpleQueue) -> None:
    _depth.value = 1  # a finalizer that runs here and calls the library is within the call that it delays
    while True:
        tasks.get()()


class BlasLimit(NamedTuple):
    """One BLAS library, and the limiter that holds it to one thread."""

    library: ThreadpoolController
    limiter: Any


class Blas:
    """BLAS libraries, held to one thread while a call runs.

    Their numbers of threads belong to the whole process, and whoever sets one with threadpoolctl puts back what it found, later. So other
    threads are told the number outside of calls while one runs, and a number that they set meanwhile is left alone. Nobody forks while it
    changes: OpenBLAS then holds a lock of its own, which in the child no one would open.

    Since threadpoolctl 3.8 the first thread that sets a number keeps others from it, silently; what is set here counts nevertheless.
    """

    def __init__(self):
        everything = ThreadpoolController()
        self.libraries = [everything.select(filepath=x.filepath) for x in everything.select(user_api="blas").lib_controllers]
        self.held, self.outside, self.holder, self.changing = [], {}, None, threading.RLock()
        self.meanwhile = set()  # files of libraries whose number another thread has set
        self.kinds = {type(x) for library in self.libraries for x in library.lib_controllers}
        for kind in self.kinds:
            kind.get_num_threads = self._as_outside(kind.get_num_threads)
            kind.set_num_threads = self._noticed(kind.set_num_threads)

    def _as_outside(self, get_num_threads):
        """The method of a controller, for threads other than the one that holds BLAS."""

        @wraps(get_num_threads)
        def reported(controller):
            threads = self.outside.get(controller.filepath)
            return get_num_threads(controller) if threads is None or self.holder == threading.get_ident() else threads

        return reported

    def _noticed(self, set_num_threads):
        """The method of a controller: what another thread than the holder sets may be 1, too, and is no less a number that was set."""

        @wraps(set_num_threads)
        def noticed(controller, threads):
            if self.holder not in (None, threading.get_ident()):
                self.meanwhile.add(controller.filepath)
            return set_num_threads(controller, threads)

        return noticed

    @contextmanager
    def _setting(self):
        """Numbers change here, whichever thread has set some before, and afterwards in any thread."""
        free = lambda: [kind.clear_controlling_thread(force=True) for kind in self.kinds if hasattr(kind, "clear_controlling_thread")]
        with self.changing:
            free()
            try:
                yield
            finally:
                free()

    def run(self, passes) -> None:
        """``passes()`` with one BLAS thread."""
        try:
            self.outside = {x.filepath: x.num_threads for library in self.libraries for x in library.lib_controllers}
            self.meanwhile.clear()
            self.holder = threading.get_ident()
            with self._setting():
                for library in self.libraries:
                    self.held.append(BlasLimit(library, library.limit(limits=1)))
            passes()
        finally:
            try:
                self.release()
            finally:
                self.release()  # once more, where an interrupt came before the first line of the other

    def release(self) -> None:
        """What was there before, unless somebody else has set another number meanwhile."""
        with self._setting():
            for library, limiter in self.held:
                (own,) = library.lib_controllers
                changed = own.filepath in self.meanwhile or own.num_threads != 1
                with library.limit() if changed else nullcontext(), limiter:
                    pass  # to leave a limiter is to put back what was there when it was made
        self.held, self.outside, self.holder = [], {}, None

    def after_fork(self) -> None:
        """What was there before, in a child of a process whose other thread has held BLAS: no one else is left to do it."""
        self.holder = threading.get_ident()
        self.release()


class Runner:
    """Runs kernels on all cores, one call at a time.

    A call within a call of the same thread, from a signal handler or a finalizer, cannot wait for that: it runs in its thread alone. As it
    must not touch any lock that its thread may hold, of threadpoolctl's either, it takes BLAS as it finds it: held but for moments,
    in which sums are rounded otherwise.
    """

    def __init__(self):
        self.threads, self.blas = config.NUMBA_NUM_THREADS, Blas()
        self._renew()

    def _renew(self) -> None:
        self.lock, self.helpers = threading.Lock(), Helpers()

    def after_fork(self) -> None:
        """In a child nobody helps, and no other thread is in a call."""
        self._renew()
        if not _depth.value:
            self.blas.after_fork()
        self.blas.changing.release()

    def call(self, passes) -> None:
        """``passes()``, which run this object on one kernel after the other."""
        _depth.value += 1
        try:
            if _depth.value > 1:
                passes()
            else:
                with self.lock:
                    self.blas.run(passes)
        finally:
            _depth.value -= 1

    def __call__(self, entry, items: int, grain: int, *args) -> None:
        """Run a compiled kernel over work items ``[0, items)``, at least `grain` of them at a time."""
        step = max(grain, items // (self.threads * BLOCKS_PER_THREAD))
        starts = range(0, items, step)
        helpers = self.helpers.available(min(self.threads, len(starts)) - 1) if _depth.value == 1 else 0
        Job(lambda start: entry(start, min(start + step, items), *args), starts, helpers).run(self.helpers.tasks.put)


runner = Runner()
if hasattr(os, "register_at_fork"):
    changing = runner.blas.changing
    os.register_at_fork(before=changing.acquire, after_in_parent=changing.release, after_in_child=runner.after_fork)
