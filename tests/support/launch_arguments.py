"""Compares the arguments that a kernel declares in its signature with those of a launch. Nothing is compiled."""

import importlib
from functools import cache
from pathlib import Path

import numpy as np

from numba_flash.cuda.runtime import lang, packing
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.files.fingerprint import package

NUMBERS = {int: "int64", float: "float64"}  # Numba's names, where they are not NumPy's


def flattened(kind) -> list:
    """Numba's types of the arguments that the driver sees: a tuple counts as its elements."""
    return [x for each in kind.types for x in flattened(each)] if isinstance(kind, lang.types.BaseTuple) else [kind]


@cache
def declared(builder: str, config: tuple) -> list:
    """Numba's types of the arguments in the kernel's signature."""
    module, build = builder.rsplit(".", 1)
    _, signature, _ = getattr(importlib.import_module(f"numba_flash.cuda.{module}"), build)(*config)
    return [kind for each in signature.args for kind in flattened(each)]


@cache
def has_dynamic_shared_memory(builder: str) -> bool:
    """Whether the launch says how much shared memory the kernel has."""
    module = f"cuda.{builder.rpartition('.')[0]}"
    source = Path(importlib.import_module(f"numba_flash.{module}").__file__).read_text()
    return "shared.array(0," in source or "cuda.sm90.hopper_kernel" in package().modules_of(module)


def check_arguments(prepared: Launch) -> None:
    """The launch has as many arguments as the kernel declares, arrays with the same dtype and dimensions, numbers of the same type.
    It asks for shared memory if the kernel uses some.
    """
    assert (prepared.shared_bytes > 0) == has_dynamic_shared_memory(prepared.builder), prepared.builder
    kinds, views = declared(prepared.builder, prepared.config), (*prepared.operands, *prepared.extras)
    numbers, first = packing.flat(prepared.numbers), len(prepared.maps)
    assert len(kinds) == first + len(views) + len(numbers), prepared.builder
    for kind, (x, view) in zip(kinds[first:], views, strict=False):
        assert kind.ndim == (view if isinstance(view, int) else len(view)), prepared.builder
        if x is not None:
            dtype = np.dtype(x.dtype)
            bits = f"uint{8 * dtype.itemsize}" if dtype.itemsize == 2 else dtype.name  # as some kernels read float16, and all bfloat16
            assert str(kind.dtype) in (dtype.name, bits), f"{prepared.builder} takes {kind.dtype}, not {dtype}"
    for kind, number in zip(kinds[first + len(views) :], numbers, strict=True):
        assert str(kind) == NUMBERS.get(type(number), type(number).__name__), prepared.builder
