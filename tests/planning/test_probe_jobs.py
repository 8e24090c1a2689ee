"""Ranks that are started to measure, or to run lines: those that fail, and for real."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.errors import LoneError, UsageError
from hpcdl.planning.probe_jobs import make_starter, run, without_length

SCRIPT = Path(__file__).parents[2] / "scripts/plan.py"
SHEET = {"cores": 2, "latency": 1e-5, "bandwidth": 1e9, "flops": 1e10, "memory": 1e10, "start": 1e-4}


def test_ranks_that_fail_are_a_line():
    def failing(ranks, arguments):
        return subprocess.CompletedProcess([], 3, "", "warning: a\ntrain: error: no memory\nb\n")

    with pytest.raises(LoneError, match=r"2 ranks .* status 3: train: error: no memory"):
        run(2, {}, failing)
    with pytest.raises(LoneError, match="no output"):
        run(2, {}, lambda ranks, arguments: subprocess.CompletedProcess([], 0, "", ""))
    with pytest.raises(UsageError, match="cannot be started"):
        make_starter("nowhere/mpiexec")(2, [])
    with pytest.raises(UsageError, match="quotes"):
        make_starter("mpiexec '")


def test_how_long_a_line_trains_is_left_out():
    assert without_length(["--steps", "9", "--lr=1", "--epochs=3", "--overlap", "--steps=2"]) == ["--lr=1", "--overlap"]
    assert without_length(["--model", "mlp:8", "--epochs", "3"]) == ["--model", "mlp:8"]


@pytest.mark.long
def test_two_ranks_are_measured_for_real(environment, tmp_path):
    def plan(*words):
        command = [sys.executable, SCRIPT, *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, timeout=120, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    lines = "-n 2: train-allreduce --model mlp:16", "-n 2: train-gossip --pretend-compute 5"
    done = plan("time", *lines)
    table = done.stdout.splitlines()
    assert table[0].split()[:4] == ["line", "ranks", "a", "step"] and len(table) == 3
    assert "measuring on 2 ranks: 3 models" in done.stderr
    (tmp_path / "m.yaml").write_text(json.dumps(SHEET))
    words = "--model mlp:16,16 --machine m.yaml --check --seconds 0.05"
    done = plan("best", "--ranks=2", *words.split())
    table = done.stdout.splitlines()
    assert table[1].split()[1:3] == ["measured", "error"] and "line: mpiexec -n 2 hpcdl train-" in table[-1]
    assert ["%" in line for line in table[2:6]] == [True, True, True, False]
