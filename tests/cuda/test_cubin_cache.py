"""Compiled CUDA kernels on disk when something is wrong with the disk: whatever it is, a kernel is right, or compiled anew."""

import errno
import json
import logging
import multiprocessing
import os
import struct
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

import simt_kernels
import sm80_kernels
import sm90_kernels

import numba_flash
from numba_flash import warmup
from numba_flash.__main__ import main
from numba_flash.arguments.options import PLAIN, Options
from numba_flash.cpu import kernels as cpu_kernels
from numba_flash.cuda.runtime import compile
from numba_flash.files import disk, durations, fingerprint, notice

KERNELS = [kernel for module in (simt_kernels, sm80_kernels, sm90_kernels) for kernel in module.KERNELS.values()]
KERNEL = "simt.forward.build", ("float32", 64, 64), (9, 0)
LOG = "ptxas info: Used 42 registers, 16 bytes spill stores, 8 bytes stack frame, 32 bytes smem"


class Compiler:
    """Stands in for Numba and the linker; counts what it is asked for."""

    def __init__(self):
        self.calls = 0

    def code(self, builder: str, config: tuple) -> bytes:
        return f"\x7fELF {builder} {config} ".encode() * 50

    def intermediate(self, builder, config, capability):
        self.calls += 1
        return self.code(builder, config)

    def link(self, code, capability):
        return code, LOG


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(compile.compiler, "intermediate", compiler.intermediate)
    monkeypatch.setattr(compile.compiler, "link", compiler.link)
    return compiler


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """An empty cache, about which nothing was said yet."""
    monkeypatch.setattr(disk, "_named", set())
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(directory: Path, kind: str) -> Path:
    """The only file of that kind."""
    (path,) = directory.glob(f"*.{kind}")
    return path


def test_a_kernel_is_compiled_once(directory, compiler):
    for _ in range(2):
        assert compile.cubin(*KERNEL) == compiler.code(*KERNEL[:2])
    assert compiler.calls == 1
    assert compile.kept_resources(*KERNEL)["registers"] == 42


def test_what_is_compiled_is_said_once(directory, compiler, monkeypatch):
    said = []
    monkeypatch.setattr(notice, "_say", said.append)
    monkeypatch.setattr(notice.time, "perf_counter", iter([0, 20, 0, 10, 0, 1]).__next__)
    monkeypatch.setattr(notice, "_begun", set())
    builder, _, capability = KERNEL
    for heads in (64, 128, 256):
        for _ in range(2):
            compile.cubin(builder, ("float32", heads, heads), capability)
    line = "compiling the CUDA kernel simt.forward.build (float32, {0}, {0}; for compute capability 9.0){1} (once: it is kept in {2})"
    took = "", ", about 20 s by what it took here before", ", about 10 s by what it took here before"
    assert said == [line.format(heads, about, directory) for heads, about in zip((64, 128, 256), took, strict=True)]


def test_two_variants_have_two_lines():
    """Of all kernels that are tried: those of one builder are told apart by what is said of their configuration."""
    told = {(kernel.builder, kernel.config): (kernel.builder, compile.of_config(kernel.config)) for kernel in KERNELS}
    assert len(told) > 300
    assert len(set(told.values())) == len(told)


@dataclass(frozen=True)
class Shape:
    rows: int
    wide: bool


def test_options_of_a_kernel_are_named():
    config = "float16", 64, Options(softcap=1.0, bias="float32", mask=True), PLAIN, Shape(128, True)
    assert compile.of_config(config) == "float16, 64, softcap=1.0, bias=float32, mask=True, plain, Shape(128, True)"


# ---- damage --------------------------------------------------------------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


DAMAGES = {
    "emptied": lambda data: b"",
    "cut in the checksum": lambda data: data[:20],
    "cut": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "bit of the checksum": lambda data: flipped(data, 3),
    "bit of the code": lambda data: flipped(data, len(data) // 2),
    "code without a checksum": lambda data: data[disk.CHECKSUM_BYTES :],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_code_is_compiled_anew_and_the_log_says_so(directory, compiler, caplog, damage):
    code = compile.cubin(*KERNEL)
    path = kept(directory, "cubin")
    good = path.read_bytes()
    path.write_bytes(DAMAGES[damage](good))
    with caplog.at_level(logging.WARNING, "numba_flash"):
        assert compile.cubin(*KERNEL) == code
    assert compiler.calls == 2
    assert [record.getMessage() for record in caplog.records] == [f"{path} counts as missing: it is damaged"]
    assert path.read_bytes() == good
    assert compile.cubin(*KERNEL) == code
    assert compiler.calls == 2


@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
def test_a_missing_or_damaged_log_is_no_error(directory, compiler, damage):
    code = compile.cubin(*KERNEL)
    log = kept(directory, "log")
    log.unlink() if damage == "missing" else log.write_bytes(DAMAGES[damage](log.read_bytes()))
    assert compile.cubin(*KERNEL) == code
    assert compile.kept_resources(*KERNEL) == {}
    assert compiler.calls == 1


def test_what_cannot_be_read_is_compiled_anew(directory, compiler, caplog):
    """A directory where the file should be: it cannot be written either, and the kernel is there all the same."""
    code = compile.cubin(*KERNEL)
    path = kept(directory, "cubin")
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning, match=f"compiled kernels are not kept in {directory}: Is a directory"):
        assert compile.cubin(*KERNEL) == code
    assert [record.getMessage() for record in caplog.records] == [f"{path} counts as missing: Is a directory"]


# ---- nowhere to keep it --------------------------------------------------------------------------------------------------------------


class Nowhere(NamedTuple):
    """A place in which nothing can be kept."""

    directory: str
    reason: str


def full(directory, monkeypatch):
    def replace(*paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", replace)
    return Nowhere(str(directory), "No space left on device")


def file_system_that_cannot_be_written(directory, monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", "/proc/numba_flash")
    return Nowhere("/proc/numba_flash", "")


def file_in_its_place(directory, monkeypatch):
    directory.write_text("")
    return Nowhere(str(directory), "File exists")


def no_home(directory, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("NUMBA_FLASH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return Nowhere("~/.cache/numba_flash", "there is no home directory")


def others_may_write(directory, monkeypatch):
    directory.mkdir()
    directory.chmod(0o777)
    return Nowhere(str(directory), r"others may write to it \(mode 0777\)")


def another_users(directory, monkeypatch):
    directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    return Nowhere(str(directory), "it belongs to user")


BUILDERS = ("simt.forward.build", "simt.backward.build_dq", "simt.forward.build")
NOWHERE = [full, file_system_that_cannot_be_written, file_in_its_place, no_home, others_may_write, another_users]


@pytest.mark.parametrize("fault", NOWHERE)
def test_without_a_place_kernels_are_compiled_and_one_warning_names_it(directory, compiler, monkeypatch, fault):
    where = fault(directory, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"compiled kernels are not kept in {where.directory}: {where.reason}") as caught:
        codes = [compile.cubin(builder, *KERNEL[1:]) for builder in BUILDERS]
    assert codes == [compiler.code(builder, KERNEL[1]) for builder in BUILDERS]
    assert len(caught) == 1
    assert compiler.calls == len(BUILDERS)
    assert not directory.is_dir() or [*directory.iterdir()] == []


@pytest.mark.parametrize("fault", [others_may_write, another_users])
def test_code_that_others_may_have_written_is_not_used(directory, compiler, monkeypatch, fault):
    compile.cubin(*KERNEL)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *arguments, **options: None)  # it is there
        fault(directory, patch)
        with pytest.warns(RuntimeWarning, match=str(directory)):
            compile.cubin(*KERNEL)
    assert compiler.calls == 2


def test_a_file_that_others_may_write_is_not_used(directory, compiler, caplog):
    compile.cubin(*KERNEL)
    path = kept(directory, "cubin")
    path.chmod(0o666)
    compile.cubin(*KERNEL)
    assert compiler.calls == 2
    assert [record.getMessage() for record in caplog.records] == [f"{path} counts as missing: others may write to it (mode 0666)"]


# ---- the command ---------------------------------------------------------------------------------------------------------------------

GRID = ["--dtype", "float32", "--direction", "forward", "--lengths", "64", "--tokens", "64", "--width", "32", "--head-dims", "16"]


@pytest.fixture
def warm_up(tmp_path, monkeypatch, compiler):
    """The exit status of the command and its rows; it works in this process, where faults are injected."""
    monkeypatch.setattr(warmup, "_compiled", lambda tasks, jobs: (task() for task in tasks))
    written = tmp_path / "warmup.json"

    def run() -> tuple[int, dict]:
        status = main(["warmup", "--arch", "8.6", "--mask", "full", *GRID, "--json", str(written)])
        return status, json.loads(written.read_text())

    return run


def test_warmup_rebuilds_what_is_damaged_and_counts_it_as_compiled(directory, warm_up, compiler):
    for expected, damage in [("compiled", None), ("cached", "cut"), ("compiled", "bit of the code"), ("compiled", None), ("cached", None)]:
        status, written = warm_up()
        assert status == 0
        (row,) = written["kernels"]
        assert row["status"] == expected
        assert row["registers"] == 42
        if damage:
            path = kept(directory, "cubin")
            path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert compiler.calls == 3


@pytest.mark.parametrize("fault", NOWHERE)
def test_warmup_says_that_nothing_is_kept(directory, warm_up, compiler, monkeypatch, capsys, fault):
    where = fault(directory, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"not kept in {where.directory}: {where.reason}"):
        status, written = warm_up()
    assert status == 1
    assert "nothing is kept (a warning says why)" in capsys.readouterr().out
    if fault is full:  # seen only once there is something to write
        (row,) = written["kernels"]
        assert row["error"] == "OSError: compiled, but nothing is kept (a warning says why)"
    else:
        assert written["refused"] == ["nothing is kept (a warning says why)"]
        assert compiler.calls == 0


@pytest.mark.parametrize("full", [False, True])
def test_warmup_for_the_cpu_says_that_nothing_is_kept(directory, monkeypatch, full):
    """Where a kernel was compiled, and a directory given up."""

    def forward(q, k, v, **options):
        if full:
            disk.give_up(directory, "No space left on device")
        return q, q[:, 0]

    monkeypatch.setattr(numba_flash, "forward", forward)
    monkeypatch.setattr(cpu_kernels, "compiled", SimpleNamespace(stats=SimpleNamespace(cache_misses={"types": 1})), raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        row = warmup._compile_for_cpu("forward", "float32")
    assert row.get("error") == ("OSError: compiled, but nothing is kept (a warning says why)" if full else None)


def test_show_config_without_a_home(directory, monkeypatch, capsys):
    no_home(directory, monkeypatch)
    main(["info"])
    assert "cubin cache: none: there is no home directory, and NUMBA_FLASH_CACHE_DIR names no other\n" in capsys.readouterr().out


# ---- several processes on one cache --------------------------------------------------------------------------------------------------

DTYPES = ("float16", "bfloat16", "float32", "float64")


def instructions(cubin: bytes) -> bytes:
    """Section ``.text.kernel`` of the ELF file; names elsewhere in it are numbered as they come."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    name = lambda at: cubin[at : cubin.index(b"\0", at)]
    return next(cubin[at : at + n] for tag, _, _, _, at, n in headers if name(headers[names][4] + tag) == b".text.kernel")


def fetch(directory: Path) -> dict[str, bytes]:
    """Kernels of all dtypes; each process begins with another one. A place that cannot be used is an error."""
    os.environ["NUMBA_FLASH_CACHE_DIR"] = str(directory)
    first = os.getpid() % len(DTYPES)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        codes = {dtype: delta(dtype) for dtype in (*DTYPES[first:], *DTYPES[:first])}
    return {dtype: codes[dtype] for dtype in DTYPES}


def delta(dtype: str) -> bytes:
    return instructions(compile.cubin("passes.delta.build", (dtype, 64, False, 16, 8), (9, 0)))


@pytest.mark.unproven("of processes and their timing")
@pytest.mark.full
def test_processes_on_one_cold_cache(tmp_path):
    """10 rounds: each of four processes gets the right code of each dtype, and they leave nothing but right code."""
    processes = len(DTYPES)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        expected = pool.submit(fetch, tmp_path / "alone").result()
        assert len(set(expected.values())) == len(DTYPES)
        for i in range(10):
            directory = tmp_path / str(i)
            assert all(found == expected for found in pool.map(fetch, [directory] * processes))
            left = [disk.load(path) for path in directory.glob("*.cubin")]
            assert sorted(map(instructions, left)) == sorted(expected.values())
            others = [path for path in directory.iterdir() if path.suffix not in (".cubin", ".log")]
            assert sorted(path.name for path in others) == [durations.FILE, fingerprint.FILE]
            assert len([*directory.iterdir()]) == 2 * len(DTYPES) + len(others)
