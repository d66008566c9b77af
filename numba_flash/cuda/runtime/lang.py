"""The language of the kernels: Numba's CUDA dialect. Kernels and their helpers import it from here
alone, so that another compiler can be tried by changing one place (and
`numba_flash.cuda.runtime.compile` and `numba_flash.cuda.ptx.emit`, which talk to it).
"""

from functools import cache

from numba import config

from numba_flash.cuda.runtime import numpy_gaps

with numpy_gaps.supplied():
    from numba import cuda
    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np import arrayobj  # noqa: F401  # wanted once a kernel is compiled

__all__ = [
    "SIMULATED",
    "cuda",
    "device",
    "f32",
    "f64",
    "i32",
    "i64",
    "inline",
    "intrinsic",
    "named",
    "once",
    "types",
    "u32",
    "u64",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
device = cuda.jit(device=True)
# Into its caller, whatever its size: registers cannot be passed to a call. The simulator has none.
inline = device if SIMULATED else cuda.jit(device=True, forceinline=True)
# What makes device functions makes them once for all kernels of a process that want the same: to
# type and lower them is most of the time of compiling a kernel.
once = cache
f32, f64 = types.float32, types.float64
i32, i64, u32, u64 = types.int32, types.int64, types.uint32, types.uint64


def named(cls, *kinds):
    """Numba's type of a named tuple, of one kind of number, or of one for each field."""
    if len(kinds) == 1:
        return types.NamedUniTuple(kinds[0], len(cls._fields), cls)
    return types.NamedTuple(kinds, cls)
