"""The documentation names what there is: modules, tests, public names, and the lines of code that it shows."""

import re
from pathlib import Path

import pytest

import numba_flash

ROOT = Path(__file__).parent.parent
DOCS, PACKAGE, TESTS = ROOT / "docs", ROOT / "numba_flash", ROOT / "tests"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
CODE_WORDS = re.findall(r"`([^`\n]+)`", ARCHITECTURE)
MODULES = {path.relative_to(PACKAGE).as_posix() for folder in (PACKAGE, PACKAGE / "cuda") for path in folder.glob("*.py")}
PACKAGES = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}


# ---- architecture.md -------------------------------------------------------------------------------------------------------------------


def test_every_module_is_on_the_map():
    rows = [line for line in ARCHITECTURE.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert named >= (MODULES | PACKAGES) - {"cuda/__init__.py", "cuda/"}


def test_every_file_that_is_named_exists():
    named = {word.split("::")[0] for word in CODE_WORDS if re.fullmatch(r"[\w/]+\.py(::\w+)?", word)}
    invented = {"cuda/sm80.py", "cuda/forward_sm80.py"}  # of the tier that is added there
    missing = {
        name for name in named - invented if not any((folder / name).exists() for folder in (PACKAGE, PACKAGE / "cuda", TESTS, ROOT))
    }
    assert "test_house_rules.py" in named
    assert missing == set()


def test_every_test_that_is_named_exists():
    defined = {name for path in TESTS.glob("*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = {word.split("::")[-1] for word in CODE_WORDS if re.fullmatch(r"(test_\w+\.py::)?test_\w+", word)}
    assert "test_problems_that_are_refused" in named
    assert named - defined == set()


# ---- api.md ----------------------------------------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference():
    documented = set(re.findall(r"^\.\. auto(?:function|class|data):: numba_flash\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    public = {name for name in numba_flash.__all__ if name != "reference"} | {"reference.forward", "reference.backward"}
    assert documented >= public


# ---- code that pages include -----------------------------------------------------------------------------------------------------------

INCLUDES = [
    (page.relative_to(DOCS).as_posix(), source, dict(re.findall(r'^:([\w-]+): *"?(.*?)"?$', options, re.MULTILINE)))
    for page in sorted(DOCS.rglob("*.md"))
    for source, options in re.findall(r"^```\{literalinclude\} (\S+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "source", "options"), INCLUDES, ids=lambda x: x if isinstance(x, str) else next(iter(x.values()), ""))
def test_included_code_is_found(page, source, options):
    """The lines that bound it stand in the source, in this order."""
    lines = (DOCS / page).parent.joinpath(source).read_text().splitlines()
    if "pyobject" in options:
        assert any(re.match(rf"(def|class) {options['pyobject']}\b", line) for line in lines)
    else:
        start = next(number for number, line in enumerate(lines) if options["start-at"] in line)
        assert "end-before" not in options or any(options["end-before"] in line for line in lines[start + 1 :])
