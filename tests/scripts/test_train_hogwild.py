"""The program as its user starts it: what it reaches and writes, how it is gone on with, and what it refuses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from written_runs import summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.models import for_data
from hpcdl.strategies.hogwild import HogwildOptions

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_hogwild.py"
SMALL = ["--data", "digits", "--epochs", "3", "--seed", "1"]


@pytest.mark.parametrize(
    "ranks, more",
    [pytest.param(2, ["--shared"], marks=pytest.mark.long), (3, ["--join-every", "5", "--exchange-every", "10"])],
)
def test_digits_are_learned(ranks, more, run_on, tmp_path):
    printed = run_on(ranks, SCRIPT, "--epochs", "10", "--threads", "2", *more, "--out", "a", check=0)
    found = summary(tmp_path / "a")
    assert found["strategy"] == "hogwild" and found["threads"] == 2 and not found["repeatable"]
    assert found["updates"] == 10 * 1438 and found["updates_per_second"] > 0
    assert ranks == 3 or 0 <= found["collisions"] <= 1
    assert found["update_staleness"]["max"] >= 0
    assert found["test_accuracy"] >= 0.93 and found["vectors"] == (3 if ranks == 3 else 1)
    if more == ["--shared"]:
        assert found["bytes_sent_per_rank"] == [0, 0] and found["replicas_agree"]
    assert found["exchange_every"] == (10 if ranks == 3 else 0)
    assert "locking none, not repeatable" in printed.stdout and ("collisions" in printed.stdout) == (ranks == 2)


def test_servers_and_gossip(run_on, tmp_path):
    run_on(3, SCRIPT, *SMALL, "--join", "servers", "--out", "s", check=0)
    found = summary(tmp_path / "s")
    assert found["updates"] == 3 * 1438 and found["join"] == "servers" and found["test_accuracy"] > 0.85
    run_on(3, SCRIPT, *SMALL, "--join", "gossip", "--topology", "ring", "--out", "g", check=0)
    found = summary(tmp_path / "g")
    assert found["topology"] == "ring" and found["consensus_distance"] > 0 and found["test_accuracy"] > 0.85


def rates(options, data, steps):
    """The learning rates of the first rounds."""
    options = HogwildOptions(**options)
    model = for_data("softmax", data, "float32")
    optimizer = options.make_optimizer(model, 1, data)
    return [optimizer.schedule(step) for step in range(steps)]


def test_the_rate_of_a_round_is_that_of_its_first_update():
    data = open_data("digits")
    assert data.examples == 1438
    falls = rates({"lr": 1.0, "schedule": "step:every=1,factor=0.5"}, data, 21)  # 10 rounds of 144 examples
    assert falls == [1] * 10 + [0.5] * 10 + [0.25]
    inverse = rates({"lr": 1.0, "schedule": "1/t:decay=1", "batch_size": 2, "round_size": 100}, data, 16)
    assert inverse[:3] == [1, 1 / 51, 1 / 101] and inverse[15] == 1 / (1 + 719)  # an epoch has 719 updates


def test_no_memory_to_share(run_on, tmp_path):
    program = tmp_path / "full.py"
    program.write_text(
        "import sys\n"
        "from hpcdl.scripts import train_hogwild\n"
        "from hpcdl.parallel import shared_vector\n"
        "share, shared_vector.share = shared_vector.share, lambda *_: None\n"
        "try:\n"
        "    train_hogwild.main(sys.argv[1:])\n"
        "finally:\n"  # the ranks stay up for other tests
        "    shared_vector.share = share\n"
    )
    done = run_on(2, program, *SMALL, "--shared", "--out", "a")
    assert done.returncode == 2 and "no memory that its ranks could share" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "a").exists()


def test_more_threads_than_cores_are_warned_of(run_on):
    done = run_on(1, SCRIPT, *SMALL, "--threads", str(1 + len(os.sched_getaffinity(0))), "--out", "none", check=0)
    assert "take turns" in done.stdout + done.stderr


@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts a program of its own")
@pytest.mark.parametrize(
    "threads, locking, every",
    [(1, "atomic", 0), *(pytest.param(3, *how, marks=pytest.mark.long) for how in [("round-robin", 0), ("none", 64)])],
)
def test_interrupted_in_the_midst_of_a_round_it_keeps_the_last_whole_one(threads, locking, every, run_on, tmp_path):
    (tmp_path / "much.py").write_text(
        "import numpy as np\n"
        "def data():\n"
        "    x = np.random.default_rng(0).standard_normal((20_000, 64)).astype(np.float32)\n"
        "    return x, (x[:, 0] > 0).astype(int)\n"
    )
    options = ["--data", "much:data", "--model", "logistic", "--round-size", "20000", "--threads", str(threads)]
    options += ["--locking", locking, "--exchange-every", str(every), "--trace", "0", "--evaluate-every", "1000"]
    how = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, SCRIPT, *options, "--epochs", "100000", "--out", "a", "--budget", "seconds=100"]
    started = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, **how)
    metrics = tmp_path / "a" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert started.poll() is None, started.stdout.read()
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    printed = started.communicate(timeout=30)[0]
    assert started.returncode == 85 and "stopped by a signal after step" in printed
    found = Checkpoint.read(tmp_path / "a")
    steps = found.attributes["step"]
    assert steps >= 1 and found.attributes["examples"] == 20_000 * steps
    if threads == 1:  # repeatable: it is where a run of so many rounds ends
        run_on(1, SCRIPT, *options, "--schedule", "step:every=1,factor=0.9", "--steps", steps, "--out", "b", check=0)
        assert np.array_equal(Checkpoint.read(tmp_path / "b").vectors["parameters"], found.vectors["parameters"])
