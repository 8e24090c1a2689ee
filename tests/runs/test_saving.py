"""Runs that save in pieces, in the background, on a disk that fails, from a folder that not all ranks see."""

import collections
import errno
import os
import threading

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.checkpoint.sharded_vector import CutVector
from hpcdl.errors import TrainingError, UsageError
from hpcdl.runs import resume, saving
from hpcdl.strategies import all_reduce, fully_sharded

pytestmark = pytest.mark.four
CUT = {"train": fully_sharded.train, "optimizer": "adam", "lr": 0.01}
OFTEN = CUT | {"checkpoint_every": 5, "evaluate_every": 99}
WHOLE = CUT | {"train": all_reduce.train}
SEVERAL = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="on one rank nothing is cut")


def contents(path):
    """The vectors and attributes of a checkpoint, without what no two runs have alike."""
    found = Checkpoint.read(path)
    assert sorted(found.vectors) == ["optimizer/first_moment", "optimizer/second_moment", "parameters"]
    return {name: vector.tobytes() for name, vector in found.vectors.items()} | {"step": found.attributes["step"]}


def pieces_of(folder):
    """The steps of the pieces that are there, with how many there are of each."""
    names = [each.name for each in (folder / "pieces").iterdir()] if (folder / "pieces").exists() else []
    return dict(collections.Counter(int(name[5:14]) for name in names))


@SEVERAL
def test_each_rank_writes_and_reads_its_own_and_nobody_all(run, world, mpi_tmp_path, monkeypatch):
    def whole(*of):
        raise AssertionError("a whole vector in one memory")

    monkeypatch.setattr(CutVector, "gather", whole)
    monkeypatch.setattr(CutVector, "scatter", whole)
    out = mpi_tmp_path / "a"
    never_stopped = run(**CUT)
    run(**OFTEN, out=str(out), keep=2, steps=13)
    assert pieces_of(out) == {10: world.size, 13: world.size}
    done = run(**CUT, out=str(out), resume=str(out))
    assert np.array_equal(done.parameters, never_stopped.parameters) and done.step == 20
    alone = Checkpoint.read(out)
    size = alone.vectors.forms["parameters"][0][0]
    held = world.allgather(len(done.parameters))
    rows = [piece.rows["parameters"] for piece in alone.joined.pieces]
    assert [sum(row.blocks * row.length for row in each) for each in rows] == held and sum(held) == size


@SEVERAL
def test_another_number_of_ranks_and_another_strategy_go_on(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    run(**CUT, out=str(out), steps=8)
    wanted = contents(out)
    whole = run(**CUT, resume=str(out), out="none").held.shards.parameter_pieces
    few = world.Split(int(world.rank < world.size - 1), world.rank)
    for how, comm in ((CUT, few), (WHOLE, world), (WHOLE, few)):
        folder = mpi_tmp_path / f"{how['train'].__module__}-{comm.size}"
        if comm is world or world.rank < world.size - 1:
            done = run(**how, comm=comm, resume=str(out), out=str(folder), steps=8, force=True)
            assert done.step == 8
            comm.Barrier()
            if how is WHOLE:
                assert done.parameters.tobytes() == wanted["parameters"]  # what was loaded, to the bit
            else:
                values = np.frombuffer(wanted["parameters"])
                for each, _ in done.held.shards.parameter_pieces:
                    mine = done.parameters[each.local : each.local + each.size]
                    assert np.array_equal(mine, values[each.start : each.start + each.size])
    assert whole
    few.Free()


@pytest.mark.parametrize("how", [WHOLE, CUT], ids=["whole", "cut"])
def test_in_the_background_the_same_is_written(how, run, world, mpi_tmp_path, monkeypatch):
    """Also where the writing is done only when the run is three steps on: what is written is as it was."""
    often = {"checkpoint_every": 5, "keep": 9, "evaluate_every": 2}
    run(**how, **often, out=str(mpi_tmp_path / "at-once"))
    go, now, most = threading.Event(), [], []

    def late(job, write=saving.CheckpointJob.write):
        if job.thread is not None:
            assert go.wait(60)
            go.clear()
        now.append(job)
        most.append(len(now))
        write(job)
        now.remove(job)

    def later(running, loss, total):
        if running.step % 5 == 3 or running.step == 19:  # before one that waits for the one that is on its way
            go.set()

    monkeypatch.setattr(saving.CheckpointJob, "write", late)

    def settle(saver, wait=True, settle=saving.Saver.settle):
        if wait and saver.job is not None:
            go.set()
        settle(saver, wait)

    monkeypatch.setattr(saving.Saver, "settle", settle)
    done = run(**how, **often, out=str(mpi_tmp_path / "beside"), checkpoint_async=True, observer=later)
    assert set(most) == {1} and done.saver.job is None and done.saver.failed == 0 and done.saved == 20
    names = sorted(each.name for each in (mpi_tmp_path / "at-once").glob("*.h5"))
    assert names == sorted(each.name for each in (mpi_tmp_path / "beside").glob("*.h5")) and len(names) == 5
    for name in names:
        assert contents(mpi_tmp_path / "at-once" / name) == contents(mpi_tmp_path / "beside" / name)
    world.Barrier()


@pytest.fixture
def failing(monkeypatch, world):
    """A function: from this step on the piece of the last rank cannot be written, until another one."""

    def fail(first, last):
        def full(folder, name, portions, write=saving.write_piece):
            if first <= int(name[5:14]) < last and world.rank == world.size - 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(folder, name, portions)

        monkeypatch.setattr(saving, "write_piece", full)

    return fail


@SEVERAL
@pytest.mark.parametrize("background", [False, True])
def test_a_piece_that_cannot_be_written_is_known_to_all(background, run, world, mpi_tmp_path, failing, capsys):
    out = mpi_tmp_path / "a"
    failing(10, 15)
    done = run(**OFTEN, out=str(out), keep=9, checkpoint_async=background, progress="lines")
    assert done.saver.failed == 1 and (world.rank or done.summary["checkpoints_failed"] == 1)
    said = " ".join(capsys.readouterr().out.split())
    assert world.rank or ("step 10, " in said and "cannot be written: No space left on device; the run goes on" in said)
    assert pieces_of(out) == dict.fromkeys((5, 15, 20), world.size)  # and of step 10 nothing is left
    failing(10, 99)
    words = "the checkpoint of step 10, .*: No space left on device; the last good checkpoint is "
    with pytest.raises(TrainingError, match=words):
        run(**OFTEN, out=str(out), force=True, checkpoint_must=True, checkpoint_async=background)
    world.Barrier()
    assert pieces_of(out) == {5: world.size} and Checkpoint.read(out).attributes["step"] == 5
    with pytest.raises(TrainingError, match="the checkpoint of step 20, "):  # the last one is what the run is for
        run(**CUT, out=str(out), resume=str(out), evaluate_every=99)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("how", [WHOLE, CUT], ids=["whole", "cut"])
def test_on_a_full_disk_the_spare_gives_way(how, keep, run, world, mpi_tmp_path, monkeypatch, capsys):
    """A disk that has room for two checkpoints, and for the one that is written beside one that stays."""
    out, write_piece, write = mpi_tmp_path / "a", saving.write_piece, Checkpoint.write

    def limited(there):
        if there >= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def piece(folder, name, portions):
        limited(len({each.name[:14] for each in (folder / "pieces").glob("step*")} - {name[:14]}))
        return write_piece(folder, name, portions)

    def whole(self, path):
        if self.joined is None:
            limited(len({each.stat().st_ino for each in path.parent.glob("*.h5")}))
        write(self, path)

    monkeypatch.setattr(saving, "write_piece", piece)
    monkeypatch.setattr(Checkpoint, "write", whole)
    often = how | {"checkpoint_every": 5, "evaluate_every": 99, "steps": 19, "out": str(out), "keep": keep}
    often |= {"progress": "lines"}
    if keep == 3:
        with pytest.raises(TrainingError, match=r"the checkpoint of step 19, .*No space left on device"):
            run(**often)
    else:
        done = run(**often)
        assert done.saver.failed == 0 and done.saved == 19
    said = " ".join(capsys.readouterr().out.split())
    gone = [] if keep != 2 or world.rank else ["000000005", "000000010"]
    assert [f"checkpoint-{each}.h5 is removed" in said for each in gone] == [True] * len(gone)
    assert said.count(".h5 is removed") == len(gone)
    world.Barrier()
    left = {int(each.name[11:20]) for each in out.glob("checkpoint-*.h5")}
    assert left - {10} == {1: set(), 2: {15}, 3: {5}}[keep]  # 10: a second name of the last one, or not yet
    assert Checkpoint.read(out).attributes["step"] == (10 if keep == 3 else 19)
    world.Barrier()


@SEVERAL
def test_a_broken_piece_is_named_and_the_checkpoint_before_taken(run, world, mpi_tmp_path, capsys):
    out = mpi_tmp_path / "a"
    whole = run(**OFTEN, out=str(out), keep=3)

    def spoil(step):
        """One byte of a number in the piece of the last rank."""
        if world.rank == 0:
            (path,) = (out / "pieces").glob(f"step-{step:09d}-*-rank-{world.size - 1:04d}.h5")
            there = bytearray(path.read_bytes())
            there[-9] ^= 1
            path.write_bytes(there)
        world.Barrier()

    spoil(20)
    with pytest.raises(UsageError, match=r"checkpoint.h5 is damaged: its piece \S*step-000000020-\S* is damaged: the"):
        run(**CUT, out=str(out), resume=str(out / "checkpoint.h5"))
    done = run(**OFTEN, out=str(out), resume=str(out), keep=3, progress="lines")
    said = " ".join(capsys.readouterr().out.split())
    assert world.rank or ("its piece" in said and f"; going on from {out}/checkpoint-000000015.h5" in said)
    assert done.parameters.tobytes() == whole.parameters.tobytes() and done.legs.first == 15
    assert pieces_of(out / "later") == {20: world.size}
    world.Barrier()
    for step in (10, 15, 20):
        spoil(step)
    (last,) = [each for each in [out / "best.h5"] if each.exists()] or [None]
    assert last is not None and last.samefile(out / "checkpoint.h5")
    with pytest.raises(
        UsageError, match=r"checkpoint.h5 is damaged: .*; all older checkpoints beside it are damaged, too$"
    ):
        run(**CUT, out=str(out), resume=str(out))


@SEVERAL
def test_what_is_not_finite_in_a_checkpoint_is_refused_by_all(run, world, mpi_tmp_path):
    """As another program may have written it: a run saves no such thing."""
    out = mpi_tmp_path / "a"
    run(**CUT, out=str(out), steps=3)
    if world.rank == 0:
        found = Checkpoint.read(out)
        vectors = {name: vector.copy() for name, vector in found.vectors.items()}
        vectors["optimizer/first_moment"][-1] = np.nan
        Checkpoint(vectors, found.attributes).write(out / "checkpoint.h5")
    with pytest.raises(UsageError, match="that run's optimizer/first_moment is not finite, which no run saves"):
        run(**CUT, out="none", resume=str(out))


@SEVERAL
def test_where_not_all_see_the_folder_rank_0_gathers_and_says_so(run, world, mpi_tmp_path, monkeypatch, capsys):
    shared, out = mpi_tmp_path / "shared", mpi_tmp_path / "apart"
    run(**CUT, out=str(shared), steps=8)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "unseen", lambda comm, folder: (["far"], 1))
        run(**CUT, out=str(out), steps=8, progress="lines")
        said = " ".join(capsys.readouterr().out.split())
        assert world.rank or f"warning: {out} is not seen on far: rank 0 gathers the whole state" in said
    assert contents(out) == contents(shared) and not (out / "pieces").exists()
    for folder in (out, shared):
        with monkeypatch.context() as patch:
            patch.setattr(resume, "visible_to_all", lambda comm, found: None)
            patch.setattr("hpcdl.checkpoint.state.visible_to_all", lambda comm, found: None)
            done = run(**CUT, out="none", resume=str(folder))
        wanted = run(**CUT, out="none", resume=str(shared))
        assert np.array_equal(done.parameters, wanted.parameters) and done.step == 20


@SEVERAL
def test_who_does_not_see_the_folder_is_found(world, mpi_tmp_path):
    from hpcdl.comm import Communicator

    comm = Communicator(world)
    blind, token = saving.unseen(comm, mpi_tmp_path)
    assert blind == [] and len(set(world.allgather(token))) == 1
    own = mpi_tmp_path / str(world.rank)
    own.mkdir()
    assert saving.unseen(comm, own)[0] == [MPI.Get_processor_name()] and not list(own.iterdir())
    world.Barrier()
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        saving.unseen(comm, mpi_tmp_path / "nowhere")
    comm.free()
