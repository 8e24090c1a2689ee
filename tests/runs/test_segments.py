"""What a run has cost: the sum over its legs, also where one was killed, ran on other ranks, or kept no account."""

import contextlib
import json
import math

import pytest
from mpi4py import MPI
from written_runs import evaluations, steps, summary

from hpcdl.checkpoint.attributes import COUNTS, SECONDS, SUMMED
from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.machine.versions import versions
from hpcdl.runs.segments import known, leg, summed
from hpcdl.runs.stopwatch import Stopwatch

pytestmark = pytest.mark.four


def kill(world, out, step, change=lambda attributes: None):
    """Make the folder what it was when the run was killed after this checkpoint, whose attributes may be changed."""
    if world.rank == 0:
        found = Checkpoint.read(out / f"checkpoint-{step:09d}.h5")
        change(found.attributes)
        found.write(out / "checkpoint.h5")
        (out / "summary.json").unlink()


def spent(ranks, number):
    return [{name: number * (1 + rank) for name in SUMMED} for rank in range(ranks)]


def test_the_sum_of_each_rank_is_over_the_legs_in_which_it_took_part():
    legs = [leg(ranks, 5, 1.0, spent(ranks, number), [], {}) for ranks, number in ((2, 1), (3, 10), (1, 100))]
    found = summed(legs)
    assert found.keys() == set(SUMMED) == {*COUNTS, *SECONDS}
    for values in found.values():
        assert values == [111, 22, 30] and sum(values) == sum(sum(of["messages_per_rank"]) for of in legs)


def test_a_sum_of_which_a_part_is_not_known_is_none():
    legs = [leg(2, 5, 1.0, spent(2, 1), [], {}), leg(3, 5, 1.0, [*spent(1, 10), {}, {}], [], {})]
    assert summed(legs)["bytes_sent_per_rank"] == [11, None, None]
    assert summed([leg(None, 5, 1.0, None, None, None), *legs[:1]])["data_seconds_per_rank"] == [None, None]
    assert [known(math.nan, True), known(None, False), known(3.0, True)] == [None, None, 3]
    json.dumps(legs, allow_nan=False)


def test_a_run_that_was_killed_and_resumed_has_the_costs_of_both_legs(run, world, mpi_tmp_path):
    whole, out = mpi_tmp_path / "whole", mpi_tmp_path / "parts"
    run(steps=15, out=str(whole), allreduce="ring")
    run(steps=15, out=str(out), allreduce="ring", checkpoint_every=6, keep=9)
    kill(world, out, 6)
    done = run(out=str(out), resume=str(out), steps=15, allreduce="ring")
    found, never = summary(out), summary(whole)
    assert [(of["ranks"], of["steps"]) for of in found["legs"]] == [(world.size, 6), (world.size, 9)]
    assert [of["steps"] for of in never["legs"]] == [15]
    begun = [traffic["broadcast"] for traffic in never["traffic_per_rank"]]  # the initial values, of each leg
    for name, more in (("bytes_sent_per_rank", "bytes"), ("messages_per_rank", "messages")):
        wanted = [a + each[more] for a, each in zip(never[name], begun, strict=True)]
        assert found[name] == wanted and (sum(wanted) > 0) == (world.size > 1)
        assert found[name] == [sum(parts) for parts in zip(*(of[name] for of in found["legs"]), strict=True)]
    for of in found["legs"]:
        assert of["hosts"] == [MPI.Get_processor_name()] and of["versions"] == versions()
        parts = [of[f"{name}_seconds_per_rank"][0] for name in ("compute", "communication", "data")]
        assert math.isclose(sum(parts), of["seconds"], rel_tol=1e-6) and min(parts) >= 0
        for name in SUMMED:
            assert len(of[name]) == world.size and None not in of[name]
    assert found["seconds"] == pytest.approx(sum(of["seconds"] for of in found["legs"]))
    if world.rank == 0:
        assert found["examples_per_second"] == pytest.approx(done.examples / found["seconds"])


@pytest.mark.mpi(min_size=2)
def test_legs_on_other_ranks(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    run(steps=4, out=str(out), allreduce="ring")
    part = world.Split(0 if world.rank < world.size - 1 else MPI.UNDEFINED, world.rank)
    if part != MPI.COMM_NULL:
        run(comm=part, steps=8, out=str(out), resume=str(out), allreduce="ring")
    run(steps=12, out=str(out), resume=str(out), allreduce="ring")
    found, ranks = summary(out), world.size
    assert [of["ranks"] for of in found["legs"]] == [ranks, ranks - 1, ranks]
    for name in SUMMED:
        assert len(found[name]) == ranks
        assert sum(found[name]) == pytest.approx(sum(sum(of[name]) for of in found["legs"]))
    assert found["messages_per_rank"][-1] == sum(of["messages_per_rank"][-1] for of in found["legs"][::2])
    assert len(found["peak_memory_bytes_per_rank"]) == ranks


def test_each_evaluation_says_what_all_ranks_have_sent_by_then_in_all_legs(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    for resumed, last in (("", 8), (str(out), 12)):
        run(steps=last, out=str(out), resume=resumed, allreduce="ring")
    scored, found = evaluations(out), summary(out)
    assert [line["step"] for line in scored] == [4, 8, 12] and not any("bytes" in line for line in steps(out))
    for name, of in (("bytes", "bytes_sent_per_rank"), ("messages", "messages_per_rank")):
        assert [line[name] for line in scored[1:]] == [sum(found["legs"][0][of]), sum(found[of])]
        assert world.size == 1 or 0 < scored[0][name] < scored[1][name]
    run(steps=4, out=str(mpi_tmp_path / "b"), allreduce="mpi")
    last = evaluations(mpi_tmp_path / "b")[-1]
    assert last["messages"] is None and last["bytes"] > 0


def test_what_bookkeeping_takes_is_between_the_steps_and_a_leg_that_did_not_note_it_is_not_known(
    run, world, mpi_tmp_path, monkeypatch
):
    out, apart = mpi_tmp_path / "a", Stopwatch.apart

    @contextlib.contextmanager
    def longer(self):
        with apart(self):
            yield
        self.apart_seconds += 100.0

    monkeypatch.setattr(Stopwatch, "apart", longer)
    run(steps=12, out=str(out), checkpoint_every=4, keep=9)
    found = summary(out)
    for seconds in found["bookkeeping_seconds_per_rank"]:
        assert seconds > 300 and len(found["bookkeeping_seconds_per_rank"]) == world.size
    assert found["seconds"] < 100 and max(found["compute_seconds_per_rank"]) < 100

    def older(attributes):
        del attributes["legs"][0]["bookkeeping_seconds_per_rank"]

    kill(world, out, 4, older)
    run(steps=12, out=str(out), resume=str(out))
    found = summary(out)
    assert found["bookkeeping_seconds_per_rank"] == world.size * [None]
    assert None not in found["legs"][1]["bookkeeping_seconds_per_rank"] + found["data_seconds_per_rank"]


def test_of_a_checkpoint_that_kept_no_account_steps_and_seconds_are_known(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    run(steps=12, out=str(out), checkpoint_every=5, keep=9)

    def older(attributes):
        del attributes["legs"], attributes["sent"]

    kill(world, out, 5, older)
    run(steps=12, out=str(out), resume=str(out))
    found = summary(out)
    before, now = found["legs"]
    assert (before["ranks"], before["steps"], before["bytes_sent_per_rank"]) == (None, 5, None)
    assert before["seconds"] > 0 and now["steps"] == 7 and None not in now["bytes_sent_per_rank"]
    assert found["bytes_sent_per_rank"] == world.size * [None]
