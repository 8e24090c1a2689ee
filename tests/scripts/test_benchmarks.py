"""The benchmarks measure what they say, print tables and write their numbers; how fast is never tested."""

import math
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from benchmarked import rows_of, table

from hpcdl.scripts import bench_coordinate_descent, bench_search, bench_search_methods, bench_training
from hpcdl.search.search_log_reader import EndedPiece, TrialPiece

FOLDER = Path(__file__).parents[2] / "scripts"


def test_the_form_of_every_benchmark_is_looked_at():
    names = {path.stem.replace("_", "-") for path in FOLDER.glob("bench_*.py")}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_bench*.py"))
    assert names == set(re.findall(r'rows_of\(tmp_path / "\w+.json", "([\w-]+)"\)', tests))


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
            columns = [True] if name == "copy" else [False, True]  # the full call, and bare
            for bare, median in zip(columns, cell.split(" / "), strict=True):
                times = times_of[size, name, bare]
                assert len(times) >= 5 and min(times) > 0
                assert min(times) - 1 <= float(median.replace(",", "")) <= max(times) + 1


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


def test_bench_replay(run_on, tmp_path):
    script = FOLDER / "bench_replay.py"
    options = ["--capacity", "500", "--batch-size", "30", "--operations", "300", "--turns", "2"]
    for more, about in ([], "(4,) float32"), (["--frame-stack", "4", "--values", "9"], "(4, 9) uint8"):
        done = run_on(1, script, *options, *more, "--json", "r.json", check=0)
        found = rows_of(tmp_path / "r.json", "bench-replay")
        pairs = [(part, name) for part in ("sum tree", "memory") for name in ("add", "sample", "update")]
        assert [(row["part"], row["operation"]) for row in found] == pairs
        rows = table(done.stdout)[2:]
        assert [row[0] for row in rows] == [
            ", ".join(pair) for pair in pairs
        ] and f"500 transitions of {about}" in done.stdout
        for row, result in zip(rows, found, strict=True):
            speeds = result["millions_per_second_per_turn"]
            assert len(speeds) == 2 and min(speeds) > 0
            assert float(row[1].split(" ")[0]) == pytest.approx(np.median(speeds), abs=0.006)
            assert ("ratio_median" in result) == (result["part"] == "sum tree") == bool(row[3])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_bench_hogwild(ranks, run_on, tmp_path):
    options = ["--data", "small:rows=600", "--locking", "none,global", "--exchange-every", "1,50", "--turns", "2"]
    done = run_on(ranks, FOLDER / "bench_hogwild.py", *options, "--plot", "h.png", "--json", "h.json", check=0)
    rows = rows_of(tmp_path / "h.json", "bench-hogwild")
    names = ["1 x none", "2 x none", "1 x global", "2 x global", "2 x none, exchange 1", "2 x none, exchange 50"]
    names += ["2 ranks x 1 none", "2 ranks, a vector each"] * (ranks == 2)
    assert [row["name"] for row in rows if row["name"] != "scikit-learn"] == names
    for row in rows:
        assert len(row["examples_per_second_per_turn"]) == 2 and min(row["examples_per_second_per_turn"]) > 0
    assert rows[0]["test_loss_per_evaluation"] == rows[2]["test_loss_per_evaluation"]  # one thread: the same bits
    assert rows[0]["collisions"] == rows[2]["collisions"] == rows[3]["collisions"] == 0
    assert [row["exchange_every"] for row in rows[:6]] == [0, 0, 0, 0, 1, 50] and rows[4]["collisions"] is None
    assert len(rows[0]["test_loss_per_evaluation"]) == 2 and (tmp_path / "h.png").stat().st_size > 0
    assert len(table(done.stdout)) == 2 + len(rows)


@pytest.mark.long
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


@pytest.mark.long
def test_bench_svrg(run_on, tmp_path):
    options = ["--batch-size", "16", "--gradients", "20", "--lr", "0.2", "--weight-decay", "0.1"]
    done = run_on(2, FOLDER / "bench_svrg.py", *options, "--json", "s.json", "--plot", "s.png", check=0)
    rows = rows_of(tmp_path / "s.json", "bench-svrg")
    last = {row["method"]: row for row in rows}
    assert [*last] == ["SGD", "SGD, rate 1/t", "SVRG", "SAGA"]
    assert [row["gradients_per_example"] for row in last.values()] == [20, 20, 20, 20]
    gaps = {name: row["suboptimality"] for name, row in last.items()}
    assert gaps["SGD"] > gaps["SGD, rate 1/t"] > 1e-7 > 100 * max(gaps["SVRG"], gaps["SAGA"]), gaps
    assert len(table(done.stdout)) == 2 + 4 and (tmp_path / "s.png").stat().st_size > 1000


@pytest.mark.parametrize("controller, groups", [("shared", 3), ("own", 2)])
def test_bench_search(run_on, tmp_path, controller, groups):
    options = ["--trials", "12", "--seconds", "0.1", "--repeats", "2", "--controller", controller, "--json", "s.json"]
    done = run_on(3, FOLDER / "bench_search.py", *options, check=0)
    rows = rows_of(tmp_path / "s.json", "bench-search")
    assert [(row["seed"], row["groups"], row["trials"]) for row in rows] == [(0, groups, 12), (1, groups, 12)]
    for row in rows:
        assert row["bound_seconds"] <= row["best_seconds"] and row["bound_seconds"] <= row["took_seconds"]
        assert 0 <= row["idle_share_list"] < 1 and 0 <= row["idle_share"] < 1 and row["per_trial_milliseconds"] > 0
    assert table(done.stdout)[0][:4] == ["took, s", "list, s", "best, s", "bound, s"] and len(table(done.stdout)) == 3


def test_bench_checkpoint(run_on, tmp_path):
    options = ["--megabytes", "3", "--repeats", "2", "--json", "c.json"]
    done = run_on(2, FOLDER / "bench_checkpoint.py", *options, check=0)
    rows = rows_of(tmp_path / "c.json", "bench-checkpoint")
    assert [(row["round"], row["ranks"], row["megabytes"]) for row in rows] == [(0, 2, 3), (1, 2, 3)]
    assert all(row[f"{name}_seconds"] > 0 for row in rows for name in ("plain", "pieces", "one_file", "read", "copy"))
    assert len(table(done.stdout)) == 3 and [each.name for each in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.long
def test_bench_search_methods(run_on, tmp_path):
    options = ["--trials", "4", "--epochs", "2", "--seeds", "2", "--methods", "asha", "--json", "m.json"]
    done = run_on(2, FOLDER / "bench_search_methods.py", *options, check=0)
    rows = rows_of(tmp_path / "m.json", "bench-search-methods")
    assert [(row["method"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("random", "asha") for seed in (0, 1)
    ]
    for row in rows:
        assert 0 < row["best"] <= 1 and row["steps"] > 0 and (row["reached"] or 0) <= row["steps"]
    assert all(row["reached"] for row in rows[:2]) and len(table(done.stdout)) == 4


def test_how_much_training_a_score_took():
    def ended(trial, rung, steps, score):
        return EndedPiece(trial, TrialPiece(rung, more={0: {"steps": steps}}), score, 0)

    pieces = [ended(0, 0, 10, 0.5), ended(1, 0, 20, 0.75), ended(0, 1, 40, 0.8), ended(2, 0, 5, None)]
    assert bench_search_methods.walked(pieces, 0.75) == (0.8, 65, 30)
    assert bench_search_methods.walked(pieces, None) == (0.8, 65, 60)
    assert bench_search_methods.walked(pieces, 0.9) == (0.8, 65, None)


def test_schedules():
    lengths = [2, 3, 4, 6, 2, 2, 1]
    assert bench_search.scheduled(lengths, 3) == 8 and bench_search.scheduled(sorted(lengths)[::-1], 3) == 7
    found = bench_search.summary(lengths, 3, 8)
    assert (found["bound_seconds"], found["idle_share"]) == (20 / 3, 1 - 20 / 24)


@pytest.mark.long
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


@pytest.mark.long
def test_bench_coordinate_descent(tmp_path, monkeypatch, capsys):
    """With a LIBLINEAR that is made up, which is as good."""
    monkeypatch.chdir(tmp_path)

    def liblinear(options, data, form, best):
        def solve():
            return {"seconds": 1e9, "certificates": 0.0, "passes": 3, "primal": best}

        solve.name = "scikit-learn"
        return solve

    monkeypatch.setattr(bench_coordinate_descent, "liblinear", liblinear)
    small = ["--data", "small:rows=60,test=0,features=40,nonzeros=8", "--weight-decay", "0.05", "--gap", "1e-3"]
    bench_coordinate_descent.main([*small, "--repeats", "2", "--threads", "2,1", "--json", "d.json"])
    found = {row["solver"]: row for row in rows_of(tmp_path / "d.json", "bench-coordinate-descent")}
    assert set(found) == {"1 thread", "2 threads, atomic", "2 threads, none", "scikit-learn"}
    for name, row in found.items():
        assert len(row["seconds_per_turn"]) == 2 and row["best"] == found["1 thread"]["best"]
        assert name == "2 threads, none" or -1e-9 <= row["primal"] / row["best"] - 1 <= 1e-3
    rows = table(capsys.readouterr().out)
    assert [row[0] for row in rows[2:]] == list(found) and rows[2][-1] == "1.00"


@pytest.mark.long
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
