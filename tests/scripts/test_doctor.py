"""`hpcdl doctor` as it is started: rows and status, worlds of one, and what training runs refuse and warn of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from hpcdl.machine.launcher import clean_environment
from hpcdl.machine.world import FLAVOURS, library

SCRIPTS = Path(__file__).parents[2] / "scripts"
QUICK = ["--model", "softmax", "--steps", "1", "--allreduce", "mpi", "--out", "none", "--progress", "none"]
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}
STEP = JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}


@pytest.fixture
def by_itself(launch, tmp_path):
    """A function: start a script without a launcher, in this environment; what Slurm says here is left out."""

    def run(script, *options, check=None, **environment):
        clean = {name: value for name, value in clean_environment().items() if not name.startswith("SLURM")}
        how = {"env": clean | environment, "cwd": tmp_path, "timeout": 60, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, SCRIPTS / script, *options], **how)
        assert check is None or done.returncode == check, done.stdout + done.stderr
        return done

    return run


def ours(done):
    return [line for line in done.stderr.splitlines() if "error: " in line]


def test_two_ranks(run_on, tmp_path):
    """Which leave with the same status, and have more threads than any machine has cores."""
    done = run_on(2, SCRIPTS / "doctor.py", "--json", "rows.json", check=1, OMP_NUM_THREADS="9999")
    result = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["what"]: row for row in result["rows"]}
    assert result["ranks"] == 2 and "Traceback" not in done.stderr
    assert (result["schema_version"], result["benchmark"], result["options"]["quick"]) == (1, "doctor", False)
    assert {"python", "mpi", "machine"} <= set(result["environment"])
    hurting = [row["what"] for row in result["rows"] if row["verdict"] == "hurts"]
    assert result["status"] == 1 and "cores" in hurting and "nothing would hurt" not in done.stdout
    assert ours(done) == [f"doctor: error: this would hurt a run: {', '.join(dict.fromkeys(hurting))}"]
    assert rows["world"]["verdict"] == "ok" and rows["world"]["found"].startswith("2 ranks")
    assert rows["MPI"]["found"].startswith(library()) and {"latency", "bandwidth", "all-reduce"} < set(rows)
    for row in result["rows"]:
        assert row["what"] in done.stdout and row["advice"] in done.stdout
        assert bool(row["advice"]) <= (row["verdict"] != "ok")


def test_notes_are_status_0(alone, monkeypatch, capsys):
    from hpcdl.machine import doctor
    from hpcdl.scripts.doctor import main

    monkeypatch.setattr(doctor, "examine", lambda *_: [doctor.CheckRow("here", "found", "note", "do this")])
    main([])
    said = capsys.readouterr()
    assert said.out.splitlines()[-3:] == ["here: do this", "", "nothing would hurt a run"] and said.err == ""


def test_alone(by_itself, tmp_path):
    """With the mpiexec of another library first on the PATH, and more threads than any machine has cores."""
    other, says = ("Open MPI", "mpiexec (Open MPI) 5") if library() != "Open MPI" else ("MPICH", "HYDRA build details")
    (tmp_path / "mpiexec").write_text(f"#!/bin/sh\necho '{says}'\n")
    (tmp_path / "mpiexec").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = by_itself("doctor.py", "--quick", "--json", "rows.json", check=1, PATH=path, OMP_NUM_THREADS="9999")
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["world"]["found"] == "1 rank, started alone" and "latency" not in rows
    assert rows["mpiexec"]["verdict"] == rows["cores"]["verdict"] == "hurts" and other in rows["mpiexec"]["found"]
    assert done.stderr.splitlines()[-1].startswith("doctor: error: this would hurt a run: mpiexec, cores")
    assert "export OMP_NUM_THREADS=" in done.stdout


@pytest.mark.parametrize("number", ["0", "2"])
def test_a_world_of_one_of_three(by_itself, tmp_path, number):
    """As `srun --mpi=none` starts it; number 0 has the word."""
    environ, flavour = STEP | {"SLURM_PROCID": number}, f"srun --mpi={FLAVOURS[library()]}"
    both = ("doctor.py", ["--json", "rows.json"], 1), ("train_allreduce.py", QUICK, 2)
    for script, options, status in both if number == "0" else both[1:]:
        done = by_itself(script, *options, check=status, **environ)
        assert done.stdout == "" and "Traceback" not in done.stderr and len(ours(done)) == (number == "0")
        assert all("srun has started 3 processes" in line and flavour in line for line in ours(done))
    assert (tmp_path / "rows.json").exists() == (number == "0")
    if number == "0":
        (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
        assert row["what"] == "world" and row["verdict"] == "hurts" and flavour in row["advice"]


def test_strategies_of_one_rank_and_ranks_of_a_batch_script(by_itself):
    """A world of one that is meant, in a step of three tasks; one that may not be meant, in a batch script."""
    done = by_itself("train_sequential.py", *QUICK, check=0, **STEP)
    assert "world" not in done.stderr
    done = by_itself("train_allreduce.py", *QUICK, check=0, **JOB)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("world: "))
    assert "allocation of 3 tasks" in line and f"srun --mpi={FLAVOURS[library()]}" in line


@pytest.mark.long
@pytest.mark.skipif("MPICH" not in MPI.Get_library_version(), reason="the other libraries know PMIx, or say so")
def test_mpich_under_a_launcher_that_offers_pmix_alone(by_itself):
    """As Open MPI's mpiexec starts it; MPICH without PMIx ends the process while MPI starts."""
    environ = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}
    for script, status in (("doctor.py", 1), ("train_allreduce.py", 2)):
        done = by_itself(script, check=status, **environ)
        (line,) = ours(done)
        assert "started 3 processes" in line and "PMIx" in line and "Abort" not in done.stderr and done.stdout == ""
    done = by_itself(script, check=status, **environ | {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"})
    assert done.stdout + done.stderr == ""


@pytest.mark.skipif("/MPI.cpython" in MPI.__file__, reason="this mpi4py was built for one library")
def test_no_mpi_library(by_itself):
    for script, status in (("doctor.py", 1), ("train_allreduce.py", 2)):
        done = by_itself(script, check=status, MPI4PY_LIBMPI="/nowhere/libmpi.so")
        (line,) = ours(done)
        assert "no MPI library" in line and "pip install 'hpcdl[mpi]'" in line and len(done.stderr.splitlines()) == 1
    hpcdl = Path(sys.executable).with_name("hpcdl")
    done = by_itself(hpcdl, "evaluate", "a", check=2, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "no MPI library" in done.stderr and "Traceback" not in done.stderr
    by_itself(hpcdl, "prepare-data", "--help", check=0, MPI4PY_LIBMPI="/nowhere/libmpi.so")  # it needs none
