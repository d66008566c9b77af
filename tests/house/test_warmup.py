"""`python -m numba_flash warmup`: which kernels it compiles, that they are those that calls look for, and what it says about them."""

import json
import time

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

import numba_flash
from numba_flash import warmup
from numba_flash.__main__ import main
from numba_flash.arguments.problem import Problem, bind
from numba_flash.bench.cases import Cell
from numba_flash.cuda.runtime import compile, compiler, launch
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.simt.tier import tile_for
from numba_flash.cuda.sm90.backward.backward_tiles import backward_tile
from numba_flash.cuda.sm90.forward.forward_tiles import forward_tile

H200, A100, T4 = Gpu(0, (9, 0), 132), Gpu(0, (8, 0), 108), Gpu(0, (7, 5), 40)
SIZES = ("--lengths", "64", "--tokens", "64", "--width", "32", "--head-dims", "16", "--mask", "full")


def cell(direction="forward", mask="full", dtype="bfloat16", **sizes) -> Cell:
    return Cell(direction, mask, dtype, **({"batch": 16, "heads": 16, "heads_kv": 4, "length": 512, "head_dim": 64} | sizes))


def problem_of(cell: Cell) -> Problem:
    zeros = lambda heads: np.zeros((cell.batch, heads, cell.length, cell.head_dim), np.float16)
    return bind(zeros(cell.heads), *[zeros(cell.heads_kv)] * 2, causal=cell.causal)


# ---- which kernels -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("length", "head_dim"), [(512, 64), (2048, 64), (2048, 128), (8192, 128), (512, 256)])
def test_forward_on_hopper(length, head_dim, mask):
    problem = problem_of(cell(mask=mask, length=length, head_dim=head_dim))
    ((builder, (config,)),) = warmup.kernels_of(cell(mask=mask, length=length, head_dim=head_dim), None, H200)
    assert builder == "sm90.forward.forward.build"
    assert (config.dtype, config.d, config.dv, config.write_lse) == ("bfloat16", head_dim, head_dim, False)
    assert config.tile == forward_tile(problem)


def test_backward_on_hopper_comes_after_a_forward_that_keeps_lse():
    forward, *others = warmup.kernels_of(cell("backward", "causal"), None, H200)
    assert forward[0] == "sm90.forward.forward.build"
    assert forward[1][0].write_lse is True
    assert [builder for builder, _ in others] == ["passes.preprocess.build", "sm90.backward.backward.build", "sm90.dq.postprocess.build"]
    assert others[1][1][0].tile == backward_tile(problem_of(cell()))


def test_few_queries_take_the_kernels_for_keys_in_parts():
    (_, (config,)), (combine, _) = warmup.kernels_of(cell(batch=1, heads=1, heads_kv=1, length=4096), None, H200)
    assert config.store == "kv_splits"
    assert combine == "passes.combine.build"


@pytest.mark.parametrize(("dtype", "backend", "gpu"), [("float32", None, T4), ("bfloat16", None, T4), ("bfloat16", "simt", H200)])
def test_where_tensor_cores_cannot_serve_or_are_not_wanted(dtype, backend, gpu):
    kernels = warmup.kernels_of(cell("backward", dtype=dtype), backend, gpu)
    builders = ["simt.forward.build", "passes.delta.build", "simt.backward.build_dkdv", "simt.backward.build_dq"]
    assert [builder for builder, _ in kernels] == builders
    assert kernels[-1][1][-1] == tile_for("dq", dtype, 64)


def test_float32_on_tensor_cores_comes_with_what_it_leaves_to_others():
    builders = [builder for builder, _ in warmup.kernels_of(cell(dtype="float32"), None, H200)]
    assert builders == [
        "passes.write_planes.build_statistics",
        "passes.write_planes.build",
        "sm90.fp16x2.forward_planes.build",
        "simt.forward.build",
    ]
    left = [builder for builder, _ in warmup.kernels_of(cell("backward", dtype="float32"), None, A100) if builder.startswith("simt")]
    assert left == ["simt.forward.build", "simt.backward.build_dkdv", "simt.backward.build_dq"]


@pytest.mark.parametrize(("dtype", "backend", "gpu"), [("bfloat16", None, A100), ("float16", None, T4), ("float16", "sm80", H200)])
def test_where_hopper_kernels_cannot_run_or_are_not_wanted(dtype, backend, gpu):
    (builder, (config,)), *_ = warmup.kernels_of(cell(dtype=dtype), backend, gpu)
    assert builder == "sm80.forward.forward.build"
    assert config.shape.turing == (gpu is T4)


def test_head_dimensions_beyond_128_take_the_kernel_that_makes_dq_of_ds():
    _, *others = warmup.kernels_of(cell("backward", head_dim=256), None, H200)
    assert [builder for builder, _ in others] == ["passes.preprocess.build", "sm90.backward.backward_wide.build", "sm90.dq.dq.build"]


def test_listing_kernels_loads_and_compiles_none(monkeypatch):
    """Nor is a GPU asked for, which need not be here."""
    for module, name in ((compile, "cubin"), (launch, "_kernel"), (launch, "gpu"), (launch, "_no_gpu")):
        monkeypatch.setattr(module, name, None)
    for backend in (None, "simt"):
        assert len(warmup.kernels_of(cell("backward"), backend, H200)) == 4


def test_what_a_backend_refuses_is_said():
    with pytest.raises(NotImplementedError, match="serves float16, bfloat16 and float32"):
        warmup.kernels_of(cell(dtype="float64"), "sm90", H200)


# ---- the command -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.full
def test_kernels_for_a_gpu_elsewhere_are_compiled_once(empty_cache, tmp_path, monkeypatch, capsys):
    written = tmp_path / "warmup.json"
    arguments = ["warmup", "--arch", "8.6", "--dtype", "float32", "--direction", "forward", *SIZES, "--json", str(written)]
    rows = []
    for status in ("compiled", "cached"):
        assert main(arguments) == 0
        (row,) = json.loads(written.read_text())["kernels"]
        rows.append(row)
        assert row["status"] == status
        assert row["kernel"].startswith("simt.forward.build float32, float32, 16, 16, False, plain, Tile(")
        assert row["seconds"] > 0
        assert 0 < row["registers"] <= 255
        printed = capsys.readouterr().out
        assert f"for compute capability 8.6, kept in {empty_cache}\n" in printed
        assert f"{row['registers']} registers" in printed
        assert row["kernel"] in printed
    assert {key for key in rows[0] if rows[0][key] != rows[1][key]} == {"status", "seconds"}
    monkeypatch.setattr(compiler, "intermediate", None)  # whoever finds the kernel on disk does not compile it
    sizes = {"batch": 1, "heads": 2, "heads_kv": 2, "length": 64, "head_dim": 16}
    (kernel,) = warmup.kernels_of(cell(dtype="float32", **sizes), None, Gpu(0, (8, 6), 1))
    assert compile.cubin(*kernel, (8, 6))[:4] == b"\x7fELF"


def test_a_row_says_how_long_the_work_took():
    start = time.perf_counter()
    row = warmup._timed("a kernel", lambda: (False, {"registers": 8}))
    assert 0 <= row.pop("seconds") <= time.perf_counter() - start
    assert row == {"kernel": "a kernel", "status": "compiled", "registers": 8}


@pytest.mark.full
def test_a_kernel_of_which_the_linker_tells_nothing_is_compiled(empty_cache, monkeypatch):
    """Its row names no registers, and no bytes that were not spilled."""
    link = compiler.link
    monkeypatch.setattr(compiler, "link", lambda *arguments: link(*arguments)._replace(log=""))
    _, kernel, *_ = warmup.kernels_of(cell("backward", dtype="float32"), None, A100)  # the one that takes least time to compile
    rows = [warmup._compile_for_gpu(*kernel, A100.capability) for _ in range(2)]
    assert [row["status"] for row in rows] == ["compiled", "cached"]
    for row in rows:
        assert set(row) == {"kernel", "status", "seconds"}
        assert warmup.line(row).endswith(f" s  {row['kernel']}")


def test_kernels_for_the_cpu(tmp_path, capsys):
    written = tmp_path / "warmup.json"
    for expected in ({"compiled", "cached"}, {"cached"}):  # what other tests compiled is in the cache
        assert main(["warmup", "--backend", "cpu", "--dtype", "float32", *SIZES, "--json", str(written)]) == 0
        content = json.loads(written.read_text())
        assert content["place"] == "cpu"
        assert [row["kernel"] for row in content["kernels"]] == ["cpu forward float32", "cpu backward float32"]
        assert {row["status"] for row in content["kernels"]} <= expected
    assert "for the CPU (the CPU is demanded)" in capsys.readouterr().out


def test_what_cannot_run_is_said_and_nothing_is_compiled(tmp_path, capsys):
    written = tmp_path / "warmup.json"
    assert main(["warmup", "--arch", "9.0", "--backend", "sm90", "--dtype", "float64", *SIZES, "--json", str(written)]) == 1
    reason = "backend sm90: serves float16, bfloat16 and float32; q.dtype is float64"
    assert f"cannot: forward full D 16 N 64: {reason}\n" in capsys.readouterr().out
    assert json.loads(written.read_text()) == {"place": "gpu", "refused": [reason], "kernels": []}


def test_a_kernel_that_does_not_compile_is_an_error(capsys):
    row = warmup._compile_for_gpu("simt.forward.no_such_builder", (), (9, 0))
    assert row["error"].startswith("AttributeError: ")
    assert warmup.line(row).startswith("failed    simt.forward.no_such_builder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "hopper"], "argument --arch: 'hopper' is not a compute capability such as 9.0"),
        (["--arch", "9.0", "--backend", "cpu"], "--arch: neither --backend cpu nor Numba's CUDA simulator has a GPU"),
        (["--jobs", "0"], "argument --jobs: '0' is not a positive integer"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_calls_find_everything_compiled(empty_cache, monkeypatch, dtype):
    """After a warm-up of a grid, calls of its shapes compile nothing."""
    import cupy

    assert main(["warmup", "--dtype", dtype, "--lengths", "128", "--tokens", "1024", "--width", "512", "--head-dims", "64"]) == 0
    launch._kernel.cache_clear()
    monkeypatch.setattr(compiler, "intermediate", None)
    q, k, v, do = (cupy.ones((8, 8, 128, 64), dtype) for _ in range(4))
    for causal in (False, True):
        numba_flash.forward(q, k, v, causal=causal)
        o, lse = numba_flash.forward(q, k, v, causal=causal, return_lse=True)
        numba_flash.backward(do, q, k, v, o, lse, causal=causal)
    launch._kernel.cache_clear()
