"""Going on from an older checkpoint: as if the run had not gone beyond it, and nothing that is newer is lost."""

import numpy as np
import pytest
from written_runs import lines

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import UsageError

pytestmark = pytest.mark.four


def steps(folder):
    return [line["step"] for line in lines(folder)]


def trained(run, world, out, **options):
    """20 steps, with checkpoints after 5, 10, 15 and 20."""
    done = run(out=str(out), checkpoint_every=5, keep=9, **options)
    world.Barrier()
    return done


def test_what_was_later_is_set_aside_and_the_run_ends_the_same(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    first = trained(run, world, out)
    second = trained(run, world, out, resume=str(out / "checkpoint-000000010.h5"))
    assert np.array_equal(first.parameters, second.parameters) and second.step == 20
    kept = {path.name for path in out.glob("check*")}
    assert kept == {"checkpoint.h5", *(f"checkpoint-0000000{step:02}.h5" for step in (5, 10, 15))}
    later = {path.name for path in (out / "later").iterdir()}
    assert later == {"checkpoint.h5", "checkpoint-000000015.h5", "metrics.jsonl", "best.h5"}
    assert Checkpoint.read(out / "later" / "checkpoint.h5").attributes["step"] == 20
    assert steps(out) == steps(out / "later")  # none twice, none lost
    assert Checkpoint.read(out / "best.h5").attributes["step"] > 10  # made anew


def test_where_the_best_was_later_the_next_evaluation_is_the_best(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    trained(run, world, out)
    trained(run, world, out, resume=str(out / "checkpoint-000000010.h5"), lr=50.0, steps=13)  # it only becomes worse
    assert Checkpoint.read(out / "best.h5").attributes["step"] == 12


def test_a_run_that_dies_before_its_next_checkpoint_goes_on_from_the_older_one(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    trained(run, world, out)

    class Died(Exception):
        """As a rank does, without a word."""

    def die(running, loss, total):
        raise Died

    with pytest.raises(Died):
        run(out=str(out), resume=str(out / "checkpoint-000000010.h5"), observer=die)
    world.Barrier()
    assert Checkpoint.read(out).attributes["step"] == 10
    assert not (out / "checkpoint-000000015.h5").exists() and max(steps(out)) == 10
    world.Barrier()
    assert run(out=str(out), resume=str(out), steps=12).step == 12


def test_where_the_last_checkpoint_is_damaged_the_one_before_is_taken(run, world, mpi_tmp_path, capsys):
    out = mpi_tmp_path / "a"
    whole = trained(run, world, out)
    if world.rank == 0:
        (out / "checkpoint.h5").write_bytes((out / "checkpoint.h5").read_bytes()[:3000])
        (out / "checkpoint-000000015.h5").write_bytes(b"")
    world.Barrier()
    with pytest.raises(UsageError, match=r"damaged .*take .*a/checkpoint-000000015.h5 or .*-000000010.h5 .*best.h5"):
        run(out=str(out), resume=str(out / "checkpoint.h5"))  # a file that is named is the one that is meant
    again = run(out=str(out), resume=str(out), progress="lines")
    said = capsys.readouterr().out
    assert world.rank > 0 or ("damaged" in said and f"; going on from {out}/checkpoint-000000010.h5" in said)
    assert np.array_equal(whole.parameters, again.parameters)
    world.Barrier()
    assert Checkpoint.read(out).attributes["step"] == 20 and not list(out.glob("checkpoint-*15.h5"))
    assert (out / "later" / "checkpoint.h5").stat().st_size == 3000
    world.Barrier()
    if world.rank == 0:
        for each in (*out.glob("check*.h5"), out / "best.h5"):
            each.write_bytes(each.read_bytes()[:3000])
    world.Barrier()
    with pytest.raises(UsageError, match=r"^\S*/a/checkpoint.h5 is damaged"):
        run(out=str(out), resume=str(out))


def test_the_best_and_the_last_by_name_and_another_folder(run, world, mpi_tmp_path):
    out, other = mpi_tmp_path / "a", mpi_tmp_path / "b"
    trained(run, world, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.*")}
    world.Barrier()
    assert trained(run, world, other, resume=str(out / "best.h5")).step == 20
    assert before == {path.name: path.stat().st_mtime_ns for path in out.glob("*.*")}
    world.Barrier()
    last = trained(run, world, out, resume=str(out / "checkpoint.h5"), steps=22)
    assert last.step == 22 and not (out / "later").exists()
    world.Barrier()
    best = Checkpoint.read(out / "best.h5").attributes["step"]
    world.Barrier()
    trained(run, world, out, resume=str(out / "best.h5"), steps=best)
    assert Checkpoint.read(out).attributes["step"] == best
    assert Checkpoint.read(out / "best.h5").attributes["step"] == best
