"""train-apex as its user starts it: on several ranks; where it diverges; and what it refuses."""

import pytest
from in_process import ends
from odd_chains import LONG, SCRIPT, SMALL, in_a_line
from written_runs import lines, summary


@pytest.mark.parametrize(
    ("ranks", "more", "roles"),
    [
        (3, "", (1, 1, 1)),
        pytest.param(5, "--replays 0 --envs 2 --uniform", (1, 1, 4), marks=pytest.mark.long),
        pytest.param(6, "--learners 2 --replays 2 --actors 2 --train-every 2", (2, 2, 2), marks=pytest.mark.long),
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
    scored = [line for line in lines(folder / "a") if "test_return" in line]
    assert len(scored) == 2 and {"control_bytes", "replay_ratio", "episodes", "environment_steps"} <= scored[0].keys()
    assert not (folder / "a/replay").exists()


@pytest.mark.parametrize("more", ["", "--learners 2 --replays 0", "--uniform --free"])
def test_a_run_that_diverges_ends_everywhere(run_on, folder, more):
    wild = ["--lr", "1e30", "--clip-norm", "0", "--optimizer", "sgd", "--loss", "squared"]
    done = run_on(5, SCRIPT, *LONG, *wild, *more.split(), "--out", "r")
    in_a_line(done, "a smaller --lr", 1)


def test_what_belongs_to_another_run_is_refused(run_on, folder, monkeypatch):
    run_on(3, SCRIPT, *SMALL, "--env-steps", 40, "--evaluate-every", 40, "--out", "a", check=0)
    monkeypatch.chdir(folder)
    plain = [each for each in SMALL if each not in ("--chunk", "4")]
    assert ends("train_dqn", [*plain, "--env-steps", "40", "--evaluate-every", "40", "--out", "d"])[0] == 0
    for given, words in [
        (["--resume", "a", "--env", "apexchains:wide"], "learns from the environment apexchains:chain"),
        (["--resume", "a", "--trust", "a", "--n-step", "2"], "n step is 3, not 2"),
        (["--resume", "a", "--trust", "a", "--model", "mlp:9"], "mlp:9"),
        (["--resume", "d", "--trust", "d"], "--resume names a run of train-dqn"),
        (["--resume", "a/metrics.jsonl", "--trust", "a"], "metrics.jsonl"),
    ]:
        in_a_line(run_on(3, SCRIPT, *given), words)
