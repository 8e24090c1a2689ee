"""A search that is stopped, killed or gone on with: each trial ends once, and with what it would have brought."""

import fcntl
import json
import shutil
import signal

import pytest
from searched import RANDOM, events, scores, wait_for_the_end_of_its_ranks


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_stopped_or_killed_it_goes_on_on_other_ranks(launch, search, few, interfere, undisturbed, number):
    """In two trials at a time, of which the one that is signalled has a checkpoint; both go on."""
    program = interfere(7, None, f"os.kill(os.getpid(), {int(number)})", "search", "/0002/")
    ended = launch(2, program, *RANDOM[:-2], "--checkpoint-every", "3", "--out", "s", cwd=few)
    assert (ended.returncode == 85) == (number == signal.SIGUSR1) and ended.returncode != 0
    wait_for_the_end_of_its_ranks(few / "s")
    before = scores(few / "s")
    assert (2, 0, 0) not in before and len(before) < 6
    if number == signal.SIGUSR1:
        assert "stopped by a signal; go on with --resume s\n" in ended.stdout
        stopped = [each for each in events(few / "s", "begin") if (each["trial"], 0, 0) not in before]
        for each in stopped:  # also the one on the rank that had no signal
            path = few / "s" / "trials" / f"{each['trial']:04d}" / "seed-0"
            assert (path / "checkpoint.h5").exists() and not (path / "begun").exists()
    search(3, "--resume", "s", check=0)
    assert scores(few / "s") == undisturbed
    summary = json.loads((few / "s" / "trials" / "0002" / "seed-0" / "summary.json").read_text())
    assert len(summary["legs"]) == 2 and summary["legs"][0]["steps"] in range(6, 10)
    assert len(events(few / "s", "leg")) == 2 and events(few / "s", "again")


def test_the_time_limit_ends_it_and_what_is_over_is_not_done_again(search, few, undisturbed):
    done = search(2, *RANDOM[:-2], "--pretend-compute", "5", "--time-limit", "0.2", "--out", "s", check=85)
    assert "the time limit is reached; go on with --resume s" in done.stdout
    before = scores(few / "s")
    assert len(before) < 6
    search(2, "--resume", "s", "--progress", "none", check=0)
    after = scores(few / "s")
    assert after == undisturbed and {key: after[key] for key in before} == before
    search(1, "--resume", "s", check=0)
    assert len(events(few / "s", "begin")) == 6


def test_a_trial_in_which_the_job_ends_again_and_again_is_given_up(search, few):
    search(1, *RANDOM, "--out", "s", check=0)
    lines = (few / "s" / "journal.jsonl").read_text().splitlines(keepends=True)
    kept = [each for each in lines if not ('"end"' in each and '"trial": 2,' in each)]
    (few / "s" / "journal.jsonl").write_text("".join(kept[: kept.index(lines[-1])] if lines[-1] in kept else kept))
    (few / "s" / "trials" / "0002" / "seed-0" / "begun").write_text("3\n")
    search(2, "--resume", "s", check=0)
    failed = {each["trial"]: each["failed"] for each in events(few / "s")}
    assert [failed[i] for i in (0, 1, 3, 4, 5)] == [None] * 5 and "job has died 3 times" in failed[2]


def test_another_search_is_not_overwritten_nor_gone_on_with(search, few):
    search(2, *RANDOM, "--out", "whole", check=0)
    done = search(2, *RANDOM, "--out", "whole", check=2)
    assert "--out whole holds another search" in done.stderr
    done = search(2, "--resume", "whole", "--trials", "7", check=2)
    assert "the journal of another search" in done.stderr and "trials" in done.stderr
    done = search(2, *RANDOM[:-4], "--trials", "2", "--out", "whole", "--force", check=0)
    assert len(scores(few / "whole")) == 2 and not (few / "whole" / "trials" / "0003").exists()
    shutil.copytree(few / "whole" / "trials" / "0001" / "seed-0", few / "run")
    assert "--out run holds another run" in search(1, *RANDOM, "--out", "run", check=2).stderr
    with (few / "whole" / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = search(1, "--resume", "whole", check=2)
        assert "another job is writing to whole" in done.stderr
