"""A job of a search as a run: where it lies, where it goes on from, what it says of how it ended."""

import json

import numpy as np
import pytest
from few import write_few

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.runs import signals
from hpcdl.search.checks import read_training
from hpcdl.search.space import Space
from hpcdl.search.tasks import Result, SearchJob, SearchTask
from hpcdl.search.training_trial import TrialWork, piece_checkpoints

LINE = "train-allreduce --model softmax --epochs 6 --batch-size 5 --dtype float64 --validation 0.2 --checkpoint-every 2"
VALUES = {"lr": 0.05}


@pytest.fixture
def work(world, mpi_tmp_path):
    """A function: what does the jobs of a search in a folder of this name, on all ranks."""
    if world.rank == 0:
        write_few(mpi_tmp_path)
    world.Barrier()

    def make(name, objective="validation_accuracy", **how):
        command = read_training(f"{LINE} --data {mpi_tmp_path / 'few.h5'}", world.size, world.size)
        return TrialWork(command, mpi_tmp_path / name, Space.read(["lr=0.01..0.9"]), objective, 3, **how)

    yield make
    world.Barrier()


def parameters(work, trial=0, seed=0):
    return Checkpoint.read(work.path(trial, seed)).vectors["parameters"]


def test_a_job_is_a_run_in_its_folder(work, world):
    mine = work("s")
    result = mine(SearchJob(SearchTask(7, VALUES), 1), world)
    summary = json.loads((mine.folder / "trials" / "0007" / "seed-1" / "summary.json").read_text())
    assert result.score == summary["validation_accuracy"] and result.failed is None and result.seconds > 0
    assert (summary["seed"], summary["options"]["lr"], summary["ranks"]) == (4, 0.05, world.size)
    assert (result.more["steps"], result.more["epochs"], result.more["folder"]) == (24, 6, "trials/0007/seed-1")
    assert result.more["examples"] == 6 * 16 and result.more["test_loss"] == summary["test_loss"]
    assert all(result.score == each.score for each in world.allgather(result))


def test_pieces_are_the_whole_and_a_job_that_has_ended_is_not_run_again(work, world):
    whole, parts = work("whole"), work("parts")
    wanted = whole(SearchJob(SearchTask(0, VALUES)), world)
    for rung, amount in enumerate((1.0, 2.5, 6.0)):
        job = SearchJob(SearchTask(0, VALUES, rung, amount))
        result = parts(job, world)
        assert result.more["epochs"] == amount
        again = parts(job, world)  # as if its end had not come into the journal
        assert again.score == result.score and again.more["steps"] == result.more["steps"]
    assert result.score == wanted.score and np.array_equal(parameters(parts), parameters(whole))
    assert len(Checkpoint.read(parts.path(0, 0)).attributes["legs"]) == 3


def test_a_piece_begins_from_the_checkpoint_of_its_parent_before_it(work, world):
    mine = work("s", heirs=True)
    for rung, amount in enumerate((1.0, 2.0, 3.0, 4.0)):
        mine(SearchJob(SearchTask(0, VALUES, rung, amount)), world)
    world.Barrier()
    assert [epochs for epochs, _ in piece_checkpoints(mine.path(0, 0))] == [2, 3, 4]
    mine(SearchJob(SearchTask(1, VALUES, 0, 1.0)), world)
    heir = SearchJob(SearchTask(1, {"lr": 0.3}, 1, 4.0, 0))
    result = mine(heir, world)
    attributes = Checkpoint.read(mine.path(1, 0)).attributes
    assert [leg["steps"] for leg in attributes["legs"]] == [4, 4, 4, 4]  # three of the parent's, and its own
    before, after = (Checkpoint.read(path).vectors["parameters"] for _, path in piece_checkpoints(mine.path(1, 0)))
    assert not np.array_equal(before, after) and not np.array_equal(after, parameters(mine))
    again = mine(heir, world)
    assert again.score == result.score and len(Checkpoint.read(mine.path(1, 0)).attributes["legs"]) == 4
    lost = mine(SearchJob(SearchTask(2, VALUES, 1, 1.5, 0)), world)
    assert "has no checkpoint for another trial" in lost.failed


def test_how_a_job_ends_otherwise(work, world, monkeypatch):
    assert "longer than --trial-limit" in work("a", limit=1e-9)(SearchJob(SearchTask(0, VALUES)), world).failed
    without = work("b", "test_rmse")(SearchJob(SearchTask(0, VALUES)), world)
    assert "has no test_rmse; scores in the summary" in without.failed
    refused = work("c")(SearchJob(SearchTask(0, {"lr": -1.0})), world)
    assert "--lr must be greater than 0" in refused.failed and refused.score is None
    mine = work("d")
    monkeypatch.setattr(signals, "received", ["SIGUSR1"])
    assert mine(SearchJob(SearchTask(0, VALUES)), world)[:3] == Result(stopped=True)[:3]
    monkeypatch.setattr(signals, "received", [])
    world.Barrier()
    assert not mine.path(0, 0).exists()


def test_what_a_search_has_left_is_removed_and_nothing_else(work, world):
    mine = work("s", heirs=True)
    for trial in (0, 1):
        mine(SearchJob(SearchTask(trial, VALUES, 0, 1.0)), world)
    world.Barrier()
    if world.rank == 0:
        (mine.path(1, 0) / "notes.txt").write_text("mine")
        mine.remove()
        left = sorted(str(path.relative_to(mine.folder)) for path in mine.folder.rglob("*") if path.is_file())
        assert left == ["trials/0001/seed-0/notes.txt"] and not (mine.folder / "trials" / "0000").exists()
