"""Jobs that fail, as users have them kept: what is started again, what not, and with which parameters it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
ALLREDUCE = SCRIPTS / "train_allreduce.py"
TRAIN = ["--data", "few.h5", "--model", "softmax", "--batch-size", "5", "--steps", "40", "--allreduce", "ring"]
TRAIN += ["--progress", "none", "--evaluate-every", "99", "--checkpoint-every", "10"]


@pytest.fixture
def supervise(launch, few, environment):
    """A function: supervise a program on so many ranks, as a user would; of `start`, the process that does it."""

    def start(ranks, script, *arguments, how=(), mpiexec=launch.mpiexec, **pipes):
        job = [mpiexec, "-n", str(ranks), sys.executable, script, *arguments]
        words = [sys.executable, SCRIPTS / "supervise.py", "--backoff", "0", *how, "--", *job]
        return subprocess.Popen([*map(str, words)], cwd=few, env=environment, text=True, **pipes)

    def run(*arguments, **how):
        process = start(*arguments, **how, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, said = process.communicate(timeout=120)
        return process.returncode, out, [line for line in said.splitlines() if line.startswith(("supervise", "inject"))]

    run.start = start
    return run


@pytest.mark.long
def test_killed_ranks_leave_the_parameters_of_a_run_never_disturbed(supervise, run_on, few):
    run_on(2, ALLREDUCE, *TRAIN, "--out", "whole", check=0, cwd=few)
    faults = "kill:rank=1,step=5 kill:rank=0,step=25 exit:rank=1,step=33,status=0"
    status, _, said = supervise(2, ALLREDUCE, *TRAIN, "--out", "run", "--inject", faults)
    assert status == 0, said
    whole, kept = (Checkpoint.read(few / name) for name in ("whole", "run"))
    assert kept.attributes["step"] == 40 and whole.vectors.keys() == kept.vectors.keys()
    assert all(np.array_equal(whole.vectors[name], kept.vectors[name]) for name in whole.vectors)
    starts = [line for line in said if line.startswith("supervise")]
    assert len(starts) == 3 and len(said) == 6
    assert "2 left, from the beginning, as nothing was saved (its files are now in run-try-1)" in starts[0]
    assert "1 left, from step 20 (run/checkpoint.h5)" in starts[1]
    assert "0 left, from step 30 (run/checkpoint.h5)" in starts[2]


@pytest.mark.long
def test_a_postmortem_knows_each_try_until_the_run_has_ended_well(supervise, environment, few):
    """One that had saved nothing, one that was gone on with, and the last; --force replaces what was there before."""

    def shown(number):
        words = [sys.executable, SCRIPTS / "postmortem.py", "run", "--which", str(number)]
        return subprocess.run(words, cwd=few, env=environment, capture_output=True, text=True).stdout

    (few / "run").mkdir()
    (few / "run" / "config.yaml").touch()
    faults = "exception:rank=1,step=5 exception:rank=0,step=25 exception:rank=1,step=33"
    told = [*TRAIN, "--out", "run", "--inject", faults, "--force"]
    assert supervise(2, ALLREDUCE, *told, how=["--restarts", "2"])[0] == 1
    for number, rank, step in ((1, 1, 5), (2, 0, 25), (3, 1, 33), (0, 1, 33)):
        lines = shown(number).splitlines()
        assert f"(try {number or 3}; --which shows tries " in lines[0]
        assert lines[1].startswith(f"rank {rank} failed with InjectedFault: ") and f"step={step}" in lines[1]
    run = [*TRAIN, "--out", "run", "--resume", "run"]
    assert supervise(2, ALLREDUCE, *run)[0] == 0
    assert shown(0) == "run: the run has ended in good order, and has left no recordings\n"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_ctrl_c_saves_and_ends_it(supervise, few, number):
    process = supervise.start(
        2, ALLREDUCE, *TRAIN, "--steps", "100000000", "--out", "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until(lambda: (few / "run" / "checkpoint.h5").exists(), process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 85 and "supervise" not in said
    assert Checkpoint.read(few / "run").attributes["step"] >= 10


@pytest.mark.long
def test_who_reads_has_seen_enough(supervise, few):
    """Its output goes to nobody: it is not started again and again."""
    options = ["--steps", "100000000", "--evaluate-every", "1", "--progress", "lines", "--out", "run"]
    process = supervise.start(2, ALLREDUCE, *TRAIN, *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith("epoch 1")
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(60) > 0
    assert said.count("supervise: ") == 1 and "given up: nobody reads the job's output any more" in said


LOST = """#!/bin/sh
# A launcher whose second host is gone as soon as a job has failed.
[ ! -e lost ] || [ "$2" -le 1 ] || exit 1
{mpiexec} "$@" && exit
status=$?
touch lost
exit $status
"""


@pytest.mark.long
def test_fewer_ranks_where_a_host_is_lost(supervise, launch, few):
    launcher = few / "mpiexec"
    launcher.write_text(LOST.format(mpiexec=launch.mpiexec))
    launcher.chmod(0o755)
    options, how = ["--out", "run", "--inject", "kill:rank=1,step=25"], ["--min-ranks", "1"]
    status, _, said = supervise(2, ALLREDUCE, *TRAIN, *options, how=how, mpiexec=launcher)
    assert status == 0, said
    assert said[-1].endswith("from step 20 (run/checkpoint.h5), on 1 rank instead of 2")
    legs = json.loads((few / "run" / "summary.json").read_text())["legs"]
    assert [(leg["ranks"], leg["steps"]) for leg in legs] == [(2, 20), (1, 20)]


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_comparison_goes_on(supervise, few):
    line = "train-allreduce --allreduce ring --inject kill:rank=1,step=7"
    common = ["--data", "few.h5", "--model", "softmax", "--batch-size", "5", "--epochs", "3", "--seeds", "1"]
    status, _, said = supervise(2, SCRIPTS / "compare.py", line, *common, "--progress", "none", "--out", "both")
    assert status == 0 and len(said) == 2 and said[1].endswith("with the runs missing in both")
    assert json.loads((few / "both" / "results.json").read_text())["lines"][0]["runs"][0]["failed"] is None


def until(holds, process, seconds=60.0):
    """Wait for it, as long as the process is there."""
    end = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < end, os.strerror(0)
        time.sleep(0.02)
