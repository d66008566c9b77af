"""The `sm80` tier from the host: what it serves. Numba is not imported here."""

import math
from functools import partial

from numba_flash import sections
from numba_flash.arguments.options import NAMES
from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import planes_of
from numba_flash.cuda.passes import prepare_planes
from numba_flash.cuda.passes.prepare_planes import ALGORITHMS
from numba_flash.cuda.recipe import Call, prepare
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.sm80 import recipes
from numba_flash.cuda.sm80.backward import prepare_temporaries
from numba_flash.cuda.sm80.operands import float64_tiles
from numba_flash.cuda.sm80.tiles import hardware
from numba_flash.cuda.work import grid

LEAST = (7, 5)
LEAST_SHARED_FLOAT32, MOST_FLOAT32_BACKWARD = 163 * 1024, 128


def prepare_forward(problem, inputs, results, gpu=None) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like these layouts; `rng` is left out if there is no
    dropout.
    """
    call = Call(problem, inputs, results, gpu or launch.gpu(inputs.q.device))
    return prepare(recipes.FORWARD, call)


def prepare_backward(problem, inputs, results, deterministic=True, gpu=None) -> Prepared:
    """The same for gradients; the same bits in every run if `deterministic`."""
    call = Call(problem, inputs, results, gpu or launch.gpu(inputs.q.device), deterministic)
    return prepare(recipes.BACKWARD, call)


def takes_numpy() -> bool:
    """False: kernels read arrays on a GPU."""
    return False


def algorithm(problem) -> str:
    """How products and sums are computed."""
    if problem.dtype == "float64":
        return "IEEE products and sums"
    return ALGORITHMS[planes_of(problem)]


def why_not(kind: str, problem, inputs, demanded: bool, gpu=None, dbias=False) -> str | None:
    """Reason why these kernels cannot run `problem` (None: anything) on such arrays, or None."""
    if launch.simulated():
        return "the CUDA simulator has no tensor cores"
    if gpu is None:
        reason = launch.why_not(inputs.q)
        if reason is not None:
            return reason
        gpu = launch.gpu_of(inputs.q)
    major, minor = gpu.capability
    if gpu.capability < LEAST:
        return f"needs a GPU of compute capability 7.5 or later; this one has {major}.{minor}"
    if problem is None:
        return None
    if (reason := grid.too_many_blocks(problem)) is not None:
        return reason
    if problem.options.paged and problem.dtype not in ("float16", "bfloat16"):
        return f"serves {NAMES['paged']} in float16 and bfloat16; q.dtype is {problem.dtype}"
    wide = problem.dtype in ("float32", "float64")
    if kind == "forward" and wide and not demanded and grid.is_decode_without_tensor_cores(problem):
        return (
            f"serves so few queries of {problem.dtype} on demand only (backend='sm80'): others"
            " read a key but once"
        )
    if problem.dtype == "float64":
        reason = _why_not_float64(kind, problem, gpu.capability)
        if reason is not None:
            return reason
    if problem.dtype == "float32":
        reason = _why_not_float32(kind, problem, demanded, gpu.capability)
        if reason is not None:
            return reason
    if problem.dtype == "bfloat16" and hardware(gpu.capability).turing:
        return (
            "needs a GPU of compute capability 8.0 or later for bfloat16;"
            f" this one has {major}.{minor}"
        )
    if not 0 < problem.scale < math.inf:
        return f"needs a positive, finite scale; got {problem.scale}"
    if kind == "backward":
        padded_sums = partial(prepare_temporaries.padded_sums, there=hardware(gpu.capability))
        return sections.too_large(problem, inputs, padded_sums)
    return None


def _why_not_float32(kind: str, problem, demanded: bool, capability: tuple[int, int]) -> str | None:
    """Three products of float16 for one pay where tensor cores add float32 at their full rate;
    those of GPUs with little shared memory do not.
    """
    if kind == "backward" and max(problem.d, problem.dv) > MOST_FLOAT32_BACKWARD:
        return f"has no backward pass of float32 beyond head dimension {MOST_FLOAT32_BACKWARD}"
    if hardware(capability).shared_limit < LEAST_SHARED_FLOAT32:
        major, minor = capability
        return (
            "serves float32 where a block may have 163 KB of shared memory;"
            f" a GPU of compute capability {major}.{minor} has less"
        )
    return prepare_planes.why_not(problem, demanded, "sm80")


def _why_not_float64(kind: str, problem, capability: tuple[int, int]) -> str | None:
    """Of GPUs whose tensor cores are fast at it, head dimensions that fit."""
    if capability not in float64_tiles.CAPABILITIES:
        major, minor = capability
        return (
            "serves float64 where tensor cores multiply it fast, compute capability 8.0, 9.0 or"
            f" 10.0; this GPU has {major}.{minor}"
        )
    if max(problem.d, problem.dv) > float64_tiles.MOST:
        return f"serves float64 up to head dimension {float64_tiles.MOST}"
    if kind == "forward" and float64_tiles.forward_tile(problem, hardware(capability)) is None:
        return (
            "has no forward pass of float64 beyond head dimension 64 with 163 KB of shared memory"
        )
    return None
