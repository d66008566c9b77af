"""That a freeze of kernels tells equal code from other code, and a comparison lets through what the gate does; one kernel is compiled."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import compiled
import evidence
import freeze
import kernel_counts
import pytest
import simt_kernels
from compiled import without_addresses
from freeze import Renamed, main
from kernel_counts import ALL
from support import SIMULATED

from numba_flash.cuda.runtime.compiler import Linked

WORDS = """
	.section	.text.kernel,"ax",@progbits
        .size           kernel,(.L_x_2 - kernel)
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                      /* 0x00000a00ff017b82 */
                                                                               /* 0x000e640000000800 */
.L_x_0:
        /*0010*/              @!P0 BRA `(.L_x_1) ;                             /* 0x0000000000908947 */
                                                                               /* 0x000fea0003800000 */
        /*0020*/                   UMOV UR4, 32@lo(_cudapy_smem_3) ;           /* 0x0000001000047882 */
                                                                               /* 0x000fe20000000000 */
.L_x_1:
        /*0030*/               @P1 BRA `(.L_x_0) ;                             /* 0x0000000000441947 */
                                                                               /* 0x000fea0003800000 */
        /*0040*/                   NOP;                                        /* 0x0000000000007918 */
                                                                               /* 0x000fc00000000000 */
.L_x_2:
"""
LOG = "ptxas info: Used 42 registers, 16 bytes spill stores, 8 bytes stack frame"
MOVED = (("/*00", "/*1f"), (".L_x_0", ".L_x_30"), (".L_x_1", ".L_x_7"), ("smem_3", "smem_12"), ("0x0000000000441947", "0x0000000000541947"))
RECORD = {
    "builder": "ring.build",
    "config": "float16, Ring(3)",
    "arch": "sm_90a",
    "key": "before",
    "counts": {"BAR.SYNC": 2, ALL: 1000},
    "resources": {"registers": 168, "spill_bytes": 8, "stack_bytes": 8, "shared_bytes": 0, "warnings": 0},
    "code": "0123",
}
NOTHING_RENAMED = Renamed({}, {}, {})


def edited(text: str, *replaced: tuple[str, str]) -> str:
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return text


# ---- code


def test_code_is_the_same_at_other_addresses():
    """Under other names of labels and functions, and padded in another way."""
    assert without_addresses(edited(WORDS, *MOVED)) == without_addresses(WORDS)
    nop = WORDS[WORDS.index("        /*0040*/") : WORDS.index(".L_x_2:\n")]
    assert without_addresses(WORDS.replace(nop, "")) == without_addresses(WORDS) == without_addresses(WORDS.replace(nop, 3 * nop))
    assert without_addresses(WORDS)[1:4] == ["LDC R1, c[0x0][0x28] 732", "name0:", "@!P0 BRA `(name1) 7f5"]


@pytest.mark.parametrize(
    "replaced",
    [
        ("c[0x0][0x28]", "c[0x0][0x30]"),  # a constant
        ("@P1", "@!P1"),
        ("@P1 BRA `(.L_x_0)", "@P1 BRA `(.L_x_1)"),  # where a branch goes
        ("UMOV UR4", "UMOV UR5"),
        ("0x000e640000000800", "0x000fe40000000800"),  # what an instruction waits for
    ],
    ids=["constant", "predicate", "target", "register", "schedule"],
)
def test_other_code_is_told_apart(replaced):
    assert without_addresses(edited(WORDS, replaced)) != without_addresses(WORDS)


@pytest.mark.skipif(SIMULATED, reason="the CUDA simulator compiles nothing")
@pytest.mark.skipif(compiled.disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
def test_every_instruction_of_a_kernel_is_in_its_code():
    text = compiled.machine_text(simt_kernels.KERNELS["delta-float32-64-64"])
    found = [line.rsplit(" ", 1) for line in without_addresses(text) if not line.endswith(":")]
    names = [each for each in compiled.machine_instructions(text) if each != "NOP"]
    assert len(found) > 50
    assert [name in words for (words, _), name in zip(found, names, strict=True)] == len(found) * [True]
    assert len({schedule for _, schedule in found}) > 5


# ---- the gate


def record(**changed) -> dict:
    """A kernel, with other sources than `RECORD`, and what else is other about it."""
    changed = {"key": "after"} | changed
    return RECORD | {name: RECORD[name] | x if isinstance(x, dict) else x for name, x in changed.items()}


def verdict(new: dict) -> str:
    return freeze.judge("ring", RECORD, new, NOTHING_RENAMED).verdict


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "identical"),
        ({"key": "before", "code": "none was made"}, "identical"),
        ({"code": "4567"}, "within"),
        *(({"code": "4567", "counts": {ALL: count}}, "within") for count in (997, 1003)),
        *(({"code": "4567", "counts": {ALL: count}}, "BREAKS") for count in (996, 1004)),
        ({"code": "4567", "counts": {"BAR.SYNC": 1}}, "within"),
        ({"code": "4567", "counts": {"BAR.SYNC": 3}}, "BREAKS"),
        ({"code": "4567", "counts": {"BAR.SYNC": 1, "BAR.ARV": 1}}, "BREAKS"),
        *(({"resources": {name: RECORD["resources"][name] + 1}}, "BREAKS") for name in RECORD["resources"]),
        *(({"resources": {name: RECORD["resources"][name] - 1}}, "within") for name in ("registers", "spill_bytes", "stack_bytes")),
    ],
)
def test_the_gate(changed, expected):
    assert verdict(record(**changed)) == expected


def test_a_row_tells_what_differs():
    new = record(code="4567", counts={ALL: 1004, "BAR.SYNC": 1}, resources={"registers": 255}, config="float16, Ring(4)", arch="sm_100a")
    row = freeze.judge("ring", RECORD, new, NOTHING_RENAMED)
    assert row.instructions == "1000 -> 1004 (+0.40 %) !"
    assert row.others.split("; ") == [
        *("2 -> 1 BAR.SYNC", "168 -> 255 registers !", "another configuration", "another architecture"),
    ]
    assert freeze.judge("ring", RECORD, record(code="4567"), NOTHING_RENAMED).others == "counts, registers, spills equal"


# ---- which kernel was which


def test_kernels_are_paired():
    """By name; by a table; by builder and configuration where just one kernel is made of them."""
    old = {name: record(builder=f"{name}.build") for name in ("same", "moved", "twins", "dropped", "gone", "called")}
    new = {name: record(builder=f"{builder}.build") for name, builder in (("same", "same"), ("as", "called"), ("moved here", "far.moved"))}
    new |= {name: record(builder="twins.build") for name in ("one", "other")} | {"another": record(builder="dropped.build")}
    renamed = Renamed({"called": "as", "dropped": None}, {"moved.": "far.moved."}, {})
    paired = {"same": "same", "called": "as", "moved": "moved here", "twins": None, "dropped": None, "gone": None}
    assert freeze.pairs(old, new, renamed) == paired
    assert freeze.pairs({"a": RECORD}, {"b": record(config="float16, Loop(3)")}, Renamed({}, {}, {"Ring(": "Loop("})) == {"a": "b"}
    assert freeze.pairs({"a": RECORD}, {"b": record(arch="sm_80")}, NOTHING_RENAMED) == {"a": None}
    verdicts = {row.kernel: row.verdict for row in freeze.compare(old, new, renamed)}
    assert verdicts == {
        **dict.fromkeys(["same", "called -> as", "moved -> moved here"], "identical"),
        **{"dropped": "dropped", "gone": "GONE", "twins": "GONE", "one": "new", "other": "new", "another": "new"},
    }


def test_several_kernels_may_become_one():
    rows = freeze.compare({"a": RECORD, "b": RECORD | {"code": "4567"}}, {"b": record()}, Renamed({"a": "b"}, {}, {}))
    assert [(row.kernel, row.verdict) for row in rows] == [("a -> b", "identical"), ("b", "within")]


def test_a_kernel_that_is_gone_may_be_there_under_another_name():
    rows = freeze.compare({"a": RECORD}, {"b": record(builder="loop.build"), "c": record(builder="x", code="4567")}, NOTHING_RENAMED)
    assert rows == [("a", "GONE", "", "the same code as the new b"), ("b", "new", "", ""), ("c", "new", "", "")]


# ---- the command


@pytest.fixture
def saved(tmp_path):
    """Writes a freeze, and returns the file's name."""

    def save(name: str, tools=None, **kernels) -> str:
        (tmp_path / name).write_text(freeze.as_text({"tools": tools or {}, "kernels": kernels}))
        return str(tmp_path / name)

    return save


def test_a_comparison_is_printed(saved, capsys):
    old = saved("old", a=RECORD, long_name=RECORD, b=RECORD, dropped=RECORD)
    spills = record(code="4567", counts={ALL: 999}, resources={"spill_bytes": 16})
    new = saved("new", a=record(), long_name=record(code="4567"), b=spills, c=record(builder="c"))
    assert main(["compare", old, new]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "| kernel    | verdict | instructions          | what else differs (! breaks the gate) |",
        "| --------- | ------- | --------------------- | ------------------------------------- |",
        "| b         | BREAKS  | 1000 -> 999 (-0.10 %) | 8 -> 16 spill_bytes !                 |",
        "| dropped   | GONE    |                       | the same code as the new c            |",
        "| long_name | within  | 1000                  | counts, registers, spills equal       |",
        "| c         | new     |                       |                                       |",
        "5 kernels: 1 identical, 1 within, 1 BREAKS, 1 GONE, 0 dropped, 1 new",
    ]


def test_the_exit_status(saved, tmp_path, capsys):
    old, table = saved("old", tools={"nvcc": "1"}, a=RECORD, b=RECORD), tmp_path / "table"
    assert main(["compare", old, saved("new", tools={"nvcc": "1"}, a=record(), b=record(code="4567"), c=record())]) == 0
    assert "tools" not in capsys.readouterr().out
    assert main(["compare", old, saved("new", tools={"nvcc": "2"}, a=record(), b=record(counts={"BAR.SYNC": 3}))]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "other tools, which make other code: nvcc 1 -> 2"
    new = saved("new", a=record())
    assert main(["compare", old, new]) == 1
    table.write_text('{"names": {"b": null}}')
    assert main(["compare", old, new, "--renamed", str(table)]) == 0
    assert main(["compare", old, new, "--only", "build a$"]) == 0
    table.write_text('{"kernels": {"b": null}}')
    with pytest.raises(SystemExit, match=r"table has \['kernels'\]; a table of what is renamed has names, builders, configs"):
        main(["compare", old, new, "--renamed", str(table)])


@pytest.fixture
def tree(tmp_path, monkeypatch) -> list[str]:
    """A tree of two kernels; builders that were linked."""
    linked = []

    def link(kernel):
        linked.append(kernel.builder)
        return Linked(b"", LOG)

    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(freeze, "KERNELS", {f"the {x}": compiled.Kernel(f"{x}.build", (x, 3)) for x in ("ring", "loop")})
    monkeypatch.setattr(evidence, "kernel_key", lambda kernel: f"sources of {kernel.builder}")
    monkeypatch.setattr(compiled, "disassembler", lambda: "nvdisasm")
    monkeypatch.setattr(compiled, "linked", link)
    monkeypatch.setattr(compiled, "machine_text", lambda kernel: WORDS)
    return linked


def test_what_is_saved(tree, tmp_path, monkeypatch):
    """One line per kernel, sorted; compiled once by one version of the tools."""
    file = tmp_path / "frozen"
    assert main(["save", str(file)]) == 0
    said = json.loads(file.read_text())
    assert said["tools"] == kernel_counts.tools()
    assert [line.split(":")[0] for line in file.read_text().splitlines()] == ['{"tools"', '"kernels"', ' "the loop"', ' "the ring"', "}}"]
    ring = said["kernels"]["the ring"]
    assert {name: ring[name] for name in ("builder", "config", "arch")} == {"builder": "ring.build", "config": "ring, 3", "arch": "sm_90a"}
    assert ring["counts"] == {ALL: 4}
    assert ring["resources"] == {"registers": 42, "spill_bytes": 16, "stack_bytes": 8, "shared_bytes": 0, "warnings": 0}
    assert ring["code"] == said["kernels"]["the loop"]["code"] != ""
    assert ring["key"] != said["kernels"]["the loop"]["key"]
    assert tree == ["loop.build", "ring.build"]
    assert main(["save", str(file)]) == 0
    assert (json.loads(file.read_text()), len(tree)) == (said, 2)
    assert main(["save", str(file), "--only", "^ring"]) == 0
    assert [*json.loads(file.read_text())["kernels"]] == ["the ring"]
    monkeypatch.setattr(freeze, "MADE_BY", (evidence,))
    assert main(["save", str(file), "--only", "^ring"]) == 0
    assert tree == ["loop.build", "ring.build", "ring.build"]
    again = tmp_path / "again"
    assert main(["save", str(again), "--known", str(file)]) == 0
    assert (json.loads(again.read_text()), tree[3:]) == (said, ["loop.build"])


def test_nothing_is_compiled_for_a_list_of_kernels(tree, tmp_path, monkeypatch, capsys):
    file = tmp_path / "frozen"
    monkeypatch.setattr(compiled, "disassembler", lambda: None)
    assert main(["save", str(file), "-j", "0"]) == 0
    assert [*json.loads(file.read_text())["kernels"]["the ring"]] == ["builder", "config", "arch", "key"]
    assert not tree
    with pytest.raises(SystemExit):
        main(["compare", str(file), "-j", "0"])
    assert "-j is 0; to compare, at least one process compiles" in capsys.readouterr().err


def test_several_processes_compile(tree, monkeypatch):
    """Here, threads."""
    pools = []
    monkeypatch.setattr(freeze, "ProcessPoolExecutor", lambda jobs: pools.append(ThreadPoolExecutor(jobs)) or pools[0])
    assert freeze.freeze(jobs=2) == freeze.freeze()
    assert [pool._max_workers for pool in pools] == [2]
    assert sorted(tree) == ["loop.build", "ring.build"]


def test_two_revisions_are_compared(monkeypatch, tmp_path, capsys):
    """Each knows the other's kernels, so that those which are the same are compiled in neither; but not what is compared with others."""
    asked = []

    def freeze_revision(revision, only, jobs, known):
        asked.append((revision, only, jobs, [*known["kernels"]]))
        return {"tools": {}, "kernels": {"ring": record(key=revision), "loop": record()}}

    monkeypatch.setattr(freeze, "freeze_revision", freeze_revision)
    assert main(["compare", "HEAD~1", "topic", "-j", "3", "--only", "o"]) == 0
    both = ["ring", "loop"]
    assert asked == [("topic", "o", 0, []), ("HEAD~1", "o", 3, both), ("topic", "o", 3, both)]
    assert capsys.readouterr().out == "2 kernels: 2 identical, 0 within, 0 BREAKS, 0 GONE, 0 dropped, 0 new\n"
    asked.clear()
    (tmp_path / "table").write_text('{"names": {"ring": "loop"}}')
    assert main(["compare", "HEAD~1", "topic", "--renamed", str(tmp_path / "table")]) == 0
    assert asked == [("topic", "", 0, []), ("HEAD~1", "", 1, ["loop"]), ("topic", "", 1, ["ring"])]


def test_the_files_as_they_are(tree, tmp_path, monkeypatch, capsys):
    """What has the same sources as before is not compiled."""
    file = tmp_path / "frozen"
    main(["save", str(file)])
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setattr(evidence, "kernel_key", lambda kernel: f"sources of {kernel.builder}".replace("loop", "edited loop"))
    monkeypatch.setattr(compiled, "machine_text", lambda kernel: edited(WORDS, ("UMOV", "IMOV")))
    tree.clear()
    assert main(["compare", str(file)]) == 0
    assert tree == ["loop.build"]
    assert capsys.readouterr().out.splitlines()[-1] == "2 kernels: 1 identical, 1 within, 0 BREAKS, 0 GONE, 0 dropped, 0 new"
    tree.clear()
    (tmp_path / "table").write_text('{"names": {"the loop": "the ring"}}')
    assert main(["compare", str(file), "--renamed", str(tmp_path / "table")]) == 0
    assert tree == ["ring.build"], "which is compared with what was another"


def test_what_cannot_be_compiled_is_named(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "linked", lambda kernel: Linked(b"", "nothing"))
    with pytest.raises(RuntimeError, match="the ring: the linker's log does not tell how many registers it has"):
        main(["save", str(tmp_path / "frozen"), "--only", "ring"])
    monkeypatch.setattr(compiled, "machine_text", lambda kernel: 1 // 0)
    with pytest.raises(ZeroDivisionError) as failure:
        main(["save", str(tmp_path / "frozen"), "--only", "ring"])
    assert failure.value.__notes__ == ["This is the kernel 'the ring'."]
    monkeypatch.setattr(compiled, "disassembler", lambda: None)
    with pytest.raises(SystemExit, match="there is no nvdisasm"):
        main(["save", str(tmp_path / "frozen")])
    monkeypatch.setattr(freeze, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=f"numba_flash is imported from .*, not from here: set PYTHONPATH={tmp_path}"):
        main(["save", str(tmp_path / "frozen")])


# A revision's command, which freezes what it is told: where it runs, and what is known of the new tree.
COMMAND = """
import json, os, sys
_, file, _, known, *arguments = sys.argv[1:]
kernels = json.load(open(known))["kernels"]
here = os.path.dirname(os.path.dirname(__file__))
kernels["old"] = kernels["the ring"] | {"config": repr([arguments, os.environ["PYTHONPATH"] == here])}
json.dump({"tools": {}, "kernels": kernels}, open(file, "w"))
"""


def test_a_revision_is_frozen_by_its_own_command(tree, tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    (repository / "tests").mkdir(parents=True)
    (repository / "numba_flash").mkdir()
    (repository / "numba_flash" / "x.py").touch()
    who = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    git = lambda *command: subprocess.run(["git", *command], cwd=repository, env=os.environ | who, check=True, capture_output=True)
    monkeypatch.setattr(freeze, "ROOT", repository)
    (repository / "tests" / "other.py").touch()
    git("init", "-q")
    for message, command in (("before", None), ("with", COMMAND)):
        if command is not None:
            (repository / "tests" / "freeze.py").write_text(command)
        git("add", ".")
        git("commit", "-q", "-m", message)
    (repository / "tests" / "freeze.py").write_text("not this one")
    listed = freeze.freeze(jobs=0)
    found = freeze.freeze_revision("HEAD", "ring", 2, listed)
    assert sorted(found["kernels"]) == ["old", "the loop", "the ring"]
    assert found["kernels"]["old"]["config"] == "[['--only', 'ring', '-j', '2'], True]"
    assert not tree, "nothing is compiled"
    with pytest.raises(SystemExit, match=r"HEAD~1 has no tests/freeze.py"):
        freeze.freeze_revision("HEAD~1", "", 1, listed)
    with pytest.raises(SystemExit, match="no_such is neither a file nor a revision"):
        freeze.freeze_revision("no_such", "", 1, listed)


def test_no_two_kernels_have_the_same_name():
    assert len(freeze.KERNELS) == sum(map(len, (simt_kernels.KERNELS, freeze.sm80_kernels.KERNELS, freeze.sm90_kernels.KERNELS)))
