"""A stage of a pipeline: its messages, what is in flight, and that the stages together are the model."""

import itertools

import numpy as np
import pytest

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.grid import two_ends
from hpcdl.comm.progress import activity
from hpcdl.data import Batch, from_arrays
from hpcdl.memory import Memory
from hpcdl.models import make_model
from hpcdl.models.layered import Vectors
from hpcdl.models.part import Part
from hpcdl.random import Random
from hpcdl.runs import Options, Run
from hpcdl.parallel.stage import TAGS, Stage, place_layers
from hpcdl.strategies.pipeline_schedules import SCHEDULES, steps_of

FEATURES, CLASSES = 5, 3
DEEP = "mlp:4,6,5,4,7,6,5"  # 8 layers


def rows(count):
    random = np.random.default_rng(count)
    x, y = random.standard_normal((count, FEATURES)), random.integers(0, CLASSES, count)
    return Batch(x, y, count, epoch=0, step=0, index=np.arange(count))


class Pipeline:
    """A model over the ranks of `comm`, layers dealt out evenly in turns, with parameters and gradient of its own."""

    def __init__(self, bare, recompute=False, parts=1):
        self.comm = Communicator(bare, "ring")
        self.model = make_model(DEEP, (FEATURES,), CLASSES, "float64")
        layers = chunks(8, bare.size * parts)[bare.rank :: bare.size]
        ranges = [range(each.start, each.stop + (each.stop == 8)) for each in layers]  # the loss goes with the last
        self.part = Part(self.model, ranges)
        self.part.pool.memory = self.memory = Memory()
        self.parameters, self.gradient = self.part.initialize(Random(0)), np.zeros(self.part.size)
        self.stage = Stage(
            self.comm, self.part, Vectors(self.part, self.parameters, self.gradient), self.model, recompute
        )

    def wanted(self, batch):
        """Loss and this rank's part of the gradient, of the whole model."""
        gradient = np.zeros(self.model.size)
        loss = self.model.loss_and_gradient(self.model.initialize(Random(0)), batch, gradient)
        return loss, np.concatenate(
            [gradient[piece.start : piece.start + piece.size] for piece, _ in self.part.pieces()]
        )

    def check(self, loss, batch):
        """Hold loss and gradient against those of the model on one rank; nothing is left in flight."""
        wanted, gradient = self.wanted(batch)
        last = self.comm.rank == self.comm.size - 1
        assert loss == (pytest.approx(wanted, rel=1e-12) if last else 0)
        assert np.abs(self.gradient - gradient).max(initial=0) < 1e-12
        assert not self.stage.flying and not self.stage.leaving and not activity.in_flight
        assert self.memory.now["activations"] == 0
        self.gradient[:] = 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_stages_together_are_the_model(schedule, recompute, each_group):
    def body(comm):
        if schedule == "interleaved" and comm.size == 1:
            return
        parts = 2 if schedule == "interleaved" else 1
        pipeline, batch, m = Pipeline(comm, recompute, parts), rows(13), 2 * comm.size
        for _ in range(2):
            steps = list(steps_of(schedule, comm.size, comm.rank, m, parts))
            pipeline.check(pipeline.stage.run(steps, batch.split(m)), batch)
        spans = pipeline.stage.spans
        assert [(span.kind, span.microbatch, span.chunk) for span in spans] == [tuple(step) for step in steps]
        assert all(a.start <= a.stop <= b.start for a, b in itertools.pairwise(spans))
        pipeline.comm.free()

    each_group(body)


@pytest.mark.parametrize("count", [0, 1, 9])
def test_one_batch_that_no_other_accompanies(count, each_group):
    def body(comm):
        for parts in (1, 2) if comm.size > 1 else (1,):
            pipeline, batch = Pipeline(comm, parts=parts), rows(count)
            pipeline.check(pipeline.stage.descend(batch), batch)
            assert pipeline.stage.flew == parts
            score = pipeline.stage.score(batch)
            wanted = pipeline.model.evaluate(pipeline.model.initialize(Random(0)), batch)
            assert score == (pytest.approx(wanted, rel=1e-12) if comm.rank == comm.size - 1 else (0.0, 0.0))
            assert pipeline.memory.now["activations"] == 0 and not pipeline.gradient.any()
            pipeline.comm.free()

    each_group(body)


def test_micro_batches_of_numbers_beyond_all_tags(each_group):
    """Tags are used again, in an order that no two messages in flight share one."""

    def body(comm):
        pipeline, batch = Pipeline(comm), rows(6)
        for first in (TAGS // 3 - 1, TAGS - 1, 10**9):
            numbers = [first + k for k in range(3)]
            steps = [("F", k, 0) for k in numbers] + [("B", k, 0) for k in numbers]
            pipeline.check(pipeline.stage.run(steps, dict(zip(numbers, batch.split(3), strict=True))), batch)
        pipeline.check(pipeline.stage.descend(batch), batch)
        assert pipeline.stage.flew == 3  # at most, though but one flew last
        pipeline.comm.free()

    each_group(body)


def test_a_version_that_is_held_serves_the_backward(each_group):
    """What a micro-batch in flight is told to hold is what its backward takes, as if nothing had been updated."""

    def body(comm):
        pipeline, batch = Pipeline(comm), rows(6)
        stage, old = pipeline.stage, Vectors(pipeline.part, pipeline.parameters.copy(), pipeline.gradient)
        stage.loss = 0.0
        stage.forward(0, 0, batch)
        stage.hold(0, old)
        pipeline.parameters[:] = np.nan
        stage.backward(0, 0)
        stage.settle()
        pipeline.check(stage.loss, batch)
        pipeline.comm.free()

    each_group(body)


def test_spans_of_all_stages_on_one_clock(world):
    pipeline, batch = Pipeline(world), rows(6)
    pipeline.stage.run(list(steps_of("1f1b", world.size, world.rank, 2)), batch.split(2))
    spans = pipeline.stage.gather_spans()
    assert (spans is None) == (world.rank > 0)
    if spans:
        assert len(spans) == world.size and min(span.start for each in spans for span in each) == 0
        when = {(s, span.kind, span.microbatch): span for s, each in enumerate(spans) for span in each}
        for s, k in ((s, k) for s in range(1, world.size) for k in range(2)):
            assert when[s - 1, "F", k].stop <= when[s, "F", k].start  # on one node, to the clock's resolution
            assert when[s, "B", k].stop <= when[s - 1, "B", k].start
    pipeline.comm.free()


def test_first_and_last_stage_share_a_group(each_group):
    def body(bare):
        comm = Communicator(bare, "ring")
        ends = two_ends(comm)
        if comm.size == 1 or 0 < comm.rank < comm.size - 1:
            assert ends is None
        else:
            assert (ends.size, ends.rank) == (2, int(comm.rank > 0))
            ends.free()
        comm.free()

    each_group(body)


@pytest.mark.parametrize("balance", ["parameters", "measured"])
def test_layers_of_stages_are_the_same_on_all_ranks(balance, world):
    comm, x = Communicator(world, "ring"), np.zeros((20, FEATURES))
    data = from_arrays(x, np.arange(20) % CLASSES, classes=CLASSES, dtype="float64")
    with Run(comm, Options(dtype="float64", progress="none", steps=1)) as run:
        run.finish = lambda: None  # it trains nothing
        model = make_model(DEEP, (FEATURES,), CLASSES, "float64")
        parts = 2 if world.size > 1 else 1
        ranges = place_layers(run, model, data, comm, parts, balance)
        assert len(ranges) == parts and all(len(each) for each in ranges)
        dealt = world.allgather(ranges)
        in_turns = [each for turn in zip(*dealt, strict=True) for each in turn]
        assert [layer for each in in_turns for layer in each] == list(range(9))
        names = [[model.layers[i].name for each in ranges for i in each] for ranges in dealt]
        assert run.extra["layers_of_stages"] == names
    comm.free()
