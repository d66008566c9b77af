"""The `sm80` kernels that are compiled to machine code without a GPU, by name: those that the tier's host prepares for these cases.

A case that it refuses has none.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from compiled import Kernel
from support import DTYPES

import numba_flash
from numba_flash import BlockMask
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.pages import PagedInputs
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, bind, bind_paged
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.sm80.backward.backward_tiles import BACKWARD_TILES
from numba_flash.cuda.sm80.decode.decode_tiles import BACKWARD_DECODE_TILES, DECODE_TILES
from numba_flash.cuda.sm80.tiles import FORWARD_TILES
from numba_flash.plan import choose, tier

TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)
ARCHITECTURES = (TURING, AMPERE, (8, 6), (8, 9), HOPPER, (10, 0), (12, 0))
MULTIPROCESSORS = 8
OF_OTHERS = {"passes.combine.build"}  # kernels that are compiled elsewhere
OTHER_LOOPS = (
    "dq",
    "dbias",
    "dbias_float64",
    "dq_dbias",
    "dk_dv",
    "dq_dbias_planes",
    "dk_dv_planes",
    "write_head_planes",
)  # main loops of a backward pass, too
AROUND = (
    "backward",
    "backward, any strides",
    "backward 64 lengths",
    "forward float32 64 for 9.0",
    "forward float32 64 everything",
)  # cases whose kernels around the loop are compiled, too


class Case(NamedTuple):
    """A call, and the GPU that it is made for.

    Attributes
    ----------
    kind : str
        ``"forward"`` or ``"backward"``.
    dtype : str
        Of q.
    d, dv : int
        Head dimensions.
    capability : tuple of two ints
        The GPU's.
    options : dict
        Of the call.
    nq : int
        Queries: if few, keys are shared out in parts.
    aligned : bool
        Rows lie at multiples of 16 bytes.
    deterministic : bool
        Of a backward pass.
    page : int
        Keys of a page; 0 if there are no pages.
    nk : int
        Keys, without pages.
    hk : int
        Their heads, likewise.
    """

    kind: str
    dtype: str
    d: int
    dv: int
    capability: tuple[int, int] = AMPERE
    options: dict = {}  # noqa: RUF012
    nq: int = 2000
    aligned: bool = True
    deterministic: bool = True
    page: int = 0
    nk: int = 3000
    hk: int = 2


NQ, NK, HQ, HK, BATCH = 2000, 3000, 4, 2, 2  # HK where there are pages, and few queries
GROUP = HQ // HK
RNG = np.random.default_rng(0)


def tilt(score, b, h, i, j):
    return np.float32(0.5) * score + (i - 2 * j) % 7


def tilt_grad(score, b, h, i, j):
    return np.float32(0.5)


def on_paper(shape: tuple[int, ...], dtype, row: int | None = None) -> np.ndarray:
    """An array that takes no memory, with strides as if it did, and rows of so many elements."""
    memory = np.zeros(1, dtype)
    lengths = (*shape[:-1], row or shape[-1])
    strides = [memory.itemsize * math.prod(lengths[axis + 1 :]) for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(memory, shape, strides)


SCORES = (BATCH, HQ, NQ, NK)
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (100, 50)},
    "lengths": {"q_lengths": np.array([5, 6], np.int32), "kv_lengths": np.array([7, 8]), "causal": True},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": on_paper(SCORES, np.float16)},
    "bias of float32": {"bias": on_paper(SCORES[2:], np.float32)},
    "mask": {"mask": on_paper(SCORES, bool)},
    "dropout": {"dropout": 0.3, "rng": (1, 2)},
    "score_mod": {"score_mod": tilt, "score_mod_grad": tilt_grad},
    "alibi": {"score_mod": numba_flash.alibi(np.linspace(0.1, 0.4, HQ))},
}
NAMES = ("lengths", "softcap", "bias", "mask", "dropout", "score_mod")
OPTIONS |= {
    "blocks": {"mask": BlockMask(on_paper((BATCH, HQ, 16, 24), bool), 128)},
    "blocks of 64": {"mask": BlockMask(on_paper((BATCH, HQ, 32, 47), bool), 64)},
    "blocks that do not fit": {"mask": BlockMask(on_paper((BATCH, HQ, 20, 60), bool), (100, 50))},
}
OPTIONS["everything"] = {option: x for name in NAMES for option, x in OPTIONS[name].items()}
OPTIONS["everything, few"] = OPTIONS["everything"] | {
    "bias": on_paper((BATCH, HQ, 1, NK), np.float16),
    "mask": on_paper((BATCH, HQ, 1, NK), bool),
}
# Which of them for which loop: every one is somewhere.
CHOSEN = {
    ("forward", 64): ("causal", "lengths", "bias", "dropout", "alibi", "everything", "blocks", "blocks of 64", "blocks that do not fit"),
    ("backward", 64): (
        "window",
        "lengths",
        "bias of float32",
        "mask",
        "softcap",
        "score_mod",
        "everything",
        "blocks",
        "blocks that do not fit",
    ),
    ("forward", 128): ("everything", "blocks"),
    ("backward", 128): ("dropout", "everything", "blocks"),
    ("forward", 256): ("everything",),
    ("backward", 256): ("everything",),
}


def name_of(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


# Every tile at the head dimension it was made for, for every architecture that it serves.
TILES = {
    f"{kind} {d} for {name_of(capability)}": Case(kind, "float16", d, d, capability)
    for kind, table in (("forward", FORWARD_TILES), ("backward", BACKWARD_TILES))
    for capability in ARCHITECTURES
    for d in dict.fromkeys(row.d for row in table)
}
# Of few queries: each tile likewise, for as many rows as there may be, and with everything else.
FEW = {
    f"forward {d}, few queries, {rows} rows for {name_of(capability)}": Case("forward", "float16", d, d, capability, nq=rows // GROUP)
    for capability in (TURING, AMPERE, (8, 6), HOPPER)
    for d, rows in dict.fromkeys((row.d, row.rows) for row in DECODE_TILES)
}
FEW |= {
    f"forward {d}, few queries {name} for 9.0": Case("forward", "float16", d, d, HOPPER, OPTIONS[name], nq)
    for name, d, nq in (("everything, few", 64, 3), ("everything, few", 128, 3), ("everything, few", 256, 3), ("lengths", 128, 3))
}
FEW |= {
    "forward 64, few queries, everything": Case("forward", "float16", 64, 64, options=OPTIONS["everything, few"], nq=16),
    "forward 128, few queries, everything": Case("forward", "float16", 128, 128, options=OPTIONS["everything, few"], nq=16),
    "forward 72, 40, few queries, any strides": Case("forward", "float16", 72, 40, options=OPTIONS["window"], nq=5, aligned=False),
}
# Their gradients.
FEW |= {
    f"backward {d}, few queries, {rows} rows for {name_of(capability)}": Case("backward", "float16", d, d, capability, nq=rows // GROUP)
    for capability in (TURING, AMPERE, (8, 6), HOPPER)
    for d, rows in dict.fromkeys((row.d, row.rows) for row in BACKWARD_DECODE_TILES)
}
FEW |= {
    "backward 64, few queries, lengths for 9.0": Case("backward", "bfloat16", 64, 64, HOPPER, OPTIONS["lengths"], 3),
    "backward 72, 40, few queries, any strides": Case("backward", "float16", 72, 40, options=OPTIONS["window"], nq=5, aligned=False),
}
# Keys in pages: each tile of few queries, and of many; pages of which a thread's rows share none, some or all.
PAGES = {
    f"forward {d}, pages of {page}, {rows} rows for {name_of(capability)}": Case(
        "forward", "float16", d, d, capability, nq=rows // GROUP, page=page
    )
    for capability, d, rows, page in (
        *((TURING, 64, 16, 16), (AMPERE, 64, 16, 16), (AMPERE, 128, 16, 1), (AMPERE, 64, 32, 16), (HOPPER, 64, 32, 256)),
        *((HOPPER, 128, 16, page) for page in (1, 7, 16, 256)),
        *((HOPPER, 128, 32, 16), (HOPPER, 256, 16, 16)),
        *((capability, d, 200, 16) for capability in (AMPERE, HOPPER) for d in (64, 128, 256)),
    )
}
PAGES |= {
    "forward 72, 40, pages of 16, any strides": Case("forward", "float16", 72, 40, nq=5, aligned=False, page=16),
    "forward 128, pages of 16, options for 9.0": Case(
        "forward", "bfloat16", 128, 128, HOPPER, {"causal": True, "softcap": 2.0, "mask": on_paper((1,), bool)}, nq=3, page=16
    ),
}
# One of each: dtype, band, head dimensions that fill no tile, rows that are loaded one element at a time, and what else makes a kernel.
OTHERS = {
    "forward": Case("forward", "bfloat16", 64, 64),
    "forward 128": Case("forward", "bfloat16", 128, 128, options={"causal": True}),
    **{
        f"forward {d} numbers of distances{of}": Case("forward", "float16", d, d, capability, OPTIONS["alibi"], 4096, nk=4096)
        for d, of, capability in ((64, "", AMPERE), (64, " for 7.5", TURING), (64, " for 9.0", HOPPER), (256, " for 9.0", HOPPER))
    },
    "forward 64 small softcap for 9.0": Case("forward", "bfloat16", 64, 64, HOPPER, OPTIONS["softcap"]),
    "backward 64 small softcap for 9.0": Case("backward", "bfloat16", 64, 64, HOPPER, OPTIONS["softcap"]),
    "forward 72, 40": Case("forward", "float16", 72, 40, options={"window": (100, 50)}),
    "forward 13, 7": Case("forward", "bfloat16", 13, 7),
    "forward 192, 128": Case("forward", "bfloat16", 192, 128),
    "forward, any strides": Case("forward", "float16", 128, 128, aligned=False),
    "forward 64, few rows": Case("forward", "float16", 64, 64, nq=100),
    "forward 128, few rows": Case("forward", "bfloat16", 128, 128, nq=100),
    "forward 256, few rows": Case("forward", "float16", 256, 256, HOPPER, nq=100),
    "forward in parts": Case("forward", "bfloat16", 128, 128, nq=17),
    "backward": Case("backward", "bfloat16", 64, 64),
    "backward 128, in any order": Case("backward", "bfloat16", 128, 128, deterministic=False),
    "backward 72, 40": Case("backward", "float16", 72, 40, options={"causal": True}),
    "backward 13, 7": Case("backward", "bfloat16", 13, 7, options={"causal": True}),
    "backward, any strides": Case("backward", "float16", 128, 128, aligned=False),
    "backward 64 bias for 9.0": Case("backward", "float16", 64, 64, HOPPER, OPTIONS["bias"]),
    **{
        f"backward {d}, {nk} keys, dq with bias gradient for 9.0": Case(
            "backward", dtype, d, d, HOPPER, {"bias": on_paper((NQ, nk), DTYPES[dtype])}, nk=nk
        )
        for d, nk, dtype in ((32, 384, "float16"), (16, 200, "bfloat16"))
    },
    **{f"{kind} {d} {name}": Case(kind, "float16", d, d, options=OPTIONS[name]) for (kind, d), names in CHOSEN.items() for name in names},
}
# Float32 as pairs of float16; where it is refused there is no kernel.
OF_FLOAT32 = {"causal": OPTIONS["causal"], "bias": OPTIONS["bias of float32"]}
OF_FLOAT32["everything"] = OPTIONS["everything"] | {"bias": on_paper(SCORES, np.float32)}
FLOAT32 = {
    f"forward float32 {d} for {name_of(capability)}": Case("forward", "float32", d, d, capability)
    for capability in ARCHITECTURES
    for d in (32, 64, 128, 256)
}
FLOAT32 |= {
    f"forward float32 {d} {name}": Case("forward", "float32", d, d, options=options)
    for d in (32, 64, 128, 256)
    for name, options in OF_FLOAT32.items()
    if name == "everything" or d in (64, 128)
}
FLOAT32 |= {
    "forward float32 13, 40": Case("forward", "float32", 13, 40, options=OPTIONS["window"]),
    "forward float32 64 lengths": Case("forward", "float32", 64, 64, HOPPER, options=OPTIONS["lengths"]),
    "forward float32 128 everything for 9.0": Case("forward", "float32", 128, 128, HOPPER, options=OF_FLOAT32["everything"]),
}
FLOAT32 |= {
    f"backward float32 {d} for {name_of(capability)}": Case("backward", "float32", d, d, capability)
    for capability in ARCHITECTURES
    for d in (32, 64, 128)
}
FLOAT32 |= {
    "backward float32 100, 40": Case("backward", "float32", 100, 40, options=OPTIONS["causal"]),
    "forward float32 64 blocks": Case("forward", "float32", 64, 64, options=OPTIONS["blocks"]),
    "backward float32 64 mask": Case("backward", "float32", 64, 64, options=OPTIONS["mask"]),
    "backward float32 64 everything": Case("backward", "float32", 64, 64, HOPPER, options=OF_FLOAT32["everything"]),
    "backward float32 64 everything for 8.0": Case("backward", "float32", 64, 64, options=OF_FLOAT32["everything"]),
    "backward float32 128 everything for 9.0": Case("backward", "float32", 128, 128, HOPPER, options=OF_FLOAT32["everything"]),
    "backward float32 100, 40 bias": Case("backward", "float32", 100, 40, options=OF_FLOAT32["bias"]),
    "backward float32 64 tf32": Case("backward", "float32", 64, 64, options=OF_FLOAT32["bias"] | {"precision": "tf32"}),
}
FLOAT32 |= {
    f"backward float32 {d} bias for {name_of(capability)}": Case("backward", "float32", d, d, capability, options=OF_FLOAT32["bias"])
    for capability in (AMPERE, HOPPER)
    for d in (32, 64, 128)
}
SHORT = {"bias": on_paper((384, 384), np.float32)}
FLOAT32 |= {
    "forward float32 32, short heads for 9.0": Case("forward", "float32", 32, 32, HOPPER, SHORT, 384, nk=384),
    "forward float32 16, short heads for 9.0": Case("forward", "float32", 16, 16, HOPPER, nq=200, nk=200),
    "backward float32 32, short heads for 9.0": Case("backward", "float32", 32, 32, HOPPER, SHORT, 384, nk=384, hk=4),
}
# Float64
FLOAT64 = {f"{kind} float64 128 for 9.0": Case(kind, "float64", 128, 128, HOPPER) for kind in ("forward", "backward")}
FLOAT64["forward float64 64 for 9.0"] = Case("forward", "float64", 64, 64, HOPPER)
FLOAT64["backward float64 13, 7 lengths"] = Case("backward", "float64", 13, 7, options=OPTIONS["lengths"], aligned=False)
OF_FLOAT64 = {"bias": {"bias": on_paper(SCORES, np.float64)}}
OF_FLOAT64["everything"] = OPTIONS["everything"] | OF_FLOAT64["bias"]
FLOAT64 |= {
    f"{kind} float64 {d} {option} for {name_of(capability)}": Case(kind, "float64", d, d, capability, options=OF_FLOAT64[option])
    for kind, d in (("forward", 64), ("backward", 64))
    for option in OF_FLOAT64
    for capability in (AMPERE, HOPPER)
}
FLOAT64 |= {
    f"{kind} float64 128 everything for 9.0": Case(kind, "float64", 128, 128, HOPPER, options=OF_FLOAT64["everything"])
    for kind in ("forward", "backward")
}
CASES = TILES | FEW | PAGES | OTHERS | FLOAT32 | FLOAT64


@cache
def launches(name: str) -> tuple[Launch, ...]:
    """What a case launches; NotImplementedError if the tier refuses it."""
    case = CASES[name]
    gpu = Gpu(0, case.capability, MULTIPROCESSORS)
    array = lambda heads, n, d: on_paper((BATCH, heads, n, d), DTYPES[case.dtype], d if case.aligned else d + 1)
    q, o = (array(HQ, case.nq, d) for d in (case.d, case.dv))
    if case.page:
        return in_pages(case, q, o, gpu)
    k, v = (array(case.hk, case.nk, d) for d in (case.d, case.dv))
    problem = bind(q, k, v, **case.options)
    unwrapped = lambda x: x.blocks if isinstance(x, BlockMask) else x
    arrays = {each: unwrapped(case.options[each]) for each in ("bias", "mask", "q_lengths", "kv_lengths") if each in case.options}
    lse = np.broadcast_to(np.zeros((), np.float64 if case.dtype == "float64" else np.float32), q.shape[:-1])
    if case.kind == "forward":
        inputs, results, settings = ForwardInputs(q, k, v, **arrays), ForwardResults(o, lse), {}
    else:
        dbias = arrays.get("bias")
        inputs, results = BackwardInputs(o, q, k, v, o, lse, **arrays), BackwardResults(q, k, v, dbias)
        settings = {"deterministic": case.deterministic}
    choose(problem, inputs, "sm80", case.kind, gpu=gpu)
    layouts = (type(x)(*map(Layout.of, x)) for x in (inputs, results))
    return getattr(tier("sm80"), f"prepare_{case.kind}")(problem, *layouts, gpu=gpu, **settings).launches


def in_pages(case: Case, q, o, gpu: Gpu) -> tuple[Launch, ...]:
    """What a case with keys in pages launches."""
    rows = [d if case.aligned else d + 1 for d in (case.d, case.dv)]
    k, v = (on_paper((500, HK, case.page, d), q.dtype, row) for d, row in zip((case.d, case.dv), rows, strict=True))
    table, kv_lengths = np.zeros((BATCH, -(-NK // case.page)), np.int32), np.array([7, 8])
    problem = bind_paged(q, k, v, table, kv_lengths, **case.options)
    inputs = PagedInputs(q, k, v, None, case.options.get("mask"), None, kv_lengths, table)
    lse = np.broadcast_to(np.zeros((), np.float32), q.shape[:-1])
    choose(problem, inputs, "sm80", gpu=gpu)
    layouts = (type(x)(*map(Layout.of, x)) for x in (inputs, ForwardResults(o, lse)))
    return tier("sm80").prepare_forward(problem, *layouts, gpu=gpu).launches


def kernels() -> dict[str, Launch]:
    """Each kernel once, under the first case that launches it; those around the loops under their own names."""
    found, seen = {}, set()
    for name, case in CASES.items():
        try:
            made = launches(name)
        except NotImplementedError:  # the tier refuses it
            continue
        for launch in made:
            kernel = Kernel(launch.builder, launch.config, case.capability)
            if launch.builder not in OF_OTHERS and kernel not in seen:
                part = ".".join(launch.builder.split(".")[-2:]).removesuffix(".build").replace(".build_", " ")
                if part not in OTHER_LOOPS and not part.startswith(case.kind) and name not in AROUND:
                    continue
                seen.add(kernel)
                found[f"sm80 {name}" if part.startswith(case.kind) else f"sm80 {name}: {part}"] = launch
    return found


LAUNCHES = kernels()
KERNELS = {name: Kernel(launch.builder, launch.config, launch.gpu.capability) for name, launch in LAUNCHES.items()}
# Those whose instructions are counted: a generation that lacks most, and one that does not.
COUNTED = {name: KERNELS[name] for name in ("sm80 forward 64 for 7.5", "sm80 forward 128")}
