"""The study of rings runs, on the CPU, and the documentation makes a table of what it writes."""

import json
import subprocess
import sys

import pytest
from support import ROOT, SIMULATED

sys.path.insert(0, str(ROOT / "docs"))

import tables


@pytest.mark.unproven("of processes and their timing")
@pytest.mark.full
@pytest.mark.skipif(SIMULATED, reason="rings are computed as anywhere")
def test_rings_of_processes(tmp_path):
    file, size = tmp_path / "ring.json", ["--lengths", "64", "--processes", "2", "--tokens", "128", "--repeats", "1"]
    subprocess.run([sys.executable, ROOT / "asv_bench/studies/ring.py", "--json", file, *size], check=True, timeout=300)
    study = json.loads(file.read_text())
    assert [row["what"] for row in study["rows"]] == ["forward", "backward", "merge", "ring", "ring", "gather", "gather"]
    text = tables.ring_measured(study)
    assert text.count("\n| ring, ") == text.count("\n| gather, ") == 2
    assert "| merge | 64 | " in text
