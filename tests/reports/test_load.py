"""hpcdl/reports/load.py: columns of one length, whole numbers whole, as pandas and polars take them."""

import json
import math
import tracemalloc

import numpy as np
import pytest
from made_search import write_journal
from written_runs import lines_of

from hpcdl import reports
from hpcdl.errors import UsageError
from hpcdl.reports.discovery import natural
from hpcdl.reports.load import runs_of


def test_columns_of_a_run(write_run):
    found = reports.load(write_run("a"))
    names = ["step", "epoch", "train_loss", "seconds", "test_loss", "test_accuracy", "bytes", "messages"]
    assert list(found) == names and {len(column) for column in found.values()} == {10}
    assert found["step"].dtype == np.int64 and found["step"].tolist() == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert found["train_loss"].tolist() == [1 / step for step in found["step"]]
    here = [4, 9]
    assert found["bytes"].dtype == float and found["bytes"][here].tolist() == [400, 800]
    for name in names[4:]:
        assert np.flatnonzero(~np.isnan(found[name])).tolist() == here
    found["epoch"] += 1  # arrays of one's own


def test_steps_and_evaluations(write_run):
    folder = write_run("a")
    steps, scores = reports.load(folder, "steps"), reports.load(str(folder), what="evaluations")
    assert list(steps) == ["step", "epoch", "train_loss", "seconds"] and steps["step"].tolist() == [*range(1, 9)]
    assert scores["step"].tolist() == [4, 8] and not any(np.isnan(column).any() for column in scores.values())
    assert scores["bytes"].dtype == scores["messages"].dtype == np.int64
    with pytest.raises(UsageError, match=r"unknown kind of line 'step' \(did you mean 'steps'\?\)"):
        reports.load(folder, "step")


def test_several_runs_with_other_columns(write_run, tmp_path):
    write_run("c/10-b/seed-0", [{"step": 1, "round": 1, "train_loss": None, "seconds": 0.5, "messages": None}])
    write_run("c/2-a/seed-0")
    write_run("c/2-a/seed-10", [])
    write_run("c/2-a/seed-2", lines_of(2))
    write_run("c/2-a/seed-2/later")
    write_run("c/2-a/seed-2/copy")  # what lies in a run's folder is none of its own
    found = reports.load(tmp_path / "c")
    names = ["2-a/seed-0"] * 10 + ["2-a/seed-2"] * 2 + ["10-b/seed-0"]
    assert next(iter(found)) == "run" and found["run"].tolist() == names
    assert {len(column) for column in found.values()} == {13} and found["step"].dtype == np.int64
    assert np.flatnonzero(~np.isnan(found["round"])).tolist() == [12] and math.isnan(found["train_loss"][12])
    again = reports.load([tmp_path / "c"])
    assert [*again] == [*found] and all(np.array_equal(found[k], again[k], equal_nan=k != "run") for k in found)
    some = reports.load([tmp_path / "c/2-a/seed-2", tmp_path / "c/10-b"])
    assert some["run"].tolist() == ["2-a/seed-2", "2-a/seed-2", "10-b/seed-0"]
    assert len(some["epoch"]) == 3 and np.isnan(some["messages"]).all()
    names = [*(f"2-a/seed-{seed}" for seed in (0, 2, 10)), "10-b/seed-0"]
    assert list(runs_of([tmp_path / "c/2-a", tmp_path / "c", tmp_path / "c"])) == names


def test_names_sort_as_people_count():
    names = ["10-b", "2-b", "2-a", "a2c10", "a2c9", "a", "7", ""]
    assert sorted(names, key=natural) == ["", "2-a", "2-b", "7", "10-b", "a", "a2c9", "a2c10"]


def test_odd_values_are_missing(write_run):
    odd = [
        {"step": 1, "a": 1, "b": "text", "c": [1], "d": 2**62 + 1},
        {"step": 2.5, "a": 10**400, "b": None, "d": 2**62 + 3},
        {"step": 3, "a": True, "e": float("inf")},
    ]
    found = reports.load(write_run("a", odd))
    assert found["step"].tolist() == [1, 2.5, 3] and found["d"].dtype == float
    np.testing.assert_array_equal(found["a"], [1, math.nan, 1])
    np.testing.assert_array_equal(found["e"], [math.nan, math.nan, math.inf])
    assert np.isnan(found["b"]).all() and np.isnan(found["c"]).all()
    exact = reports.load(write_run("b", [line | {"step": 2} for line in odd[:2]]))
    assert exact["d"].tolist() == [2**62 + 1, 2**62 + 3] and exact["d"].dtype == np.int64


def test_broken_lines_are_left_out_and_told(write_run):
    folder = write_run("a", end='{"st\n[1]\n{"step": 9, "seco')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: 2 lines cannot be read, and are left out$"):
        found = reports.load(folder)
    assert found["step"].max() == 8


def test_no_run_is_refused(tmp_path, write_run):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for folder, said in (
        (tmp_path / "empty", r"empty is no run's folder \(metrics\.jsonl is missing\), and no folder below it is one"),
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path / "file", "file is a file, not the folder of a run"),
        ([write_run("a"), tmp_path / "nowhere"], "nowhere does not exist"),
        ([], "give the folder of a run"),
        ("a\0b", "does not exist|null"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            reports.load(folder)
        assert "\n" not in str(caught.value)
    (write_run("b") / "metrics.jsonl").unlink()
    assert reports.load(tmp_path / "b") == {}  # it has only begun
    (tmp_path / "b" / "metrics.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"metrics\.jsonl cannot be read: Is a directory"):
        reports.load(tmp_path / "b")


def test_memory_is_that_of_the_columns(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of(20_000, every=10**9)))
    reports.load(tmp_path)
    tracemalloc.start()
    found = reports.load(tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found["step"]) == 20_000 and most < 3 * sum(column.nbytes for column in found.values())


def test_the_trials_of_a_search(write_run, tmp_path):
    folder = write_journal(tmp_path / "found", trials=6, failing=(2,))
    write_run("found/trials/0004/seed-0", lines_of(8))
    write_run("found/trials/0005/seed-0", lines_of(8))
    found = reports.trials(folder)
    assert [row["trial"] for row in found] == [*range(6)] and found[0]["values"]["lr"] > 0
    assert [row["score"] is None for row in found] == [row["failed"] is not None for row in found]
    assert [row["status"] for row in found].count("failed") == 1
    assert {*reports.load(folder)["run"]} == {"trials/0004/seed-0", "trials/0005/seed-0"}
    with pytest.raises(UsageError, match=r"journal\.jsonl is missing"):
        reports.trials(tmp_path)
