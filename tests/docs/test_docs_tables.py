"""Tables and figures of README and docs are what committed results give, and so are the few numbers that a reader takes away."""

import re
import sys

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import figures  # of docs
import tables

# ---- headline claims -------------------------------------------------------------------------------------------------------------------


def beside_standard() -> list[float]:
    """GPT-2's attention: time of standard attention over ours, full and causal."""
    rows = {(row["contender"], row["mask"]): row["forward_ms"] + row["backward_ms"] for row in tables.load("h200/traffic")["rows"]}
    return [rows["CuPy", mask] / rows["numba_flash", mask] for mask in ("full", "causal")]


def of_own() -> list[float]:
    """A function of the user: our speed over FlexAttention's, least and greatest, forward and backward."""
    rows = tables.load("h100/score_mod")["rows"]
    return [end(row[each] for row in rows if each in row) for each in ("forward", "backward") for end in (min, max)]


CLAIMS = {  # what a sentence says, and the values of its numbers
    r"([\d.]+) times as fast as standard attention in CuPy, ([\d.]+) times if causal": beside_standard,
    r"It has ([\d.]+) to ([\d.]+) of FlexAttention's speed forward, and ([\d.]+) to ([\d.]+) backward": of_own,
    r"([\d.]+) GB as a matrix": lambda: [65_536**2 * 4 / 1e9],  # of the photograph, in float32
}


def wrong(text: str, claim: str) -> list[str]:
    """Where a page makes the claim with other numbers than its results give, at the precision that it prints."""
    values = CLAIMS[claim]()
    differs = lambda printed, value: printed != f"{value:.{len(printed.partition('.')[2])}f}"
    found = re.finditer(claim, " ".join(text.split()))
    return [match[0] for match in found if any(map(differs, match.groups(), values))]


@pytest.mark.parametrize("claim", CLAIMS)
def test_headline_claims_are_what_results_give(claim):
    pages = [page.read_text() for page in tables.PAGES]
    assert any(re.search(claim, " ".join(page.split())) for page in pages)
    assert [found for page in pages for found in wrong(page, claim)] == []


def test_a_changed_claim_is_found():
    claim = next(iter(CLAIMS))
    said = "{:.0f} times as fast as standard\nattention in CuPy, {:.0f} times if causal"
    full, causal = beside_standard()
    assert wrong(said.format(full, causal), claim) == []
    assert wrong(said.format(full, causal + 1), claim) != []


# ---- tables and figures ----------------------------------------------------------------------------------------------------------------


def test_tables_and_figures_are_what_the_results_give():
    assert figures.stale() == []


def test_a_changed_table_is_found():
    text = (ROOT / "docs" / "performance.md").read_text()
    at = text.index("| D = 128, full | ") + len("| D = 128, full | ")
    changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
    assert figures.with_tables(changed, "figures") == figures.with_tables(text, "figures") == text


def test_figures_are_drawn_again_with_the_same_bytes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="figures need numba_flash[examples]")
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    drawn = []
    for _ in range(2):
        figures.draw("speed")
        drawn.append((tmp_path / "speed.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert figures.data_of(figures.ALL["speed"]).encode() in drawn[0]


# ---- spread over GPUs --------------------------------------------------------------------------------------------------------------------


def test_the_model_of_a_ring():
    """One GPU loses nothing; a link without end loses nothing but merging; a slow one takes as long as what it sends."""
    ring_model, flat = tables.ring_model, {512: 1e14}
    work = ring_model.Work(tokens=2**18)
    of = lambda gpus, link, memory=1e30: ring_model.Machine(gpus, link, flat, flat, memory)
    efficiency = lambda way, machine: ring_model.efficiency(work, machine, way(work, machine))
    ways = (ring_model.ring, ring_model.gather, ring_model.heads)
    for way in ways:
        assert efficiency(way, of(1, 1e9)) == pytest.approx(1)
        assert efficiency(way, of(8, 1e30)) == pytest.approx(1)
        assert efficiency(way, of(8, 1e8)) < efficiency(way, of(8, 1e9)) < 1
    assert efficiency(ring_model.ring, of(8, 1e30, memory=1e12)) < 1
    slow, keys = of(8, 1e3), 2 * ring_model.part(work, 8) / 1e3
    # forward 7 times K and V; backward 7 times these, and 8 times sums of twice their bytes
    assert ring_model.ring(work, slow) == pytest.approx((7 + 7 + 8 * 2) * keys, rel=1e-3)
    assert ring_model.heads(work, of(16, 1e9)) is None
    assert ring_model.rate({512: 1.0, 1024: 2.0}, 100) == 1.0
    assert ring_model.rate({512: 1.0, 1024: 2.0}, 1500) == 2.0
