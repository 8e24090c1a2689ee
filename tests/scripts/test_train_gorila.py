"""train-gorila as its user starts it: what it writes, how it is stopped and gone on with, environments that raise."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from in_process import ends

from hpcdl.comm.launcher import clean_environment
from hpcdl.runs.checkpoint import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "train_gorila.py"
CHAINS = (Path(__file__).parents[1] / "chains.py").read_text()
SMALL = ["--env", "mychains:chain", "--model", "mlp:8,dueling", "--learning-starts", "20", "--batch-size", "8"]
SMALL += ["--replay", "400", "--episodes", "2", "--evaluate-every", "120", "--seed", "3", "--train-every", "1"]
SMALL += ["--chunk", "2", "--sync-every", "4"]
FAILING = """
import collections, os, signal
from mpi4py import MPI
RANK, WORST = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - 1
TAKEN = collections.Counter()  # steps of this rank in each folder, for the ranks may stay up

class Failing(Chain):
    '''Of the last rank; `when` is the step of the rank at which it raises, or sends itself a signal.'''
    def __init__(self, raises=0, always=False, sends=0):
        super().__init__()
        self.raises, self.always, self.sends = raises, always, sends
    def step(self, action):
        if RANK == WORST:
            TAKEN[os.getcwd()] += 1
            count = TAKEN[os.getcwd()]
            if count == self.raises or (self.always and count >= self.raises > 0):
                raise OSError(f"the emulator at step {count} is gone")
            if count == self.sends and not os.path.exists("sent"):
                open("sent", "w").close()
                os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)

def failing(raises=0, always=False, sends=0):
    return Failing(raises, always, sends)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mychains.py").write_text(CHAINS + FAILING)
    return tmp_path


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def logs(folder):
    return "".join(path.read_text() for path in (folder / "logs").iterdir())


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
        run_on(1, SCRIPTS / "evaluate.py", "a", "--episodes", "2", "--json", "e.json", check=0)
        assert json.loads((folder / "e.json").read_text())["return_mean"] == found["test_return"]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(3, ["--save-replay"]), (4, ["--learners", "1", "--save-replay"]), (3, ["--consistency", "bsp"])],
    ids=["bundles", "apart", "rounds"],
)
def test_a_signal_ends_it_in_good_order_and_it_goes_on(launch, run_on, folder, ranks, more):
    """SIGTERM to one rank, the last; also on another number of ranks, whose memories are filled anew."""
    sends = ["--env", "mychains:failing", "--env-options", "sends=40"]
    stopped = launch(
        ranks, SCRIPT, *SMALL, *sends, *more, "--env-steps", "1200", "--evaluate-every", "1200", "--out", "r"
    )
    assert stopped.returncode == 85 and "--resume r" in stopped.stdout, stopped.stdout + stopped.stderr
    assert (folder / "sent").exists() and "Traceback" not in stopped.stderr
    at = Checkpoint.read(folder / "r").attributes["step"]
    assert 0 < at < 1200
    own = sorted(path.name for path in (folder / "r").glob("replay/*"))
    assert own == ([] if "bsp" in more else ["0001.h5"] if "--learners" in more else ["0001.h5", "0002.h5"])
    run_on(ranks, SCRIPT, "--resume", "r", "--env-steps", "1600", "--evaluate-every", "1600", check=0)
    assert "filled anew" not in logs(folder / "r")
    first = summary(folder / "r")
    per_step = 2 if "bsp" in more else 1
    assert first["steps"] == 1600 / per_step and first["legs"][0]["steps"] == at and len(first["legs"]) == 2
    assert first["episodes"] > 100
    if "bsp" not in more:
        run_on(ranks + 1, SCRIPT, "--resume", "r", "--env-steps", "1900", check=0)
        assert "filled anew" in logs(folder / "r")
        last = summary(folder / "r")
        assert last["steps"] == 1900 and last["episodes"] > first["episodes"]
        assert last["updates"] > first["updates"] and [leg["ranks"] for leg in last["legs"]] == [
            ranks,
            ranks,
            ranks + 1,
        ]


def test_a_signal_to_all(launch, folder):
    """As a batch system sends it: to mpiexec, which hands it on."""
    command = [launch.mpiexec, "-n", "3", sys.executable, str(SCRIPT), *SMALL, "--env-steps", "100000000"]
    with subprocess.Popen(
        [*command, "--evaluate-every", "100000000", "--out", "r"],
        cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        deadline = time.monotonic() + 60
        metrics = folder / "r/metrics.jsonl"
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        said, wrong = job.communicate(timeout=60)
    assert job.returncode == 85 and "--resume r" in said, said + wrong
    assert Checkpoint.read(folder / "r").attributes["step"] > 0


def test_a_time_limit(run_on, folder):
    given = [*SMALL, "--env-steps", "100000000", "--evaluate-every", "100000000", "--time-limit", "1", "--out", "t"]
    done = run_on(4, SCRIPT, *given, "--learners", "1", check=0)
    assert summary(folder / "t")["stopped"] == "time limit" and "time limit" in done.stdout


@pytest.mark.parametrize("more", [[], ["--learners", "1"], ["--consistency", "bsp"]], ids=["bundles", "apart", "bsp"])
def test_an_environment_that_raises_once_is_made_anew(run_on, folder, more):
    raises = ["--env", "mychains:failing", "--env-options", "raises=30"]
    run_on(3, SCRIPT, *SMALL, *raises, *more, "--env-steps", "480", "--out", "r", check=0)
    found = summary(folder / "r")
    assert found["environment_restarts"] == 1 and found["stopped"] == "finished"


@pytest.mark.parametrize("more", [[], ["--learners", "1"], ["--consistency", "bsp"]], ids=["bundles", "apart", "bsp"])
def test_one_that_raises_three_times_in_a_row_ends_the_run(launch, folder, more):
    """On one rank: it says which environment, and what it has raised where; all ranks are gone."""
    raises = ["--env", "mychains:failing", "--env-options", "raises=30,always=True"]
    done = launch(3, SCRIPT, *SMALL, *raises, *more, "--env-steps", "100000", "--out", "r", timeout=40)
    lines = [line for line in done.stderr.splitlines() if "mychains" in line]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert "has raised three times in a row: OSError: the emulator at step 32 is gone (mychains.py, line" in lines[0]
    assert not (folder / "r/summary.json").exists() and "Traceback" not in done.stderr


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
