"""train-gorila as its user starts it: what it writes, and what it refuses."""

import json

import pytest
from failing_chains import MODULE, SCRIPT, SCRIPTS, SMALL, summary
from in_process import ends


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mychains.py").write_text(MODULE)
    return tmp_path


APART = {3: ["--learners", "1"], 5: ["--actors", "2", "--learners", "2"]}


@pytest.mark.parametrize("ranks", [2, 3, 5])
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
    lines = [json.loads(line) for line in (folder / "a/metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if "test_return" in line]
    assert [line["environment_steps"] for line in told] == [120, 240]
    assert 0 < told[0]["gradients_bytes"] < told[1]["gradients_bytes"] <= found["gradients_bytes"]
    if ranks == 5:
        run_on(1, SCRIPTS / "evaluate.py", "a", "--trust", "a", "--episodes", "2", "--json", "e.json", check=0)
        assert json.loads((folder / "e.json").read_text())["return_mean"] == found["test_return"]


REFUSED = {
    "actors in rounds": (["--consistency", "bsp", "--actors", "1"], "--consistency bsp is for bundles"),
    "servers": (["--servers", "0"], "--servers must be greater than 0"),
    "syncs": (["--sync-every", "0"], "--sync-every must be greater than 0"),
    "chunks": (["--chunk", "0"], "--chunk must be greater than 0"),
    "actors": (["--actors", "-1"], "--actors"),
    "outliers": (["--outliers", "-1"], "--outliers"),
    "staleness": (["--max-staleness", "-1"], "--max-staleness"),
    "a consistency": (["--consistency", "ssp"], "ssp"),
    "data": (["--partition", "shards:2"], "--partition: this program learns in an environment"),
    "one rank": ([], "no bundles are left over: 1 parameter server of 1 rank; start at least 2 ranks"),
    "one rank, with actors": (["--actors", "2"], "1 parameter server, 1 learner of 1 rank; start at least 4 ranks"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_bad_options_are_refused_in_a_line(alone, folder, monkeypatch, what):
    more, words = REFUSED[what]
    monkeypatch.chdir(folder)
    status, said = ends("train_gorila", [*SMALL, *more, "--out", "r"])
    assert status == 2 and words in said and len(said.splitlines()) == 1, said
    assert not (folder / "r").exists()


TOGETHER = {
    "too few ranks": (
        ["--servers", "2", "--learners", "2"],
        "no actors are left over: 2 parameter servers, 2 learners",
    ),
    "another number": (["--actors", "1", "--learners", "1"], "--actors 1, --learners 1 and 1 parameter server are 3"),
    "more learners": (["--learners", "2"], "--learners 2: each needs an actor, and there are 1"),
    "a batch": (["--batch-size", "390"], "--batch-size 390: the replay memories of 3 ranks never hold more than"),
    "streams": (["--envs", "40"], "never hold more than"),
    "a start": (["--learning-starts", "390"], "--learning-starts 390: the replay memories of 3 ranks never hold"),
    "a short evaluation": (["--consistency", "bsp", "--evaluate-every", "2"], "at least 3 environment steps"),
    "memory": (["--replay", str(2**40)], "--replay"),
    "an environment": (["--env", "mychains:nothing"], "nothing"),
}


@pytest.mark.parametrize("what", sorted(TOGETHER))
def test_what_does_not_go_together_is_refused_in_a_line(run_on, folder, what):
    more, words = TOGETHER[what]
    done = run_on(4, SCRIPT, *SMALL, *more, "--out", "r", check=2)
    assert words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (folder / "r").exists()
