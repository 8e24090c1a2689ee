"""scripts/compare.py: lines, seeds, a table; stopped, killed and gone on with; failures are rows."""

import csv
import json
import signal
from pathlib import Path

import pytest
from in_process import ends
from searched import wait_for_the_end_of_its_ranks

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare.py"
FEW = ["--model", "softmax", "--epochs", "2", "--progress", "none"]
ALL_REDUCE, LOCAL, GOSSIP = "train-allreduce", "-n 2: train-local-sgd --sync-every 2", "train-gossip --topology ring"


@pytest.fixture
def compare(run_on, few):
    """A function: the comparison on so many ranks, in a folder with few.h5."""

    def run(ranks, *arguments, check=None):
        return run_on(ranks, SCRIPT, "--data", "few.h5", *FEW, *arguments, check=check, cwd=few)

    return run


def results(folder):
    return json.loads((folder / "results.json").read_text())


def values(folder, measure):
    """Of each line the values with each seed."""
    found = results(folder)
    return [[run["values"].get(measure) for run in line["runs"]] for line in found["lines"]]


def test_each_line_with_each_seed(compare, few, run_on):
    done = compare(3, ALL_REDUCE, LOCAL, GOSSIP, "--seeds", "2", "--target", "accuracy=0.01", "--out", "c", check=0)
    assert done.stdout == "" and done.stderr == ""  # --progress none
    found = results(few / "c")
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
    compare(3, *lines, "--seeds", "5,3", "--out", "one", check=0)
    compare(3, *lines, "--seeds", "5,3", "--out", "beside", "--at-once", check=0)
    assert results(few / "one")["seeds"] == [5, 3]
    for measure in ("test_loss", "train_loss", "messages_per_rank"):
        assert values(few / "one", measure) == values(few / "beside", measure)


def test_what_fails_is_a_row_and_the_others_go_on(run_on, few):
    lines = ["train-allreduce --optimizer sgd --lr 1e30 --model mlp:8,8", "train-gossip --topology none.txt"]
    lines += ["train-allreduce --model nowhere:Model", ALL_REDUCE, GOSSIP]
    (few / "c").mkdir()
    (few / "c" / "5-train-gossip").write_text("mine")  # so that its folder cannot be made
    done = run_on(2, SCRIPT, *lines, "--data", "few.h5", "--model", "softmax", "--seeds", "1", "--out", "c", cwd=few)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "5-train-gossip/seed-0 cannot be" in done.stderr
    failed = [line["runs"][0]["failed"] for line in results(few / "c")["lines"]]
    assert "is not finite" in failed[0] and "none.txt" in failed[1] and "nowhere" in failed[2] and failed[3] is None
    assert failed[4] is not None and (few / "c" / "5-train-gossip").read_text() == "mine"
    for number, why in enumerate(failed[:3], 1):
        assert f"line {number} failed with seed 0: {why}" in done.stdout
    assert "[4/5] seed 0  train-allreduce: test accuracy" in done.stdout


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


@pytest.mark.long
def test_where_all_fail_a_line_says_so_and_they_are_tried_again_only_when_asked(compare, few, run_on):
    done = compare(2, "train-gossip --topology graph.txt", "--seeds", "1", "--out", "c", check=1)
    assert done.stdout == "" and done.stderr.startswith("error: no run has succeeded; 1 run failed: ")
    assert done.stderr.count("\n") == 1 and "failed: " in (few / "c" / "report.html").read_text()
    (few / "graph.txt").write_text("0 1\n1 0\n")
    run_on(2, SCRIPT, "--resume", "c", cwd=few, check=1)
    run_on(2, SCRIPT, "--resume", "c", "--retry", cwd=few, check=0)
    assert results(few / "c")["lines"][0]["runs"][0]["failed"] is None


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_or_killed_it_goes_on(launch, few, run_on, interfere, number):
    """In the second run of two, on one rank, which then goes on from its checkpoint."""
    program = interfere(7, 1, f"os.kill(os.getpid(), {int(number)})", "compare", "2-train")
    lines = [ALL_REDUCE, "train-allreduce --checkpoint-every 3"]
    how = ["--data", "few.h5", *FEW, "--batch-size", "2", "--seeds", "1", "--out", "c"]
    ended = launch(2, program, *lines, *how, cwd=few)
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


def test_a_rank_that_fails_alone_ends_the_job_and_is_not_tried_again(launch, few, run_on, interfere):
    said = "ends the job: it leaves the program, with status 51 (interfere.py, line 9)"
    program = interfere(2, 1, "sys.exit(51)", "compare", "1-train", "isolated_run.PATIENCE = 0.2")
    ended = launch(2, program, ALL_REDUCE, GOSSIP, "--data", "few.h5", *FEW, "--seeds", "1", "--out", "c", cwd=few)
    assert ended.returncode != 0 and ended.stderr.count(said) == 1 and "would wait for ever" not in ended.stderr
    wait_for_the_end_of_its_ranks(few / "c")
    run_on(2, SCRIPT, "--resume", "c", cwd=few, check=0)
    first, second = (line["runs"][0]["failed"] for line in results(few / "c")["lines"])
    assert said.removeprefix("ends the job: ") in first and second is None


@pytest.mark.long
def test_another_comparison_is_neither_overwritten_nor_gone_on_with(compare, few, run_on):
    compare(2, ALL_REDUCE, "-n 1: train-gossip", "--seeds", "1", "--out", "c", check=0)
    assert "--out c holds another comparison" in compare(2, GOSSIP, "--seeds", "1", "--out", "c", check=2).stderr
    for ranks, more, words in (
        (2, ["--epochs", "3"], "a comparison keeps its --epochs; leave the option out"),
        (3, ["--seeds", "2"], "'train-allreduce' ran on 2 ranks, and would now run on 3"),
    ):
        assert words in run_on(ranks, SCRIPT, "--resume", "c", *more, cwd=few, check=2).stderr
    path = few / "c" / "1-train-allreduce" / "seed-0"
    (path / "summary.json").unlink()
    (path / "begun").write_text("3\n")  # the job has ended in it again and again
    run_on(2, SCRIPT, "--resume", "c", cwd=few, check=0)
    found = results(few / "c")["lines"]
    assert [line["ranks"] for line in found] == [2, 1]
    assert found[0]["runs"][0]["failed"] == "the job has died 3 times during this run"
    compare(2, GOSSIP, "--seeds", "1", "--out", "c", "--force", check=0)
    assert [line["line"] for line in results(few / "c")["lines"]] == [GOSSIP]
    assert not (path / "summary.json").exists()


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
