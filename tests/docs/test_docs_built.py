"""What the documentation is built with: formulas as MathML, pages that load nothing from elsewhere, a history of equal things."""

import json
import re
import sys

import pytest
from support import ROOT

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import history  # noqa: E402  (in docs)
import offline  # noqa: E402

# ---- formulas --------------------------------------------------------------------------------------------------------------------------

CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
FORMULA = re.compile(r"\$\$(.*?)\$\$|\$([^$\n]+)\$", re.DOTALL)


@pytest.fixture(scope="module")
def mathml():
    from mathml import mathml  # of docs

    return mathml


def test_every_formula_of_the_docs_can_be_shown(mathml):
    pages = [CODE.sub("", path.read_text()) for path in DOCS.rglob("*.md")]
    formulas = [match[1] or match[2] for page in pages for match in FORMULA.finditer(page)]
    assert len(formulas) > 100
    for formula in formulas:
        assert "\\" not in mathml(formula, display=True)


def test_formulas_are_set_as_tex_sets_them(mathml):
    words = mathml(r"\mathrm{lse}_i = -\infty", display=True)
    assert "<mi>lse</mi>" in words
    assert '<mo form="prefix">&#x02212;</mo><mi>&#x0221E;</mi>' in words
    assert 'display="block"' in words
    difference = mathml("(a) - b", display=False)
    assert "prefix" not in difference
    assert 'display="inline"' in difference


def test_an_unknown_command_is_an_error(mathml):
    with pytest.raises(ValueError, match=r"\\nonsense cannot be shown, in the formula a \\nonsense b"):
        mathml(r"a \nonsense b", display=False)


# ---- pages that load nothing from elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        '<script async src="https://cdn.example/mathjax.js"></script>',
        '<link rel="stylesheet" href="//cdn.example/a.css">',
        '<img alt="" srcset="a.png 1x, https://example.org/b.png 2x">',
        '<p style="background: url(http://example.org/c.png)">',
        '<object data="https://example.org/d.svg">',
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(tmp_path, page):
    (tmp_path / "howto").mkdir()
    (tmp_path / "howto" / "page.html").write_text(f"<html>{page}</html>")
    (found,) = offline.loaded_from_elsewhere(tmp_path)
    assert found.startswith("howto/page.html: ")


def test_style_sheets_are_looked_at(tmp_path):
    (tmp_path / "a.css").write_text('@import "https://fonts.example/a.css"; b { background: url("data:image/png;base64,//8=") }')
    assert offline.loaded_from_elsewhere(tmp_path) == ["a.css: https://fonts.example/a.css"]


def test_links_may_lead_elsewhere(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="https://example.org">x</a><link rel="canonical" href="https://example.org/a"><img src="figures/a.svg"><script src="a.js">'
    )
    assert offline.loaded_from_elsewhere(tmp_path) == []


# ---- the benchmark history -------------------------------------------------------------------------------------------------------------

MACHINES = {"gpu": {"machine": "gpu", "os": "L"}, "cpu": {"machine": "cpu", "os": "L"}}
FORWARD = {
    "name": "a.Forward.track_tflops",
    "unit": "TFLOP/s",
    "params": [["'simt'", "'sm90'"], ["'full'", "'causal'"]],
    "param_names": ["b", "m"],
}
IMPORT = {"name": "s.Import.track_milliseconds", "unit": "ms", "params": [], "param_names": []}
GRAPHS = {  # the last run left a backend out
    ("gpu", FORWARD["name"]): [
        [1, [24.0, 26.0, 500.0, 600.0]],
        [2, [24.1, 26.1, 501.0, 601.0]],
        [3, [None, None, 502.0, 602.0]],
        [4, None],
    ],
    ("cpu", IMPORT["name"]): [[1, 50.0], [3, 51.0]],
}


@pytest.fixture
def pages(tmp_path):
    """Pages made of what `asv publish` writes."""
    published = tmp_path / "published"
    for (machine, name), points in GRAPHS.items():
        file = published / "graphs" / f"machine-{machine}" / "os-L" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(points))
        (file.parent / "summary.json").write_text("[]")
    index = {
        "project": "p",
        "machines": MACHINES,
        "graph_param_list": list(MACHINES.values()),
        "params": {"machine": ["cpu", "gpu"], "os": ["L"]},
        "benchmarks": {b["name"]: b for b in (FORWARD, IMPORT)},
    }
    (published / "index.json").write_text(json.dumps(index))
    jump = [f"{FORWARD['name']}('sm90', 'full')", "graphs/x.json", MACHINES["gpu"], 2, 502.0, 500.0, []]
    (published / "regressions.json").write_text(json.dumps({"regressions": [jump]}))
    assert history.split(published, tmp_path / "pages") == ["gpu", "cpu"]
    return tmp_path / "pages"


def test_each_line_of_the_history_is_one_set_of_parameters(pages):
    """A mean over the sets that happened to be measured would rise here from 287 to 552."""
    index = json.loads((pages / "gpu" / "index.json").read_text())
    series = {name: json.loads((pages / f"gpu/graphs/machine-gpu/os-L/{name}.json").read_text()) for name in index["benchmarks"]}
    assert series == {
        "a.Forward.track_tflops (simt, full)": [[1, 24.0], [2, 24.1]],
        "a.Forward.track_tflops (simt, causal)": [[1, 26.0], [2, 26.1]],
        "a.Forward.track_tflops (sm90, full)": [[1, 500.0], [2, 501.0], [3, 502.0]],
        "a.Forward.track_tflops (sm90, causal)": [[1, 600.0], [2, 601.0], [3, 602.0]],
    }
    assert all(b["name"] == name and b["params"] == [] and b["unit"] == "TFLOP per s" for name, b in index["benchmarks"].items())


def test_a_machine_shows_what_was_measured_on_it(pages):
    gpu, cpu = (json.loads((pages / machine / "index.json").read_text()) for machine in ("gpu", "cpu"))
    assert list(cpu["benchmarks"]) == [IMPORT["name"]]
    assert (cpu["params"], list(cpu["machines"])) == ({"machine": ["cpu"], "os": ["L"]}, ["cpu"])
    assert gpu["graph_param_list"] == [MACHINES["gpu"]]
    jumps = {machine: json.loads((pages / machine / "regressions.json").read_text())["regressions"] for machine in ("gpu", "cpu")}
    assert [jump[0] for jump in jumps["gpu"]] == ["a.Forward.track_tflops (sm90, full)"]
    assert jumps["cpu"] == []
