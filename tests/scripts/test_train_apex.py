"""train-apex as its user starts it: on several ranks, stopped by a signal to any of them, gone on with, and refused."""

import json
from pathlib import Path

import pytest
from in_process import ends

from hpcdl.runs.checkpoint import Checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_apex.py"
CHAINS = (Path(__file__).parents[1] / "chains.py").read_text()
ODD = """
import os, signal
from pathlib import Path
from mpi4py import MPI

class Odd(Chain):
    '''At step `at` of rank `rank`, `often` times in all: raises, or sends the rank `to` a signal.'''
    def __init__(self, rank, at, often=1, to=-1):
        super().__init__()
        self.mine, self.at_step, self.often, self.to, self.count = MPI.COMM_WORLD.rank == rank, at, often, to, 0
        Path(f"pid-{MPI.COMM_WORLD.rank}").write_text(str(os.getpid()))
    def step(self, action):
        self.count += 1
        before = len([*Path().glob("happened-*")])
        if self.mine and before < self.often and (before or self.count >= self.at_step):
            Path(f"happened-{before}").touch()
            if self.to < 0:
                raise ValueError("the arm is stuck")
            os.kill(int(Path(f"pid-{self.to}").read_text()), signal.SIGTERM)
        return super().step(action)

def odd(rank, at, often=1, to=-1): return Odd(rank, at, often, to)
class Wide(Chain):
    def shown(self): return np.zeros(7, np.float32)
def wide(): return Wide()
"""
SMALL = (
    "--env apexchains:chain --model mlp:8 --learning-starts 20 --batch-size 8 --replay 200 --train-every 1 --chunk 4"
)
SMALL = [*f"{SMALL} --episodes 2 --evaluate-every 100 --seed 3".split()]
LONG = [*SMALL, "--env-steps", "10000000", "--evaluate-every", "1000000"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "apexchains.py").write_text(CHAINS + ODD)
    return tmp_path


def odd(**settings):
    return ["--env", "apexchains:odd", "--env-options", ",".join(f"{name}={value}" for name, value in settings.items())]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def so_far(folder):
    """Of a checkpoint: after which step it is, and how many environment steps and updates there were by then."""
    found = Checkpoint.read(folder)
    return found.attributes["step"], found.vectors["actor/totals"][0], found.attributes["updates"]


def in_a_line(done, words, status=2):
    lines = [line for line in done.stderr.splitlines() if "goes on from a run of" not in line]
    assert done.returncode == status and len(lines) == 1 and words in lines[0], done.stdout + done.stderr


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


@pytest.mark.parametrize(
    ("ranks", "to", "kept", "later"),
    [
        pytest.param(3, 1, ["--save-replay"], 3, id="to the memory, which is kept"),
        pytest.param(3, 2, [], 5, id="to an actor"),
        pytest.param(5, 3, ["--save-replay"], 6, id="to one of several", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_to_one_rank_ends_it_and_it_goes_on(launch, run_on, folder, ranks, to, kept, later):
    """All end, with 85; as many actors go on, or more."""
    stopped = launch(ranks, SCRIPT, *LONG, *odd(rank=ranks - 1, at=60, to=to), *kept, "--out", "r")
    assert stopped.returncode == 85 and "--resume r" in stopped.stdout, stopped.stdout + stopped.stderr
    assert "Traceback" not in stopped.stderr
    at, seen, updates = so_far(folder / "r")
    assert 20 < at < 100_000 and seen >= at and updates == at - 19
    assert (folder / "r/replay/0001.h5").exists() == bool(kept)
    run_on(later, SCRIPT, "--resume", "r", "--env-steps", at + 100, check=0)
    found = summary(folder / "r")
    assert [leg["steps"] for leg in found["legs"]] == [at, 100] and found["stopped"] == "finished"
    assert [leg["ranks"] for leg in found["legs"]] == [ranks, later]
    assert found["episodes"] > at / 20 and found["environment_steps"] >= seen + 100
    # A memory that was kept is there at once, for as many copies of the environment; else it is filled anew first.
    assert found["updates"] - updates == (100 if kept and ranks == later else 81)
    again = run_on(later, SCRIPT, "--resume", "r", check=0).stdout
    assert "nothing is left to do" in again


def test_an_environment_that_raises_is_made_anew(run_on, folder):
    """Once, on one actor; the others do not notice."""
    run_on(5, SCRIPT, *SMALL, *odd(rank=3, at=20), "--env-steps", 200, "--out", "r", check=0)
    assert summary(folder / "r")["environment_restarts"] == 1 and (folder / "happened-0").exists()


def test_one_that_raises_three_times_in_a_row_ends_the_run(launch, folder):
    done = launch(3, SCRIPT, *LONG, *odd(rank=2, at=60, often=3), "--out", "r")
    assert done.returncode == 1 and done.stderr.count("three times in a row") == 1, done.stderr
    assert "environment 0, episode" in done.stderr and "the arm is stuck" in done.stderr


@pytest.mark.parametrize("more", ["", "--learners 2 --replays 0", "--uniform --free"])
def test_a_run_that_diverges_ends_everywhere(run_on, folder, more):
    wild = ["--lr", "1e30", "--clip-norm", "0", "--optimizer", "sgd", "--loss", "squared"]
    done = run_on(5, SCRIPT, *LONG, *wild, *more.split(), "--out", "r")
    in_a_line(done, "a smaller --lr", 1)


def test_a_time_limit(run_on, folder):
    done = run_on(5, SCRIPT, *LONG, "--time-limit", 1, "--out", "t", check=0)
    assert summary(folder / "t")["stopped"] == "time limit" and "time limit" in done.stdout


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
        (["--resume", "a", "--n-step", "2"], "n step is 3, not 2"),
        (["--resume", "a", "--model", "mlp:9"], "mlp:9"),
        (["--resume", "d"], "this was to go on from a run of train-dqn"),
        (["--resume", "a/metrics.jsonl"], "metrics.jsonl"),
    ]:
        in_a_line(run_on(5, SCRIPT, *given), words)
