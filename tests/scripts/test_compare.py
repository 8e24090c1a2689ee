"""scripts/compare.py: lines, seeds, a table; stopped, killed and gone on with; failures are rows."""

import csv
import fcntl
import json
import signal
from pathlib import Path

import pytest
import yaml
from in_process import ends

from hpcdl.reports import comparison

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare.py"
FEW = ["--model", "softmax", "--epochs", "2", "--progress", "none"]
ALL_REDUCE, LOCAL, GOSSIP = "train-allreduce", "-n 2: train-local-sgd --sync-every 2", "train-gossip --topology ring"


@pytest.fixture
def compare(run_on, few):
    """A function: the comparison on so many ranks, in a folder with few.h5."""

    def run(ranks, *arguments, check=None):
        return run_on(ranks, SCRIPT, "--data", "few.h5", *FEW, *arguments, check=check, cwd=few)

    return run


def values(folder, measure):
    """Of each line the values with each seed."""
    found = comparison.read(folder)
    return [[run["values"].get(measure) for run in line["runs"]] for line in found["lines"]]


def test_each_line_with_each_seed(compare, few, run_on):
    done = compare(3, ALL_REDUCE, LOCAL, GOSSIP, "--seeds", "2", "--target", "accuracy=0.01", "--out", "c", check=0)
    assert done.stdout == "" and done.stderr == ""  # --progress none
    found = comparison.read(few / "c")
    assert [line["ranks"] for line in found["lines"]] == [3, 2, 3] and found["seeds"] == [0, 1]
    for line in found["lines"]:
        for run in line["runs"]:
            summary = json.loads((few / "c" / run["folder"] / "summary.json").read_text())
            assert (summary["ranks"], summary["seed"], summary["epochs"]) == (line["ranks"], run["seed"], 2)
            assert run["values"]["test_loss"] == summary["test_loss"] and run["failed"] is None
    assert all(steps == [1, 1] for steps in values(few / "c", "steps_to_target"))
    rows = list(csv.reader((few / "c" / "table.csv").open()))
    assert [row[0] for row in rows[1:]] == [ALL_REDUCE, LOCAL, GOSSIP]
    assert GOSSIP in (few / "c" / "table.md").read_text()
    alone = ["--data", "few.h5", *FEW, "--topology", "ring", "--seed", "1", "--out", "alone"]
    run_on(3, SCRIPT.with_name("train_gossip.py"), *alone, cwd=few, check=0)  # a line's run is that of its program
    assert json.loads((few / "alone" / "summary.json").read_text())["test_loss"] == values(few / "c", "test_loss")[2][1]


@pytest.mark.long
def test_at_once_gives_the_same(compare, few):
    lines = ["-n 1: train-allreduce", LOCAL, "-n 1: train-gossip --topology ring"]
    compare(3, *lines, "--seeds", "2", "--out", "one", check=0)
    compare(3, *lines, "--seeds", "2", "--out", "beside", "--at-once", check=0)
    for measure in ("test_loss", "train_loss", "messages_per_rank"):
        assert values(few / "one", measure) == values(few / "beside", measure)


def test_what_fails_is_a_row_and_the_others_go_on(run_on, few):
    lines = [
        "train-allreduce --optimizer sgd --lr 1e30 --model mlp:8,8",
        "train-gossip --topology none.txt",
        "train-allreduce --model nowhere:Model",
        ALL_REDUCE,
    ]
    done = run_on(2, SCRIPT, *lines, "--data", "few.h5", "--model", "softmax", "--seeds", "1", "--out", "c", cwd=few)
    assert done.returncode == 0 and done.stderr == ""
    failed = [line["runs"][0]["failed"] for line in comparison.read(few / "c")["lines"]]
    assert "is not finite" in failed[0] and "none.txt" in failed[1] and "nowhere" in failed[2] and failed[3] is None
    for number, why in enumerate(failed[:3], 1):
        assert f"line {number} failed with seed 0: {why}" in done.stdout
    assert "[4/4] seed 0  train-allreduce: test accuracy" in done.stdout


def test_where_all_fail_a_line_says_so_though_nothing_else_is_said(run_on, few):
    lines = ["train-allreduce --model nowhere:Model", "train-gossip --topology none.txt"]
    more = ["--data", "few.h5", "--model", "softmax", "--seeds", "1", "--progress", "none", "--out", "c"]
    done = run_on(2, SCRIPT, *lines, *more, cwd=few)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: no run has come out well; 1 run failed: ") and done.stderr.count("\n") == 1
    assert "failed: " in (few / "c" / "report.html").read_text()


def test_a_configuration_says_the_same(run_on, few):
    config = {"data": "few.h5", "model": "softmax", "epochs": 2, "lines": [ALL_REDUCE, GOSSIP], "seeds": "5,3"}
    (few / "c.yaml").write_text(yaml.safe_dump(config))
    run_on(2, SCRIPT, "--config", "c.yaml", "--progress", "none", "--out", "c", cwd=few, check=0)
    found = comparison.read(few / "c")
    assert found["seeds"] == [5, 3] and [line["line"] for line in found["lines"]] == [ALL_REDUCE, GOSSIP]
    run_on(2, SCRIPT, "--config", "c/config.yaml", "--progress", "none", "--out", "again", cwd=few, check=0)
    assert values(few / "again", "test_loss") == values(few / "c", "test_loss")


@pytest.mark.long
def test_more_seeds_may_be_asked_for_and_nothing_is_run_twice(compare, few, run_on):
    compare(2, ALL_REDUCE, GOSSIP, "--seeds", "1", "--out", "c", check=0)
    first = few / "c" / "1-train-allreduce" / "seed-0" / "summary.json"
    before = first.stat().st_mtime_ns
    left = [first.with_name("begun"), few / "c" / ".table.csv.123.part"]  # by a job that was killed
    for each in left:
        each.write_text("1\n")
    done = run_on(2, SCRIPT, "--resume", "c", "--seeds", "2", cwd=few, check=0)
    assert first.stat().st_mtime_ns == before and not any(each.exists() for each in left)
    assert "[3/4] seed 1  train-gossip" in done.stdout and "seed 0" not in done.stdout
    assert "seed" not in run_on(2, SCRIPT, "--resume", "c", cwd=few, check=0).stdout.partition("ranks")[0]
    assert all(None not in each and len(each) == 2 for each in values(few / "c", "test_loss"))


def test_what_failed_is_tried_again_only_when_asked(run_on, few):
    line = "train-gossip --topology graph.txt"
    common = ["--data", "few.h5", *FEW]
    assert run_on(2, SCRIPT, line, "--seeds", "1", "--out", "c", *common, cwd=few).returncode == 1
    (few / "graph.txt").write_text("0 1\n1 0\n")
    assert run_on(2, SCRIPT, "--resume", "c", cwd=few).returncode == 1
    run_on(2, SCRIPT, "--resume", "c", "--retry", cwd=few, check=0)
    assert comparison.read(few / "c")["lines"][0]["runs"][0]["failed"] is None


def test_a_run_in_which_the_job_ends_again_and_again_is_given_up(compare, few, run_on):
    compare(2, ALL_REDUCE, GOSSIP, "--seeds", "1", "--out", "c", check=0)
    path = few / "c" / "1-train-allreduce" / "seed-0"
    (path / "summary.json").unlink()
    (path / "begun").write_text("3\n")
    run_on(2, SCRIPT, "--resume", "c", cwd=few, check=0)
    assert comparison.read(few / "c")["lines"][0]["runs"][0]["failed"] == "the job has ended in it 3 times"


def wait_for_the_end_of_its_ranks(folder):
    """mpiexec may leave before the last of the ranks that it has killed."""
    with (folder / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_stopped_or_killed_it_goes_on(launch, few, run_on, number):
    """In the second run of two, on one rank, which then goes on from its checkpoint."""
    program = few / "interfere.py"
    program.write_text(
        "import os\n"
        "from hpcdl.scripts import compare\n"
        "from hpcdl.runs import run\n"
        "def record(self, loss, total, original=run.Run.record):\n"
        "    original(self, loss, total)\n"
        "    if self.step == 7 and self.comm.rank == 1 and '2-train' in self.options.out:\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "run.Run.record = record\n"
        "compare.main()\n"
    )
    lines = [ALL_REDUCE, "train-allreduce --checkpoint-every 3"]
    ended = launch(
        2, program, *lines, "--data", "few.h5", *FEW, "--batch-size", "2", "--seeds", "1", "--out", "c", cwd=few
    )
    assert (ended.returncode == 85) == (number == signal.SIGTERM) and ended.returncode != 0
    if number == signal.SIGTERM:
        assert ended.stdout == "stopped by a signal; go on with --resume c\n"
    wait_for_the_end_of_its_ranks(few / "c")
    path = few / "c" / "2-train-allreduce" / "seed-0"
    assert not (path / "summary.json").exists()
    run_on(2, SCRIPT, "--resume", "c", cwd=few, check=0)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["legs"][0]["steps"] in range(6, 11) and len(summary["legs"]) == 2
    assert not (path / "begun").exists()
    assert values(few / "c", "test_loss")[0] == values(few / "c", "test_loss")[1]  # resumed = never stopped


@pytest.mark.parametrize(
    "code, said",
    [
        ("raise KeyError('alone')", "KeyError: 'alone'"),
        ("sys.exit(51)", "ends all: it leaves the program, with status 51 (interfere.py, line 8)"),
    ],
)
def test_a_rank_that_fails_alone_ends_the_job_and_the_run_is_not_tried_again(code, said, launch, few, run_on):
    program = few / "interfere.py"
    program.write_text(
        "import sys\n"
        "from hpcdl.scripts import compare\n"
        "from hpcdl.launch import isolated_run\n"
        "from hpcdl.runs import run\n"
        "isolated_run.PATIENCE = 0.2\n"
        "def record(self, loss, total, original=run.Run.record):\n"
        "    original(self, loss, total)\n"
        f"    if self.step == 2 and self.comm.rank == 1 and '1-train' in self.options.out: {code}\n"
        "run.Run.record = record\n"
        "compare.main()\n"
    )
    ended = launch(2, program, ALL_REDUCE, GOSSIP, "--data", "few.h5", *FEW, "--seeds", "1", "--out", "c", cwd=few)
    assert ended.returncode != 0 and ended.stderr.count(said) == 1 and "would wait for ever" not in ended.stderr
    wait_for_the_end_of_its_ranks(few / "c")
    run_on(2, SCRIPT, "--resume", "c", cwd=few, check=0)
    first, second = (line["runs"][0]["failed"] for line in comparison.read(few / "c")["lines"])
    assert said.removeprefix("ends all: ") in first and second is None


def test_another_comparison_is_not_overwritten(compare, few, run_on):
    compare(2, ALL_REDUCE, "--seeds", "1", "--out", "c", check=0)
    done = compare(2, GOSSIP, "--seeds", "1", "--out", "c", check=2)
    assert "--out c holds another comparison" in done.stderr
    done = run_on(2, SCRIPT, "--resume", "c", "--epochs", "3", cwd=few, check=2)
    assert "with another --epochs it would be another comparison" in done.stderr
    compare(2, GOSSIP, "--seeds", "1", "--out", "c", "--force", check=0)
    assert [line["line"] for line in comparison.read(few / "c")["lines"]] == [GOSSIP]
    assert not (few / "c" / "1-train-allreduce" / "seed-0" / "summary.json").exists()


def test_what_others_have_left_is_not_overwritten(few, monkeypatch):
    monkeypatch.chdir(few)
    mine = few / "notes" / "table.md", few / "old" / "1-train-gossip" / "seed-0" / "metrics.jsonl"
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    for out in ("notes", "old"):
        status, told = ends("compare", [ALL_REDUCE, "--data", "few.h5", "--out", out])
        assert status == 2 and f"--out {out} holds another comparison" in told
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def test_on_other_ranks_it_would_be_another_comparison(compare, few, run_on):
    compare(2, ALL_REDUCE, "-n 1: train-gossip", "--seeds", "1", "--out", "c", check=0)
    done = run_on(3, SCRIPT, "--resume", "c", "--seeds", "2", cwd=few, check=2)
    assert "'train-allreduce' was run on 2 ranks, and is now to run on 3" in done.stderr
    assert [line["ranks"] for line in comparison.read(few / "c")["lines"]] == [2, 1]


def test_a_folder_that_cannot_be_made_is_a_row(compare, few):
    (few / "c").mkdir()
    (few / "c" / "1-train-allreduce").write_text("mine")
    done = compare(2, ALL_REDUCE, GOSSIP, "--seeds", "1", "--out", "c", check=0)
    assert "Traceback" not in done.stderr and (few / "c" / "1-train-allreduce").read_text() == "mine"
    assert [each[0] is None for each in values(few / "c", "steps")] == [True, False]
