"""`bench --watts`: medians of what nvidia-smi tells while a contender runs, and nothing where it tells nothing."""

import json
import sys

import pytest
from test_bench import SMALL

from numba_flash.__main__ import main
from numba_flash.bench import power, timing
from numba_flash.bench.peers import OURS, contenders
from numba_flash.bench.power import Power

NVIDIA_SMI = """#!{python}
import sys, time
assert "--id=0000:01:00.0" in sys.argv
for watts in [1000] * {ignored} + list(range(600, 600 + 10 * {samples}, 10)) + [0] * 100:
    print(f"{{watts}}.00, {{watts + 1000}}", flush=True)
    time.sleep(0.02)
"""


def test_medians_while_it_runs(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi: what it tells first does not count, and it is ended when there is enough."""
    script, calls = tmp_path / "nvidia-smi", []
    script.write_text(NVIDIA_SMI.format(python=sys.executable, ignored=power.IGNORED, samples=power.SAMPLES))
    script.chmod(0o755)
    monkeypatch.setattr(power, "COMMAND", (str(script), *power.COMMAND[1:]))
    counted, of = [], power.of
    monkeypatch.setattr(power, "of", lambda lines: counted.extend(lines) or of(lines))
    found = power.while_running(lambda: calls.append(power.time.sleep(0.001)), "0000:01:00.0")
    assert [float(line.split(",")[0]) for line in counted[: power.SAMPLES]] == [*range(600, 600 + 10 * power.SAMPLES, 10)]
    assert 600 < found.watts < 800
    assert found.mhz == found.watts + 1000
    assert len(calls) > power.SAMPLES


@pytest.mark.parametrize("lines", [[], ["[N/A], [N/A]\n"], ["700.0\n"], ["700.0, 17"]])
def test_nothing_where_nothing_is_told(lines):
    assert power.of(lines) is None


def test_nothing_without_nvidia_smi(monkeypatch):
    monkeypatch.setattr(power, "COMMAND", ("/nowhere/nvidia-smi",))
    assert power.while_running(lambda: None, "0") is None


def test_it_stands_beside_the_speed(tmp_path, monkeypatch, capsys):
    written = tmp_path / "bench.json"
    monkeypatch.setattr(timing.HostClock, "power", lambda self, bound, count: Power(500.0, 1700.0))
    assert main([*SMALL, "--mask", "full", "--watts", "--json", str(written)]) == 0
    for entry in json.loads(written.read_text())["cells"]:
        for of in entry["contenders"].values():
            assert (of["watts"], of["mhz"], of["tflops_per_watt"]) == (500, 1700, of["tflops"] / 500)
    assert "  500 W at 1700 MHz: 0.00 TFLOP/s per watt" in capsys.readouterr().out
    monkeypatch.undo()
    main([*SMALL, "--mask", "full", "--watts", "--json", str(written)])
    assert "watts" not in json.loads(written.read_text())["cells"][0]["contenders"][OURS]


@pytest.mark.parametrize(("milliseconds", "calls"), [(0.1, 100), (2.0, 5), (40.0, 1)])
def test_a_contender_makes_as_many_calls_between_two_looks_as_in_a_turn(milliseconds, calls, monkeypatch):
    made, clock = [], timing.HostClock()
    monkeypatch.setattr(clock, "power", lambda bound, count: made.append(count))
    monkeypatch.setattr(timing, "_check", lambda *_: (timing.Outcome("ok"), timing.Bound(len, tuple)))
    monkeypatch.setattr(timing, "take_turns", lambda bound, clock, repeats, own_stream: {name: [milliseconds] * repeats for name in bound})
    timing.compare(timing.Cell("forward", "full", "float32", 1, 1, 1, 8, 8), contenders("cpu")[:1], clock, 3, watts=True)
    assert made == [calls]


@pytest.mark.gpu
def test_on_a_gpu():
    clock = timing.GpuClock()
    x = clock.xp.ones((4096, 4096), "float16")
    with clock.current():
        found = clock.power(timing.Bound(lambda count: [x @ x for _ in range(count)], tuple), 50)
    if found is None:
        pytest.skip("nvidia-smi does not tell")
    assert found.watts > 50
    assert found.mhz > 300
