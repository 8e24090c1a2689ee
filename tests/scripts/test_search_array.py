"""search --only: jobs that do one trial each, of the same search, beside each other."""

import csv
import fcntl
import json
import threading

from searched import LR, RANDOM, TRAINING, events, scores

GIVEN = [*RANDOM, "--out", "s"]


def test_many_jobs_bring_what_one_does(search, few, undisturbed):
    """The first two at once; then one by one, and the rest by a job that resumes; a torn line is somebody who died."""
    beside = [threading.Thread(target=search, args=(1, *GIVEN, "--only", str(i)), kwargs={"check": 0}) for i in (4, 1)]
    for each in beside:
        each.start()
    for each in beside:
        each.join()
    with (few / "s" / "journal.jsonl").open("a") as file:
        file.write('{"event": "begin", "trial": 2, "ru')
    done = search(3, *GIVEN[:-2], "--only", "0", "--out", "s", "--seeds", "1", "--ranks-per-trial", "1", check=0)
    assert done.stderr == ""
    assert {trial: undisturbed[trial, 0, 0] for trial in (0, 1, 4)} == {
        key[0]: v for key, v in scores(few / "s").items()
    }
    rows = {int(row["trial"]): row["status"] for row in csv.DictReader((few / "s" / "trials.csv").open())}
    assert rows == {0: "ended", 1: "ended", 4: "ended"}
    assert {each["trial"] for each in events(few / "s", "leg")} == {0, 1, 4}
    search(2, "--resume", "s", "--progress", "none", check=0)
    assert scores(few / "s") == undisturbed and len(events(few / "s", "begin")) == 6


def test_what_was_interrupted_goes_on_and_what_has_ended_is_left(search, few, undisturbed):
    search(1, *GIVEN, "--only", "3", check=0)
    path = few / "s" / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))  # killed before it has ended; the run itself is done
    search(1, *GIVEN, "--only", "3", check=0)
    assert [each["trial"] for each in events(few / "s", "again")] == [3]
    search(1, *GIVEN, "--only", "3", check=0)
    assert scores(few / "s") == {(3, 0, 0): undisturbed[3, 0, 0]} and len(events(few / "s", "begin")) == 1


def test_a_trial_that_fails_is_status_1(search, few):
    limit = [*TRAINING, *LR, "--pretend-compute", "30", "--trial-limit", "0.05", "--trials", "2", "--only", "1"]
    search(1, *limit, "--out", "late", check=1)
    assert [each["failed"] for each in events(few / "late")] == ["it took longer than --trial-limit 0.05"]


def test_what_cannot_be_done_is_one_line(search, few):
    search(1, *GIVEN, "--only", "0", check=0)
    search(1, *RANDOM, "--out", "whole", check=0)
    (few / "other").mkdir()
    (few / "other" / "config.yaml").write_text("{}\n")
    trial = few / "s" / "trials" / "0002"
    trial.mkdir()
    with (trial / ".lock").open("w") as one, (few / "whole" / ".lock").open("w") as all_of_it:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(all_of_it, fcntl.LOCK_EX)
        for arguments, said in (
            ([*GIVEN, "--only", "2"], f"another job is writing to {trial.relative_to(few)}"),
            ([*GIVEN, "--only", "1", "--seed", "9"], "s holds the journal of another search: its seed is 0, not 9"),
            (["--resume", "s", "--only", "1"], "--only: the jobs of a search share its folder: give --out"),
            ([*GIVEN[:-2], "--out", "whole", "--only", "1"], "another job is writing to whole"),
            ([*GIVEN[:-2], "--out", "other", "--only", "1"], "--out other holds another run"),
        ):
            done = search(1, *arguments, check=2)
            assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    with (few / "s" / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert "another job is writing to s" in search(1, "--resume", "s", check=2).stderr
    assert json.loads((few / "s" / "journal.jsonl").read_text().splitlines()[0])["settings"]["trials"] == 6
