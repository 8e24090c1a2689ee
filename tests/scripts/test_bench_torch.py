"""What is measured beside PyTorch: its programs over hpcdl and over gloo, and its DDP beside train-allreduce."""

import re
from pathlib import Path

import pytest
from benchmarked import rows_of, table

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "scripts"


@pytest.mark.long
def test_bench_torch(launch, tmp_path):
    options = ["--sizes", "4KiB", "--models", "mlp", "--batch-per-rank", "2", "--seconds", "0.001", "--json", "t.json"]
    done = launch(2, FOLDER / "bench_torch.py", *options, check=0)
    rows = rows_of(tmp_path / "t.json", "bench-torch")
    ways = ["DDP over hpcdl", "DDP over gloo", "door 1", "alone"]
    assert [(row["kind"], row["way"]) for row in rows] == [
        *(("all_reduce", way) for way in ("hpcdl", "gloo")),
        *(("step", way) for way in ways),
    ]
    assert all(len(row["microseconds_per_turn"]) >= 5 for row in rows)
    assert table(done.stdout)[0] == ["all_reduce", "hpcdl", "gloo"] and "| step | " + " | ".join(ways) in done.stdout


@pytest.mark.long
def test_bench_training(launch, tmp_path):
    options = [
        "--model",
        "mlp:16",
        "--epochs",
        "10",
        "--lr",
        "0.1",
        "--repeats",
        "1",
        "--ranks",
        "2",
        "--json",
        "c.json",
    ]
    done = launch(1, FOLDER / "bench_training.py", *options, check=0, timeout=120)
    (row,) = rows_of(tmp_path / "c.json", "bench-training")
    for name in ("hpcdl", "torch"):
        assert row[f"{name}_test_accuracy"] > 0.2  # both learn; guessing is 0.1
    speeds = [row[f"{name}_examples_per_second"] for name in ("hpcdl", "torch")]
    assert row["examples_per_second_ratio"] == speeds[0] / speeds[1]
    assert re.search(r"hpcdl / PyTorch: [\d.]+ \([\d.]+ to [\d.]+, 1 pair\)", done.stdout)
