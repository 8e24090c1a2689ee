"""train-apex refuses in a line what cannot be."""

from in_process import ends
from odd_chains import SCRIPT, SMALL, in_a_line


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
