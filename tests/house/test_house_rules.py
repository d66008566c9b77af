"""The rules of the house, as programs: who imports whom, how long things may be, where assembler may stand, and that the README runs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import numba_flash

PACKAGE = Path(numba_flash.__file__).parent
ROOT = PACKAGE.parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

every_file = pytest.mark.parametrize("name", FILES)


# ---- imports -------------------------------------------------------------------------------------------------------------------------


def imported(nodes) -> set[str]:
    """Full names of everything that the import statements among `nodes` name."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def own(names: set[str]) -> set[str]:
    """Modules of the package among `names`, relative to it."""
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in FILES}
    return {name.removeprefix("numba_flash.") for name in names} & (modules - {"__init__", "cuda"})


@every_file
def test_kernels_do_not_know_the_interface(name):
    """Data flows one way: nothing in cuda/, nor the CPU backend, imports the API or the choice of a backend."""
    if not name.startswith(("cuda/", "cpu")):
        return
    names = imported(ast.walk(TREES[name]))
    assert not own(names) & {"api", "plan", "reference", "diagnose", "__main__"}
    assert not {n for n in names if n.startswith("numba_flash.problem.bind")}


def test_what_each_layer_imports_from_the_package():
    allowed = {
        "arrays.py": set(),
        "mask.py": set(),
        "fingerprint.py": set(),
        "disk.py": set(),
        "notice.py": {"disk"},
        "cpu/pool.py": set(),
        "numeric.py": set(),
        "checks.py": {"arrays"},
        "captures.py": set(),
        "scoremod.py": {"captures", "checks"},
        "options.py": {"arrays", "checks", "scoremod"},
        "problem.py": {"arrays", "checks", "options"},
        "rng.py": {"options"},
        "dropout.py": {"arrays", "checks", "options", "rng"},
        "merge.py": {"annotations", "arrays", "checks", "spec"},
        "reference.py": {"spec", "rng"},
        "annotations.py": {"plan"},
        "plan.py": {"spec", "arrays", "cpu", "cuda.simt", "cuda.sm90"},
        "call.py": {"arrays", "options", "scoremod", "spec", "plan"},
        "api.py": {"annotations", "call", "checks", "spec", "plan"},
        "packed.py": {"annotations", "api", "call", "checks", "plan", "spec"},
        "bench/cases.py": {"reference"},
        "bench/standard.py": {"arrays"},
        "bench/progress.py": set(),
        "bench/grid.py": {"bench.cases", "plan"},
        "bench/peers.py": {"api", "bench", "bench.cases", "bench.standard"},
        "bench/timing.py": {"bench.cases", "bench.peers"},
        "bench/report.py": {"bench.cases", "bench.peers", "bench.timing"},
        "warmup.py": {
            *("arrays", "disk", "notice", "options", "plan", "spec", "cpu_kernels", "cuda.compile", "cuda.launch"),
            *("bench", "bench.cases", "bench.grid", "bench.progress"),
        },
        "cpu/cache.py": {"disk", "fingerprint"},
        "cuda/compile.py": {"disk", "fingerprint", "notice"},
        "cuda/launch.py": {"arrays", "cuda.compile", "cuda.swizzle"},
        "cuda/simt/tier.py": {"arrays", "options", "cuda.launch"},
        "cuda/sm90/tier.py": {"arrays", "options", "cuda.launch", "cuda.sm90_backward", "cuda.swizzle"},
        "cuda/schedule.py": {"mask"},
        "cuda/swizzle.py": set(),
        "cuda/ptx.py": set(),
        "cuda/sm90/pipeline.py": {"cuda.ptx", "cuda.swizzle"},
        "cuda/sm90/wgmma.py": {"cuda.pipeline", "cuda.ptx", "cuda.swizzle"},
        "cuda/softmax.py": {"cuda.ptx"},
        "cuda/combine.py": {"cuda.tiles"},
        "cuda/sm90/forward.py": {
            "mask",
            "cuda.mma",
            "cuda.pipeline",
            "cuda.ptx",
            "cuda.schedule",
            "cuda.scores",
            "cuda.softmax",
            "cuda.swizzle",
            "cuda.tiles",
        },
        "cuda/sm90/prepare_backward.py": {"arrays", "cuda.launch", "cuda.sm90", "cuda.swizzle"},
        "cuda/sm90/backward.py": {
            "cuda.mma",
            "cuda.movers_sm90",
            "cuda.pipeline",
            "cuda.ptx",
            "cuda.recompute_sm90",
            "cuda.softmax",
            "cuda.swizzle",
        },
        "cuda/sm90/backward_wide.py": {
            "cuda.mma",
            "cuda.movers_sm90",
            "cuda.pipeline",
            "cuda.ptx",
            "cuda.recompute_sm90",
            "cuda.softmax",
            "cuda.swizzle",
        },
        "cuda/sm90/dq.py": {
            "cuda.mma",
            "cuda.pipeline",
            "cuda.ptx",
            "cuda.schedule",
            "cuda.scores",
            "cuda.softmax",
            "cuda.swizzle",
            "cuda.tiles",
        },
        "cuda/sm90/softmax_backward.py": {"cuda.mma", "cuda.movers_sm90", "cuda.pipeline", "cuda.ptx", "cuda.softmax"},
        "cuda/sm90/load.py": {"cuda.pipeline", "cuda.ptx", "cuda.schedule", "cuda.scores", "cuda.swizzle"},
        "cuda/sm90/preprocess.py": {"mask", "cuda.mma", "cuda.pipeline", "cuda.ptx", "cuda.schedule", "cuda.scores", "cuda.swizzle"},
        "cuda/simt/tiles.py": {"mask", "numeric"},
        "cuda/simt/modify.py": {"mask", "rng", "cuda.tiles"},
    }
    for name, modules in allowed.items():
        assert own(imported(ast.walk(TREES[name]))) <= modules, name


def test_the_oracle_needs_nothing_but_numpy():
    names = {name.split(".")[0] for name in imported(ast.walk(TREES["reference.py"]))}
    assert names <= {"numpy", "numba_flash"}


@pytest.mark.parametrize(
    "name",
    [
        *("__init__.py", "annotations.py", "api.py", "arrays.py", "call.py", "captures.py", "checks.py", "diagnose.py", "disk.py"),
        *("dropout.py", "fingerprint.py", "merge.py", "options.py", "packed.py", "plan.py", "reference.py", "scoremod.py", "problem.py"),
        *("bench/cases.py", "bench/command.py", "bench/grid.py", "bench/peers.py", "bench/progress.py", "bench/report.py"),
        *("bench/standard.py", "bench/timing.py"),
    ],
)
def test_modules_that_every_user_imports_load_no_compiler(name):
    names = {module.split(".")[0] for module in imported(TREES[name].body)}
    assert not names & {"numba", "numba_cuda", "cuda", "cupy", "scipy", "llvmlite", "threadpoolctl"}
    assert not own(imported(TREES[name].body)) & {"cpu", "mask", "numeric", "cuda.simt", "cuda.launch", "cuda.tiles"}


@every_file
def test_other_libraries_of_arrays_and_pictures_are_never_imported_at_module_level(name):
    names = {n.split(".")[0] for n in imported(TREES[name].body)}
    assert not names & {"cupy", "torch", "jax", "flash_attn", "matplotlib", "rich"}


def test_errors_about_arguments_are_raised_in_one_place():
    """Beside `spec` and what it is made of, only `plan` (backend=), `api` (the tuple out=) and functions of their own say so."""
    speakers = {"captures.py", "problem.py", "options.py", "checks.py", "scoremod.py", "plan.py", "api.py", "dropout.py", "merge.py"}
    for name, tree in TREES.items():
        raised = {
            node.exc.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
        }
        if name not in speakers:
            assert not raised & {"ValueError", "TypeError"}, name


# ---- sizes ---------------------------------------------------------------------------------------------------------------------------


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]


def own_lines(function) -> int:
    """Lines of a function without its docstring, its blank lines and the functions within it."""
    lines = set(range(function.lineno, function.end_lineno + 1))
    if ast.get_docstring(function) is not None:
        lines -= set(range(function.body[0].lineno, function.body[0].end_lineno + 1))
    for inner in ast.walk(function):
        if isinstance(inner, FUNCTION) and inner is not function:
            lines -= set(range(inner.decorator_list[0].lineno if inner.decorator_list else inner.lineno, inner.end_lineno + 1))
    return len(lines)


def kernel_names(tree) -> set[str]:
    """Functions that run as kernels: those that a ``build`` function returns, or that are decorated with ``@kernel``."""
    names = set()
    for function in functions(tree):
        if any(isinstance(decorator, ast.Name) and decorator.id == "kernel" for decorator in function.decorator_list):
            names.add(function.name)
        if function.name.startswith("build"):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and isinstance(node.value.elts[0], ast.Name):
                    names.add(node.value.elts[0].id)
    return {name for name in names if name.endswith(("_simt", "_sm80", "_sm90", "_items"))}


def test_kernels_are_recognised():
    found = {kernel for name, tree in TREES.items() for kernel in kernel_names(tree)}
    assert found >= {"forward_simt", "dkdv_simt", "dq_simt", "delta_simt", "forward_sm90"}


@every_file
def test_files_are_short(name):
    assert len(FILES[name].read_text().splitlines()) <= (120 if name == "reference.py" else 350)


@every_file
def test_functions_are_short(name):
    kernels = kernel_names(TREES[name])
    lines = {f.name: own_lines(f) for f in functions(TREES[name])}
    assert {f: n for f, n in lines.items() if n > (120 if f in kernels else 60)} == {}


@every_file
def test_functions_have_few_parameters(name):
    exempt = kernel_names(TREES[name]) | (set(numba_flash.__all__) if name in ("api.py", "packed.py") else set())
    parameters = {f.name: len(f.args.posonlyargs + f.args.args + f.args.kwonlyargs) for f in functions(TREES[name])}
    assert {f: n for f, n in parameters.items() if n > 10 and f not in exempt} == {}


@every_file
def test_assembler_stands_in_one_file(name):
    if name == "cuda/ptx.py":
        return
    names = {node.attr for node in ast.walk(TREES[name]) if isinstance(node, ast.Attribute)}
    names |= {n.rsplit(".")[-1] for n in imported(ast.walk(TREES[name]))}
    assert not names & {"InlineAsm", "inline_asm", "inline_ptx"}
    strings = [node.value for node in ast.walk(TREES[name]) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    others = r"mma\.sync|wgmma\.|cp\.async|ldmatrix\.|mbarrier\.|setmaxnreg\.|bar\.(sync|arrive)|fence\.|ex2\.approx|fma\.rn"
    instruction = re.compile(rf"\b({others}|(ld|st)\.(shared|global)\.)")
    assert [text for text in strings if instruction.search(text)] == []


@every_file
def test_modules_and_public_functions_have_docstrings(name):
    tree = TREES[name]
    if name == "cuda/__init__.py":
        return
    assert ast.get_docstring(tree)
    public = [node for node in tree.body if isinstance(node, (*FUNCTION, ast.ClassDef)) and not node.name.startswith("_")]
    is_overload = lambda node: any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)
    public = [node for node in public if not is_overload(node)]
    needs_none = {"writeable"}  # says all there is to say
    assert [node.name for node in public if not ast.get_docstring(node) and node.name not in needs_none] == []


# ---- the README ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="there is no README.md")
def test_readme_examples_run(tmp_path):
    """The python blocks of README.md, one after the other, as a reader would paste them."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    run = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
