"""The program as its user starts it: what it reaches and writes, how it is gone on with and used, what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from few import write_few
from printed import as_printed, commands
from written_runs import lines, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
SCRIPT = SCRIPTS / "train_coordinate_descent.py"
PAGE = (ROOT / "docs" / "coordinate_descent.md").read_text()
SMALL = ["--data", "few.h5", "--model", "logistic", "--weight-decay", "0.05"]


@pytest.fixture
def two(tmp_path):
    """A data file of 20 rows and 2 classes."""
    write_few(tmp_path, 2)
    return tmp_path


def evaluations(folder):
    return [line for line in lines(folder) if "duality_gap" in line]


def test_the_certificate_ends_it_and_is_told(run_on, two):
    options = [*SMALL, "--tolerance", "0.001", "--l1", "0.01", "--allreduce", "ring", "--out", "a"]
    printed = run_on(3, SCRIPT, *options, check=0).stdout
    found, told = summary(two / "a"), evaluations(two / "a")
    assert found["stopped"] == "tolerance" and found["strategy"] == "coordinate_descent"
    assert found["duality_gap"] <= 0.001 < told[-2]["duality_gap"] and len(told) == found["rounds"] == found["steps"]
    assert found["duality_gap"] == told[-1]["duality_gap"] == found["primal"] - found["dual"]
    assert "duality gap" in printed and f"{found['rounds']} of 1 pass over a rank's examples" in printed
    assert (found["aggregate"], found["threads"], found["locking"]) == ("add", 1, None)
    assert (found["weight_decay"], found["l1"], found["local_steps"]) == (0.05, 0.01, 1.0)
    assert sum(found["bytes_sent_per_rank"]) == found["rounds"] * 2 * 2 * 4 * 8  # 2 (N-1) K values of 8 bytes
    calls = [each["all_reduce"]["calls"] for each in found["traffic_per_rank"]]
    assert calls == [found["rounds"]] * 3 and found["replicas_agree"] is True


def test_its_model_is_used_as_any_other(run_on, two):
    run_on(2, SCRIPT, *SMALL, "--rounds", "5", "--threads", "2", "--out", "a", check=0)
    run_on(2, SCRIPTS / "evaluate.py", "a", "--json", "s.json", "--export", "w.npz", "--predict", "p.csv", check=0)
    scores, found = json.loads((two / "s.json").read_text()), summary(two / "a")
    assert scores["scores"]["accuracy"] == pytest.approx(found["test_accuracy"])
    with np.load(two / "w.npz") as weights:
        flat = np.concatenate([weights[name].ravel() for name in weights.files])
    assert np.array_equal(np.sort(flat), np.sort(Checkpoint.read(two / "a").vectors["parameters"]))
    assert len((two / "p.csv").read_text().splitlines()) == 7


@pytest.mark.long
def test_the_page_as_printed(environment, tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    shown = commands(PAGE)
    assert len(shown) == 5
    as_printed(shown, tmp_path, environment)
    assert summary(tmp_path / "runs/sex")["stopped"] == "tolerance"
