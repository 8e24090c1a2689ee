"""train-gorila as its user starts it: what it writes, and what it refuses."""

import json

import pytest
from failing_chains import SCRIPT, SCRIPTS, SMALL
from written_runs import lines, summary

APART = {3: ["--learners", "1"], 5: ["--actors", "2", "--learners", "2"]}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), 5])
def test_a_run_and_what_it_writes(run_on, folder, ranks):
    given = [*SMALL, "--env-steps", "240", "--out", "a", *APART.get(ranks, [])]
    printed = run_on(ranks, SCRIPT, *given, check=0).stdout
    found = summary(folder / "a")
    assert found["strategy"] == "gorila" and found["environment_steps"] == found["steps"] == 240
    assert "environment step 240/240" in printed and f"test return {found['test_return']:.4g}" in printed
    wanted = "updates episodes return_mean replay_ratio environment_restarts discarded_outliers updates_per_second"
    wanted += " staleness_histogram bytes_by_kind_per_rank discarded_per_rank parameters_bytes gradients_bytes bundles"
    assert set(wanted.split()) <= found.keys()
    kinds = found["bytes_by_kind_per_rank"]
    assert [sum(each.values()) for each in kinds] == found["bytes_sent_per_rank"] and len(kinds) == ranks
    assert bool(sum(each["transitions"] for each in kinds)) == (ranks > 2)
    assert (found["servers"], found["learners"], found["actors"]) == {2: (1, 1, 1), 3: (1, 1, 1), 5: (1, 2, 2)}[ranks]
    told = [line for line in lines(folder / "a") if "test_return" in line]
    assert [line["environment_steps"] for line in told] == [120, 240]
    assert 0 < told[0]["gradients_bytes"] < told[1]["gradients_bytes"] <= found["gradients_bytes"]
    if ranks == 5:
        run_on(1, SCRIPTS / "evaluate.py", "a", "--trust", "a", "--episodes", "2", "--json", "e.json", check=0)
        assert json.loads((folder / "e.json").read_text())["return_mean"] == found["test_return"]
