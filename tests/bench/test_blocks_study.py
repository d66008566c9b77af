"""The study of dask's blocks runs, on the CPU, and the documentation makes a table of what it writes."""

import json
import subprocess
import sys

import pytest
from support import ROOT, SIMULATED

sys.path.insert(0, str(ROOT / "docs"))

import tables


@pytest.mark.unproven("of processes and their timing")
@pytest.mark.full
@pytest.mark.skipif(SIMULATED, reason="blocks are computed as anywhere")
def test_blocks_beside_one_call(tmp_path):
    pytest.importorskip("distributed", reason="dask is not installed")
    file, size = tmp_path / "blocks.json", ["--tokens", "256", "--chunks", "128", "--workers", "2", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, ROOT / "asv_bench/studies/blocks.py", "--json", file, *size], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "one call: " in done.stdout
    study = json.loads(file.read_text())
    one, blocks = study["rows"]
    pairs, rows, columns, gradients = 3, 2, 2, 3  # causal; each gradient of each pair is taken out of what its task returns
    assert blocks["forward_tasks"] == pairs + 1 + 2 * rows  # a merge; o and lse
    assert blocks["backward_tasks"] == (1 + gradients) * pairs + gradients + rows + 2 * columns
    assert all(row[name] > 0 for row in (one, blocks) for name in ("forward_ms", "backward_ms", "bytes"))
    assert tables.blocks_measured(study).count("\n| ") == 4
