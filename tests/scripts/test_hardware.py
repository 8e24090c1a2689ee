"""`hpcdl hardware` as it is started: its tables and files, and what it refuses; never how fast anything is."""

import json
from pathlib import Path

import pytest

from hpcdl.machine.hardware_arithmetic import CHAINS, levels
from hpcdl.machine.topology import from_sys

SCRIPT = Path(__file__).parents[2] / "scripts" / "hardware.py"
SHORT = ["--seconds", "0.0001"]


def summary(folder):
    folder.mkdir()
    made = {"model": "mlp", "parameters": 1000, "steps": 10, "batch_size": 4, "bytes_sent_per_rank": [500, 700]}
    made |= {
        "compute_seconds_per_rank": [1, 3],
        "communication_seconds_per_rank": [4, 4],
        "idle_seconds_per_rank": [0, 1],
    }
    (folder / "summary.json").write_text(json.dumps(made))


@pytest.mark.long
def test_the_whole_report(run_on, tmp_path):
    """With the roofline of a small model and a run beside it."""
    summary(tmp_path / "a")
    roofline = ["--roofline", "mlp:8", "--batch-size", "16", "--size", "4KiB", "--plot", "under", "--run", "a"]
    done = run_on(1, SCRIPT, *SHORT, *roofline, "--json", "h.json", check=0, timeout=180)
    found = json.loads((tmp_path / "h.json").read_text())
    assert (found["schema_version"], found["benchmark"], found["options"]["size"]) == (1, "hardware", "4KiB")
    rows = found["rows"]
    kinds = {"processor", "processors", "cores", "arithmetic", "bandwidth", "types", "lock", "point", "run"}
    machine = from_sys()
    cores = len(machine.one_per_core())
    assert kinds <= {row["what"] for row in rows}
    assert ({"cache line", "barrier"} <= {row["what"] for row in rows}) == (cores > 1)
    arithmetic = [row for row in rows if row["what"] == "arithmetic"]
    assert list(dict.fromkeys(row["level"] for row in arithmetic)) == [level.name for level in levels()]
    assert {row["chains"] for row in arithmetic} == set(CHAINS)
    points = [row for row in rows if row["what"] == "point"]
    assert {row["name"] for row in points if row["kind"] == "forward"} == {"dense1", "dense2", "loss"}
    assert all({"flops", "bytes", "seconds", "intensity", "gflops"} <= set(row) for row in points)
    (run,) = (row for row in rows if row["what"] == "run")
    assert run["flops_per_byte"] == 200 and run["machine_flops_per_byte"] > 0
    assert (tmp_path / "under.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (tmp_path / "under.svg").read_text()
    for words in ("peak arithmetic", "bandwidth: ", "between cores", "mlp:8 under the roofline", "written: under.png"):
        assert words in done.stdout
    assert "a: 2 ranks, each 2 s computing" in done.stdout and "Traceback" not in done.stderr


def test_a_part_alone(run_on, tmp_path):
    done = run_on(1, SCRIPT, "--parts", "machine", check=0)
    assert "cores" in done.stdout and "GB/s" not in done.stdout and not list(tmp_path.glob("*.json"))
