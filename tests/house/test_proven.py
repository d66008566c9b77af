"""``--affected``: what a slow test is a function of, what is recorded of those that pass, and which run again."""

import json

import evidence
import hypothesis
import proven
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("slow tests of kernels are not traced in the simulator", allow_module_level=True)

KERNEL = "some.build", (64, "causal"), (9, 0)
# A slow test of a kernel: on paper it ends at its text.
TEST = """
import compiled, evidence, pytest

@pytest.mark.full
def test_it():
    evidence.uses({used})
    text = compiled.text(*{kernel})
    {then}

@pytest.mark.full
def test_other():
    {other}
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder of tests of kernels, which are what `project.sources` and `project.ptx` say."""
    monkeypatch.setattr(proven, "RECORD", pytester.path / "proven.json")
    pytester.sources, pytester.ptx, pytester.runs = "sources", "ptx", []
    monkeypatch.setattr(evidence, "kernel_key", lambda kernel: pytester.sources)
    monkeypatch.setattr(evidence, "kernel_text", lambda kernel: pytester.ptx)
    for name in ("all_sources", "host_sources"):
        monkeypatch.setattr(evidence, name, lambda *_, name=name: name)
    monkeypatch.setattr("compiled._code", lambda *kernel: pytester.runs.append(kernel) or "text")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers =\n    full\n    unproven\n    gpu\n")
    return pytester


def run(project, *options, then="pass", used="1", other="pass", kernel=KERNEL, folder="ptx_machine"):
    """Outcomes of both tests, and lines that were printed."""
    evidence.own_source.cache_clear()
    path = project.mkdir(folder) if not (project.path / folder).exists() else project.path / folder
    (path / "test_kernels_of_paper.py").write_text(TEST.format(then=then, used=used, other=other, kernel=kernel))
    done = project.runpytest_inprocess("-p", "proven", "-q", "-rs", "-k", "test_it", *(options or ("--affected",)))
    return done.parseoutcomes(), "\n".join(done.outlines)


def record(project) -> dict:
    """What is recorded of tests."""
    return {name: hashes for name, hashes in json.loads((project.path / "proven.json").read_text()).items() if name != proven.ALL}


PASSED, PROVEN = {"passed": 1, "deselected": 1}, {"skipped": 1, "deselected": 1}


def test_what_has_passed_does_not_run_again(project):
    assert run(project)[0] == PASSED
    assert project.runs
    assert [*record(project)] == ["ptx_machine/test_kernels_of_paper.py::test_it"]
    project.runs.clear()
    outcomes, said = run(project)
    assert outcomes == PROVEN
    assert proven.BEFORE in said
    assert not project.runs


@pytest.mark.parametrize(
    "change",
    [
        {"then": "assert text"},
        {"used": "2"},
        {"kernel": ("some.build", (64, "full"), (9, 0))},
        {"kernel": ("some.build", (64, "causal"), (8, 0))},
        {"sources": "edited", "ptx": "another"},
    ],
    ids=["test", "value", "configuration", "architecture", "kernel"],
)
def test_what_has_changed_runs_again(project, change):
    run(project)
    project.sources, project.ptx = change.pop("sources", "sources"), change.pop("ptx", "ptx")
    assert run(project, **change)[0] == PASSED
    assert run(project, **change)[0] == PROVEN


@pytest.mark.parametrize("change", [{"sources": "edited"}, {"other": "assert True"}], ids=["the same PTX", "another test"])
def test_what_changes_nothing_does_not_run_again(project, change):
    run(project)
    project.sources = change.pop("sources", "sources")
    for project.ptx in ("ptx", "not looked at"):  # as sources are found the second time
        assert run(project, **change)[0] == PROVEN


def test_what_fails_is_not_recorded(project):
    assert run(project, then="assert not text")[0] == {"failed": 1, "deselected": 1}
    assert not (project.path / "proven.json").exists()
    assert run(project, then="assert not text")[0] == {"failed": 1, "deselected": 1}


def test_all_run_when_all_are_asked_for(project):
    run(project)
    assert run(project, "--full")[0] == PASSED
    assert run(project, "--affected", "--audit", "1")[0] == PASSED


def test_an_audit_names_a_record_that_lied(project):
    """A test that passes and fails with the same code is no function of it."""
    run(project, then="import pathlib; assert not pathlib.Path('broken').exists()")
    (project.path / "broken").touch()
    outcomes, said = run(project, "--affected", "--audit", "1", then="import pathlib; assert not pathlib.Path('broken').exists()")
    assert outcomes == {"failed": 1, "deselected": 1}
    assert "1 slow tests failed, though proven.json says that they passed on the same code" in said
    assert record(project) == {}


@pytest.mark.parametrize(("every", "is_written"), [(0, True), (60, False)])
def test_what_has_passed_is_written_during_the_run(project, monkeypatch, every, is_written):
    """A run that is cut off has not been in vain."""
    monkeypatch.setattr(proven, "EVERY", every)
    other = f"import pathlib; assert pathlib.Path('proven.json').exists() is {is_written}"
    path = project.mkdir("ptx_machine") / "test_kernels_of_paper.py"
    path.write_text(TEST.format(then="pass", used="1", other=other, kernel=KERNEL))
    assert project.runpytest_inprocess("-p", "proven", "-q", "--full").parseoutcomes() == {"passed": 2}
    assert len(record(project)) == 2


def test_nobody_looks_again_while_all_sources_are_the_same(project, monkeypatch):
    """Not after a run of some tests, nor where a record was of other code."""
    monkeypatch.setattr(evidence, "all_sources", lambda: project.all)
    monkeypatch.setattr(evidence, "host_sources", lambda *_: project.all)
    project.all, affected = "all", ("-p", "proven", "-q", "--affected")
    run(project)
    project.ptx = project.sources = "looked at"
    assert run(project)[0] == PASSED
    assert project.runpytest_inprocess(*affected).parseoutcomes() == {"passed": 1, "skipped": 1}
    project.ptx = project.sources = "not looked at"
    assert project.runpytest_inprocess(*affected).parseoutcomes() == {"skipped": 2}
    assert project.runpytest_inprocess(*affected, "--audit", "1").parseoutcomes() == {"passed": 2}
    project.all = "edited"
    outcomes = project.runpytest_inprocess(*affected, "--minutes", "0").parseoutcomes()
    assert outcomes == {"skipped": 2}
    assert [*record(project)] == ["ptx_machine/test_kernels_of_paper.py::test_it"]  # the other one is of sources of the host


def test_what_passed_on_other_sources_runs_again_where_these_are_undone(project, monkeypatch):
    monkeypatch.setattr(evidence, "all_sources", lambda: project.all)
    project.all, affected = "all", ("-p", "proven", "-q", "--affected")
    assert run(project, then="assert 0")[0] == {"failed": 1, "deselected": 1}
    assert project.runpytest_inprocess(*affected).parseoutcomes() == {"failed": 1, "passed": 1}
    project.all = "edited"
    assert run(project)[0] == PASSED
    project.all = "all"
    assert run(project, then="assert 0")[0] == {"failed": 1, "deselected": 1}


def test_a_run_of_other_tests_leaves_the_record_alone(project, monkeypatch, tmp_path_factory):
    """As those that a test of this project makes and runs."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "proven.json"
    elsewhere.write_text(kept := '{"tests/test_it.py::test_it": "1 2"}')
    monkeypatch.setattr(proven, "RECORD", elsewhere)
    assert run(project)[0] == PASSED
    assert project.runpytest_inprocess("-p", "proven", "-q", "--affected").parseoutcomes() == {"passed": 2}
    assert elsewhere.read_text() == kept


def test_what_does_not_fit_is_listed(project):
    outcomes, said = run(project, "--affected", "--minutes", "0")
    assert outcomes == PROVEN
    assert "1 slow tests did not fit into the time, and were not run" in said
    assert "\nptx_machine/test_kernels_of_paper.py::test_it" in said
    assert not project.runs
    run(project)
    assert "did not fit" not in run(project, "--affected", "--minutes", "0")[1]


def test_a_test_of_no_kernel_is_one_of_the_host(project, monkeypatch):
    """Also one that asks for more kernels than it does on paper, and one of another folder."""
    for folder, kernel, then in (("ptx_machine", KERNEL, "compiled.text('other.build', (), (9, 0))"), ("contract", KERNEL, "pass")):
        monkeypatch.setattr(evidence, "host_sources", lambda *_: "all")
        assert run(project, folder=folder, kernel=kernel, then=then)[0] == PASSED
        assert run(project, folder=folder, kernel=kernel, then=then)[0] == PROVEN
        monkeypatch.setattr(evidence, "host_sources", lambda *_: "one of them edited")
        assert run(project, folder=folder, kernel=kernel, then=then)[0] == PASSED
        (project.path / folder / "test_kernels_of_paper.py").unlink()


@pytest.mark.parametrize(
    ("folder", "backend", "found"),
    [("contract", "cpu", "cpu"), ("contract", None, None), ("cpu", None, "cpu"), ("docs", None, "cpu"), ("bench", None, None)],
)
def test_a_test_of_one_backend_is_not_one_of_the_others(project, monkeypatch, folder, backend, found):
    asked = []
    monkeypatch.setattr(evidence, "host_sources", lambda path, function, backend: asked.append((path.name, function, backend)))
    parameter = f"SimpleNamespace(name={backend!r})" if backend else "'something else'"
    source = f"import pytest\nfrom types import SimpleNamespace\n@pytest.mark.parametrize('backend', [{parameter}])\n"
    (project.mkdir(folder) / "test_one.py").write_text(source + "@pytest.mark.full\ndef test_it(backend): pass\n")
    assert project.runpytest_inprocess("-p", "proven", "-q", "--full").parseoutcomes() == {"passed": 1}
    assert {*asked} == {("test_one.py", "test_it", found)}


@pytest.mark.parametrize("folder", ["ptx_machine", "contract"])
def test_slow_tests_draw_the_same_each_time(project, monkeypatch, folder):
    monkeypatch.setattr(evidence, "host_sources", lambda *_: "the same")
    source = """
import pytest
from hypothesis import given, strategies as st

@pytest.mark.full
@given(st.integers())
def test_it(n):
    with open("drawn.txt", "a") as file:
        print(n, file=file)
"""
    (project.mkdir(folder) / "test_drawn.py").write_text(source)
    drawn, file, before = [], project.path / "drawn.txt", hypothesis.settings.get_current_profile_name()
    for option, outcome in (("--full", "passed"), ("--affected", "skipped"), ("--full", "passed")):
        assert project.runpytest_inprocess("-p", "proven", "-q", option).parseoutcomes() == {outcome: 1}
        drawn.append(file.read_text() if file.exists() else "")
        file.unlink(missing_ok=True)
    assert drawn[0] == drawn[2] != drawn[1] == ""
    assert hypothesis.settings.get_current_profile_name() == before
    monkeypatch.setattr(proven, "version", lambda name: f"another {name}")
    assert project.runpytest_inprocess("-p", "proven", "-q", "--affected").parseoutcomes() == {"passed": 1}


def test_pytest_explains_no_comparison_on_paper(project):
    """There results differ that are equal in earnest."""
    project.makeconftest("def pytest_assertrepr_compare():\n    with open('explained', 'a') as file:\n        file.write('once ')\n")
    noted = "with open('run', 'a') as file: file.write('once ')"
    test = f"import pytest\n@pytest.mark.full\ndef test_it():\n    {noted}\n    assert b'1' == b'2'\n"
    (project.mkdir("ptx_machine") / "test_bytes.py").write_text(test)
    assert project.runpytest_inprocess("-p", "proven", "-q", "--affected").parseoutcomes() == {"failed": 1}
    assert (project.path / "run").read_text() == "once once "
    assert (project.path / "explained").read_text() == "once "


def test_a_list_of_tests_leaves_the_record_alone(project):
    assert run(project)[0] == PASSED
    before = record(project)
    assert before
    project.runpytest_inprocess("-p", "proven", "-q", "--affected", "--collect-only")
    assert record(project) == before


def test_who_says_so_is_not_recorded(project):
    path = project.mkdir("ptx_machine") / "test_of_time.py"
    path.write_text("import pytest\n@pytest.mark.unproven('of time')\n@pytest.mark.full\ndef test_it(): pass\n")
    for _ in range(2):
        assert project.runpytest_inprocess("-p", "proven", "-q", "--affected").parseoutcomes() == {"passed": 1}
    assert record(project) == {}


def test_after_a_run_of_all_tests_the_record_is_of_these(project):
    """Not after one of some of them, nor one that is interrupted."""
    run(project)
    before = record(project)
    project.makepyfile(test_more="import pytest\n@pytest.mark.full\ndef test_more(): pass\n")
    (project.path / "ptx_machine" / "test_kernels_of_paper.py").rename(project.path / "elsewhere.txt")
    more = {"test_more.py::test_more"}
    for options in (("--full", "test_more.py"), ("--full", "-k", "more"), ("--affected", "-k", "more")):
        project.runpytest_inprocess("-p", "proven", *options)
        assert {*record(project)} == {*before} | more
    project.makepyfile(test_interrupt="import pytest\ndef test_it(): pytest.exit('interrupted')\n")
    project.runpytest_inprocess("-p", "proven", "--full")
    assert {*record(project)} == {*before} | more
    (project.path / "test_interrupt.py").unlink()
    project.runpytest_inprocess("-p", "proven", "--full")
    assert {*record(project)} == more


def test_paper_leaves_nothing_behind(project):
    """What the test patches, and the files that it makes."""
    source = """
import evidence, os, pytest

@pytest.mark.full
def test_it(monkeypatch, tmp_path, pytestconfig):
    assert pytestconfig.option.full
    (tmp_path / "made").mkdir()
    assert "PATCHED" not in os.environ
    monkeypatch.setenv("PATCHED", "1")
    trace = evidence.current()
    with pytest.raises(ValueError):
        int("0" if trace.paper else "x")  # on paper it does not raise what it should
"""
    (project.mkdir("ptx_machine") / "test_it.py").write_text(source)
    for options in (("--affected",), ("--full",)):
        assert project.runpytest_inprocess("-p", "proven", *options).parseoutcomes() == {"passed": 1}
