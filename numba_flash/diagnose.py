"""What this installation can do, and whether it does it right: `show_config` and `selftest`."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

import numpy as np

from numba_flash import reference
from numba_flash.api import backward, forward
from numba_flash.arguments import precisions
from numba_flash.arguments.problem import ForwardInputs
from numba_flash.files import disk
from numba_flash.plan import BACKENDS, in_words, tier

PACKAGES = ("numpy", "scipy", "numba", "llvmlite", "threadpoolctl", "numba-cuda", "cuda-core", "cupy-cuda13x", "cupy-cuda12x", "ml_dtypes")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _why_not(backend: str) -> str | None:
    return tier(backend).why_not("forward", None, ForwardInputs(np.empty(0), None, None), True)


def _device_lines() -> list[str]:
    """Name, capability and memory of each CUDA device that CuPy sees."""
    import cupy

    lines = []
    for i in range(cupy.cuda.runtime.getDeviceCount()):
        p = cupy.cuda.runtime.getDeviceProperties(i)
        memory = p["totalGlobalMem"] / 2**30
        lines.append(f"device {i}: {p['name'].decode()}, compute capability {p['major']}.{p['minor']}, {memory:.0f} GiB")
    return lines


def _precision() -> str:
    """That of calls that give none; the error that they raise where the environment names none that there is."""
    try:
        return precisions.get_precision()
    except ValueError as error:
        return str(error)


def _of_cpu_kernels() -> Path | None:
    """Where they are kept."""
    from numba_flash.cpu.kernels import forward_items

    path = forward_items.stats.cache_path
    return path and Path(path)


def _held(directory: Path | None) -> str | None:
    """A directory with what it holds; None for None."""
    if directory is None:
        return None
    files, size = disk.held(directory)
    return f"{directory} ({files} file{'s' * (files != 1)}, {in_words(size)})"


def show_config(file: TextIO | None = None) -> None:
    """Print versions, devices, backends (and why one cannot run), the default precision, and where compiled kernels are kept: how many
    files, and how large they are.

    Parameters
    ----------
    file : text file, optional
        Where to print; default standard output.
    """
    from numba_flash import __version__
    from numba_flash.cuda.runtime.compile import cache_directory

    show = lambda *parts: print(*parts, file=file or sys.stdout)
    show(f"numba_flash {__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPU threads")
    show("packages:", ", ".join(f"{package} {_version(package)}" for package in PACKAGES))
    show("precision of float32:", _precision())
    show("cubin cache:", _held(cache_directory()) or "none: there is no home directory, and NUMBA_FLASH_CACHE_DIR names no other")
    show("CPU kernel cache:", _held(_of_cpu_kernels()) or "none: neither the package's folder nor the user's for caches can be written to")
    for backend in BACKENDS:
        reason = _why_not(backend)
        show(f"backend {backend}:", "ready" if reason is None else f"not available: {reason}")
        if backend != "cpu" and reason is None and not tier(backend).takes_numpy():
            show("\n".join(_device_lines()))


def _dtypes() -> list:
    """The dtypes NumPy can hold here; bfloat16 needs ml_dtypes."""
    dtypes = [np.dtype(name) for name in ("float16", "float32", "float64")]
    try:
        import ml_dtypes
    except ImportError:
        return dtypes
    return [*dtypes, np.dtype(ml_dtypes.bfloat16)]


def _relative_error(x, ref) -> float:
    x = x.astype(np.float64)
    return float(np.linalg.norm(x - ref) / max(np.linalg.norm(ref), np.finfo(np.float64).tiny))


def selftest(file: TextIO | None = None) -> bool:
    """Run every available backend in every dtype, forward and backward, against the float64 oracle; print a table.

    Parameters
    ----------
    file : text file, optional
        Where to print; default standard output.

    Returns
    -------
    bool
        True if each result is as accurate as its dtype allows: relative error below one unit of rounding of the dtype, plus
        ``4 sqrt(N)`` units of the accumulator.
    """
    show = lambda *parts: print(*parts, file=file or sys.stdout)
    rng = np.random.default_rng(0)
    good = True
    for backend in BACKENDS:
        reason = _why_not(backend)
        if reason is not None:
            show(f"{backend}: skipped: {reason}")
            continue
        n, d = (6, 4) if backend != "cpu" and tier(backend).takes_numpy() else (150, 40)
        for dtype in _dtypes():
            q, k, v, do = (rng.standard_normal((heads, rows, d)).astype(dtype) for heads, rows in ((2, n), (1, n + 3), (1, n + 3), (2, n)))
            try:
                o, lse = forward(q, k, v, causal=True, return_lse=True, backend=backend)
            except NotImplementedError as error:
                show(f"{backend:5} {dtype.name:9} {error}")
                continue
            o_ref, lse_ref = reference.forward(q, k, v, causal=True, return_lse=True)
            ref, results = [o_ref], [o]
            if tier(backend).why_not("backward", None, ForwardInputs(q, k, v), True) is None:
                results += backward(do, q, k, v, o, lse, causal=True, backend=backend)
                ref += reference.backward(do, q, k, v, o_ref, lse_ref, causal=True)
            errors = [_relative_error(x, r) for x, r in zip(results, ref, strict=True)]
            accumulator = np.finfo(lse.dtype).eps
            bound = (0 if dtype == lse.dtype else _epsilon(dtype)) + 4 * n**0.5 * accumulator
            passed = all(error <= bound for error in errors)
            good &= passed
            columns = "  ".join(f"{name} {error:.1e}" for name, error in zip(("o", "dq", "dk", "dv"), errors, strict=False))
            show(f"{backend:5} {dtype.name:9} {columns}  bound {bound:.1e}  {'ok' if passed else 'FAILED'}")
    return good


def _epsilon(dtype) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
