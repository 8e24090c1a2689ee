"""train-apex as its user starts it: on several ranks; and where it diverges."""

import json

import pytest
from odd_chains import LONG, SCRIPT, SMALL, in_a_line
from written_runs import summary


@pytest.mark.parametrize(
    ("ranks", "more", "roles"),
    [
        (3, "", (1, 1, 1)),
        (5, "--replays 0 --envs 2 --uniform", (1, 1, 4)),
        (6, "--learners 2 --replays 2 --actors 2 --train-every 2", (2, 2, 2)),
    ],
)
def test_a_run_and_what_it_says(run_on, folder, ranks, more, roles):
    printed = run_on(ranks, SCRIPT, *SMALL, *more.split(), "--env-steps", 200, "--out", "a", check=0).stdout
    found = summary(folder / "a")
    assert found["strategy"] == "apex" and found["ranks"] == ranks and found["workers"] == roles[0]
    assert (found["learners"], found["replays"], found["actors"]) == roles
    assert found["steps"] * found["environment_steps_per_step"] == 200 <= found["environment_steps"]
    assert f"test return {found['test_return']:.4g}" in printed and "training episodes" in printed
    wanted = "updates episodes return_mean replay_ratio learner_waited_seconds environment_steps_per_second"
    wanted += " updates_per_second environment_restarts test_return_min bytes_by_kind_per_rank transitions_bytes"
    assert set(wanted.split()) <= found.keys()
    lines = [json.loads(line) for line in (folder / "a/metrics.jsonl").read_text().splitlines()]
    scored = [line for line in lines if "test_return" in line]
    assert len(scored) == 2 and {"control_bytes", "replay_ratio", "episodes", "environment_steps"} <= scored[0].keys()
    assert not (folder / "a/replay").exists()


@pytest.mark.parametrize("more", ["", "--learners 2 --replays 0", "--uniform --free"])
def test_a_run_that_diverges_ends_everywhere(run_on, folder, more):
    wild = ["--lr", "1e30", "--clip-norm", "0", "--optimizer", "sgd", "--loss", "squared"]
    done = run_on(5, SCRIPT, *LONG, *wild, *more.split(), "--out", "r")
    in_a_line(done, "a smaller --lr", 1)
