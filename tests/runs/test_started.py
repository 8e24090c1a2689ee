"""What a run says of itself when it begins, and again when it is gone on with."""

import json
import time

import pytest
from mpi4py import MPI
from written_runs import summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.runs.folder import environment

pytestmark = pytest.mark.four


def told(folder):
    return json.loads((folder / "started.json").read_text())


def test_it_is_there_before_the_first_step_and_has_what_the_summary_says(run, world, mpi_tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1900000000")
    out, seen = mpi_tmp_path / "a", []

    def look(running, loss, total):
        if running.comm.rank == 0 and running.step == 1:
            seen.append(told(out))

    before = time.time()
    done = run(out=str(out), epochs=3, time_limit=1000.0, observer=look)
    if world.rank == 0:
        (found,) = seen
        at_end = summary(out)
        same = ("strategy", "ranks", "workers", "data", "model", "parameters", "dtype", "seed", "batch_size")
        assert {name: found[name] for name in same} == {name: at_end[name] for name in same}
        assert (found["schema_version"], found["program"]) == (1, "train-allreduce")
        assert (found["first_step"], found["steps"], found["steps_per_epoch"]) == (0, 12, 4) == (0, done.step, 4)
        assert before <= found["started"] <= time.time() and found["time_limit"] == 1000
        assert (found["job"], found["ends"]) == ("812", 1900000000)
        assert found["hosts"] == [MPI.Get_processor_name()] and found["environment"] == environment()
        assert told(out) == found
        assert len(found) == 20


def test_who_goes_on_writes_it_anew_unless_nothing_is_left_to_do(run, world, mpi_tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    out = mpi_tmp_path / "a"
    run(out=str(out), epochs=2)
    first = told(out)
    assert (first["job"], first["ends"]) == (None, None)
    run(out=str(out), resume=str(out), epochs=2)  # nothing is left to do
    assert told(out) == first
    run(out=str(out), resume=str(out), epochs=3)
    again = told(out)
    assert (again["first_step"], again["steps"]) == (8, 12) and again["started"] > first["started"]
    assert Checkpoint.read(out).attributes["step"] == 12


def test_a_strategy_of_ones_own_has_no_program(run, world, mpi_tmp_path):
    def train(comm, model, data, optimizer, running):
        from hpcdl.runs import Whole

        running.begin("my_own", Whole(model, running.initial(model), optimizer), data)
        running.stopping.steps = 0
        running.start()
        running.end()

    run(train=train, out=str(mpi_tmp_path / "a"))
    assert told(mpi_tmp_path / "a")["program"] is None and told(mpi_tmp_path / "a")["strategy"] == "my_own"
