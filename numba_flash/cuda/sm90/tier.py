"""The `sm90` tier from the host: what it serves. Numba is not imported here."""

import math

from numba_flash import sections
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.options import NAMES
from numba_flash.arguments.problem import MAX_HEAD_DIM, ForwardResults, Prepared
from numba_flash.cuda.arguments import planes_of
from numba_flash.cuda.passes import prepare_planes
from numba_flash.cuda.passes.prepare_planes import ALGORITHMS
from numba_flash.cuda.recipe import Call, prepare
from numba_flash.cuda.runtime import launch, tensor_maps
from numba_flash.cuda.sm90 import fold, recipes
from numba_flash.cuda.sm90.backward import prepare_temporaries
from numba_flash.cuda.sm90.backward.options_tiles import MOST as MOST_WITH_OPTIONS
from numba_flash.cuda.sm90.bias_gradient import prepare_dbias
from numba_flash.cuda.sm90.forward.forward_tiles import forward_tile
from numba_flash.cuda.sm90.forward.prepare_forward import has_resident_bias
from numba_flash.cuda.sm90.prepare_pairs import copied_pairs
from numba_flash.cuda.sm90.tiles import MOST_FLOAT32
from numba_flash.cuda.work import grid

# Options that the kernels of float32 know; the others know all but pages.
SERVED_FLOAT32 = {"q_lengths", "kv_lengths"}
WITHOUT_OPTIONS = ("softcap", "q_lengths", "kv_lengths")
# By an estimate, tanh is off by up to 2**-22 of it, which a score has to bear.
GREATEST_SOFTCAP = 1024
# Up to here tiles have too few products to hide the loads of a bias or a mask of each pair, and
# `sm80`, which has more warps, is faster, by a tenth or so; beyond, `sm90` is as fast or faster.
# Gradients were timed before the copy engine brought the bias. Measured:
# docs/lab/hopper_forward.md, `MOST_WAITING`.
MOST_WAITING = {"forward": 64, "backward": 32}
# The same limit of the forward pass, where the copy engine brings them: at D = 64 `sm90` is faster
# then, and below that nothing was timed. Measured: docs/lab/hopper_forward.md,
# `MOST_WAITING_FOR_COPIES`.
MOST_WAITING_FOR_COPIES = 32
# Queries of all heads that share keys up to which sm80's tiles of few queries are as fast, up to
# head dimension 64 and beyond. Few queries take as long as K and V need from memory, on either; of
# more, they take as long as products, which Hopper's own instructions make in less time. Measured:
# docs/lab/hopper_forward.md, `MOST_OF_OTHERS`.
MOST_OF_OTHERS = {64: 64, MAX_HEAD_DIM: 32}
STORED = "o", "dq", "dk", "dv"  # results that kernels store through tensor maps, or in vectors
GREATEST_RATIO = 1e38  # of scale to softcap, within float32 also times 2 log2(e)


def prepare_forward(problem, inputs, results, gpu=None) -> Prepared:
    """``run(inputs, results)`` on arrays like these layouts."""
    call = Call(problem, inputs, results, gpu or launch.gpu(inputs.q.device))
    return prepare(recipes.FORWARD, call, STORED)


def prepare_backward(problem, inputs, results, deterministic=True, gpu=None) -> Prepared:
    """The same for gradients; the same bits in every run if `deterministic`."""
    call = Call(problem, inputs, results, gpu or launch.gpu(inputs.q.device), deterministic)
    return prepare(recipes.BACKWARD, call, STORED)


def takes_numpy() -> bool:
    """False: kernels read arrays on a GPU."""
    return False


def algorithm(problem) -> str:
    """How products and sums are computed."""
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
    if major != 9:
        return f"needs a GPU of compute capability 9.0 (Hopper); this one has {major}.{minor}"
    if problem is None:
        return None
    if (reason := grid.too_many_blocks(problem)) is not None:
        return reason
    if not demanded and _few(kind, problem, inputs):
        return "serves so few queries on demand only (backend='sm90'): others read a key but once"
    most = 0 if demanded else _most_waiting(kind, problem, inputs, dbias)
    if max(problem.d, problem.dv) <= most:
        return (
            f"serves such a bias or mask of each pair up to head dimension {most} on demand only"
            " (backend='sm90'): it waits for it longer than others"
        )
    if problem.dtype == "float32":
        reason = _why_not_float32(kind, problem, inputs, demanded) or _why_not_problem(problem)
        return reason or _too_large(kind, problem, inputs)
    names = ("q", "k", "v", "do", "o") if kind == "backward" else ("q", "k", "v")
    reasons = (tensor_maps.why_not(name, Layout.of(getattr(inputs, name))) for name in names)
    with_options = kind == "backward" and problem.options.modifies_beyond_softcap
    of_options = _why_not_backward(problem) if with_options else None
    reason = _why_not_problem(problem) or of_options or next(filter(None, reasons), None)
    return reason or _too_large(kind, problem, inputs)


def _too_large(kind: str, problem, inputs) -> str | None:
    """Why the sums of dQ would take too much memory."""
    if kind == "forward":
        return None
    return sections.too_large(problem, inputs, prepare_temporaries.padded_sums)


def _few(kind: str, p, inputs) -> bool:
    """True if others read a key once, and here each head of queries would."""
    if kind == "backward":
        return grid.is_decode_gradient(p)
    most = next(rows for d, rows in MOST_OF_OTHERS.items() if max(p.d, p.dv) <= d)
    if not grid.bound_by_memory(p) or fold.rows(p) <= most:
        return grid.bound_by_memory(p)
    layouts = inputs._replace(q=Layout.of(inputs.q))
    return fold.folded(p, layouts, ForwardResults(None, None), forward_tile(p).block_m) is None


def _most_waiting(kind: str, p, inputs, dbias: bool) -> int:
    """The head dimension up to which a warp waits for what it reads of each pair for longer than
    its products take; 0 if it reads nothing of each.
    """
    if kind == "forward" and has_resident_bias(p, inputs):
        return 0
    if kind == "backward" and prepare_dbias.has_resident_bias(p, inputs, dbias):
        return 0
    mask = None if p.options.blocks else inputs.mask  # of blocks a warp reads little
    given = [x for x in (inputs.bias, mask) if x is not None and len(x.shape) > 1]
    if not any(x.shape[-2] > 1 and x.strides[-2] for x in given):
        return 0
    if kind == "backward" or p.dtype == "float32":
        return MOST_WAITING[kind]
    laid_out = inputs._replace(bias=Layout.of(inputs.bias), mask=Layout.of(inputs.mask))
    copied = copied_pairs(p, laid_out) is not None
    return MOST_WAITING_FOR_COPIES if copied else MOST_WAITING[kind]


def _why_not_float32(kind: str, p, inputs, demanded: bool) -> str | None:
    """Any strides will do: planes are read in the place of the arrays."""
    if kind == "backward":
        if p.precision == "tf32":
            return "has no backward pass of one product for three (precision='tf32')"
        if inputs.dlse is not None:
            return "does not know gradients of the lse with float32"
    if max(p.d, p.dv) > MOST_FLOAT32:
        return f"serves float32 up to head dimension {MOST_FLOAT32}"
    return prepare_planes.why_not(p, demanded, "sm90")


def _why_not_backward(p) -> str | None:
    """Of options beyond a softcap."""
    options = " or ".join(NAMES[name] for name in p.options.used if name not in WITHOUT_OPTIONS)
    if max(p.d, p.dv) > MOST_WITH_OPTIONS:
        return f"has no backward pass with {options} beyond head dimension {MOST_WITH_OPTIONS}"
    return None


def _why_not_problem(p) -> str | None:
    if p.dtype not in ("float16", "bfloat16", "float32"):
        return f"serves float16, bfloat16 and float32; q.dtype is {p.dtype}"
    if p.options.paged:
        return f"does not know {NAMES['paged']}"
    for option in p.options.used if planes_of(p) else ():
        if option not in SERVED_FLOAT32:
            return f"does not know {NAMES[option]} with float32"
    alone = p.options.softcap and not p.options.modifies_beyond_softcap
    if alone and not p.scale / GREATEST_RATIO < p.options.softcap <= GREATEST_SOFTCAP:
        return (
            f"needs a softcap between scale / {GREATEST_RATIO:.0e} and {GREATEST_SOFTCAP};"
            f" got {p.options.softcap}"
        )
    if p.d % 8 or p.dv % 8:
        return (
            "needs head dimensions that are multiples of 8;"
            f" q.shape[-1] is {p.d}, v.shape[-1] {p.dv}"
        )
    if not 0 < p.scale < math.inf:
        return f"needs a positive, finite scale; got {p.scale}"
    if 0 in (*p.batch, p.hq, p.nq, p.nk):
        return "needs at least one query and one key"
    return None
