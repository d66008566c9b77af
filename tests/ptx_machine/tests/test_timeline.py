"""The machine with clocks, its tables and its pictures: on texts written by hand, and on the figures of the docs."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest
from support import ROOT, SIMULATED, random_inputs, whole

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine import timeline
from ptx_machine.machine.gantt import Row, gantt
from ptx_machine.machine.machine import Deadlock
from ptx_machine.machine.timed import BYTES_PER_TICK, COMPUTES, COPIES_IN, LATENCY, PRODUCTS, TENSOR_CORE, WAITS, Timed, Watch
from test_kernels import mutated
from test_order import FENCE, FETCH, HEAD, MAKE, WAITED, WHOLE, wait

from numba_flash.cuda.sm90.backward.backward_tiles import BackwardTile, WideTile
from numba_flash.cuda.sm90.forward.forward_tiles import Tile

SVG = "{http://www.w3.org/2000/svg}"


def timed(body: str, threads: int = 64, grid: int = 1, resident: int | None = None, **options) -> Timed:
    """The machine after a kernel of that body, which has ``[out]`` and ``[flag]``."""
    machine = Timed(HEAD + body + "ret; }", resident=resident, **options)
    out, flag = np.full(1024, 7, np.float32), np.zeros(1, np.int32)
    machine.launch([machine.memory.place("out", out), machine.memory.place("flag", flag)], grid, threads)
    return machine


def waits_of(machine: Timed, row: str) -> list:
    return [span for span in machine.spans if span.row == row and span.kind == WAITS]


READY = MAKE + FENCE + "bar.sync 0;"
LOADED = READY + FETCH + wait("loaded", "%r80", 0)
FIRST_IS_LATE = "setp.ge.u32 %p2, %r1, 32; @%p2 bra $on;" + 50 * "add.s32 %r7, %r1, 1;" + "$on:"
LATE = FIRST_IS_LATE + "bar.sync 0;"


# ---- time ------------------------------------------------------------------------------------------------------------------------------


def test_the_same_happens_at_the_same_time():
    assert timed(LOADED).spans == timed(LOADED).spans


def test_an_instruction_takes_its_ticks():
    """Ordinary ones take one, special functions eight, moves none."""
    ends = [
        timed(body, threads=32).spans[-1].end for body in ("", "add.s32 %r7, %r1, 1;", "ex2.approx.f32 %f1, 0f3F800000;", "mov.u32 %r7, 1;")
    ]
    assert [end - ends[0] for end in ends] == [0, 1, 8, 0]


def test_whoever_waits_goes_on_when_the_last_has_come():
    machine = timed(LATE)
    (span,) = waits_of(machine, "warp 1")
    comes = next(span.end for span in machine.spans if span.row == "warp 0")
    assert (span.what, span.by) == ("barrier 0", "warp 0")
    assert 45 <= span.end - span.begin <= 55
    assert comes - 5 < span.end <= comes


def test_a_copy_takes_its_way_and_its_bytes():
    """256 bytes: the wait ends with the copy, which has ended it."""
    machine = timed(LOADED, mbarriers={4096: "k ready 0"})
    (copied,) = (span for span in machine.spans if span.row == COPIES_IN)
    assert (copied.what, copied.end - copied.begin) == ("k 0", 256 // BYTES_PER_TICK)
    for row in ("warp 0", "warp 1"):
        span = waits_of(machine, row)[-1]
        assert (span.what, span.by, span.end) == ("k ready 0", "copy engine", copied.end)
        assert LATENCY - 20 < span.end - span.begin < LATENCY + 20


def test_copies_come_one_after_the_other():
    second = FETCH.replace("%r80", "%r81").replace("[%r90]", "[%r91]")
    machine = timed(READY + "add.s32 %r91, %r90, 1024;" + FETCH + second + wait("loaded", "%r80", 0) + wait("also", "%r81", 0))
    first, second = (span for span in machine.spans if span.row == COPIES_IN)
    assert second.begin == first.end
    assert second.end - first.begin == 2 * 256 // BYTES_PER_TICK


def test_a_block_begins_when_there_is_room():
    begins = lambda resident: [min(s.begin for s in timed(LATE, grid=2, resident=resident).spans if s.block == b) for b in range(2)]
    assert begins(None) == [0, 0]
    assert begins(1)[1] > 50


# ---- products --------------------------------------------------------------------------------------------------------------------------


def test_products_are_there_when_they_are_due():
    """m64n8k16 takes 4 ticks, and their warps wait for no more."""
    machine = timed(WHOLE, threads=128)
    (product,) = (span for span in machine.spans if span.row == TENSOR_CORE)
    assert (product.kind, product.what, product.end - product.begin) == (f"{PRODUCTS} of warps 0 to 3", "1", 4)
    for warp in range(4):
        (span,) = (each for each in waits_of(machine, f"warp {warp}") if each.what.startswith(PRODUCTS))
        assert (span.what, span.by, span.end) == (f"{PRODUCTS} 1", TENSOR_CORE, product.end)


def test_products_of_two_warp_groups_share_the_tensor_core():
    """Both multiply the same; warps that compute meanwhile overlap with products, products never with each other."""
    machine = timed(WHOLE.replace(WAITED, 20 * "add.s32 %r40, %r1, 1;" + WAITED), threads=256)
    first, second = sorted(span for span in machine.spans if span.row == TENSOR_CORE)
    assert {first.kind, second.kind} == {f"{PRODUCTS} of warps 0 to 3", f"{PRODUCTS} of warps 4 to 7"}
    assert first.end == second.begin
    computing = [span for span in machine.spans if span.kind == COMPUTES]
    assert any(span.begin < first.begin and second.end < span.end for span in computing)


# ---- spans -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "threads"), [(LATE, 64), (LOADED, 64), (WHOLE, 256)], ids=["barrier", "copy", "products"])
def test_spans_cover_the_life_of_a_warp(body, threads):
    """From the beginning to its end, one after the other; in other rows with gaps."""
    machine = timed(body, threads=threads)
    for row in {span.row for span in machine.spans}:
        spans = sorted((span for span in machine.spans if span.row == row), key=lambda span: span.begin)
        if row.startswith("warp "):
            assert spans[0].begin == 0
            assert all(one.end == next_.begin for one, next_ in pairwise(spans))
        assert all(span.begin < span.end for span in spans)
        assert all(one.end <= next_.begin for one, next_ in pairwise(spans))


def test_who_waits_for_ever_is_told_by_name():
    machine = Timed(HEAD + READY + FIRST_IS_LATE + wait("loaded", "%r80", 0) + "ret; }", mbarriers={4096: "k ready 0"})
    with pytest.raises(Deadlock, match=r"block 0, warp 1 waits for k ready 0, line \d+"):
        machine.launch([machine.memory.place("out", np.zeros(4)), machine.memory.place("flag", np.zeros(1, np.int32))], 1, 64)
    machine.stop()
    (span,) = (span for span in waits_of(machine, "warp 1") if span.what == "k ready 0")
    assert span.by == "nobody"
    assert span.end - span.begin > 40


# ---- instructions ----------------------------------------------------------------------------------------------------------------------


def test_instructions_of_a_lane():
    body = "setp.gt.u32 %p1, %r1, 40;\n@%p1 add.s32 %r7, %r1, 100;\nadd.s32 %r8, %r1, 1;\n"
    line = HEAD.count("\n") + 1
    machine = timed(body, watch=Watch(1, 3, range(line, line + 3)))
    opcodes = [machine.kernel.instructions[step.number].opcode for step in machine.steps]
    assert opcodes == ["setp.gt.u32", "add.s32", "add.s32"]
    assert [step.values.get("%r1") for step in machine.steps] == [35, 35, 35]
    assert [step.time for step in machine.steps] == sorted(step.time for step in machine.steps)
    assert (machine.steps[1].values["%r7"], machine.steps[2].values["%r8"]) == ("never written", 36)
    assert timed(body).steps == []


# ---- tables and pictures ---------------------------------------------------------------------------------------------------------------


def test_waits_are_added_up():
    """Of warps 0 to 3 the first comes last; the others are a consumer."""
    spans = timed(LATE, threads=256).spans
    waited = spans[0]._replace(row="warp 5", kind=WAITS, what="products 3", begin=0, end=9, by="x", line=7)
    table = timeline.waits([*spans, waited], {0: "producer"})
    assert {each.who for each in table} == {"nothing", "consumer 0"}
    (products,) = (each for each in table if each.what == PRODUCTS)
    whole = max(span.end for span in spans)
    assert products == timeline.Waited("consumer 0", PRODUCTS, 1, 9, 9 / whole / 4, 9, "x", "7")
    assert [each.share for each in table] == sorted((each.share for each in table), reverse=True)


def test_a_picture_has_a_line_for_each_row():
    spans = timed(WHOLE, threads=256).spans
    rows = [Row(f"the <{name}>", name) for name in sorted({span.row for span in spans})]
    tree = ElementTree.fromstring(gantt(spans, rows, "a & b"))
    groups = [group for group in tree.iter(f"{SVG}g") if group.get("class") == "row"]
    assert [group.find(f"{SVG}text").text for group in groups] == [row.label for row in rows]
    assert all(group.find(f"{SVG}path") is not None for group in groups)
    assert gantt(spans, rows, "a & b") == gantt(spans, rows, "a & b")


def test_bars_lie_where_their_spans_do():
    """Two spans of equal length fill the halves of the picture."""
    one = timed("", threads=32).spans[0]
    spans = [one._replace(begin=0, end=500), one._replace(kind=WAITS, what="it", begin=500, end=1000)]
    tree = ElementTree.fromstring(gantt(spans, [Row("x", "warp 0")], ""))
    (group,) = tree.iter(f"{SVG}g")
    assert [re.match(r"M(\d+) \d+h([\d.]+)", path.get("d")).groups() for path in group.iter(f"{SVG}path")] == [
        ("150", "499.5"),
        ("650", "499.5"),
    ]


@pytest.mark.parametrize(
    ("tile", "d"), [(Tile(128, 128, 2, 2, 2, True), 128), (BackwardTile(64, 3, 2, True), 64)], ids=["forward", "backward"]
)
def test_mbarriers_have_names(tile, d):
    """Each slot of each ring has two, at addresses of their own."""
    names, layout = timeline.names_of_mbarriers(tile, d, d, 100), tile.layout(d, d)
    slots = sum(2 * ring.slots for ring in layout if hasattr(ring, "slots"))
    assert len(names) == len(set(names.values())) == slots
    assert names[layout.ALIGNMENT + layout.k.ready] == "k ready 0"
    assert names[layout.ALIGNMENT + layout.q.free + 8] == "q free 1"


def test_warps_have_roles():
    assert timeline.roles_of(Tile(128, 128, 2, 2, 2, True)) == {0: "producer"}
    assert timeline.roles_of(BackwardTile(64, 3, 2, True)) == {0: "adds dQ 0", 1: "adds dQ 1", 2: "producer", 3: "work items"}
    assert timeline.roles_of(WideTile()) == {2: "producer", 3: "work items"}


def test_named_barriers_have_names():
    assert timeline.names_of_barriers(2) == {
        0: "block",
        1: "ping pong 0",
        2: "ping pong 1",
        4: "warp group 0",
        5: "warp group 1",
        7: "consumers",
    }


# ---- the figures of docs/debugging.md --------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "debugging.md").read_text()
COMMANDS = re.findall(r"^python tests/ptx_machine/machine/timeline\.py (.*) --svg (docs/figures/\S+)$", PAGE, re.MULTILINE)
WARPS = {
    "forward": ["warp 0, producer"],
    "backward": ["warp 0, adds dQ 0", "warp 1, adds dQ 1", "warp 2, producer", "warp 3, work items"],
}
OTHERS = ["consumer 0", "consumer 1", "tensor core", "copies in", "copies out"]


def labels(svg: str) -> list[str]:
    return [group.find(f"{SVG}text").text for group in ElementTree.fromstring(svg).iter(f"{SVG}g")]


def ticks(svg: str) -> int:
    return int(re.search(r"<desc>(\d+) ticks</desc>", svg)[1])


@pytest.mark.parametrize(("options", "file"), COMMANDS, ids=[options.split()[0] for options, _ in COMMANDS])
def test_figures_show_every_row(options, file):
    text = (ROOT / file).read_text()
    assert f"]({file.removeprefix('docs/')})" in PAGE
    assert labels(text) == WARPS[options.split()[0]] + OTHERS
    assert len(text) < 100_000


def test_there_is_a_figure_of_each_direction():
    assert [options.split()[0] for options, _ in COMMANDS] == list(WARPS)


@pytest.mark.full
@pytest.mark.parametrize(("options", "file"), COMMANDS, ids=[options.split()[0] for options, _ in COMMANDS])
def test_figures_are_what_their_commands_draw(options, file, tmp_path, capsys):
    """But for a few ticks, since compilers differ."""
    drawn = tmp_path / "drawn.svg"
    timeline.main([*options.split(), "--waits", "--svg", str(drawn)])
    committed = (ROOT / file).read_text()
    assert labels(drawn.read_text()) == labels(committed)
    assert abs(ticks(drawn.read_text()) / ticks(committed) - 1) < 0.05
    said = capsys.readouterr().out
    assert "the tensor core busy for" in said
    assert re.search(r"^consumer 1 +products ", said, re.MULTILINE)
    assert re.search(r"^producer +k free 0 ", said, re.MULTILINE)


@pytest.mark.full
def test_products_that_are_done_early_are_right():
    """The machine of the other tests executes them as late as it may."""
    passes = [
        timeline.prepare(timeline.parsed(f"backward --d 64 --nq 200 --nk 200 --causal --blocks {blocks}".split())) for blocks in (1, 2)
    ]
    for each in passes:
        each.run()
    q, k, v, do = random_inputs(batch=(1,), hq=1, hk=1, nq=200, nk=200, d=64, dtype="float16")
    for x, y, expected in zip(*(each.results for each in passes), whole.gradients(do, q, k, v, causal=True), strict=False):
        assert x is y is None or x.tobytes() == y.tobytes()
        np.testing.assert_allclose(x.astype(float), expected, atol=8e-3, rtol=8e-3)


@pytest.mark.full
def test_what_a_lane_of_a_kernel_does(capsys):
    """An mbarrier is called by its name."""
    timeline.main("forward --d 64 --nk 64 --warp 4 --lane 0".split())
    said = capsys.readouterr().out
    assert re.search(r"^ +\d+ +\d+  mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\] +%r\d+=\d+ \(k free 0\)$", said, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\];", "", r"(?s)nobody can go on:.*warp 4 waits for work ready 0, line \d+"),
        (r"(expect_tx\.shared::cta\.b64 _, \[%r\d+\]), %r\d+;", r"\1, 128;", r"bytes arrive at the mbarrier at \d+ \([kq] ready 0\)"),
    ],
    ids=["no arrivals", "more bytes than expected"],
)
def test_an_error_ends_what_is_printed(monkeypatch, capsys, tmp_path, old, new, message):
    """Names stand in the error; the table, the instructions and the picture end there."""
    mutated(monkeypatch, old, new)
    with pytest.raises(SystemExit, match=message):
        timeline.main(["forward", "--d", "64", "--waits", "--warp", "0", "--svg", str(tmp_path / "it.svg")])
    said = capsys.readouterr().out
    assert re.search(r"^ +\d+ +\d+  fence\.mbarrier_init\.release\.cluster$", said, re.MULTILINE)
    assert labels((tmp_path / "it.svg").read_text())[0] == "warp 0, producer"
    assert re.search(r"^consumer 0 .* nobody$", said, re.MULTILINE)
