"""A folder in which a run has ended, or died: to resume it changes nothing, and --force replaces it."""

import fcntl

import numpy as np
import pytest
from written_runs import steps, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import TrainingError, UsageError


def everything(folder):
    """All files below, with their contents and when they were written."""
    found = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    return {path: (when, path.read_bytes()) for path, when in found.items()}


@pytest.mark.parametrize("how", ["folder", "checkpoint"])
def test_a_run_that_is_finished_is_left_as_it_is(run, world, mpi_tmp_path, capfd, how):
    out = mpi_tmp_path / "a"
    run(out=str(out), checkpoint_every=6, keep=9)
    before, resume = everything(out), {"folder": out, "checkpoint": out / "checkpoint.h5"}[how]
    capfd.readouterr()
    again = run(out=str(out), resume=str(resume), lr=9.0, checkpoint_every=3, progress="lines")
    assert everything(out) == before and again.step == 20 and again.stopped == "finished"
    assert again.agree is True  # all the same
    said = capfd.readouterr().out.splitlines()
    assert len(said) == (world.rank == 0)
    if world.rank == 0:
        assert said[0].startswith(f"nothing is left to do: the run in {out} has ended after step 20; ask for")
        assert again.summary == summary(out)
        assert np.array_equal(again.parameters, Checkpoint.read(out).vectors["parameters"])
    assert run(out=str(out), resume=str(out), epochs=6).step == 24  # nobody has the folder


@pytest.mark.parametrize("before", [None, '{"steps": 12}', '{"st', "[]"])  # None: nothing; and what was of another leg
def test_a_run_that_was_killed_before_it_said_how_it_ended_does_so_when_it_is_resumed(run, world, mpi_tmp_path, before):
    out = mpi_tmp_path / "a"
    run(out=str(out))
    first = summary(out)
    world.Barrier()
    if world.rank == 0:
        (out / "summary.json").unlink()
        if before is not None:
            (out / "summary.json").write_text(before)
    run(out=str(out), resume=str(out))
    again = summary(out)
    assert "NaN" not in (out / "summary.json").read_text()
    for name in ("steps", "train_loss", "test_loss", "test_accuracy", "epochs"):
        assert again[name] == first[name]


def test_force_replaces_what_another_run_has_left(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"

    class Died(Exception):
        """As a rank does, without a word."""

    def die(running, loss, total):
        if running.step == 3:
            raise Died

    with pytest.raises(Died):
        run(out=str(out), steps=9, seed=7, observer=die)
    world.Barrier()
    if world.rank == 0:
        (out / "notes.txt").write_text("mine")
        (out / "logs" / "rank-0099.log").write_text("of a run on more ranks")
    with pytest.raises(UsageError, match=rf"^--out {out} holds another run; give another folder, or --force to repl"):
        run(out=str(out), steps=6)
    done = run(out=str(out), steps=6, force=True)
    assert done.step == 6
    assert [line["step"] for line in steps(out)] == list(range(1, 7))
    assert (out / "notes.txt").read_text() == "mine" and not (out / "logs" / "rank-0099.log").exists()
    config = (out / "config.yaml").read_text()
    assert "\nseed: 0\n" in config and "\nforce" not in config
    assert summary(out)["options"]["force"] is True


def test_force_removes_nothing_when_the_run_is_refused(run, world, mpi_tmp_path):
    out, other = mpi_tmp_path / "a", mpi_tmp_path / "b"
    run(out=str(out), steps=4)
    run(out=str(other), steps=4, seed=3)
    before = everything(out)
    with pytest.raises(UsageError, match="--force would remove the run that --resume continues"):
        run(out=str(out), resume=str(out), steps=6, force=True)
    with pytest.raises(UsageError, match="that run's seed is 3, not 0"):
        run(out=str(out), resume=str(other), steps=6, force=True)
    with (out / ".lock").open() as held:
        if world.rank == 0:
            fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another job is writing"):
            run(out=str(out), steps=6, force=True)
    assert everything(out) == before
    done = run(out=str(out), resume=str(other), steps=6, seed=3, force=True)  # into another folder it may
    assert done.step == 6 and Checkpoint.read(out).attributes["seed"] == 3


@pytest.mark.mpi(min_size=2)
def test_a_run_whose_replicas_did_not_agree_has_not_ended_well_either_when_it_is_resumed(run, world, mpi_tmp_path):
    out = str(mpi_tmp_path / "a")
    with pytest.raises(TrainingError, match="the replicas do not agree"):
        run(out=out, checkpoint_every=8, keep=3, inject=f"corrupt:rank={world.size - 1},step=15")
    words = r"did not agree when the run in .*a ended.*go on from an earlier checkpoint"
    with pytest.raises(TrainingError, match=words):
        run(out=out, resume=out)
    run(out=out, resume=f"{out}/checkpoint-000000008.h5")  # as it has struck, it does not do so again
    assert summary(mpi_tmp_path / "a")["replicas_agree"] is True
