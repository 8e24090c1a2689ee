"""One stage of a pipeline: its layers, and the messages between it and its neighbours.

    forward     wait for x from the stage before, y = layers(x), push y to the stage after
    backward    wait for dy from the stage after, dx, push dx to the stage before

A schedule says which of the two comes next and for which micro-batch. Pushes never block: what is sent stays where it
is until it has left, so that the stages cannot deadlock, whatever an MPI sends without a partner who waits. Receiving
blocks, and that is all the time that a stage idles.

    in flight    from a micro-batch's forward to its backward: x, and what the layers have kept
    recompute    in flight is x alone; backward makes the rest anew (Chen et al., "Training deep nets with sublinear
                 memory cost", 2016; GPipe does so)
    chunks       a stage may hold several chunks of layers, which lie round the stages: chunk c of stage s is number
                 c * stages + s of all
"""

import contextlib
import itertools
import time
from typing import NamedTuple

import numpy as np

from hpcdl.comm.node import ranks_of_node
from hpcdl.comm.progress import activity
from hpcdl.comm.trace import clock_offset
from hpcdl.data import Batch
from hpcdl.models.balance import cut_layers, measured_costs
from hpcdl.runs.straggler import stretched, unslowed

KINDS = "FBS"  # forward, backward, score
TAGS = 32768 // len(KINDS) * len(KINDS)  # of those that MPI guarantees


def place_layers(run, model, data, comm, chunks: int = 1, balance: str = "parameters") -> list[range]:
    """The layers of this rank: `chunks` ranges of their numbers, the chunks of all ranks lying in turns; collective.

    balance: "parameters" or "measured", by the seconds that rank 0 takes for a batch's layers, one after the other.
    """
    costs = None
    if balance == "measured":
        model = unslowed(model)
        costs = np.empty(len(model.layers) - 1)
        if run.comm.rank == 0:
            x, y = (model.device.array(each) for each in data.train.rows(0, min(data.examples, run.plan(data)[0])))
            few = Batch(x, y, len(x), epoch=0, step=0, index=np.arange(len(x)))
            costs[:] = measured_costs(model, few)
        run.own.broadcast(costs)
        costs = costs.tolist()
    ranges = cut_layers(model, comm.size * chunks, costs)
    names = [[layer.name for layer in model.layers[each.start : each.stop]] for each in ranges]
    run.extra["layers_of_stages"] = [list(itertools.chain(*names[s :: comm.size])) for s in range(comm.size)]
    return ranges[comm.rank :: comm.size]


class Flying(NamedTuple):
    """A micro-batch between its forward and its backward; kept: None where it is made anew; shape: of y."""

    batch: object
    x: object
    kept: list | None
    shape: tuple
    sent: object
    store: object


class Span(NamedTuple):
    """What a stage computed, and when: kind F or B, start and stop in seconds of `time.perf_counter`."""

    kind: str
    microbatch: int
    chunk: int
    start: float
    stop: float


class Stage:
    """The layers of `part`, whose chunks are this rank's of those that the ranks of `comm` have in turns.

    store: where the layers find their tensors (hpcdl/models/layered.py). model: the one that the part is of, slowed or
    not (hpcdl/runs/straggler.py): a micro-batch takes one stage as long as a gradient takes that. `flew`: most
    micro-batches, times chunks, that were in flight at once; `spans`: of the last `run`; `done`: of each of them first
    start, last stop and seconds computing, for `costs`.
    """

    def __init__(self, comm, part, store, model, recompute: bool = False):
        self.comm, self.part, self.store, self.model, self.recompute = comm, part, store, model, recompute
        self.stages, self.chunks, self.pool = comm.size, len(part.chunks), part.pool
        self.before, self.after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self.flying, self.leaving, self.spans = {}, [], []
        self.loss, self.flew, self.done = 0.0, 0, []

    def run(self, steps, batches) -> float:
        """Take micro-batches through this stage as the schedule says; returns their sum of losses, 0 where it is not.

        steps: (kind, micro-batch, chunk) in order. batches: the micro-batches, on every stage.
        """
        self.loss, self.spans = 0.0, []
        for kind, number, chunk in steps:
            if kind == "F":
                self.forward(number, chunk, batches[number])
            else:
                self.backward(number, chunk)
        self.settle()
        busy = sum(span.stop - span.start for span in self.spans)
        self.done.append((self.spans[0].start, self.spans[-1].stop, busy) if self.spans else (0.0, 0.0, 0.0))
        return self.loss

    def descend(self, batch) -> float:
        """Forward and backward of one batch, which no other accompanies."""
        chunks = range(self.chunks)
        return self.run([*(("F", 0, c) for c in chunks), *(("B", 0, c) for c in reversed(chunks))], [batch])

    def forward(self, number: int, chunk: int, batch, store=None) -> None:
        """Forward of a micro-batch; store: another one than this stage's."""
        store, first, last = store or self.store, self._first(chunk), self._last(chunk)
        shape = None if first else self.part.input_shape(chunk, len(batch.y))
        x = batch.x if first else self._receive(shape, self.before, self._tag("F", number, chunk))
        with self._computing("F", number, chunk, 1 / 3):
            y, kept = self._forward(store, x, chunk, batch)
        if last:
            self.loss, shape, sent = self.loss + y[0], None, None
        else:
            sent, shape = self._send(y, self.after, "F", number, chunk + (self.comm.rank == self.stages - 1)), y.shape
        if self.recompute:
            self.part.release(kept[:-1])
            self.leaving.append((sent, lambda: self.part.release(kept[-1:])))  # y stays until it has left
        self.flying[number, chunk] = Flying(batch, x, None if self.recompute else kept, shape, sent, store)
        self.flew = max(self.flew, len(self.flying))
        self._sweep()

    def backward(self, number: int, chunk: int) -> None:
        """Backward of a micro-batch."""
        batch, x, kept, shape, sent, store = self.flying.pop((number, chunk))
        dy = None
        if not self._last(chunk):
            dy = self._receive(shape, self.after, self._tag("B", number, chunk))
            sent.wait()  # it has arrived, or there were no answer
        self._sweep()
        with self._computing("B", number, chunk, 2 / 3 + (1 / 3 if kept is None else 0)):
            if kept is None:
                _, kept = self._forward(store, x, chunk, batch)
            dx = self.part.backward(store, kept, dy, self.part.numbers[chunk])
        if not self._first(chunk):
            self.pool.give(x)
            to = self._send(dx, self.before, "B", number, chunk - (self.comm.rank == 0))
            self.leaving.append((to, lambda: self.pool.give(dx)))

    def hold(self, number: int, store) -> None:
        """Let the backward of a micro-batch in flight find its tensors in another store."""
        self.flying[number, 0] = self.flying[number, 0]._replace(store=store)

    def score(self, batch) -> tuple[float, float]:
        """(sum of losses, score) of a batch where the loss is, zeros elsewhere; all stages take the same batches."""
        result = 0.0, 0.0
        for chunk in range(self.chunks):
            first, last = self._first(chunk), self._last(chunk)
            shape = None if first else self.part.input_shape(chunk, len(batch.y))
            x = batch.x if first else self._receive(shape, self.before, self._tag("S", 0, chunk))
            y, kept = self._forward(self.store, x, chunk, batch, keep=False)
            if last:
                result = y
                self.part.release(kept)
            else:
                self._send(y, self.after, "S", 0, chunk + (self.comm.rank == self.stages - 1)).wait()
                self.part.release(kept)
            if not first:
                self.pool.give(x)
        return result

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        for request, give in self.leaving:
            if request is not None:
                request.wait()
            give()
        self.leaving = []

    def costs(self, run) -> dict:
        """What a summary says of it: the idle share of the stages, and the most micro-batches in flight on each rank.

        Idle is what a stage does not compute between the first start and the last end of a step on any stage: waiting,
        and handling messages. Over all steps; None where there were none. A collective call of all ranks.
        """
        offset = self._clock_offset()
        mine = [(first + offset, last + offset, busy) for first, last, busy in self.done]
        with activity.inside("gather what the stages did"):
            steps = list(zip(*self.comm.mpi.allgather(mine), strict=True))
            flew = run.own.mpi.allgather(self.flew)
        whole = self.stages * sum(
            max(last) - min(first) for first, last, _ in (zip(*step, strict=True) for step in steps)
        )
        busy = sum(busy for step in steps for _, _, busy in step)
        return {"idle_share": 1 - busy / whole if whole else None, "in_flight_per_rank": flew}

    def _clock_offset(self) -> float:
        """Seconds to add to this rank's clock to have that of the first stage; collective."""
        node = ranks_of_node(self.comm.mpi)
        with activity.inside("compare clocks"):
            offset = clock_offset(self.comm.mpi, node) / 1e9
        node.Free()
        return offset

    def gather_spans(self) -> list[list[Span]] | None:
        """The spans of the last run of all stages on rank 0, in seconds from the first; None elsewhere. Collective."""
        offset = self._clock_offset()
        with activity.inside("gather the spans"):
            spans = self.comm.mpi.gather(
                [each._replace(start=each.start + offset, stop=each.stop + offset) for each in self.spans]
            )
        if spans is None:
            return None
        origin = min((each.start for stage in spans for each in stage), default=0.0)
        return [
            [each._replace(start=each.start - origin, stop=each.stop - origin) for each in stage] for stage in spans
        ]

    # -- what these share --------------------------------------------------------------------------------------------

    def _first(self, chunk):
        return self.comm.rank == 0 and chunk == 0

    def _last(self, chunk):
        return self.comm.rank == self.stages - 1 and chunk == self.chunks - 1

    def _forward(self, store, x, chunk, batch, keep=True):
        targets = self.part.targets(batch) if self._last(chunk) else None
        return self.part.forward(store, x, self.part.numbers[chunk], targets, keep)

    def _tag(self, kind, number, chunk):
        """Of a message to this chunk of the stage that receives it."""
        return (len(KINDS) * (number * self.chunks + chunk) + KINDS.index(kind)) % TAGS

    def _receive(self, shape, source, tag):
        array = self.pool.take(*shape)
        self.comm.wait(array, source, tag)
        return array

    def _send(self, array, to, kind, number, chunk):
        return self.comm.ipush(array, to, self._tag(kind, number, chunk))

    def _sweep(self):
        """Give back what has left."""
        still = []
        for request, give in self.leaving:
            if request is None or request.test():
                give()
            else:
                still.append((request, give))
        self.leaving = still

    @contextlib.contextmanager
    def _computing(self, kind, number, chunk, fraction):
        """A span of the picture; as long as the run pretends."""
        begun = time.perf_counter_ns()
        with stretched(self.model, fraction / self.chunks, self.comm.traffic):
            yield
        ended = time.perf_counter_ns()
        self.spans.append(Span(kind, number, chunk, begun / 1e9, ended / 1e9))
        name = {"F": "forward", "B": "backward"}[kind]
        self.comm.timeline.add(name, begun, ended, **{"micro-batch": number, "chunk": chunk})
