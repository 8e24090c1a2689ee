"""The benchmarks measure what they say, print tables and write their numbers; how fast is never tested."""

import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import in_process
import numpy as np
import pytest

from hpcdl.scripts import bench_coordinate_descent, bench_search, bench_search_methods, bench_training
from hpcdl.search.search_log_reader import EndedPiece, TrialPiece

FOLDER = Path(__file__).parents[2] / "scripts"
CUT = "--data digits --model mlp:16,16,16 --steps 2"


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


@pytest.fixture
def bench(run_on, tmp_path):
    """A function: start a benchmark on so many ranks; the rows of its file, its table, and all that it prints."""

    def run(name, ranks, options, start=run_on, **how):
        done = start(ranks, FOLDER / f"bench_{name}.py", *options.split(), "--json", "b.json", check=0, **how)
        return rows_of(tmp_path / "b.json", f"bench-{name.replace('_', '-')}"), table(done.stdout), done.stdout

    return run


def test_the_form_of_every_benchmark_is_looked_at():
    names, tests = {path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py")}, Path(__file__).read_text()
    found = re.findall(r'rows_of\(tmp_path / "\w+.json", "bench-([\w-]+)"\)', tests)
    assert names == {name.replace("-", "_") for name in found} | set(re.findall(r' bench\("(\w+)"', tests))


def test_mpi_is_not_imported_before_a_benchmark_begins(alone):
    names = [f"hpcdl.scripts.{path.stem}" for path in [*FOLDER.glob("bench_*.py"), FOLDER / "gpu_check.py"]]
    code = f"import sys, {', '.join(names)}; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_bench_allreduce(bench):
    found, rows, _ = bench("allreduce", 3, "--algorithms auto,ring,shared --sizes 4KiB,100000 --seconds 0.02")
    assert {row["ranks"] for row in found} == {3}
    times_of = {(row["size_bytes"], row["algorithm"], row["bare"]): row["microseconds_per_turn"] for row in found}
    assert len(times_of) == len(found)
    names = ["auto", "ring", "shared", "shared, copied", "mpi", "copy"]
    assert rows[0] == ["size", *names] and [row[0] for row in rows[2:]] == ["4KiB", "100000"]
    for row, size in zip(rows[2:], (4096, 100000), strict=True):
        for name, cell in zip(names, row[1:], strict=True):
            columns = [True] if name == "copy" else [False, True]  # the full call, and bare
            for bare, median in zip(columns, cell.split(" / "), strict=True):
                times = times_of[size, name, bare]
                assert len(times) >= 5 and min(times) > 0
                assert min(times) - 1 <= float(median.replace(",", "")) <= max(times) + 1


def test_bench_kernels(bench):
    names = "momentum", "softmax_cross_entropy"
    found, rows, _ = bench("kernels", 1, f"--kernels {','.join(names)} --sizes 64,4KiB --seconds 0.01")
    assert {row["dtype"] for row in found} == {"float32"}
    assert [(row[0], row[2]) for row in rows[2:]] == [(name, size) for name in names for size in ("64", "4KiB")]
    for row, result in zip(rows[2:], found, strict=True):
        times = {name: result[f"{name}_microseconds_per_turn"] for name in ("kernel", "copy", "numpy")}
        assert len(times["kernel"]) == len(times["copy"]) == len(times["numpy"]) >= 5 and min(times["kernel"]) > 0
        assert float(row[3].replace(",", "")) == pytest.approx(np.median(times["kernel"]), abs=0.01)
        assert float(row[4]) == pytest.approx(result["moved_bytes"] / np.median(times["kernel"]) / 1e3, abs=0.06)
        ratio = np.median(np.divide(times["kernel"], times["numpy"]))
        assert float(row[6].split(" ")[0]) == pytest.approx(ratio, abs=0.006)
    assert [result["moved_bytes"] for result in found[:2]] == [5 * 64, 5 * 4096]  # 3 reads, 2 writes


@pytest.mark.parametrize("more, about", [("", "(4,) float32"), ("--frame-stack 4 --values 9", "(4, 9) uint8")])
def test_bench_replay(bench, more, about):
    found, rows, out = bench("replay", 1, f"--capacity 500 --batch-size 30 --operations 300 --turns 2 {more}")
    pairs = [(part, name) for part in ("sum tree", "memory") for name in ("add", "sample", "update")]
    assert [(row["part"], row["operation"]) for row in found] == pairs
    assert [row[0] for row in rows[2:]] == [", ".join(pair) for pair in pairs]
    assert f"500 transitions of {about}" in out
    for row, result in zip(rows[2:], found, strict=True):
        speeds = result["millions_per_second_per_turn"]
        assert len(speeds) == 2 and min(speeds) > 0
        assert float(row[1].split(" ")[0]) == pytest.approx(np.median(speeds), abs=0.006)
        assert ("ratio_median" in result) == (result["part"] == "sum tree") == bool(row[3])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_bench_hogwild(ranks, bench, tmp_path):
    options = "--data small:rows=600 --locking none,global --exchange-every 1,50 --turns 2 --plot h.png"
    rows, cells, _ = bench("hogwild", ranks, options)
    names = ["1 x none", "2 x none", "1 x global", "2 x global", "2 x none, exchange 1", "2 x none, exchange 50"]
    names += ["2 ranks x 1 none", "2 ranks, a vector each"] * (ranks == 2)
    names += ["1 x plain kernel", "2 x plain kernel"]
    assert [row["name"] for row in rows if row["name"] != "scikit-learn"] == names
    for row in rows:
        assert len(row["examples_per_second_per_turn"]) == 2 and min(row["examples_per_second_per_turn"]) > 0
    assert rows[0]["test_loss_per_evaluation"] == rows[2]["test_loss_per_evaluation"]  # one thread: the same bits
    assert rows[0]["collisions"] == rows[2]["collisions"] == rows[3]["collisions"] == 0
    plain, two = (row for row in rows if "plain" in row["name"])
    assert plain["test_loss_per_evaluation"][-1] == pytest.approx(rows[0]["test_loss_per_evaluation"][-1], rel=0.1)
    speeds = np.array([row["examples_per_second_per_turn"] for row in (two, plain)])
    assert two["gain_per_turn"] == (speeds[0] / speeds[1]).tolist() and plain["gain_median"] == 1
    assert [row["exchange_every"] for row in rows[:6]] == [0, 0, 0, 0, 1, 50] and rows[4]["collisions"] is None
    assert len(rows[0]["test_loss_per_evaluation"]) == 2 and (tmp_path / "h.png").stat().st_size > 0
    assert len(cells) == 2 + len(rows)


@pytest.mark.long
def test_bench_batch_size(bench):
    options = "--model softmax --batches 100,700 --epochs 2 --seeds 2 --reference 50"
    rows, cells, _ = bench("batch_size", 2, options)
    pairs = [(size, scaled) for scaled in (False, True) for size in (100, 700)]
    assert [(row["batch_size"], row["scaled"]) for row in rows] == pairs
    for row in rows:
        assert row["steps"] == 2 * math.ceil(1438 / row["batch_size"])
        assert row["lr"] == pytest.approx(0.01 * (row["batch_size"] / 50 if row["scaled"] else 1))
        assert 0 < row["test_accuracy_lowest"] <= row["test_accuracy"] <= row["test_accuracy_highest"] <= 1
    assert rows[1]["test_accuracy"] < rows[3]["test_accuracy"]  # with so few updates, the scaled rate gets further
    assert len(cells) == 2 + 4


def test_bench_sklearn(bench, tmp_path):
    pytest.importorskip("sklearn")
    values = "\n".join(
        f"{k % 7},{k % 5},{'no' if k % 7 < 3 else 'yes'},{3 * (k % 7) - k % 5 + k % 2 / 10}" for k in range(200)
    )
    (tmp_path / "a.csv").write_text(f"a,b,c,y\n{values}\n")
    for file, label, other in (("a", "y", "c"), ("c", "c", "y")):
        given = ["csv", str(tmp_path / "a.csv"), str(tmp_path / f"{file}.h5"), "--label", label, "--drop", other]
        assert in_process.ends("prepare_data", given) == (0, "")
    options = "--epochs 60 --width 8 --seeds 1 --weight-decay 0.00001 --lr 0.05"
    rows, cells, _ = bench("sklearn", 2, f"--data {tmp_path / 'a.h5'},{tmp_path / 'c.h5'} {options}")
    found = {(row["data"], row["way"], row["seed"]): row["value"] for row in rows}
    assert len(found) == len(rows) == 2 * 4 and len(cells) == 2 + 2
    both = found["a", "linear", 0], found["a", "its linear", 0]
    assert all(0.04 < value < 0.09 for value in both)  # what k % 2 adds, in the label's units
    assert all(found["c", way, 0] > 0.93 for way in ("linear", "its linear", "mlp", "its mlp"))


@pytest.mark.long
def test_bench_svrg(bench, tmp_path):
    rows, cells, _ = bench("svrg", 2, "--batch-size 16 --gradients 20 --lr 0.2 --weight-decay 0.1 --plot s.png")
    last = {row["method"]: row for row in rows}
    assert [*last] == ["SGD", "SGD, rate 1/t", "SVRG", "SAGA"]
    assert [row["gradients_per_example"] for row in last.values()] == [20, 20, 20, 20]
    gaps = {name: row["suboptimality"] for name, row in last.items()}
    assert gaps["SGD"] > gaps["SGD, rate 1/t"] > 1e-7 > 100 * max(gaps["SVRG"], gaps["SAGA"]), gaps
    assert len(cells) == 2 + 4 and (tmp_path / "s.png").stat().st_size > 1000


@pytest.mark.parametrize("controller, groups", [("shared", 3), ("own", 2)])
def test_bench_search(bench, controller, groups):
    rows, cells, _ = bench("search", 3, f"--trials 12 --seconds 0.1 --repeats 2 --controller {controller}")
    assert [(row["seed"], row["groups"], row["trials"]) for row in rows] == [(0, groups, 12), (1, groups, 12)]
    for row in rows:
        assert row["bound_seconds"] <= row["best_seconds"] and row["bound_seconds"] <= row["took_seconds"]
        assert 0 <= row["idle_share_list"] < 1 and 0 <= row["idle_share"] < 1 and row["per_trial_milliseconds"] > 0
    assert cells[0][:4] == ["took, s", "list, s", "best, s", "bound, s"] and len(cells) == 3


def test_bench_checkpoint(bench, tmp_path):
    rows, cells, _ = bench("checkpoint", 2, "--megabytes 3 --repeats 2")
    assert [(row["round"], row["ranks"], row["megabytes"]) for row in rows] == [(0, 2, 3), (1, 2, 3)]
    assert all(row[f"{name}_seconds"] > 0 for row in rows for name in ("plain", "pieces", "one_file", "read", "copy"))
    assert len(cells) == 3 and [each.name for each in tmp_path.iterdir()] == ["b.json"]


@pytest.mark.long
def test_bench_search_methods(bench):
    rows, cells, _ = bench("search_methods", 2, "--trials 4 --epochs 2 --seeds 2 --methods asha")
    pairs = [(name, seed) for name in ("random", "asha") for seed in (0, 1)]
    assert [(row["method"], row["seed"]) for row in rows] == pairs
    for row in rows:
        assert 0 < row["best"] <= 1 and row["steps"] > 0 and (row["reached"] or 0) <= row["steps"]
    assert all(row["reached"] for row in rows[:2]) and len(cells) == 4


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
def test_bench_gossip_of_the_optimum(bench):
    """One label per rank: D-PSGD stays away from the optimum, gradient tracking and DeTAG go on towards it."""
    options = "--model softmax --partition by-label --batch-size full --dtype float64 --weight-decay 1 --lr 0.1"
    rows, seen = bench("gossip", 4, f"{options} --repeats 1 --at 200,50", timeout=120)[0], {}
    for row in rows:
        seen.setdefault(row["strategy"].partition(",")[0], []).append(row)
    assert [[each["steps"] for each in one] for one in seen.values()] == [[50, 200]] * 3
    end = {name: (one[-1]["distance_of_average"], one[-1]["distance_of_replicas"]) for name, one in seen.items()}
    average, replicas = end["dpsgd"]
    assert replicas > max(0.02, average) and average > 1e-6
    assert end["gradient-tracking"][1] < 1e-12 and end["detag"][1] < replicas / 100
    assert all(row["train_loss"] > 0 for row in rows)


def test_what_bench_training_writes(tmp_path, monkeypatch, capsys):
    """With runs that are made up, and so without PyTorch."""
    run = {"examples_per_second": 300.0, "test_accuracy": 0.5}
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2"))
    monkeypatch.setattr(bench_training, "ours", lambda options, folder: dict(run))
    monkeypatch.setattr(bench_training, "theirs", lambda options, folder: run | {"examples_per_second": 100.0})
    monkeypatch.setattr(bench_training, "products", lambda options: (0.5, 2.0))  # GFLOP a step, GFLOP/s
    monkeypatch.chdir(tmp_path)
    bench_training.main(["--repeats", "2", "--batch-per-rank", "64,128", "--json", "c.json"])
    rows = rows_of(tmp_path / "c.json", "bench-training")
    found = [(row["ranks"], row["batch_size"], row["repeat"], row["examples_per_second_ratio"]) for row in rows]
    assert found == [(2, 128, 0, 3.0), (2, 128, 1, 3.0), (2, 256, 0, 3.0), (2, 256, 1, 3.0)]
    out = capsys.readouterr().out
    assert "2 ranks, 64 examples each" in out and "2 ranks, 128 examples each" in out
    assert "hpcdl / PyTorch: 3.00 (3.00 to 3.00, 2 pairs)" in out
    part = 300 / 2 / 64 * 0.5 / 2  # steps a second on each rank, times GFLOP, by GFLOP/s
    assert [row["hpcdl_part_of_products"] for row in rows] == [part, part, part / 2, part / 2]
    assert f"matrix products: 2 GFLOP/s on one core by themselves; hpcdl's steps reach {part:.0%} (59% to 59%)" in out
    with pytest.raises(SystemExit, match="2"):
        bench_training.main(["--batch-per-rank", "64,0"])
    assert "--batch-per-rank: whole numbers above 0 with commas between, not '64,0'" in capsys.readouterr().err


@pytest.mark.long
def test_bench_training(bench, launch):
    pytest.importorskip("torch")
    options = "--model mlp:16 --epochs 10 --lr 0.1 --repeats 1 --ranks 2"
    (row,), _, out = bench("training", 1, options, launch, timeout=120)
    assert row["hpcdl_test_accuracy"] > 0.2 < row["torch_test_accuracy"]  # both learn; guessing is 0.1
    assert row["examples_per_second_ratio"] == row["hpcdl_examples_per_second"] / row["torch_examples_per_second"]
    assert re.search(r"hpcdl / PyTorch: [\d.]+ \([\d.]+ to [\d.]+, 1 pair\)", out)


@pytest.mark.long
def test_bench_torch(bench, launch):
    pytest.importorskip("torch")
    rows, cells, out = bench("torch", 2, "--sizes 4KiB --models mlp --batch-per-rank 2 --seconds 0.001", launch)
    ways = ["DDP over hpcdl", "DDP over gloo", "DDP alone", "door 1", "alone"]
    kinds = {kind: [row["way"] for row in rows if row["kind"] == kind] for kind in ("all_reduce", "step")}
    assert kinds == {"all_reduce": ["hpcdl", "gloo", "communicator"], "step": ways} and len(rows) == 8
    assert all(len(row["microseconds_per_turn"]) >= 5 for row in rows)
    assert cells[0] == ["all_reduce", "hpcdl", "gloo", "communicator"] and "| step | " + " | ".join(ways) in out


@pytest.mark.long
def test_bench_coordinate_descent(tmp_path, monkeypatch, capsys):
    """With a LIBLINEAR that is made up, which is as good."""
    monkeypatch.chdir(tmp_path)

    def liblinear(options, data, form, best):
        return "scikit-learn", lambda turn: {"seconds": 1e9, "certificates": 0.0, "passes": 3, "primal": best}

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
def test_bench_model_parallel(bench):
    found, (head, _, *lines), _ = bench("model_parallel", 2, f"{CUT} --repeats 2")
    results = {}
    for row in found:
        results.setdefault((row["strategy"], row["ranks"]), []).append(row)
    cells = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    parameters = results["sequential", 1][0]["parameters"]
    kinds = ("parameters", "gradients", "optimizer", "activations")
    for (name, ranks), runs in results.items():
        held, cell = [runs[0][f"{kind}_bytes_per_rank"] for kind in kinds], cells[name]
        assert len(runs) == 2 and len(held[0]) == ranks, name
        shown, busiest = sum(float(cell[f"{kind}, MiB"]) for kind in kinds), max(map(sum, zip(*held, strict=True)))
        assert shown == pytest.approx(busiest / 2**20, abs=0.021), name
        assert float(cell["16 bytes a parameter / N"]) == round(16 * parameters / ranks / 2**20, 2)
    whole, sharded = (results[each][0] for each in (("sequential", 1), ("fully sharded, stage 3", 2)))
    assert whole["parameters_bytes_per_rank"] == [4 * parameters]
    assert whole["optimizer_bytes_per_rank"] == [8 * parameters]
    assert sharded["optimizer_bytes_per_rank"] == pytest.approx([4 * parameters] * 2, abs=8 * 8)


@pytest.mark.long
def test_bench_model_parallel_and_idle_stages(bench):
    options = f"{CUT} --case idle --pretend-compute 1 --microbatches 2,4"
    rows, (head, _, *lines), _ = bench("model_parallel", 2, options)
    cells = [dict(zip(head, line, strict=True)) for line in lines]
    assert [f"{row['idle_share_theory']:.3f}" for row in rows] == [cell["idle, theory"] for cell in cells]
    assert all(len(row["in_flight_per_rank"]) == 2 and 0 < row["idle_share"] < 1 for row in rows)
    theory = {(cell["schedule"], cell["micro-batches"]): float(cell["idle, theory"]) for cell in cells}
    assert theory["naive", "2"] == 0.5 and theory["1f1b", "4"] == 0.2 and theory["interleaved", "4"] == 0.111
