"""Pipelines of random shapes, one after the other: mpiexec -n 4 python tests/soak/pipelines.py SEED FIRST LAST

Case i draws from (SEED, i) and the number of ranks a schedule, stages, chunks, micro-batches, recomputation and the
size of messages, from nothing to a megabyte, which is far above and below what an MPI sends without a receiver that
waits; and naps that shuffle which stage is first. Layers are arithmetic on whole numbers, so that each message is
checked: it came from the right stage, for the right micro-batch, once. A deadlock is ended after a minute by the
watchdog, which says who waits for what."""

import contextlib
import sys
import time
from types import SimpleNamespace

import numpy as np
from collectives import main

from hpcdl.models.pool import Pool
from hpcdl.parallel.stage import Stage
from hpcdl.random import Random
from hpcdl.strategies.pipeline_schedules import INTERLEAVED, SCHEDULES, actions_of, placement

NAMES = list(SCHEDULES)
WIDTHS = 1, 30, 1000, 10_000


class Arithmetic:
    """In place of a model's part: forward adds 1 at each place, backward multiplies by 3; sums are known."""

    def __init__(self, comm, where, width, naps):
        self.comm, self.width, self.naps, self.pool = comm, width, naps, Pool("float64")
        self.where, self.chunks = where, [range(c, c + 1) for c in range(where.chunks)]
        self.numbers = self.chunks
        self.arrived = {}

    def input_shape(self, chunk, rows):
        return rows, self.width

    def targets(self, batch):
        return batch.number

    def forward(self, weights, x, layers, targets, keep, batch):
        self.nap()
        y = self.pool.take(*x.shape)
        y[...] = x + 1
        last = self.where.virtual(self.comm.rank, layers.start) == self.where.last
        return (float(y.sum()), 0) if last else y, [(y, targets)]

    def backward(self, weights, kept, dy, layers, left=None):
        self.nap()
        if left is not None:
            left.append(layers)
        y, number = kept.pop()
        dx = self.pool.take(*y.shape)
        dx[...] = number + 1 if dy is None else 3 * dy
        if dy is not None:
            self.pool.give(dy)
        self.pool.give(y)
        if self.comm.rank == 0 and layers.start == 0:
            self.arrived.setdefault(len(self.arrived), dx.copy())
            self.pool.give(dx)
            return None
        return dx

    def weight_gradients(self, weights, left):
        self.nap()
        assert len(left) == 1

    def unchanged(self):
        return contextlib.nullcontext()

    def release(self, kept):
        for y, _ in kept:
            self.pool.give(y)

    def nap(self):
        if self.naps.random() < 0.1:
            time.sleep(float(self.naps.random()) / 500)


def case(comm, seed: int, i: int) -> str:
    """Run case i on some of the ranks; returns what it was."""
    draw = Random(seed)("pipelines", i, comm.size)
    schedule = NAMES[draw.integers(len(NAMES))]
    stages = int(draw.integers(2 if schedule in INTERLEAVED else 1, comm.size + 1))
    where = placement(schedule, stages, int(draw.integers(1, 4)) if schedule in INTERLEAVED else 1)
    chunks, microbatches = where.chunks, int(draw.integers(1, 17))
    if schedule in INTERLEAVED:
        microbatches = stages * int(draw.integers(1, 4))
    elif schedule == "dualpipe-v":
        microbatches += 2 * stages
    width, recompute = WIDTHS[draw.integers(len(WIDTHS))], bool(draw.integers(2))
    rows = draw.integers(0, 14, microbatches)
    what = f"{schedule}, {stages} stages, {chunks} chunks, {microbatches} micro-batches, width {width}"
    group = comm.split(0 if comm.rank < stages else None)
    if group is None:
        return what
    part = Arithmetic(group, where, width, Random(seed)("naps", i, comm.rank))
    stage = Stage(group, part, None, None, recompute, where)
    places = stages * chunks
    for _ in range(2):  # the second batch follows without a pause
        x = [np.full((n, width), k, np.float64) for k, n in enumerate(rows)]
        batches = [SimpleNamespace(x=x[k], y=np.zeros(n), number=k) for k, n in enumerate(rows)]
        actions = list(actions_of(schedule, stages, group.rank, microbatches, chunks))
        loss = stage.run(actions, batches)
        if group.rank == where.place(where.last)[0]:
            assert loss == sum(n * width * (k + places) for k, n in enumerate(rows)), (i, what, loss)
        if group.rank == 0:
            order = [each.microbatch for each in actions if each.kind == "B" and each.chunk == 0]
            for k, dx in zip(order, part.arrived.values(), strict=True):
                assert dx.shape == (rows[k], width) and (dx == (k + 1) * 3 ** (places - 1)).all(), (i, what, k)
            part.arrived.clear()
        assert not stage.in_flight and not stage.leaving, (i, what)
    assert not group.mpi.Iprobe(), f"{i}, {what}: a message is left"
    group.free()
    return what


if __name__ == "__main__":
    main(case, *sys.argv[1:])
