"""The benchmarks measure what they say, print tables and write their numbers; how fast is never tested."""

import json
import math
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from hpcdl.scripts import bench_training

FOLDER = Path(__file__).parents[2] / "scripts"


def table(text):
    """The rows of the first table, as lists of cells."""
    lines = text[text.index("| ") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows_of(path, benchmark):
    """The rows of the file of --json, which has the form that is the same for all."""
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(found)[:5] == ["schema_version", "benchmark", "command", "environment", "options"]
    assert (found["schema_version"], found["benchmark"], list(found)[-1]) == (1, benchmark, "rows")
    assert re.match(r"\d+ ranks?: ", found["command"]) and found["options"]["json"] == path.name
    assert {"commit", "python", "numpy", "mpi", "machine"} <= set(found["environment"])
    assert all(isinstance(text, str) for text in found["environment"].values()) and found["rows"]
    for row in found["rows"]:
        for key, value in row.items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", key)
            assert isinstance(value, list) == bool(re.search("_per_(rank|turn|evaluation)$", key)) or not value, key
            each = value if isinstance(value, list) else [value]
            assert all(cell is None or isinstance(cell, bool | int | float | str) for cell in each), key
    return found["rows"]


def test_the_form_of_every_benchmark_is_looked_at():
    names = {path.stem.replace("_", "-") for path in FOLDER.glob("bench_*.py")}
    assert names == set(re.findall(r'rows_of\(tmp_path / "\w+.json", "([\w-]+)"\)', Path(__file__).read_text()))


def test_bench_allreduce(run_on, tmp_path):
    options = ["--algorithms", "ring,shared", "--sizes", "4KiB,100000", "--seconds", "0.02", "--json", "a.json"]
    done = run_on(3, FOLDER / "bench_allreduce.py", *options, check=0)
    found = rows_of(tmp_path / "a.json", "bench-allreduce")
    assert {row["ranks"] for row in found} == {3}
    times_of = {(row["size_bytes"], row["algorithm"], row["bare"]): row["microseconds_per_turn"] for row in found}
    assert len(times_of) == len(found)
    rows = table(done.stdout)
    names = ["ring", "shared", "shared, copied", "mpi", "copy"]
    assert rows[0] == ["size", *names] and [row[0] for row in rows[2:]] == ["4KiB", "100000"]
    for row, size in zip(rows[2:], (4096, 100000), strict=True):
        for name, cell in zip(names, row[1:], strict=True):
            columns = [True] if name == "copy" else [False, True]  # through the door, and without it
            for bare, median in zip(columns, cell.split(" / "), strict=True):
                times = times_of[size, name, bare]
                assert len(times) >= 5 and min(times) > 0
                assert min(times) - 1 <= float(median.replace(",", "")) <= max(times) + 1
    for options, words in [(["--sizes", "4kb"], "write 64KiB"), (["--algorithms", "rong"], "did you mean 'ring'")]:
        done = run_on(3, FOLDER / "bench_allreduce.py", *options)
        assert done.returncode == 2 and words in done.stderr


def test_bench_kernels(run_on, tmp_path):
    script = FOLDER / "bench_kernels.py"
    options = ["--kernels", "momentum,softmax_cross_entropy", "--sizes", "64,4KiB", "--seconds", "0.01"]
    done = run_on(1, script, *options, "--json", "k.json", check=0)
    found = rows_of(tmp_path / "k.json", "bench-kernels")
    assert {row["dtype"] for row in found} == {"float32"}
    rows = table(done.stdout)[2:]
    pairs = [(name, size) for name in ("momentum", "softmax_cross_entropy") for size in ("64", "4KiB")]
    assert [(row[0], row[2]) for row in rows] == pairs
    for row, result in zip(rows, found, strict=True):
        times = {name: result[f"{name}_microseconds_per_turn"] for name in ("kernel", "copy", "numpy")}
        assert len(times["kernel"]) == len(times["copy"]) == len(times["numpy"]) >= 5 and min(times["kernel"]) > 0
        assert float(row[3].replace(",", "")) == pytest.approx(np.median(times["kernel"]), abs=0.01)
        assert float(row[4]) == pytest.approx(result["moved_bytes"] / np.median(times["kernel"]) / 1e3, abs=0.06)
        ratio = np.median(np.divide(times["kernel"], times["numpy"]))
        assert float(row[6].split(" ")[0]) == pytest.approx(ratio, abs=0.006)
    assert [result["moved_bytes"] for result in found[:2]] == [5 * 64, 5 * 4096]  # 3 reads, 2 writes
    for options, words in [
        (["--kernels", "momentun"], "did you mean 'momentum'"),
        (["--dtype", "float16"], "float32 or float64"),
        ([], "one rank"),
    ]:
        done = run_on(2, script, *options)
        assert done.returncode == 2 and words in done.stderr


def test_bench_batch_size(run_on, tmp_path):
    options = ["--model", "softmax", "--batches", "100,700", "--epochs", "2", "--seeds", "2", "--reference", "50"]
    done = run_on(2, FOLDER / "bench_batch_size.py", *options, "--json", "b.json", check=0)
    rows = rows_of(tmp_path / "b.json", "bench-batch-size")
    assert [(row["batch_size"], row["scaled"]) for row in rows] == [
        (100, False),
        (700, False),
        (100, True),
        (700, True),
    ]
    for row in rows:
        assert row["steps"] == 2 * math.ceil(1438 / row["batch_size"])
        assert row["lr"] == pytest.approx(0.01 * (row["batch_size"] / 50 if row["scaled"] else 1))
        assert 0 < row["test_accuracy_lowest"] <= row["test_accuracy"] <= row["test_accuracy_highest"] <= 1
    assert rows[1]["test_accuracy"] < rows[3]["test_accuracy"]  # with so few updates, the scaled rate gets further
    assert len(table(done.stdout)) == 2 + 4
    done = run_on(2, FOLDER / "bench_batch_size.py", "--batches", "10,x")
    assert done.returncode == 2 and "--batches" in done.stderr


def test_bench_gossip_of_the_optimum(run_on, tmp_path):
    """One label per rank: D-PSGD stays away from the optimum, gradient tracking and DeTAG go on towards it."""
    options = ["--model", "softmax", "--partition", "by-label", "--batch-size", "full"]
    options += ["--dtype", "float64", "--weight-decay", "1", "--lr", "0.1", "--repeats", "1", "--at", "200,50"]
    run_on(4, FOLDER / "bench_gossip.py", *options, "--json", "o.json", check=0, timeout=120)
    rows, seen = rows_of(tmp_path / "o.json", "bench-gossip"), {}
    for row in rows:
        seen.setdefault(row["strategy"].partition(",")[0], []).append(row)
    assert [[each["steps"] for each in one] for one in seen.values()] == [[50, 200]] * 3
    end = {name: (one[-1]["distance_of_average"], one[-1]["distance_of_replicas"]) for name, one in seen.items()}
    assert end["dpsgd"][1] > end["dpsgd"][0] > 1e-6 and end["gradient-tracking"][1] < 1e-12
    assert end["detag"][1] < end["dpsgd"][1] / 100
    assert all(row["train_loss"] > 0 for row in rows)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--topologies", "ring,hypercube"], "a hypercube has a power of two of ranks, not 3"),
        (["--topologies", "one-peer"], "detag's gossip is accelerated on one graph"),
        (["--at", "1,0"], "--at: numbers above 0"),
    ],
)
def test_bench_gossip_refuses_in_one_line(run_on, options, words):
    done = run_on(3, FOLDER / "bench_gossip.py", *options)
    ours = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 2 and len(ours) == 1 and words in ours[0] and done.stdout == ""


def test_bench_training(launch, tmp_path):
    pytest.importorskip("torch")
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


def test_what_bench_training_writes(tmp_path, monkeypatch, capsys):
    """With runs that are made up, and so without PyTorch."""
    run = {"examples_per_second": 300.0, "test_accuracy": 0.5}
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2"))
    monkeypatch.setattr(bench_training, "ours", lambda options, folder: dict(run))
    monkeypatch.setattr(bench_training, "theirs", lambda options, folder: run | {"examples_per_second": 100.0})
    monkeypatch.chdir(tmp_path)
    bench_training.main(["--repeats", "2", "--json", "c.json"])
    rows = rows_of(tmp_path / "c.json", "bench-training")
    assert [(row["ranks"], row["repeat"], row["examples_per_second_ratio"]) for row in rows] == [
        (2, 0, 3.0),
        (2, 1, 3.0),
    ]
    assert "hpcdl / PyTorch: 3.00 (3.00 to 3.00, 2 pairs)" in capsys.readouterr().out


def test_bench_model_parallel(run_on, tmp_path):
    script, options = FOLDER / "bench_model_parallel.py", ["--data", "digits", "--steps", "2", "--json", "m.json"]
    done = run_on(2, script, *options, "--model", "mlp:16,16,16", "--repeats", "2", check=0)
    results, rows = {}, table(done.stdout)
    for row in rows_of(tmp_path / "m.json", "bench-model-parallel"):
        results.setdefault((row["strategy"], row["ranks"]), []).append(row)
    cells = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    parameters = results["sequential", 1][0]["parameters"]
    kinds = ("parameters", "gradients", "optimizer", "activations")
    for (name, ranks), runs in results.items():
        assert len(runs) == 2, name
        held = {kind: runs[0][f"{kind}_bytes_per_rank"] for kind in kinds}
        cell = cells[name]
        assert len(held["parameters"]) == ranks
        busiest = max(sum(held[kind][rank] for kind in held) for rank in range(len(held["parameters"])))
        shown = sum(float(cell[f"{kind}, MiB"]) for kind in held)
        assert shown == pytest.approx(busiest / 2**20, abs=0.021), name
        assert float(cell["16 bytes a parameter / N"]) == round(16 * parameters / len(held["parameters"]) / 2**20, 2)
    whole, sharded = (results[each][0] for each in (("sequential", 1), ("fully sharded, stage 3", 2)))
    assert whole["parameters_bytes_per_rank"] == [4 * parameters]
    assert whole["optimizer_bytes_per_rank"] == [8 * parameters]
    assert sharded["optimizer_bytes_per_rank"] == pytest.approx([4 * parameters] * 2, abs=8 * 8)
    done = run_on(
        2,
        script,
        *options,
        "--case",
        "idle",
        "--model",
        "mlp:16,16,16",
        "--pretend-compute",
        "1",
        "--microbatches",
        "2,4",
        check=0,
    )
    cells = [dict(zip(rows[0], row, strict=True)) for rows in [table(done.stdout)] for row in rows[2:]]
    rows = rows_of(tmp_path / "m.json", "bench-model-parallel")
    assert [f"{row['idle_share_theory']:.3f}" for row in rows] == [cell["idle, theory"] for cell in cells]
    assert all(len(row["in_flight_per_rank"]) == 2 and 0 < row["idle_share"] < 1 for row in rows)
    theory = {(cell["schedule"], cell["micro-batches"]): float(cell["idle, theory"]) for cell in cells}
    assert theory["naive", "2"] == 0.5 and theory["1f1b", "4"] == 0.2 and theory["interleaved", "4"] == 0.111
    for ranks, more, words in [(1, ["--case", "idle"], "start 2 ranks"), (2, ["--microbatches", "0"], "above 0")]:
        done = run_on(ranks, script, *options, *more)
        assert done.returncode == 2 and words in done.stderr
