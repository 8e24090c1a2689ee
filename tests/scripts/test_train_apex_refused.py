"""train-apex refuses in a line what cannot be."""

import pytest
from in_process import ends
from odd_chains import CHAINS, ODD, SCRIPT, SMALL, in_a_line


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "apexchains.py").write_text(CHAINS + ODD)
    return tmp_path


ALONE = {
    "too few ranks": ([], "no actors are left over: 1 learner, 1 replay of 1 rank; start at least 3 ranks"),
    "no learner": (["--learners", "0"], "--learners must be greater than 0"),
    "fewer memories than none": (["--replays", "-1"], "--replays"),
    "no chunk": (["--chunk", "0"], "--chunk must be greater than 0"),
    "no broadcasts": (["--broadcast-every", "0"], "--broadcast-every must be greater than 0"),
    "no number": (["--epsilon-alpha", "nan"], "--epsilon-alpha"),
}
TOGETHER = {
    "as many roles as ranks": (["--learners", "4"], "no actors are left over: 4 learners, 1 replay of 5 ranks"),
    "other actors": (["--actors", "1"], "--actors 1, --learners 1 and --replays 1 are 3 ranks, not 5"),
    "more memories than actors": (["--replays", "3"], "3 ranks that remember need as many actors"),
    "a batch for each learner": (["--learners", "2", "--replays", "0", "--batch-size", "1"], "2 learners share it"),
    "a replay too small for its shards": (
        ["--learners", "2", "--replays", "0", "--replay", "200", "--learning-starts", "195"],
        "the replay memories of 2 ranks never hold more",
    ),
    "an environment that is not there": (["--env", "nothing:here"], "nothing"),
    "a network": (["--model", "softmax"], "mlp:128,128,dueling"),
    "its option": (["--env-options", "size=3"], "size"),
    "nothing to resume": (["--resume", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize("what", sorted(ALONE))
def test_bad_options_are_refused_in_a_line(alone, folder, monkeypatch, what):
    more, words = ALONE[what]
    monkeypatch.chdir(folder)
    status, said = ends("train_apex", [*SMALL, *more, "--out", "r"])
    assert status == 2 and words in said and len(said.splitlines()) == 1, said
    assert not (folder / "r").exists()


def test_what_ranks_together_cannot_do_is_refused_in_a_line(run_on, folder):
    for more, words in TOGETHER.values():
        in_a_line(run_on(5, SCRIPT, *SMALL, *more, "--out", "r"), words)
        assert not (folder / "r").exists()


def test_what_belongs_to_another_run_is_refused(run_on, folder, monkeypatch):
    run_on(5, SCRIPT, *SMALL, "--env-steps", 40, "--evaluate-every", 40, "--out", "a", check=0)
    monkeypatch.chdir(folder)
    plain = [each for each in SMALL if each not in ("--chunk", "4")]
    assert ends("train_dqn", [*plain, "--env-steps", "40", "--evaluate-every", "40", "--out", "d"])[0] == 0
    for given, words in [
        (["--resume", "a", "--env", "apexchains:wide"], "learns from the environment apexchains:chain"),
        (["--resume", "a", "--trust", "a", "--n-step", "2"], "n step is 3, not 2"),
        (["--resume", "a", "--trust", "a", "--model", "mlp:9"], "mlp:9"),
        (["--resume", "d", "--trust", "d"], "this was to go on from a run of train-dqn"),
        (["--resume", "a/metrics.jsonl", "--trust", "a"], "metrics.jsonl"),
    ]:
        in_a_line(run_on(5, SCRIPT, *given), words)
