"""``--affected``: the slow tests whose code has changed since they passed. ``tests/data/proven.json`` has, for each that passed, two
hashes of what it is a function of (`evidence`): one of the sources that its kernels are made of, looked up without compiling, and one of
their PTX. It also has a hash of all sources for which all of it was last looked up: while they are the same, nobody looks again.

A slow test that is no such function (of time, of threads and processes, of what is installed) is marked `unproven`, with the reason, and
runs whenever slow tests do. Every other one outside the folders of kernels is a function of its own source and of the package, or of what
its backend consists of. So is one of Hypothesis: where slow tests run, the same source and version draw the same examples, elsewhere
others each time.
"""

import hashlib
import json
import random
import sys
import time
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import evidence
import pytest
from support import SIMULATED

RECORD = Path(__file__).parent / "data" / "proven.json"
OF_KERNELS = {"ptx_machine", "cuda"}  # folders of tests that are traced, at any depth
OF_THE_CPU = {"cpu", "docs"}  # of those whose package runs on the CPU alone
BEGUN = time.monotonic()
EVERY = 60  # seconds: what has passed is written so often, so that a run that is cut off has not been in vain
PASSED, CONFIRMED, LEFT_OUT, LIED = "proven", "confirmed", "left out", "lied"
ALL = "all sources"  # beside the names of tests
BEFORE = "passed before, with the same kernels, arguments and sources"


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests that are slow or exhaustive (marked `full`)")
    parser.addoption(
        "--affected",
        action="store_true",
        help=f"run the slow tests, too, but for those that {RECORD.name} says have passed on the same code",
    )
    parser.addoption("--audit", type=int, metavar="N", help="with --affected, also a random Nth of those that have passed")
    parser.addoption("--order", type=int, metavar="SEED", help="with --affected, of slow tests; another one in each run, by default")
    parser.addoption("--minutes", type=float, help="with --affected, begin no slow test after so many; those left out are listed")


def kept() -> dict[str, str]:
    """What is recorded: two hashes of each test, with a space between them."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def tree() -> str:
    """Hash of all that any record is a function of."""
    return _hash(evidence.all_sources(), *_versions(), version("hypothesis"))


def _versions() -> tuple:
    return sys.version_info[:2], evidence.tools()


def _hash(*what) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def is_provable(item) -> bool:
    """Its result is a function of code."""
    slow, others = item.get_closest_marker("full"), ("unproven", "gpu")
    return slow is not None and not SIMULATED and not any(map(item.get_closest_marker, others))


def _draws(item) -> bool:
    return getattr(item.function, "is_hypothesis_test", False)


class Proof:
    """What one test is a function of.

    Attributes
    ----------
    trace : Trace
        Of the test on paper; None of one that is not traced.
    base : tuple
        All but the kernels, the same in both hashes.
    """

    def __init__(self, item):
        self.nodeid, self.trace, function = item.nodeid, None, item.function.__name__
        self.base = evidence.own_source(item.path, function), item.name, _versions()
        if _draws(item):
            self.base += (version("hypothesis"),)
        self._host = lambda: evidence.host_sources(item.path, function, _backend(item))
        if OF_KERNELS & {*item.nodeid.split("::")[0].split("/")} and not _draws(item):
            self.trace = _on_paper(item)
            self.base += (self.trace.events,)

    def by_sources(self, whole: bool) -> str:
        """Hash without compiling; of sources of the host, too, if the trace on paper is not the `whole` of it."""
        kernels = [] if self.trace is None else [evidence.kernel_key(each) for each in self.trace.kernels]
        return _hash(self.base, kernels, () if whole else self._host())

    def by_ptx(self, whole: bool) -> str:
        """Hash of what the compiler makes."""
        if not (whole and self.trace and self.trace.kernels):
            return "-"
        return _hash(self.base, [evidence.kernel_text(each) for each in self.trace.kernels])

    def has_sources(self, record: str) -> bool:
        """The test has passed on these sources."""
        sources = record.split()[0]
        return sources == self.by_sources(False) or (self.trace is not None and sources == self.by_sources(True))

    def has_ptx(self, record: str) -> bool:
        """The test has passed on this PTX, which may have to be compiled."""
        ptx = record.split()[1]
        return ptx != "-" and ptx == self.by_ptx(True)

    def record(self, earnest) -> str:
        """What to keep after it has passed in earnest."""
        return self._said(self.trace is not None and self.trace.tells_all_of(earnest))

    def renewed(self) -> str:
        """What to keep of a test whose PTX is as it was, though sources are not."""
        return self._said(True)

    def _said(self, whole: bool) -> str:
        return f"{self.by_sources(whole)} {self.by_ptx(whole)}"


def _backend(item) -> str | None:
    """The only one that it runs, if that is known and needs no GPU."""
    given = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    return getattr(given, "name", None) or ("cpu" if item.path.parent.name in OF_THE_CPU else None)


def _on_paper(item) -> evidence.Trace:
    """The trace of a test on paper. It may end as it likes: results are not those of attention."""
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    with evidence.traced(paper=True) as trace, pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
        own = {"monkeypatch": patch, "tmp_path": Path(directory)}  # it leaves nothing behind for the run in earnest
        # Of results that differ pytest would show all differences, where CI is set: of bytes that takes half an hour.
        patch.setattr("_pytest.assertion.util._reprcompare", None)
        arguments |= {name: own[name] for name in own if name in arguments}
        try:
            item.obj(**arguments)
        except (Exception, evidence.Enough, pytest.fail.Exception, pytest.skip.Exception) as error:
            trace.note(type(error).__name__)
    return trace


class Proofs:
    """The plugin of a process that runs tests."""

    def __init__(self, config):
        self.config, self.record = config, kept()

    @cached_property
    def looked_up(self) -> bool:
        """Nobody has to look again."""
        return ALL in self.record and self.record[ALL] == tree()

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        if not is_provable(pyfuncitem):
            if pyfuncitem.get_closest_marker("full"):
                self._leave_out_late(pyfuncitem)
            return (yield)
        record = self.record.get(pyfuncitem.nodeid) if self.config.option.affected else None
        if record is None:
            self._leave_out_late(pyfuncitem)
        elif self.looked_up:
            self._leave_out_confirmed(pyfuncitem)
        proof = Proof(pyfuncitem)
        if record is not None and not self.looked_up:
            self._leave_out_proven(pyfuncitem, proof, record)
        with evidence.traced(paper=False) as earnest:
            result = yield
        pyfuncitem.user_properties.append((PASSED, proof.record(earnest)))
        return result

    def _leave_out_proven(self, item, proof: Proof, record: str) -> None:
        if not proof.has_sources(record):
            self._leave_out_late(item)
            if not proof.has_ptx(record):
                return
            item.user_properties.append((PASSED, proof.renewed()))
        self._leave_out_confirmed(item)

    def _leave_out_confirmed(self, item) -> None:
        audit = self.config.option.audit
        if not audit or random.random() * audit >= 1:
            item.user_properties.append((CONFIRMED, True))
            pytest.skip(BEFORE)
        item.user_properties.append((LIED, True))

    def _leave_out_late(self, item) -> None:
        minutes = self.config.option.minutes
        if minutes is not None and time.monotonic() - BEGUN > 60 * minutes:
            item.user_properties.append((LEFT_OUT, True))
            pytest.skip(f"slow tests begin within {minutes:g} minutes (--minutes)")


class Records:
    """The plugin of the process that reports: writes what has passed. After a run of all slow tests, what has neither passed nor been
    looked up is no longer in the record.
    """

    def __init__(self, config):
        self.passed, self.confirmed, self.left_out, self.lied = {}, set(), [], []
        self.written = time.monotonic()
        named = config.args_source is config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr not in ("", "full")
        self.all = not named
        # Not those that a test of this project makes and runs, and not where tests are only listed.
        self.ours = config.rootpath in RECORD.parents and not config.option.collectonly

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """All processes of pytest-xdist have the same order."""
        node.workerinput["order"] = node.config.option.order

    def pytest_runtest_logreport(self, report):
        said = dict(report.user_properties)
        if report.when != "call":
            return
        if PASSED in said and not report.failed:
            self.passed[report.nodeid] = said[PASSED]
            if time.monotonic() - self.written > EVERY:
                self._write(kept())
        if CONFIRMED in said:
            self.confirmed.add(report.nodeid)
        if report.failed and LIED in said:
            self.lied.append(report.nodeid)
        if report.skipped and LEFT_OUT in said:
            self.left_out.append(report.nodeid)

    def pytest_sessionfinish(self, exitstatus):
        before = kept()
        if self.ours and self.all and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._write({name: before[name] for name in self.confirmed} | {ALL: tree()})
        else:
            self._write({name: hashes for name, hashes in before.items() if name not in self.lied})

    def _write(self, others: dict[str, str]) -> None:
        """Keep what has passed, beside `others`. What passed on other sources than `others` were looked up for has not passed on those."""
        record, self.written = others | self.passed, time.monotonic()
        if self.ours and record != kept():
            if record.get(ALL) != tree():
                record.pop(ALL, None)
            new = RECORD.with_suffix(".new")
            new.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")
            new.replace(RECORD)

    def pytest_terminal_summary(self, terminalreporter):
        for what, names in (
            ("did not fit into the time, and were not run", self.left_out),
            (f"failed, though {RECORD.name} says that they passed on the same code", self.lied),
        ):
            if names:
                terminalreporter.section(f"{len(names)} slow tests {what}")
                terminalreporter.write("\n".join((*sorted(names), "")))


def pytest_configure(config):
    if config.option.full or config.option.affected:
        config.option.full = True  # slow tests run, and whoever asks whether they do is told so
        from hypothesis import settings

        before = settings.get_current_profile_name()
        settings.register_profile("proven", derandomize=True)
        settings.load_profile("proven")
        config.add_cleanup(lambda: settings.load_profile(before))
        if config.option.order is None:
            config.option.order = getattr(config, "workerinput", {}).get("order", random.randrange(2**16))
        config.pluginmanager.register(Proofs(config), "proofs")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Records(config), "records")
