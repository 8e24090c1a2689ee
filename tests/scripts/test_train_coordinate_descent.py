"""The program as its user starts it: what it reaches and writes, how it is gone on with and used, what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from few import write_few
from printed import as_printed, commands

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import UsageError
from hpcdl.runs.options import parse
from hpcdl.scripts.train_coordinate_descent import CoordinateOptions

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


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def evaluations(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "duality_gap" in line]


def test_the_certificate_ends_it_and_is_told(run_on, two):
    options = [*SMALL, "--tolerance", "0.001", "--l1", "0.01", "--allreduce", "ring", "--out", "a"]
    printed = run_on(3, SCRIPT, *options, check=0).stdout
    found, lines = summary(two / "a"), evaluations(two / "a")
    assert found["stopped"] == "tolerance" and found["strategy"] == "coordinate_descent"
    assert found["duality_gap"] <= 0.001 < lines[-2]["duality_gap"] and len(lines) == found["rounds"] == found["steps"]
    assert found["duality_gap"] == lines[-1]["duality_gap"] == found["primal"] - found["dual"]
    assert "duality gap" in printed and f"{found['rounds']} of 1 pass over a rank's examples" in printed
    assert (found["aggregate"], found["threads"], found["locking"]) == ("add", 1, None)
    assert (found["weight_decay"], found["l1"], found["local_steps"]) == (0.05, 0.01, 1.0)
    assert sum(found["bytes_sent_per_rank"]) == found["rounds"] * 2 * 2 * 4 * 8  # 2 (N-1) K values of 8 bytes
    calls = [each["all_reduce"]["calls"] for each in found["traffic_per_rank"]]
    assert calls == [found["rounds"]] * 3 and found["replicas_agree"] is True


def test_gone_on_with_on_any_number_of_ranks(run_on, two):
    run_on(2, SCRIPT, *SMALL, "--rounds", "9", "--checkpoint-every", "4", "--keep", "9", "--out", "a", check=0)
    whole = Checkpoint.read(two / "a")
    run_on(2, SCRIPT, "--resume", "a/checkpoint-000000004.h5", "--out", "b", check=0)
    again = Checkpoint.read(two / "b")
    assert set(again.vectors) == set(whole.vectors) == {"parameters", "dual/v", "dual/variables"}
    assert all(np.array_equal(again.vectors[name], each) for name, each in whole.vectors.items())
    run_on(3, SCRIPT, "--resume", "a", "--rounds", "60", "--tolerance", "1e-5", "--out", "c", check=0)
    found = summary(two / "c")
    assert found["stopped"] == "tolerance" and found["legs"][0]["steps"] == 9
    done = run_on(3, SCRIPT, "--resume", "c", check=0)
    assert "nothing is left to do" in done.stdout
    refused = run_on(2, SCRIPT, "--resume", "a", "--weight-decay", "0.1", "--rounds", "60", check=2).stderr
    assert "that run's weight decay is 0.05, not 0.1" in refused


def test_its_model_is_used_as_any_other(run_on, two):
    run_on(2, SCRIPT, *SMALL, "--rounds", "5", "--threads", "2", "--out", "a", check=0)
    run_on(2, SCRIPTS / "evaluate.py", "a", "--json", "s.json", "--export", "w.npz", "--predict", "p.csv", check=0)
    scores, found = json.loads((two / "s.json").read_text()), summary(two / "a")
    assert scores["scores"]["accuracy"] == pytest.approx(found["test_accuracy"])
    with np.load(two / "w.npz") as weights:
        flat = np.concatenate([weights[name].ravel() for name in weights.files])
    assert np.array_equal(np.sort(flat), np.sort(Checkpoint.read(two / "a").vectors["parameters"]))
    assert len((two / "p.csv").read_text().splitlines()) == 7


@pytest.mark.parametrize(
    "options, words",
    [
        (["--weight-decay", "0"], "--weight-decay must be greater than 0, and is 0.0"),
        (["--weight-decay", "0", "--l1", "0.1"], "--weight-decay must be greater than 0 (with --l1, too: the dual"),
        (["--l1", "-1"], "--l1 must not be negative, and is -1.0"),
        (["--tolerance", "-1"], "--tolerance must not be negative, and is -1.0"),
        (["--rounds", "0"], "--rounds must be greater than 0, not 0"),
        (["--threads", "0"], "--threads must be greater than 0, not 0"),
        (["--threads", "5000"], "--threads is 1,024 at most, not 5000"),
        (["--local-steps", "0"], "--local-steps must be greater than 0, not 0.0"),
        (["--local-steps", "1e7"], "--local-steps is 1,000,000 at most, not 10000000.0"),
        (["--aggregate", "mean"], "--aggregate: expected one of 'add', 'average', not mean"),
        (["--locking", "no"], "--locking: expected one of 'atomic', 'none', not no"),
        (["--device", "cuda"], "--device cuda: coordinate descent is for CPUs"),
        (["--placement", "streamed"], "each rank goes through rows in its memory: --placement shared or partitioned"),
        (["--data-servers", "1"], "each rank goes through rows in its memory: --placement shared or partitioned"),
        *(
            ([f"--{name}", value], f"--{name} has no meaning where single coordinates are solved for: leave it out")
            for name, value in [
                *(("lr", "1"), ("optimizer", "adam"), ("schedule", "1/t"), ("epochs", "3"), ("steps", "3")),
                *(("batch-size", "8"), ("batch-per-rank", "8"), ("clip-norm", "1"), ("accumulate", "2")),
                *(("average", "from=1"), ("augment", "flip"), ("straggler", "0:2"), ("pretend-compute", "1")),
            ]
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(options, words):
    with pytest.raises(UsageError, match="^" + re.escape(words)) as found:
        parse(CoordinateOptions, "train-coordinate-descent", "", options)
    assert "\n" not in str(found.value)


def test_refused_in_one_line_by_all_ranks(run_on, two):
    softmax = "train-coordinate-descent works on the coordinates of linear models: take --model linear, logistic or svm"
    for options, words in ((["--model", "softmax"], softmax), (["--weight-decay", "-1"], "--weight-decay must")):
        done = run_on(2, SCRIPT, *SMALL, *options, "--out", "a", check=2)
        ours = [line for line in done.stderr.splitlines() if "error: " in line]
        assert len(ours) == 1 and words in ours[0] and "Traceback" not in done.stderr
        assert not (two / "a").exists()


def test_what_another_program_was_told_is_left_out(run_on, two):
    (two / "c.yaml").write_text("lr: 0.1\noptimizer: adam\nepochs: 7\nweight_decay: 0.05\nmodel: svm\ndata: few.h5\n")
    done = run_on(1, SCRIPT, "--config", "c.yaml", "--rounds", "2", "--out", "a", check=0)
    assert "left out, of another strategy" in done.stderr and summary(two / "a")["options"]["optimizer"] == "sgd"


def test_the_page_as_printed(environment, tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    shown = commands(PAGE)
    assert len(shown) == 5
    as_printed(shown, tmp_path, environment)
    assert summary(tmp_path / "runs/sex")["stopped"] == "tolerance"
