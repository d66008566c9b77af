"""The rules of the house, as programs: who imports whom, how long things may be, where assembler may stand, and that the README runs."""

import ast
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import numba_flash
from numba_flash.cuda.runtime import compile
from numba_flash.files.fingerprint import package

PACKAGE = Path(numba_flash.__file__).parent
ROOT = PACKAGE.parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def each(names):
    """Makes a test of one of these a test of all: thousands would take longer to be reported than they run."""

    def of_all(test):
        def together():
            wrong = {}
            for name in names:
                try:
                    test(name)
                except AssertionError as error:
                    wrong[name] = str(error)
            assert wrong == {}

        together.__doc__ = test.__doc__
        return together

    return of_all


every_file = each(FILES)


# ---- imports -------------------------------------------------------------------------------------------------------------------------

MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree for name, tree in TREES.items()}
TIERS = {name.removesuffix("/tier.py").replace("/", ".") for name in FILES if name.endswith("/tier.py")}
# From the top: a module imports from its own layer and from those below. What flows down through them is a problem on arrays.
LAYERS = (
    "__main__ warmup bench dask distributed",
    "__init__ diagnose vjp packed paged planning api arguments.inputs arguments.annotations merge dropout reference",
    "call",
    "plan",
    " ".join([f"{tier}.tier" for tier in TIERS] + [name for name in MODULES if ".prepare_" in name or name.endswith(".recipes")]),
    "cuda.recipe",
    "cuda.runtime.launch cuda.runtime.compile cuda.runtime.tensor_maps cuda.runtime.packing cuda.runtime.driver cuda.work.grid",
    "cuda.runtime.compiler",
    " ".join([*TIERS, "cuda.passes"]),  # kernels, and what only they have
    "cuda.score cuda.work cuda.arguments",
    "cuda.config cuda.number cuda.ptx cuda.runtime",
    "arguments.problem oracle sections",
    "arguments.option_checks rng",
    "arguments.options",
    "scoremod arguments.block_mask",
    "arguments.pages",
    "arguments files ledger mask numeric",
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
CUDA_HOSTS = re.compile(
    r"cuda\.(runtime\.(launch|packing|driver|tensor_maps)|work\.grid|recipe|(\w+\.)?arguments|(sm\d+\.)?config|(\w+\.)*prepare_\w+"
    r"|\w+\.tier|sm\d+\.(recipes|tiles|backward\.options_tiles))"
)
COMPILERS = {"numba", "numba_cuda", "llvmlite"}

every_module = each(MODULES)


def imported(nodes) -> set[str]:
    """Full names of everything that the import statements among `nodes` name."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def known(name: str, names) -> str:
    """The longest of `names` that is `name`, or one of the packages that it lies in; ``"__init__"`` if there is none."""
    while name not in names and name:
        name = name.rpartition(".")[0]
    return name or "__init__"


def own(nodes) -> set[str]:
    """Modules of the package that the import statements among `nodes` name, relative to it; ``"__init__"`` is the package itself."""
    inside = (name.removeprefix("numba_flash").removeprefix(".") for name in imported(nodes) if name.split(".")[0] == "numba_flash")
    return {known(name, MODULES) for name in inside}


IMPORTS = {module: own(ast.walk(tree)) for module, tree in MODULES.items()}  # anywhere; `plan` and `launch` name what they load in strings
LAZY = {"diagnose": {"__init__"}}  # on purpose: the package's version, for which its caller has imported the package
AT_ONCE = {module: own(tree.body) for module, tree in MODULES.items()}


def loaded(module: str) -> set[str]:
    """The modules of the package that are loaded with a module, itself among them."""
    found, more = set(), {module}
    while more:
        found |= more
        more = set().union(*(AT_ONCE[each] for each in more)) - found
    return found


def test_every_module_belongs_to_a_layer():
    homes = {module: known(module, LAYER) for module, tree in MODULES.items() if tree.body}
    assert {module for module, home in homes.items() if home == "__init__" != module} == set()
    assert set(homes.values()) == set(LAYER), "layers name modules and packages that there are"


@every_module
def test_data_flows_one_way(module):
    """No module imports from a layer above its own."""
    layer = lambda name: LAYER[known(name, LAYER)]
    assert {name for name in IMPORTS[module] if layer(name) < layer(module)} == set()


def test_imports_make_no_circle():
    """Those within functions count, too."""
    try:
        TopologicalSorter({module: names - LAZY.get(module, set()) for module, names in IMPORTS.items()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@every_module
def test_no_tier_knows_another(module):
    home = known(module, TIERS)
    assert {name for name in IMPORTS[module] if home in TIERS and known(name, TIERS) in TIERS - {home}} == set()


def test_tiers_are_recognised():
    assert TIERS == {"cpu", "cuda.simt", "cuda.sm80", "cuda.sm90"}
    assert {module for module in MODULES if CUDA_HOSTS.fullmatch(module)} >= {
        *("cuda.runtime.launch", "cuda.work.grid", "cuda.runtime.tensor_maps", "cuda.arguments", "cuda.simt.tier"),
        *(f"cuda.{tier}.{name}" for tier in ("sm80", "sm90") for name in ("tier", "tiles", "arguments", "forward.prepare_forward")),
    }


@each([name for name in MODULES if name in ("__init__", "__main__") or name.startswith("bench") or CUDA_HOSTS.fullmatch(name)])
def test_who_runs_cached_kernels_waits_for_no_compiler(module):
    """Nothing that is loaded with the package, its commands, and the hosts of cuda loads a compiler, or a library of others."""
    outside = {(each, name.split(".")[0]) for each in loaded(module) for name in imported(MODULES[each].body)}
    assert {(each, name) for each, name in outside if name in COMPILERS | {"cuda", "cupy", "scipy", "threadpoolctl"}} == set()
    assert "cuda.runtime.lang" not in loaded(module)


@every_module
def test_few_modules_talk_to_the_compiler_of_cuda(module):
    """`cuda.runtime.launch` runs kernels in Numba's simulator: it imports that when it is wanted."""
    if module in ("cuda.runtime.compiler", "cuda.runtime.lang") or module.startswith("cuda.ptx"):
        return
    nodes = MODULES[module].body if module == "cuda.runtime.launch" else ast.walk(MODULES[module])
    assert {name for name in imported(nodes) if f"{name}.".startswith(("numba.cuda.", "numba_cuda.", "llvmlite."))} == set()


def test_the_oracle_needs_nothing_but_numpy():
    names = {name.split(".")[0] for name in imported(ast.walk(TREES["oracle.py"]))}
    assert names <= {"numpy", "numba_flash", "typing"}


@every_file
def test_other_libraries_of_arrays_and_pictures_are_never_imported_at_module_level(name):
    names = {n.split(".")[0] for n in imported(TREES[name].body)}
    assert not names & {"cupy", "torch", "jax", "flash_attn", "matplotlib", "rich"}


def test_errors_about_arguments_are_raised_in_one_place():
    """Beside `problem` and what it is made of, only `plan` (backend=), `inputs` (the tuple out=) and functions of their own say so."""
    of_arguments = ("problem", "option_checks", "checks", "inputs", "pages", "precisions", "block_mask", "axes", "band", "signatures")
    speakers = {f"arguments/{name}.py" for name in of_arguments}
    speakers |= {"scoremod/captures.py", "scoremod/functions.py", "plan.py", "dropout.py", "merge.py"}
    speakers |= {"dask/arguments.py", "distributed/agreement.py", "distributed/nccl.py"}
    speakers |= {"reference.py"}  # o= and lse=, which are not what they should be
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
    """Functions that run as kernels: those that a builder returns with a signature and options, or that are decorated with ``@kernel``."""
    names = set()
    for function in functions(tree):
        if any(isinstance(decorator, ast.Name) and decorator.id == "kernel" for decorator in function.decorator_list):
            names.add(function.name)
        for node in ast.walk(function) if re.match("build|hopper_kernel$", function.name) else ():
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 3:
                kernel, _, _ = node.value.elts
                names.add(kernel.id)
    return names


BUILDERS = {
    node.value
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+\.build\w*", node.value)
}


SHARED_KERNEL = "cuda.sm90.hopper_kernel"


def test_kernels_are_recognised():
    """One of each module that a builder is named of in a string; those of specialised warps on Hopper share one."""
    assert len(BUILDERS) >= 13
    for builder in BUILDERS:
        module, function = f"cuda.{builder}".rsplit(".", 1)
        assert function in {f.name for f in MODULES[module].body if isinstance(f, FUNCTION)}, builder
        assert kernel_names(MODULES[module]) or SHARED_KERNEL in loaded(module), builder
    assert kernel_names(MODULES[SHARED_KERNEL])
    assert kernel_names(TREES["cpu/kernels.py"])


SHARED = {"mask", "numeric", "arguments.options", "rng"}  # by kernels of all tiers
HOSTS_OF_CPU = {"cpu.tier", "cpu.pool", "cpu.scratch", "cpu.sequences", "cpu.cache"}


def of_kernels(module: str) -> bool:
    """Nothing that only prepares, launches or keeps kernels; of the hosts, tiles and the arguments that kernels take."""
    if module.startswith("cuda."):
        return module != "cuda.runtime.compile" and (not CUDA_HOSTS.fullmatch(module) or module.endswith(("tiles", "arguments", "config")))
    return module in SHARED or (module.startswith("cpu.") and module not in HOSTS_OF_CPU)


@pytest.mark.parametrize("builder", [*sorted(BUILDERS), None], ids=str)
def test_kernels_are_made_of_nothing_that_hosts_do(builder):
    """Whoever edits a host compiles no kernel anew, on either side."""
    modules = package().modules_of(*(["cpu.kernels"] if builder is None else compile.modules(builder, ())))
    assert {module for module in modules if not of_kernels(module)} == set()


@every_file
def test_files_are_short(name):
    assert len(FILES[name].read_text().splitlines()) <= (120 if name == "oracle.py" else 350)


def test_folders_are_small():
    """A reader sees at once what is in one."""
    folders = [PACKAGE, *(ROOT / name for name in ("tests", "docs", "asv_bench") if (ROOT / name).exists())]
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py"))
    assert {folder: n for folder, n in counts.items() if n > 20} == {}


@every_file
def test_functions_are_short(name):
    """Kernels are longer, and so are `consume`, the main loop of one for Hopper, and `work`, what a kernel does for one of several
    items: each line of an algorithm is one of theirs.
    """
    long = kernel_names(TREES[name]) | {"consume", "work"}
    lines = {f.name: own_lines(f) for f in functions(TREES[name])}
    assert {f: n for f, n in lines.items() if n > (120 if f in long else 60)} == {}


@every_file
def test_functions_have_few_parameters(name):
    public = ("api.py", "reference.py", "packed.py", "paged.py", "planning.py", "vjp.py", "dask/__init__.py", "distributed/__init__.py")
    exempt = kernel_names(TREES[name]) | (set(numba_flash.__all__) if name in public else set())
    counts = {f.name: len(parameters(f)) for f in functions(TREES[name])}
    assert {f: n for f, n in counts.items() if n > 12 and f not in exempt} == {}


OF_A_KERNEL = each([name for name in FILES if name.startswith(("cuda/", "cpu/"))])
INLINED = {"inline", "device"}  # decorators of functions that kernels call


@OF_A_KERNEL
def test_kernels_take_no_powers(name):
    """Numba computes `2.0**-N` of constants when the kernel runs, by a call in float64. Builders do, once."""
    kernels = kernel_names(TREES[name])
    decorators = lambda function: {each.id for each in function.decorator_list if isinstance(each, ast.Name)}
    inside = [f for f in functions(TREES[name]) if f.name in kernels or decorators(f) & INLINED]
    powers = [node for f in inside for node in ast.walk(f) if isinstance(getattr(node, "op", None), ast.Pow)]
    assert [(node.lineno, ast.unparse(node)) for node in powers] == []


# ---- names, not positions --------------------------------------------------------------------------------------------------------------

MOST_IN_A_TUPLE = 3
# Parameters whose elements have numbers, not names: arrays and tensor maps, axes of an array, one for each row, LLVM's values.
NUMBERED = {"operands", "maps", "shape", "summed", "inverse", "alpha", "values", "results", "args"}


def parameters(function) -> set[str]:
    return {each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}


@OF_A_KERNEL
def test_what_functions_return_has_names(name):
    """Who returns more than a few things returns a named tuple."""
    returned = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)]
    assert [(node.lineno, ast.unparse(node)) for node in returned if len(node.value.elts) > MOST_IN_A_TUPLE] == []


@OF_A_KERNEL
def test_what_functions_take_has_names(name):
    """No parameter is taken apart by position, unless its elements have no names."""
    found = []
    for function in functions(TREES[name]):
        taken = parameters(function) - NUMBERED
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in taken:
                at = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
                if isinstance(at, ast.Constant) and isinstance(at.value, int):
                    found.append((node.lineno, ast.unparse(node)))
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in taken:
                if any(isinstance(target, ast.Tuple) and len(target.elts) > MOST_IN_A_TUPLE for target in node.targets):
                    found.append((node.lineno, ast.unparse(node)))
    assert found == []


# ---- lines -----------------------------------------------------------------------------------------------------------------------------


def test_lines_of_kernels_are_no_wider_than_a_page():
    """As the linter is told, whom one line between two others tells nothing else."""
    told = tomllib.loads((PACKAGE / "cuda" / "ruff.toml").read_text())
    assert told == {"extend": "../../ruff.toml", "line-length": 100}
    wide = [(name, line) for name in FILES if name.startswith("cuda/") for line in FILES[name].read_text().splitlines() if len(line) > 100]
    assert wide == []


@every_file
def test_a_line_has_one_statement(name):
    with FILES[name].open("rb") as file:
        assert [token.line for token in tokenize.tokenize(file.readline) if token.type == tokenize.OP and token.string == ";"] == []


# ---- assembler -------------------------------------------------------------------------------------------------------------------------


@every_file
def test_assembler_stands_in_one_place(name):
    names = {node.attr for node in ast.walk(TREES[name]) if isinstance(node, ast.Attribute)}
    names |= {n.rpartition(".")[-1] for n in imported(ast.walk(TREES[name]))}
    assert names & {"InlineAsm", "inline_asm", "inline_ptx"} == ({"InlineAsm"} if name == "cuda/ptx/emit.py" else set())
    if name.startswith("cuda/ptx/"):
        return
    said = {node.value for node in ast.walk(TREES[name]) if isinstance(node, ast.Expr)}  # docstrings
    constants = {node for node in ast.walk(TREES[name]) if isinstance(node, ast.Constant)} - said
    strings = [node.value for node in constants if isinstance(node.value, str)]
    others = r"mma\.sync|wgmma\.|cp\.async|ldmatrix\.|mbarrier\.|setmaxnreg\.|bar\.(sync|arrive)|fence\.|ex2\.approx|fma\.rn"
    instruction = re.compile(rf"\b({others}|(ld|st)\.(shared|global)\.)")
    assert [text for text in strings if instruction.search(text)] == []


# ---- docstrings ------------------------------------------------------------------------------------------------------------------------


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
