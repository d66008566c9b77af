"""The `simt` kernels of plain attention that are compiled without a GPU, by name."""

from dataclasses import replace

from compiled import Kernel

from numba_flash.arguments.options import PLAIN, Options
from numba_flash.cuda.simt import tier as simt
from numba_flash.cuda.simt.decode_tiles import TILES
from numba_flash.cuda.simt.lanes_tiles import tile_of

# Every tile of simt.TILES at the head dimension it was made for, every dtype in every kernel, and head dimensions that fill no tile.
FORWARD = [
    ("float32", 64, 64), ("float32", 128, 128), ("float32", 256, 256), ("float64", 64, 64), ("float64", 128, 128), ("float64", 256, 256),
    ("float16", 128, 128), ("bfloat16", 64, 64), ("float32", 40, 96),
]  # fmt: skip
DKDV = [
    ("float32", 64, 64), ("float32", 128, 128), ("float32", 256, 256), ("float64", 128, 128), ("float64", 256, 256),
    ("float16", 64, 64), ("bfloat16", 128, 128),
]  # fmt: skip
DQ = [
    ("float32", 64, 64), ("float32", 128, 128), ("float32", 256, 256), ("float64", 128, 128), ("float64", 256, 256),
    ("float16", 128, 128), ("bfloat16", 33, 1),
]  # fmt: skip
FEW = [("float32", 64, 64), ("float32", 256, 256), ("float64", 128, 128), ("bfloat16", 40, 96)]
LANES = [("float32", 128, 128), ("float32", 64, 40), ("float32", 256, 256), ("float64", 128, 128), ("float64", 64, 64)]
HEADS = 8  # that read the same keys


def kernel(name: str, dtype: str, d: int, dv: int, write_lse: bool = True, options: Options = PLAIN) -> Kernel:
    """Builder and configuration, as `simt.prepare_forward` and `simt.prepare_backward` make them."""
    if name == "delta":
        return Kernel("passes.delta.build", (dtype, dv, False, simt.DELTA_LANES, simt.DELTA_ROWS))
    if name == "few":
        tiles = TILES["float64" if dtype == "float64" else "float32"]
        return Kernel("simt.decode.build", (dtype, dtype, d, dv, write_lse, options, replace(tiles[-1], group=HEADS)))
    if name == "lanes":
        return Kernel("simt.decode_lanes.build", (dtype, d, dv, write_lse, options, tile_of(dtype, max(d, dv), HEADS, HEADS)))
    tile = simt.tile_for("dq" if name == "dbias" else name, dtype, max(d, dv))
    if name == "forward":
        return Kernel("simt.forward.build", (dtype, dtype, d, dv, write_lse, options, tile))
    if name == "dbias":
        return Kernel("simt.dbias.build", (dtype, d, dv, options, options.bias, (True, False, True, False, True), tile))
    return Kernel(f"simt.backward.build_{name}", (dtype, d, dv, options, tile))


CHOSEN = (
    [("forward", *sizes) for sizes in FORWARD]
    + [("forward", "bfloat16", 256, 256, False)]
    + [("few", *sizes) for sizes in FEW]
    + [("lanes", *sizes) for sizes in LANES]
    + [("dkdv", *sizes) for sizes in DKDV]
    + [("dq", *sizes) for sizes in DQ]
    + [("delta", dtype, 64, 64) for dtype in ("float16", "bfloat16", "float32", "float64")]
)


def name_of(chosen: tuple) -> str:
    return "-".join(map(str, chosen))


KERNELS = {name_of(chosen): kernel(*chosen) for chosen in CHOSEN}
