"""What a type checker tells users: mypy on small scripts of theirs, right and wrong ones, against the package as it is installed."""

import configparser
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from support import ROOT

import numba_flash
from numba_flash.arguments import annotations

PACKAGE = Path(numba_flash.__file__).parent
run_once = pytest.mark.xdist_group("mypy")

RIGHT = '''
from collections.abc import Callable
from typing import Any, Literal, assert_type

import numpy as np
from numpy.typing import NDArray

import numba_flash
from numba_flash.arguments.annotations import ForwardOptions
from numba_flash.plan import Plan


def numpy(x: NDArray[np.float64], lengths: NDArray[np.int64], rectify: Callable[..., float], flag: bool) -> None:
    o = numba_flash.forward(x, x, x, scale=1, causal=True, window=(3, -1), bias=x, kv_lengths=lengths, score_mod=rectify, backend="cpu")
    assert_type(o, NDArray[np.float64])
    o, lse = numba_flash.forward(x, x, x, return_lse=True)
    assert_type(o, NDArray[np.float64])
    assert_type(lse, NDArray[Any])
    assert_type(numba_flash.forward(x, x, x, return_lse=flag), Any)
    assert_type(numba_flash.forward(x, x, x, out=o), Any)
    gradient = NDArray[np.float64]
    assert_type(numba_flash.backward(x, x, x, x, o, lse, dlse=lse, mask=x > 0), tuple[gradient, gradient, gradient])
    dq, dk, dv, dbias = numba_flash.backward(x, x, x, x, o, lse, bias=x, bias_grad=True, deterministic=False)
    assert_type((dv, dbias), tuple[gradient, NDArray[Any]])
    assert_type(numba_flash.backward(x, x, x, x, o, lse, out=(dq, None, None)), tuple[Any, ...])
    assert_type(numba_flash.backward(x, x, x, x, o, lse, bias=x, bias_grad=flag), tuple[Any, ...])
    assert_type(numba_flash.forward_packed(x, x, x, lengths, lengths), NDArray[np.float64])
    assert_type(numba_flash.forward_packed(x, x, x, lengths, lengths, return_lse=True), tuple[NDArray[np.float64], NDArray[Any]])
    assert_type(numba_flash.forward_packed(x, x, x, lengths, lengths, return_lse=flag), Any)
    assert_type(numba_flash.forward_paged(x, x, x, lengths, lengths), NDArray[np.float64])
    assert_type(numba_flash.forward_paged(x, x, x, lengths, lengths, return_lse=True), tuple[NDArray[np.float64], NDArray[Any]])
    assert_type(numba_flash.backward_packed(x, x, x, x, o, lse, lengths, lengths), tuple[gradient, gradient, gradient])
    assert_type(numba_flash.merge(o, lse, o, lse), tuple[NDArray[Any], NDArray[Any]])
    assert_type(numba_flash.dropout_mask((2, 3), dropout=0.5, rng=(1, 2)), NDArray[np.bool_])
    assert_type(numba_flash.reference.forward(x, x, x, scale=1, precision="ieee"), gradient)
    assert_type(numba_flash.reference.forward(x, x, x, return_lse=True), tuple[gradient, gradient])
    assert_type(numba_flash.reference.backward(x, x, x, x, o, lse, backend="cpu"), tuple[gradient, gradient, gradient])
    assert_type(numba_flash.reference.backward(x, x, x, x, o, lse, bias_grad=True), tuple[gradient, gradient, gradient, gradient])
    assert_type(numba_flash.reference.backward(x, x, x, x, o, lse, bias_grad=flag), tuple[gradient, ...])
    o, pullback = numba_flash.vjp(x, x, x, causal=True, deterministic=False, axes="bnhd")
    assert_type(o, NDArray[np.float64])
    assert_type(pullback(o), tuple[gradient, gradient, gradient])
    o, lse, pullback = numba_flash.vjp(x, x, x, return_lse=True)
    assert_type(pullback(o, dlse=lse), tuple[gradient, gradient, gradient])
    o, lse, pullback_of_bias = numba_flash.vjp(x, x, x, bias=x, bias_grad=True, return_lse=True)
    assert_type(pullback_of_bias(o, lse), tuple[gradient, gradient, gradient, NDArray[Any]])
    assert_type(numba_flash.vjp(x, x, x, bias=x, bias_grad=True)[1](o)[3], NDArray[Any])
    assert_type(numba_flash.vjp(x, x, x, return_lse=flag), tuple[Any, ...])
    assert_type(numba_flash.get_precision(), Literal["float32", "ieee", "tf32"])
    numba_flash.plan(x, x, x, kind="backward", bias=x, bias_grad=True, dlse=True, page_table=None)
    assert_type(numba_flash.show_config(), None)
    assert_type(numba_flash.forward(x, x, x, window=[3, 3], kv_lengths=[3, 4], rng=[1, 2]), NDArray[np.float64])
    both: ForwardOptions = {"causal": True, "deterministic": False, "bias_grad": False, "dlse": None}
    numba_flash.forward(x, x, x, **both)
    numba_flash.backward(x, x, x, x, o, lse, causal=True, return_lse=True)
    numba_flash.backward_packed(x, x, x, x, o, lse, [0, 3], (0, 3), return_lse=True)
    assert_type(numba_flash.set_precision("tf32"), None)
    with numba_flash.use_precision("ieee"):
        numba_flash.forward_packed(x, x, x, lengths, lengths, precision="float32")
    chosen = numba_flash.plan(x, x, x, dropout=0.1, rng=(1, 2))
    assert_type(chosen, Plan)
    assert_type(chosen.backend, Literal["sm90", "sm80", "simt", "cpu"])


class Tensor:
    """A foreign array."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return None

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class OnGpu:
    """Another one."""

    __cuda_array_interface__: dict[str, Any]


def foreign(x: Tensor, y: OnGpu, cupy: Any) -> None:
    assert_type(numba_flash.forward(x, x, x), Any)
    o, lse = numba_flash.forward(y, y, y, return_lse=True)
    assert_type(o, Any)
    o, lse = numba_flash.forward(cupy, cupy, cupy, return_lse=True)
    dq, dk, dv = numba_flash.backward(cupy, cupy, cupy, cupy, o, lse)
    turned: Literal["bhnd", "bnhd"] = "bnhd"
    assert_type(numba_flash.forward(x, x, x, axes=turned), Any)
    print(dq.device, numba_flash.merge(x, x, x, x)[0].device, numba_flash.forward(cupy, cupy, cupy).device)
'''

WRONG = """
import numpy as np
import numba_flash

x = np.zeros((3, 4))
lengths = np.array([0, 3])
numba_flash.forward([[1.0]], x, x)  # call-overload: argument types "list[list[float]]"
numba_flash.forward(x, x)  # call-overload: No overload variant of "forward"
numba_flash.forward(x, x, x, causl=True)  # call-overload: did you mean "causal"
numba_flash.forward(x, x, x, scale="1")  # call-overload: "str"
numba_flash.forward(x, x, x, return_lse="no")  # call-overload: "str"
numba_flash.forward(x, x, x, backend="cuda")  # call-overload: "str"
numba_flash.forward(x, x, x, axes="bdnh")  # call-overload: "str"
numba_flash.forward(x, x, x, mask=True)  # call-overload: "bool"
o, lse = numba_flash.forward(x, x, x, return_lse=True).T  # attr-defined: "tuple[ndarray[
numba_flash.forward(x, x, x).size()  # operator: "int" not callable
a, b = numba_flash.backward(x, x, x, x, x, x)  # misc: 2 expected, 3 provided
c, d, e = numba_flash.backward(x, x, x, x, x, x, bias=x, bias_grad=True)  # misc: 3 expected, 4 provided
numba_flash.forward_packed(x, x, x, 3, lengths)  # call-overload: "int"
numba_flash.forward_packed(x, x, x, lengths, lengths, bias=x)  # call-overload: Unexpected keyword argument "bias"
f, g = numba_flash.backward_packed(x, x, x, x, x, x, lengths, lengths)  # misc: 2 expected, 3 provided
g, h, i = numba_flash.vjp(x, x, x)  # misc: 3 expected
numba_flash.vjp(x, x, x)[1](x)[3]  # misc: out of range
numba_flash.vjp(x, x, x, out=x)  # call-overload: "out"
numba_flash.plan(x, x, x, kind="both")  # arg-type: expected "Literal['forward', 'backward']"
numba_flash.merge(x, x)  # call-overload: No overload variant of "merge"
numba_flash.dropout_mask(3, dropout=0.5, rng=(1, 2))  # arg-type: "int"; expected "tuple[int, ...] | list[int]"
numba_flash.dropout_mask((3, 4), dropout=0.5, rng=(1, 2), p=0.5)  # arg-type: expected "Never"
numba_flash.forward(x, x, x, dlse=x)  # call-overload: argument type
numba_flash.plan(x, x, x, backend="gpu")  # arg-type: expected "Literal['sm90', 'sm80', 'simt', 'cpu'] | None"
numba_flash.forward(x, x, x, precision="tf16")  # call-overload: "str"
numba_flash.set_precision("tf16")  # arg-type: expected "Literal['float32', 'ieee', 'tf32']"
with numba_flash.use_precision(None):  # arg-type: "None"; expected "Literal['float32', 'ieee', 'tf32']"
    pass
numba_flash.show_config("config.txt")  # arg-type: "str"; expected "TextIO
numba_flash.forwrd  # attr-defined: maybe "forward"
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory) -> dict[str, list[tuple[int, str, str]]]:
    """Line, code and message of each error in the two scripts. The package is found as an installed one is: only for its py.typed."""
    folder = tmp_path_factory.mktemp("user")
    for name, text in (("right", RIGHT), ("wrong", WRONG)):
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--hide-error-context", "right.py", "wrong.py"]
    run = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)}, capture_output=True, text=True)
    assert run.returncode in (0, 1), f"{run.stderr}{run.stdout}(numba_flash[test] installs mypy)"
    found = re.findall(r"^(\w+)\.py:(\d+): error: (.*?)  \[([\w-]+)\]$", run.stdout, re.MULTILINE)
    return {name: [(int(line), code, message) for file, line, message, code in found if file == name] for name in ("right", "wrong")}


@run_once
def test_a_right_script_has_no_errors(complaints):
    assert complaints["right"] == []


@run_once
def test_a_wrong_script_has_the_errors_that_it_should(complaints):
    expected = [(n, *re.search(r"# ([\w-]+): (.*)$", line).groups()) for n, line in enumerate(WRONG.splitlines(), 1) if "  # " in line]
    assert len(expected) == 29
    assert sorted({(line, code) for line, code, _ in complaints["wrong"]}) == sorted((line, code) for line, code, _ in expected)
    for line, _, text in expected:
        assert any(text in message for at, _, message in complaints["wrong"] if at == line), (line, text)


def test_the_marker_of_a_typed_package_is_installed():
    assert (PACKAGE / "py.typed").exists()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options.package_data"]["numba_flash"] == "py.typed"


@pytest.mark.parametrize(
    ("function", "options", "others"),
    [
        (numba_flash.forward, annotations.ForwardOptions, {"return_lse", "out"}),
        (numba_flash.backward, annotations.BackwardOptions, {"bias_grad", "out"}),
        (numba_flash.vjp, annotations.VjpOptions, {"bias_grad", "return_lse"}),
        (numba_flash.reference.forward, annotations.ForwardOptions, {"return_lse"}),
        (numba_flash.reference.backward, annotations.BackwardOptions, {"bias_grad"}),
        (numba_flash.plan, annotations.Options, {"page_table", "kind", "return_lse", "dlse", "bias_grad"}),
        (numba_flash.forward_packed, annotations.PackedForwardOptions, {"return_lse", "out"}),
        (numba_flash.forward_paged, annotations.PagedOptions, {"return_lse", "out"}),
        (numba_flash.backward_packed, annotations.PackedBackwardOptions, {"out"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_overloads_take_the_options_of_the_function(function, options, others):
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    own = {name: hints[name] for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and name not in others}
    assert get_type_hints(options) == own
    assert others <= parameters.keys()
