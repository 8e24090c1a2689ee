"""scripts/search.py: trials on groups of ranks, in rungs and populations; failures are rows."""

import csv
import json
from pathlib import Path

import numpy as np
import yaml
from in_process import ends
from searched import LR, RANDOM, TRAINING, events, scores

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts"


def test_the_same_trials_on_any_number_of_ranks(search, few, undisturbed):
    for ranks, more in ((1, []), (5, []), (3, ["--controller", "own"])):
        done = search(ranks, *RANDOM, "--out", f"on{ranks}", *more, check=0)
        assert done.stderr == "" and done.stdout == ""
        assert scores(few / f"on{ranks}") == undisturbed
    assert len(undisturbed) == 6
    folder = few / "on1" / "trials" / "0003" / "seed-0"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_accuracy"] == undisturbed[3, 0, 0] and summary["stopped"] == "finished"
    ended = events(few / "on1")[3]
    assert summary["options"]["lr"] == events(few / "on1", "begin")[3]["values"]["lr"]
    assert (ended["more"]["steps"], ended["more"]["folder"]) == (summary["steps"], "trials/0003/seed-0")
    names = {"best.h5", "checkpoint.h5", "config.yaml", "logs", "metrics.jsonl", "started.json", "summary.json"}
    assert {path.name for path in folder.iterdir()} == names | {"trace.json", ".lock"}


def test_a_trial_is_the_run_of_its_program_and_the_best_is_given_to_it(search, few, run_on):
    done = search(3, *RANDOM[:-2], "--ranks-per-trial", "2", "--seeds", "2", "--seed", "7", "--out", "s", check=0)
    assert "1 group of 2 ranks; 1 rank left over, without work" in done.stdout
    assert "judged by their validation accuracy, on 30% of the training rows" in done.stdout
    assert {seed for _, _, seed in scores(few / "s")} == {0, 1} and len(scores(few / "s")) == 12
    rows = list(csv.DictReader((few / "s" / "trials.csv").open()))
    assert len(rows) == 6
    best = yaml.safe_load((few / "s" / "best.yaml").read_text())
    top = max(rows, key=lambda row: float(row["score"]))
    assert float(best["lr"]) == float(top["lr"])
    program = SCRIPT / "train_allreduce.py"
    run_on(2, program, "--config", "s/best.yaml", "--seed", "8", "--out", "alone", "--progress=none", cwd=few, check=0)
    trial = few / "s" / "trials" / f"{int(top['trial']):04d}" / "seed-1"
    one, other = (Checkpoint.read(path).vectors["parameters"] for path in (few / "alone", trial))
    assert np.array_equal(one, other)


def test_what_fails_is_a_row_and_the_search_goes_on(search, few):
    (few / "broken.py").write_text(
        "class Model:\n"
        "    def __init__(self, features, classes, dtype, how):\n"
        "        from hpcdl.models import make_model\n"
        "        self.how, self.inner = how, make_model('softmax', features, classes, dtype)\n"
        "        self.layout = self.inner.layout\n"
        "    def initialize(self, *given): return self.inner.initialize(*given)\n"
        "    def predict(self, *given): return self.inner.predict(*given)\n"
        "    def loss_and_gradient(self, parameters, batch, gradient, on_ready=None):\n"
        "        if self.how == 'raises': raise KeyError('mine')\n"
        "        if self.how == 'memory': raise MemoryError\n"
        "        if self.how == 'leaves': raise SystemExit(0)\n"
        "        loss = self.inner.loss_and_gradient(parameters, batch, gradient, on_ready)\n"
        "        return float('nan') if self.how == 'diverges' else loss\n"
    )
    kinds = ["raises", "memory", "leaves", "diverges", "trains"]
    models = "|".join(f"broken:Model,how={kind}" for kind in kinds)
    grid = [*TRAINING, "--space", f"model={models}", "--method", "grid", "--out", "s"]
    done = search(2, *grid, check=0)
    assert "Traceback" not in done.stderr
    said = {each["values"]["model"].partition("=")[2]: None for each in events(few / "s", "begin")}
    for each in events(few / "s"):
        said[kinds[each["trial"]]] = each["failed"]
    assert said["trains"] is None and "KeyError: 'mine'" in said["raises"] and "MemoryError" in said["memory"]
    assert "it leaves the program, with status 0" in said["leaves"] and "is not finite" in said["diverges"]
    rows = {row["trial"]: row for row in csv.DictReader((few / "s" / "trials.csv").open())}
    assert "KeyError" in rows["0"]["reason"] and rows["4"]["reason"] == ""
    limit = [*TRAINING, *LR, "--pretend-compute", "30", "--trial-limit", "0.05", "--trials", "2", "--out", "late"]
    done = search(2, *limit, check=1)
    assert [each["failed"] for each in events(few / "late")] == ["it took longer than --trial-limit 0.05"] * 2


def test_rows_are_in_memory_once_for_all_trials(few, monkeypatch):
    from hpcdl.data import opening

    made = []

    class Counted(opening.Arena):
        def __init__(self, comm, specs):
            super().__init__(comm, specs)
            made.append(self)

    monkeypatch.chdir(few)
    monkeypatch.setattr(opening, "Arena", Counted)
    status, _ = ends("search", [*RANDOM, "--space", "dtype=float32|float64", "--out", "s"])
    assert status == 0 and len(made) == 2  # one for each type


def test_options_that_both_have_stand_with_the_program(search, few):
    line = "train-gossip --method adapt-then-combine --topology ring --data few.h5 --model softmax --epochs 1"
    (few / "space.yaml").write_text("lr: log:0.01..0.1\noptimizer: [sgd, adam]\n")
    search(
        2, line, "--space-file", "space.yaml", "--method=grid", "--points=2", "--out=s", "--ranks-per-trial=2", check=0
    )
    assert len(scores(few / "s")) == 4
    summary = json.loads((few / "s" / "trials" / "0000" / "seed-0" / "summary.json").read_text())
    assert (summary["method"], summary["ranks"]) == ("adapt-then-combine", 2)
    first = json.loads((few / "s" / "journal.jsonl").read_text().splitlines()[0])
    assert first["settings"]["program"] == f"{line} --validation=0.1"
