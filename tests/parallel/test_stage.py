"""A stage of a pipeline: its messages, what is in flight, and that the stages together are the model."""

import itertools

import numpy as np
import pytest

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.data import Batch
from hpcdl.memory import Memory
from hpcdl.models import make_model
from hpcdl.models.layered import FlatWeights
from hpcdl.models.part import ModelPart
from hpcdl.parallel.stage import TAGS, Stage, StageTotals
from hpcdl.parallel.timetable import Action, Placement
from hpcdl.random import Random
from hpcdl.strategies.pipeline_schedules import INTERLEAVED, SCHEDULES, actions_of, most_in_flight, placement

FEATURES, CLASSES = 5, 3
DEEP = "mlp:4,6,5,4,7,6,5"  # 8 layers


def rows(count):
    random = np.random.default_rng(count)
    x, y = random.standard_normal((count, FEATURES)), random.integers(0, CLASSES, count)
    return Batch(x, y, count, epoch=0, step=0, index=np.arange(count))


class Pipeline:
    """A model over the ranks of `comm`, layers dealt out evenly, with parameters and gradient of its own."""

    def __init__(self, bare, recompute=False, where=None):
        self.comm = Communicator(bare, "ring")
        self.model = make_model(DEEP, (FEATURES,), CLASSES, "float64")
        self.where = where or Placement(bare.size)
        layers = [chunks(8, self.where.last + 1)[v] for v in self.where.of(bare.rank)]
        ranges = [range(each.start, each.stop + (each.stop == 8)) for each in layers]  # the loss goes with the last
        self.part = ModelPart(self.model, ranges)
        self.part.pool.memory = self.memory = Memory()
        self.parameters, self.gradient = self.part.initialize(Random(0)), np.zeros(self.part.size)
        weights = FlatWeights(self.part, self.parameters, self.gradient)
        self.stage = Stage(self.comm, self.part, weights, self.model, recompute, where)

    def check(self, loss, batch):
        """Hold loss and gradient against those of the model on one rank; nothing is left in flight."""
        gradient = np.zeros(self.model.size)
        wanted = self.model.loss_and_gradient(self.model.initialize(Random(0)), batch, gradient)
        mine = np.concatenate([gradient[each.start : each.start + each.size] for each, _ in self.part.pieces()])
        last = self.comm.rank == self.where.place(self.where.last)[0]
        assert loss == (pytest.approx(wanted, rel=1e-12) if last else 0)
        assert np.abs(self.gradient - mine).max(initial=0) < 1e-12
        assert not self.stage.in_flight and not self.stage.leaving and not activity.in_flight
        assert not self.stage.left and not self.stage.handed and not self.part.pool.pins
        assert self.memory.now["activations"] == 0
        self.gradient[:] = 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_stages_together_are_the_model(schedule, recompute, comm):
    if schedule in INTERLEAVED and comm.size == 1:
        return
    where = placement(schedule, comm.size, 2 if schedule in INTERLEAVED else 1)
    pipeline, batch, m = Pipeline(comm, recompute, where), rows(13), 2 * comm.size
    for _ in range(2):
        actions = list(actions_of(schedule, comm.size, comm.rank, m, where.chunks))
        pipeline.check(pipeline.stage.run(actions, batch.split(m)), batch)
    spans = pipeline.stage.spans
    assert [span.action for span in spans] == actions
    assert all(a.start <= a.stop <= b.start for a, b in itertools.pairwise(spans))
    assert pipeline.stage.most_in_flight == most_in_flight(actions)
    pipeline.comm.free()


def test_micro_batches_of_numbers_beyond_all_tags(comm):
    """Tags are used again, in an order that no two messages in flight share one."""
    pipeline, batch = Pipeline(comm), rows(6)
    for first in (TAGS // 3 - 1, TAGS - 1, 10**9):
        numbers = [first + k for k in range(3)]
        actions = [Action("F", k) for k in numbers] + [Action("B", k) for k in numbers]
        pipeline.check(pipeline.stage.run(actions, dict(zip(numbers, batch.split(3), strict=True))), batch)
    pipeline.check(pipeline.stage.forward_backward(batch), batch)
    assert pipeline.stage.most_in_flight == 3  # at most, though but one was last
    pipeline.comm.free()


def test_spans_of_all_stages_on_one_clock(world):
    pipeline, batch = Pipeline(world), rows(6)
    pipeline.stage.run(list(actions_of("1f1b", world.size, world.rank, 2)), batch.split(2))
    spans = pipeline.stage.gather_spans()
    assert (spans is None) == (world.rank > 0)
    if spans:
        assert len(spans) == world.size and min(span.start for each in spans for span in each) == 0
        when = {(s, span.action.kind, span.action.microbatch): span for s, each in enumerate(spans) for span in each}
        for s, k in ((s, k) for s in range(1, world.size) for k in range(2)):
            assert when[s - 1, "F", k].stop <= when[s, "F", k].start  # on one node, to the clock's resolution
            assert when[s, "B", k].stop <= when[s - 1, "B", k].start
    pipeline.comm.free()


def test_what_was_done(comm):
    """Of all steps the seconds from first start to last end and those computing; what warms up is no step, and of a
    long one the last spans are kept."""
    pipeline, batch = Pipeline(comm), rows(6)
    stage = pipeline.stage
    stage.warm_up(batch)
    assert stage.done == (0, 0) and pipeline.gradient.any()
    seconds = busy = 0.0
    for m in (2, 3):
        stage.run(actions_of("1f1b", comm.size, comm.rank, m), batch.split(m))
        spans = list(stage.spans)
        assert len(spans) == 2 * m
        seconds += spans[-1].stop - spans[0].start
        busy += sum(span.stop - span.start for span in spans)
        assert stage.done == pytest.approx((seconds, busy))
    stage.begin(shown=2)
    for number in range(3):
        stage.forward(number, 0, batch)
        stage.backward(number, 0)
        if number == 0:
            started = stage.spans[0].start
    stage.end(apart_seconds=1.0)
    spans = list(stage.spans)
    assert [span.action for span in spans] == [Action("F", 2), Action("B", 2)]
    assert stage.done.seconds == pytest.approx(seconds + spans[-1].stop - 1.0 - started)
    done = stage.done
    stage.begin()
    stage.end()
    assert stage.done == done  # nothing was done
    pipeline.comm.free()


@pytest.mark.mpi(min_size=2)
def test_the_first_stage_begins_and_ends_each_step(world):
    """So that its clock alone tells how long the step took on all of them."""
    pipeline, batch = Pipeline(world), rows(12)
    for schedule in ("naive", "gpipe", "1f1b"):
        pipeline.stage.run(actions_of(schedule, world.size, world.rank, 4), batch.split(4))
        spans = pipeline.stage.gather_spans()
        if spans is not None:
            first, *others = [(each[0].start, each[-1].stop) for each in spans]
            assert all(first[0] < start and stop < first[1] for start, stop in others)
    pipeline.comm.free()


def test_idle_share_and_most_in_flight(world):
    """Of all stages' time between the first start and the last end of a step, what was not spent computing."""
    pipeline = Pipeline(world)
    assert pipeline.stage.costs(pipeline.comm) == {"idle_share": None, "in_flight_per_rank": [0] * world.size}
    pipeline.stage.done = StageTotals(5.0 - world.rank / 8, 3.5)
    pipeline.stage.most_in_flight = world.rank
    p = world.size
    found = pipeline.stage.costs(pipeline.comm)
    assert found["idle_share"] == pytest.approx(1 - 3.5 * p / (p * 5.0))
    assert found["in_flight_per_rank"] == list(range(p))
    pipeline.comm.free()
