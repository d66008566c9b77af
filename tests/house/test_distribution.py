"""What is distributed: links of the description, one version everywhere. `.ci/run` builds it and looks for what is missing."""

import importlib.util
import re

import pytest
from support import ROOT

import numba_flash

ADDRESS = "https://example.org/numba_flash/blob/main"
README = (ROOT / "README.md").read_text()
LINKS = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def setup():
    """The module setup.py, which sets nothing up when it is imported."""
    specification = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_links_lead_to_the_address(setup):
    links = [target for _, target in LINKS.findall(setup.description(README, ADDRESS)) if not target.startswith("#")]
    assert len(links) > 15
    for target in links:
        assert target.startswith(f"{ADDRESS}/"), target
        assert (ROOT / target.removeprefix(f"{ADDRESS}/").partition("#")[0]).exists(), target


def test_without_an_address_there_are_no_links_to_files(setup):
    text = setup.description(README, "")
    assert [target for _, target in LINKS.findall(text) if not target.startswith("#")] == []
    assert "![" not in text
    assert "how to (`docs/howto/paged.md`)" in text
    assert "[limits](#limits)" in text
    assert README.count("\n") == text.count("\n")


def test_pages_of_the_project(setup):
    assert setup.urls("") == {}
    for page in setup.urls(ADDRESS).values():
        assert (ROOT / page.removeprefix(ADDRESS).removeprefix("/")).exists()


def test_the_address_is_none_or_one(setup):
    assert re.fullmatch(r"|https://\S+[^/]", setup.public_address())


def test_one_version():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    logged = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert cited == logged == numba_flash.__version__
