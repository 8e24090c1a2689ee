"""Memories beside checkpoints: written when one is due, taken back whole, filled anew where they do not fit."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from agent_ranks import CHAIN
from plain_replay import Walk, assert_same

from hpcdl.errors import LoneError, UsageError
from hpcdl.rl.options import GORILA, GorilaOptions
from hpcdl.rl.replay import Replay
from hpcdl.rl.replay_checkpoint import replay_path, restore_replay, save_if_due, write_replay
from hpcdl.rl.training import Learning


def filled(capacity=60, seed=0, **how):
    """A memory of two streams, of which much has been overwritten."""
    replay = Replay(capacity, (3,), "f4", streams=2, **{"prioritized": True} | how)
    walk = Walk(np.random.default_rng(seed), 2, (3,), 1, "f4")
    for _ in range(70):
        replay.add(*walk.step(0, 2))
    return replay


def options_in(folder, **options):
    given = {"save_replay": True, "resume": str(folder), "checkpoint_every": 20} | options
    return SimpleNamespace(**given)


def test_all_that_is_in_it_comes_back_and_new_episodes_begin(tmp_path):
    replay, again = filled(), Replay(60, (3,), "f4", streams=2, prioritized=True)
    left = replay_path(tmp_path, 3).with_name(".0003.h5.123.part")  # by a process that was killed
    left.parent.mkdir()
    left.touch()
    write_replay(replay, tmp_path, 3)
    assert not left.exists()
    assert [path.name for path in (tmp_path / "replay").iterdir()] == ["0003.h5"]
    restore_replay(options_in(tmp_path), again, 3)
    replay.cut()
    assert_same(again, replay.state())
    one, other = (each.sample(40, 0.5, np.random.default_rng(1)) for each in (replay, again))
    np.testing.assert_array_equal(one.serial, other.serial)
    assert (again.last == -1).all()


def test_when_it_is_written(tmp_path):
    """At the first step at or after each checkpoint, of every 10 steps here; and at the end."""
    options, replay, saved, written = options_in(tmp_path), filled(), 3, []
    for step in (4, 9, 10, 11, 12, 35, 36, 39, 41):
        before = saved
        saved = save_if_due(options, 2, tmp_path, replay, 0, step, saved)
        path = replay_path(tmp_path, 0)
        written += [step] if path.exists() else []
        path.unlink(missing_ok=True)
        assert saved >= before
    assert written == [10, 35, 41]
    save_if_due(options, 2, tmp_path, replay, 0)
    assert replay_path(tmp_path, 0).exists()
    replay_path(tmp_path, 0).unlink()
    for other, folder in ((options_in(tmp_path, save_replay=False), tmp_path), (options, None)):
        save_if_due(other, 2, folder, replay, 0)
        save_if_due(other, 2, folder, replay, 0, 1000, 3)
    assert save_if_due(options_in(tmp_path, checkpoint_every=0), 2, tmp_path, replay, 0, 1000, 3) == 3
    assert not replay_path(tmp_path, 0).exists(), "without --checkpoint-every at the end alone"


@pytest.mark.parametrize("how", [{"capacity": 61}, {"gamma": 0.5}, {"n_step": 2}, None], ids=str)
def test_of_another_memory_it_is_filled_anew(tmp_path, caplog, how):
    if how is not None:
        write_replay(filled(**how), tmp_path, 0)
    empty = Replay(60, (3,), "f4", streams=2)
    with caplog.at_level(logging.WARNING, "hpcdl"):
        restore_replay(options_in(tmp_path), empty, 0)
    assert empty.size == empty.written == 0
    assert len(caplog.records) == 1 and "filled anew" in caplog.text and str(replay_path(tmp_path, 0)) in caplog.text


def test_nothing_is_read_where_it_was_not_asked_for(tmp_path):
    write_replay(filled(), tmp_path, 0)
    empty = Replay(60, (3,), "f4", streams=2)
    restore_replay(options_in(tmp_path, save_replay=False), empty, 0)
    restore_replay(options_in(tmp_path, resume=None), empty, 0)
    restore_replay(options_in(tmp_path), None, 0)
    assert empty.written == 0


def test_a_damaged_file_is_refused(tmp_path):
    replay_path(tmp_path, 0).parent.mkdir()
    replay_path(tmp_path, 0).write_bytes(b"no HDF5")
    with pytest.raises(UsageError, match=r"0000\.h5 cannot be read"):
        restore_replay(options_in(tmp_path), Replay(60, (3,), "f4", streams=2), 0)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "replay").write_text("a file")
    with pytest.raises(LoneError, match="cannot be written"):
        write_replay(filled(), tmp_path, 0)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("apart", [False, True], ids=["bundles", "apart"])
def test_a_run_that_is_gone_on_with_learns_at_once(world, mpi_tmp_path, apart):
    """With --save-replay; else it fills its memories first. Each rank that remembers keeps its own."""
    folder, learners = mpi_tmp_path / "r", 1 if apart else world.size - 1
    how = CHAIN | {"learning_starts": 100, "replay": 400, "evaluate_every": 300, "outliers": 0.0, "chunk": 2}
    how |= {"learners": int(apart), "out": str(folder)}

    def updates(steps, **more):
        run = Learning(GORILA).run(world, GorilaOptions(**how | {"env_steps": steps} | more))
        return json.loads((folder / "summary.json").read_text())["updates"] if run.comm.rank == 0 else 0

    first = updates(300, save_replay=True)
    kept = updates(600, resume=str(folder), save_replay=True)
    anew = updates(900, resume=str(folder))
    if world.rank == 0:
        ranks = range(1, 2) if apart else range(1, world.size)
        assert sorted(path.name for path in (folder / "replay").iterdir()) == [f"{rank:04d}.h5" for rank in ranks]
        assert kept - first == 300 and 100 < anew - kept < 300 - 60, (first, kept, anew, learners)
