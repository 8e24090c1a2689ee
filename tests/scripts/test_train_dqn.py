"""train-dqn as its user starts it: what it writes and prints, how it ends and goes on, what it refuses; evaluate."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from in_process import ends
from written_runs import lines, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "train_dqn.py"
CHAINS = (Path(__file__).parents[1] / "chains.py").read_text()
SMALL = ["--env", "mychains:chain", "--model", "mlp:8,dueling", "--learning-starts", "20", "--batch-size", "8"]
SMALL += ["--replay", "200", "--episodes", "2", "--evaluate-every", "100", "--seed", "3", "--train-every", "1"]
SIGNALS = """
import os, signal
class Signalling(Chain):
    count = 0
    def step(self, action):
        Signalling.count += 1
        if Signalling.count == 130 and not os.path.exists("signalled"):
            open("signalled", "w").close()
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().step(action)
    def render(self):
        picture = np.zeros((8, 8 * STATES, 3), np.uint8)
        picture[:, 8 * min(max(self.at, 0), STATES - 1) :][:, :8] = 255
        return picture
def signalling(): return Signalling()
def wide(): return Wide()
class Wide(Chain):
    def shown(self): return np.zeros(7, np.float32)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mychains.py").write_text(CHAINS + SIGNALS)
    return tmp_path


def test_a_run_and_what_it_has_learned(run_on, folder):
    printed = run_on(1, SCRIPT, *SMALL, "--env-steps", "200", "--out", "a", check=0).stdout
    found = summary(folder / "a")
    assert found["strategy"] == "dqn" and found["env"] == "mychains:chain" and found["steps"] == 200
    assert "environment step 200/200" in printed and f"test return {found['test_return']:.4g}" in printed
    assert "training episodes" in printed and "200 of 1 environment step, with" in printed
    wanted = "environment_steps updates episodes return_mean return_min return_max replay_ratio replay_size"
    wanted += " environment_steps_per_second updates_per_second environment_restarts test_return_min test_return_max"
    assert set(wanted.split()) <= found.keys() and found["options"]["n_step"] == 3
    assert not {"--placement", "--data-servers"} & set(run_on(1, SCRIPT, "--help-all", check=0).stdout.split())
    steps = [line for line in lines(folder / "a") if "test_return" not in line]
    assert [line["environment_steps"] for line in steps] == list(range(1, 201))
    assert {line["train_loss"] is None for line in steps[:20]} == {True} and steps[-1]["train_loss"] > 0

    trust = ["--trust", "mychains:chain", "--episodes", "2", "--json", "e.json"]
    said = run_on(1, SCRIPTS / "evaluate.py", "a", *trust, check=0).stdout
    scored = json.loads((folder / "e.json").read_text())
    assert "2 episodes of mychains:chain" in said and scored["return_mean"] == found["test_return"]
    assert len(scored["returns"]) == 2 and scored["step"] == 200


@pytest.mark.long
def test_a_signal_ends_it_in_good_order_and_it_goes_on(launch, folder):
    long = [*SMALL, "--env-steps", "300", "--save-replay"]
    launch(1, SCRIPT, *long, "--out", "whole", check=0)
    (folder / "mychains.py").write_text((folder / "mychains.py").read_text() + "\nchain = signalling\n")
    stopped = launch(1, SCRIPT, *long, "--out", "r")
    assert stopped.returncode == 85 and "--resume r" in stopped.stdout, stopped.stderr
    at = Checkpoint.read(folder / "r").attributes["step"]
    assert 100 <= at < 300 and (folder / "signalled").exists()  # some of the 130 steps are of an evaluation
    launch(1, SCRIPT, "--resume", "r", "--trust", "r", check=0)
    whole, gone_on = (Checkpoint.read(folder / name).vectors["parameters"] for name in ("whole", "r"))
    np.testing.assert_array_equal(gone_on, whole)
    assert [leg["steps"] for leg in summary(folder / "r")["legs"]] == [at, 300 - at]
    again = launch(1, SCRIPT, "--resume", "r", "--trust", "r", check=0).stdout
    assert "nothing is left to do" in again

    if importlib.util.find_spec("imageio"):
        assert_seen(launch, folder)


def assert_seen(launch, folder):
    """What was learned is seen to move."""
    import imageio.v2 as imageio

    given = "r", "--trust", "r", "--episodes", "1", "--render", "r.gif"
    said = launch(1, SCRIPTS / "evaluate.py", *given, check=0).stdout
    with imageio.get_reader(folder / "r.gif") as file:
        frames = np.array([np.asarray(frame)[..., :3] for frame in file])
    assert f"r.gif: return {summary(folder / 'r')['test_return_min']:g}" in said
    assert frames.shape[1:] == (8, 40, 3) and len(frames) > 1 and (frames[0] != frames[-1]).any()
    assert not [each for each in os.listdir(folder) if each.endswith(".part") or each.startswith(".r")]


def test_what_does_not_belong_to_it_is_refused(alone, folder, monkeypatch):
    monkeypatch.chdir(folder)
    unseen = "cannot be shown" if importlib.util.find_spec("imageio") else "imageio"
    assert ends("train_dqn", [*SMALL, "--env-steps", "40", "--evaluate-every", "40", "--out", "a"])[0] == 0
    assert ends("train_sequential", ["--epochs", "1", "--model", "softmax", "--out", "d"])[0] == 0
    for program, given, words in [
        ("train_dqn", ["--resume", "a", "--env", "mychains:wide"], "learns from the environment mychains:chain"),
        ("train_dqn", ["--resume", "a", "--n-step", "2"], "a/config.yaml names mychains:chain (env)"),
        ("train_dqn", ["--resume", "a", "--trust", "a", "--n-step", "2"], "n step is 3, not 2"),
        ("train_dqn", ["--resume", "d"], "--resume names a run of train-sequential"),
        ("train_sequential", ["--resume", "a"], "--resume names a run of train-dqn"),
        ("predict", ["a", "rows.csv", "--out", "p.csv"], "has learned to act in mychains:chain"),
        ("evaluate", ["a", "--predict", "p.csv"], "--predict: a has learned to act"),
        ("evaluate", ["d", "--episodes", "3"], "--episodes: d has learned from data"),
        ("evaluate", ["a", "--render", "a.avi"], ".gif or .mp4"),
        ("evaluate", ["a"], "a names mychains:chain (env)"),
        ("evaluate", ["a", "--trust", "a", "--render", "a.gif"], unseen),
    ]:
        status, said = ends(program, given)
        ours = [line for line in said.splitlines() if "goes on from a run of" not in line]
        assert status == 2 and words in said and len(ours) == 1, (given, said)
    assert not (folder / "p.csv").exists() and not (folder / "a.gif").exists()
