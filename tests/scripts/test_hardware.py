"""`hpcdl hardware`: its tables and files, and what it refuses; never how fast anything is."""

import json

import pytest
from made_runs import write_run

from hpcdl.machine import hardware_memory, hardware_threads
from hpcdl.machine.hardware_arithmetic import CHAINS, levels
from hpcdl.machine.topology import from_sys
from hpcdl.scripts import hardware

pytestmark = pytest.mark.usefixtures("alone")
KINDS = {"processor", "processors", "cores", "arithmetic", "bandwidth", "types", "lock", "point", "run"}


@pytest.mark.long
def test_the_whole_report(tmp_path, monkeypatch, capsys):
    """With the roofline of a small model and a run beside it; few repetitions, on a memory that is soon read."""
    monkeypatch.setattr(hardware_memory, "MOST", 4 << 20)
    monkeypatch.setattr(hardware_threads, "REPEATS", 3)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", ranks=2, traced=False)
    options = "--roofline mlp:8 --batch-size 16 --size 4KiB --plot under --run a --json h.json --seconds 0.0001"
    hardware.main(options.split())
    found, out = json.loads((tmp_path / "h.json").read_text()), capsys.readouterr().out
    assert (found["schema_version"], found["benchmark"], found["options"]["size"]) == (1, "hardware", "4KiB")
    kinds = {kind: [row for row in found["rows"] if row["what"] == kind] for kind in KINDS}
    assert all(kinds.values())
    several = len(from_sys().one_per_core()) > 1
    assert ({"cache line", "barrier"} <= {row["what"] for row in found["rows"]}) == several
    assert list(dict.fromkeys(row["level"] for row in kinds["arithmetic"])) == [level.name for level in levels()]
    assert {row["chains"] for row in kinds["arithmetic"]} == set(CHAINS)
    assert {row["name"] for row in kinds["point"] if row["kind"] == "forward"} == {"dense1", "dense2", "loss"}
    assert all({"flops", "bytes", "seconds", "intensity", "gflops"} <= set(row) for row in kinds["point"])
    (run,) = kinds["run"]
    assert run["flops_per_byte"] == 6 * 2410 * 32 / 2 / 4820 and run["machine_flops_per_byte"] > 0
    assert (tmp_path / "under.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (tmp_path / "under.svg").read_text()
    for words in ("peak arithmetic", "bandwidth: ", "between cores", "mlp:8 on the roofline", "written: under.png"):
        assert words in out
    assert "a: 2 ranks, each 3" in out


def test_a_part_alone(capsys):
    hardware.main(["--parts", "machine"])
    out = capsys.readouterr().out
    assert "cores" in out and "GB/s" not in out
