"""The public functions on the machine: NumPy arrays go in, tensor-core kernels are prepared, launched and executed, results come out."""

from contextlib import ExitStack, contextmanager
from unittest import mock

from kernels import Executed
from sums import EXACT, TensorCore
from support import Backend

from numba_flash import call
from numba_flash.cuda import launch
from numba_flash.cuda.sm90 import tier as sm90

SM90 = Backend("sm90", "numpy")


@contextmanager
def machine(seed: int = 0, multiprocessors: int = 2, resident: int | None = None, core: TensorCore | None = EXACT):
    """Let calls of a tensor-core tier be executed by the machine.

    Parameters
    ----------
    seed : int
        Of the order in which warps take turns and copies arrive.
    multiprocessors : int
        Of the GPU that there seems to be.
    resident : int, optional
        How many blocks it has room for at a time; all, by default.
    core : TensorCore, optional
        How its tensor cores add; rounded to nearest, by default.
    """
    gpu = launch.Gpu(0, (9, 0), multiprocessors)

    def load(self):
        run = Executed(self, seed, resident, core)
        self._submit = lambda operands, extras, numbers: run(*operands, extras=extras, numbers=numbers)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(call._prepared, clear=True))
        for module, name, instead in (
            (launch, "why_not", lambda x: None),
            (launch, "gpu", lambda device: gpu),
            (launch, "gpu_of", lambda x: gpu),
            (launch.Launch, "_load", load),
            (sm90, "takes_numpy", lambda: True),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        yield
