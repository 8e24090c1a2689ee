"""scripts/train_ensemble.py: members, how they differ, what comes out; what is refused."""

import csv
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_ensemble.py"
FEW = ["--data", "few.h5", "--model", "softmax", "--epochs", "2", "--batch-size", "4"]


@pytest.fixture
def ensemble(run_on, few):
    """A function: the ensemble on so many ranks, in a folder with few.h5; returns what it has printed, and found."""

    def run(ranks, *arguments, program=(), check=0):
        done = run_on(ranks, SCRIPT, *program, *FEW, *arguments, check=check, cwd=few)
        return done, json.loads((few / "e" / "summary.json").read_text()) if check == 0 else None

    return run


def parameters(folder, number):
    return Checkpoint.read(folder / "members" / f"{number:04d}").vectors["parameters"]


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.long)])
def test_members_do_not_depend_on_the_ranks(ensemble, few, run_on, ranks):
    """With bootstrap rows, validation and subspaces; with one rank for each, a member is the same to the bit."""
    draws = ["--members", "3", "--bagging", "--subspace", "0.7", "--validation", "0.2"]
    done, found = ensemble(ranks, *draws, "--out", "e")
    assert done.stderr == ""
    assert [each["number"] for each in found["members"]] == [0, 1, 2] and found["ranks"] == ranks
    assert all(each["failed"] is None and "accuracy" in each["scores"] for each in found["members"])
    assert found["out_of_bag"]["rows"] <= 16 and 0 <= found["disagreement"] <= 1
    assert (f"{ranks - 3} ranks of 5 idle" in done.stdout) == (ranks == 5)
    summary = json.loads((few / "e/members/0001/summary.json").read_text())
    assert (summary["seed"], summary["ranks"], summary["steps"]) == (1, 1, 8)
    assert len({parameters(few / "e", number).tobytes() for number in range(3)}) == 3
    run_on(1, SCRIPT, *FEW, *draws, "--out", "alone", "--progress", "none", cwd=few, check=0)
    for number in range(3):
        assert parameters(few / "alone", number).tobytes() == parameters(few / "e", number).tobytes()
    alone = json.loads((few / "alone/summary.json").read_text())
    for name in ("accuracy", "loss"):
        assert alone["scores"][name] == pytest.approx(found["scores"][name], rel=1e-6)
    assert alone["out_of_bag"]["accuracy"] == pytest.approx(found["out_of_bag"]["accuracy"])


@pytest.mark.parametrize("ranks", [1, 3])
def test_folds_are_cross_validation(ensemble, few, ranks):
    """Each training row is predicted by the one member that has not seen it; each member is scored on its own fold."""
    _, found = ensemble(ranks, "--folds", "4", "--validation", "0.2", "--out", "e")
    scores = found["out_of_fold"]
    rows = [each["rows"] for each in scores["members"]]
    assert sum(rows) == scores["rows"] == 16 and rows == [4, 4, 4, 4]
    for name in ("accuracy", "loss"):
        assert scores[name] == pytest.approx(np.mean([each[name] for each in scores["members"]]))
    with (few / "e" / "out_of_fold.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len({row["row"] for row in table}) == len(table) == 16
    assert np.mean([row["label"] == row["class"] for row in table]) == pytest.approx(scores["accuracy"])
    for number in range(4):
        summary = json.loads((few / f"e/members/{number:04d}/summary.json").read_text())
        assert summary["steps"] == 2 * 12 / 4  # epochs, rows of the other folds, batches


def test_a_member_is_what_its_program_trains(ensemble, few, run_on):
    """Without a draw of rows or features, member 1 is the run of its program with its seed."""
    how = ["--sync-every", "2", "--members", "2", "--ranks-per-member", "2", "--seed", "4", "--out", "e"]
    ensemble(2, *how, program=["train-local-sgd"])
    alone = [*FEW, "--sync-every", "2", "--seed", "5", "--out", "alone"]
    run_on(2, SCRIPT.with_name("train_local_sgd.py"), *alone, cwd=few, check=0)
    assert Checkpoint.read(few / "alone").vectors["parameters"].tobytes() == parameters(few / "e", 1).tobytes()


def test_options_take_turns_and_stacking_is_fitted(ensemble, few, run_on):
    vary = ["--vary", "model=softmax|mlp:4", "--vary", "lr=0.1|0.2"]
    _, found = ensemble(2, "--members", "5", *vary, "--validation", "0.3", "--combine", "stacking", "--out", "e")
    assert [each["differs"] for each in found["members"]][:3] == [
        "seed=0 model=softmax lr=0.1",
        "seed=1 model=softmax lr=0.2",
        "seed=2 model=mlp:4 lr=0.1",
    ]
    assert len(found["stacking"]["weights"]) == 5 and len(found["stacking"]["bias"]) == 3
    evaluate = SCRIPT.with_name("evaluate.py")
    done = run_on(2, evaluate, "e", "--json", "e.json", "--predict", "p.csv", cwd=few, check=0)
    assert "e, 5 members, on 6 rows of few" in done.stdout and "(stacking of the members)" in done.stdout
    assert json.loads((few / "e.json").read_text())["scores"] == pytest.approx(found["scores"])
    run_on(3, SCRIPT.with_name("predict.py"), "e", "few.h5", "--split", "test", "--out", "q.csv", cwd=few, check=0)
    tables = [list(csv.reader((few / name).open())) for name in ("p.csv", "q.csv")]
    assert tables[0][0] == ["row", "label", "class", "probability", "spread"] and len(tables[0]) == 7
    assert [row[:3] for row in tables[0]] == [row[:3] for row in tables[1]]
    refused = run_on(2, evaluate, "e", "--samples", cwd=few)
    assert refused.returncode == 2 and "give one of the members, as e/members/0000" in refused.stderr


def test_snapshots_are_the_ends_of_cycles(ensemble, few, run_on):
    _, found = ensemble(2, "--snapshots", "3", "--epochs", "3", "--out", "e")
    assert [each["run"] for each in found["members"]] == [
        "members/0000/checkpoint-000000005.h5",
        "members/0000/checkpoint-000000010.h5",
        "members/0000/checkpoint.h5",
    ]
    lines = [json.loads(line) for line in (few / "e/members/0000/metrics.jsonl").read_text().splitlines()]
    assert json.loads((few / "e/members/0000/summary.json").read_text())["options"]["schedule"] == "cosine:cycles=3"
    assert [line["step"] for line in lines if "train_loss" in line][-1] == 15
    run, last = few / "e/members/0000", Checkpoint.read(few / "e/members/0000").vectors["parameters"]
    shutil.copy(run / "checkpoint-000000010.h5", run / "checkpoint.h5")  # as if it had been killed after that
    for summary in (run / "summary.json", few / "e/summary.json"):
        summary.unlink()
    run_on(2, SCRIPT, "--resume", "e", cwd=few, check=0)
    assert json.loads((few / "e/summary.json").read_text())["members"] == found["members"]
    assert np.array_equal(Checkpoint.read(run).vectors["parameters"], last)


def test_boosting_is_done_one_after_another(ensemble, few, run_on):
    """SAMME's weights follow from the members, whatever the number of ranks; gone on with, nothing is trained again."""
    _, found = ensemble(2, "--boost", "samme", "--members", "3", "--out", "e")
    good = [each for each in found["members"] if each["failed"] is None]
    assert good and found["combine"] == "vote" and good[0]["weight"] > 0
    with np.load(few / "e/members/0000/weights.npz") as kept:
        assert kept["alpha"] == good[0]["weight"] and kept["weights"].sum() == pytest.approx(1)
        assert len(set(np.round(kept["weights"], 12))) <= 2  # right or wrong
    before = {path: path.stat().st_mtime_ns for path in (few / "e").glob("members/*/checkpoint.h5")}
    left = few / "e/members/0000/.weights.npz.123.part"  # by a job that was killed
    left.touch()
    run_on(3, SCRIPT, "--resume", "e", cwd=few, check=0)
    assert not left.exists()
    assert before == {path: path.stat().st_mtime_ns for path in before}
    again = json.loads((few / "e/summary.json").read_text())
    assert [each["weight"] for each in again["members"]] == [each["weight"] for each in found["members"]]


def test_a_member_of_which_nothing_could_be_written_is_left_out_and_said(ensemble, few):
    """Not even why it has failed; its last checkpoint is one of the midst."""
    full = ["--inject", "diskfull:step=6,times=0", "--checkpoint-every", "4", "--progress", "none"]
    done, _ = ensemble(2, "--members", "2", *full, "--out", "e", check=1)
    for number in range(2):
        assert f"e/members/{number:04d}: " in done.stderr and (few / f"e/members/{number:04d}/checkpoint.h5").exists()
    assert done.stderr.count("No space left on device") == 2
    assert "error: no run has succeeded; 2 runs failed: its folder has no summary, and no reason why\n" in done.stderr


def test_a_member_that_fails_is_a_row(ensemble, few, run_on):
    wild = ["--optimizer", "sgd", "--model", "mlp:8,8"]
    _, found = ensemble(2, "--members", "2", "--vary", "lr=0.1|1e30", *wild, "--out", "e")
    assert found["members"][0]["failed"] is None and "is not finite" in found["members"][1]["failed"]
    done = run_on(1, SCRIPT, "--resume", "e", cwd=few, check=0)
    assert "member 1 is left out: " in done.stdout
    done = run_on(1, SCRIPT, *FEW, "--members", "1", "--lr", "1e30", *wild, "--out", "f", cwd=few)
    assert done.returncode == 1 and "member 0 is left out" in done.stdout
    refused = run_on(1, SCRIPT.with_name("evaluate.py"), "f", cwd=few)
    assert refused.returncode == 2 and "has no members" in refused.stderr


def test_another_ensemble_in_the_folder(ensemble, few, run_on):
    ensemble(1, "--members", "1", "--out", "e")
    for given, words in (([*FEW, "--out"], "holds another ensemble"), (["--resume"], "an ensemble keeps its")):
        done = run_on(2, SCRIPT, *given, "e", "--members", "2", cwd=few, check=2)
        assert words in done.stderr and done.stderr.count("\n") == 1
    _, found = ensemble(2, "--members", "2", "--out", "e", "--force")
    assert len(found["members"]) == 2 and yaml.safe_load((few / "e/ensemble.yaml").read_text())["members"] == 2


def test_values_have_a_mean_and_a_spread(run_on, few):
    """Of a regression: rows and features drawn, scored out of bag, predicted with the deviation over the members."""
    random = np.random.default_rng(0)
    with h5py.File(few / "v.h5", "w") as file:
        for part, rows in (("train", 30), ("test", 8)):
            file[f"{part}/x"] = x = random.standard_normal((rows, 3))
            file[f"{part}/y"] = x @ [3.0, -2.0, 1.0] + 100
        file.attrs["classes"] = 0
    common = ["--data", "v.h5", "--model", "linear", "--epochs", "3", "--standardize"]
    run_on(2, SCRIPT, *common, "--members", "3", "--bagging", "--subspace", "0.7", "--out", "e", cwd=few, check=0)
    found = json.loads((few / "e/summary.json").read_text())
    assert found["out_of_bag"]["rmse"] > 0 and found["scores"]["rmse"] > 0 and "disagreement" not in found
    predict = SCRIPT.with_name("predict.py")
    asked, values = ["v.h5", "--split", "test", "--out", "p.npz", "--force"], []
    for number in range(3):
        run_on(1, predict, f"e/members/000{number}", *asked, cwd=few, check=0)
        with np.load(few / "p.npz") as file:
            values.append(file["prediction"])
    run_on(2, predict, "e", *asked, cwd=few, check=0)
    with np.load(few / "p.npz") as file:
        assert file["prediction"] == pytest.approx(np.mean(values, axis=0))
        assert file["spread"] == pytest.approx(np.std(values, axis=0), abs=1e-4) and file["spread"].min() > 0
        assert found["scores"]["rmse"] == pytest.approx(
            np.sqrt(np.square(file["prediction"] - file["label"]).mean()), rel=1e-5
        )
