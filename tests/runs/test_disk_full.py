"""A full disk ends a run in one line that names the file; what was there before stays whole, and nothing is half there.

The limit on the size of a file stands in for the disk's end: what is written beyond it fails, as on a full disk."""

import contextlib
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import room
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.checkpoint.export import export
from hpcdl.comm.trace import Timeline
from hpcdl.data.batch import PredictionRows, RowBlock
from hpcdl.data.schema import Schema
from hpcdl.errors import LoneError, TrainingError, UsageError
from hpcdl.inference.predictions import predict_all
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.runs.folder import Folder

THREE = TrainedModel.__new__(TrainedModel)  # a checkpoint of a model of three classes, and the model in one
THREE.schema, THREE.classes, THREE.outputs, THREE.dtype = Schema(), 3, (), np.dtype("f4")
THREE.parameters, THREE.statistics, THREE.about = None, {}, {"model": "of a test"}
THREE.predict = lambda w, x: np.ones((len(x), 3))


def ones():
    """Rows to predict."""
    yield lambda: RowBlock(np.ones((500, 3)), np.arange(500))


pytestmark = pytest.mark.four


def sample(step):
    vectors = {"parameters": np.full(2000, 0.5 * step), "optimizer/momentum": np.ones(500, "f4")}
    return Checkpoint(vectors, {"step": step})


def test_wherever_the_disk_ends_a_checkpoint_is_the_old_one(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)  # h5py closes a file late, and complains there
    path = tmp_path / "checkpoint.h5"
    sample(1).write(path)
    for size in range(0, path.stat().st_size, 997):
        with room(size), pytest.raises(OSError, match="too large"):
            sample(2).write(path)
        assert [each.name for each in tmp_path.iterdir()] == ["checkpoint.h5"]
        assert Checkpoint.read(path).attributes["step"] == 1
    with room(path.stat().st_size):
        sample(2).write(path)
    assert Checkpoint.read(path).attributes["step"] == 2 and not said


def test_wherever_the_disk_ends_a_line_of_metrics_is_whole_or_not_there(tmp_path):
    path, line = tmp_path / "metrics.jsonl", '{"step": 1}\n'
    (tmp_path / "logs").mkdir()
    for size in range(3 * len(line)):
        path.write_text("")
        folder = Folder(tmp_path, 0)
        folder.open(0)
        folder.record([{"step": 1}])
        with room(max(size, len(line))), pytest.raises(LoneError, match="jsonl cannot be written: File too"):
            folder.record([{"step": 1}] * 2)
        folder.close()
        assert path.read_text() == line


@contextlib.contextmanager
def full_after(step, until=0):
    """An observer of runs: after this step no file of rank 0 grows beyond 20 kB, until another one is done."""
    with contextlib.ExitStack() as limit:

        def fill(running, loss, total):
            if running.step in (step, until) and running.saver.job is not None:
                running.saver.job.thread.join()  # what is written in the background is written by now
            if running.step == step and running.comm.rank == 0:
                limit.enter_context(room(20_000))
            if running.step == until:
                limit.pop_all().close()

        yield fill


UNWRITTEN = r"the checkpoint of step 10, \S*a/checkpoint.h5, cannot be written: File too large; "
LARGE = {"checkpoint_every": 5, "evaluate_every": 9, "model": "mlp:400"}  # 40 kB at least


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_finds_no_room_ends_a_run_that_must_have_it(background, run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    with full_after(7) as fill, pytest.raises(TrainingError, match=f"{UNWRITTEN}the last good checkpoint is "):
        run(out=str(out), **LARGE, checkpoint_must=True, checkpoint_async=background, observer=fill)
    world.Barrier()
    assert Checkpoint.read(out).attributes["step"] == 5
    assert not [each.name for each in out.iterdir() if each.name.endswith(".part")]


@pytest.mark.parametrize("background", [False, True])
def test_else_the_run_goes_on_with_a_warning(background, run, world, mpi_tmp_path, capsys):
    out, steps = mpi_tmp_path / "a", []
    whole = run(**LARGE)
    with full_after(7, until=16) as fill:

        def look(running, loss, total):
            if running.step in (11, 16) and running.comm.rank == 0:
                steps.append(Checkpoint.read(out).attributes["step"])
            fill(running, loss, total)

        done = run(out=str(out), **LARGE, checkpoint_async=background, observer=look, progress="lines")
    said = " ".join(capsys.readouterr().out.split())
    assert np.array_equal(done.parameters, whole.parameters) and done.saver.failed == 2 and done.saved == 20
    if world.rank == 0:
        assert done.summary["checkpoints_failed"] == 2 and steps == [5, 5]
        assert said.count("warning: the checkpoint of step 1") == 2 and "the run goes on, and the last good" in said
    assert Checkpoint.read(out).attributes["step"] == 20


def test_the_last_one_is_what_a_run_is_for(run, mpi_tmp_path):
    with full_after(17) as fill, pytest.raises(TrainingError, match="the checkpoint of step 20, "):
        run(out=str(mpi_tmp_path / "a"), **LARGE, observer=fill)


def test_metrics_summary_trace_and_log(alone, tmp_path):
    """One rank writes them, and ends the job with its line."""
    (tmp_path / "logs").mkdir()
    folder = Folder(tmp_path, 0)
    folder.open(0)
    folder.write("summary.json", {"first": True})
    timeline = Timeline(MPI.COMM_WORLD, 10)
    trace = tmp_path / "trace.json"
    with room(0):
        for name, write in {
            "metrics.jsonl": lambda: folder.record([{"step": 1}]),
            "summary.json": lambda: folder.write("summary.json", {"second": True}),
            "trace.json": lambda: timeline.write(trace),
            "rank-0000.log": lambda: logging.getLogger("hpcdl").info("of no use"),
        }.items():
            with pytest.raises(LoneError, match=rf"{name} cannot be written: File too large$"):
                write()
        folder.close()  # says it no second time
    timeline.close()
    assert (tmp_path / "summary.json").read_text() == '{\n  "first": true\n}\n' and not trace.exists()
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors", "p.csv", "p.npz"])
def test_exports(alone, tmp_path, name):
    path = tmp_path / name
    with room(100), pytest.raises(LoneError, match=rf"{name} cannot be written: "):
        if name[0] == "w":
            export({"weight": np.ones(500)}, path)
        else:
            predict_all(MPI.COMM_SELF, THREE, THREE, PredictionRows("ones", ones), str(path))
    assert not list(tmp_path.iterdir())


def test_a_folder_on_a_full_disk_is_refused(run, mpi_tmp_path):
    with room(10), pytest.raises(UsageError, match=r"a cannot be written: File too large"):
        run(out=str(mpi_tmp_path / "a"))
    assert not Path(mpi_tmp_path / "a" / "config.yaml").exists()
