"""A pipeline stage: its layers, and the messages to its neighbours, in the order of a schedule.

    forward             wait for x from the stage before, y = layers(x), push y to the stage after
    backward            wait for dy from the stage after, compute dx, push dx to the stage before
    weight gradients    compute the products that a backward has left (zero-bubble schedules)

Pushes never block: sent arrays stay in place until they have left, so that stages cannot deadlock, however little an
MPI buffers. Receives block, and cause all the idle time.

    in flight    data from a micro-batch's forward to its backward: x, and the layers' saved data
    recompute    only x is in flight; backward recomputes the rest (Chen et al., "Training deep nets with sublinear
                 memory cost", 2016; GPipe does so)
    left         the operands of products, from a micro-batch's backward to its weight gradients
    chunks       of layers, assigned in turn or in a V (timetable.py); between two chunks of one stage, as at the bottom
                 of a V, a copy of y takes the place of a message, and dx is handed over"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hpcdl.comm import Communicator
from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.comm.requests import Request
from hpcdl.comm.trace import clock_offset
from hpcdl.data import Batch
from hpcdl.faults.straggler import stretched
from hpcdl.kernels.device import Array
from hpcdl.models.layered import Weights
from hpcdl.models.part import ModelPart
from hpcdl.parallel.timetable import Action, Placement, Span, split_backwards

KINDS = "FBS"  # forward, backward, score
TAGS = 32768 // len(KINDS) * len(KINDS)  # of the number that MPI guarantees


class InFlight(NamedTuple):
    """A micro-batch between forward and backward. tape: saved data; None: recompute it. shape, sent: of y, if sent."""

    batch: Batch
    x: Array
    tape: list | None
    shape: Any  # tuple[int, ...] | None
    sent: Any  # Request | None
    weights: Weights


class Left(NamedTuple):
    """What a micro-batch's backward has left: (layer, products) by layer, and the weights whose gradient they are."""

    weights: Weights
    products: list[tuple[int, list]]


class StageTotals(NamedTuple):
    """Times of a stage, summed over steps: from a step's first action to its last, and of computing in between."""

    seconds: float = 0.0
    busy: float = 0.0


class Stage:
    """A pipeline stage: the layers of `part`, whose chunks lie on the ranks of `comm` as `where` says; None: in turn.
    weights: provides the tensors. model: the full model, possibly a StragglerModel. most_in_flight: largest number
    of pairs (micro-batch, chunk) in flight or left. spans: of the actions since `begin`. done: times of all steps."""

    def __init__(
        self,
        comm: Communicator,
        part: ModelPart,
        weights: Weights,
        model: Any,
        recompute: bool = False,
        where: Placement | None = None,
    ):
        self.comm, self.part, self.weights, self.model, self.recompute = comm, part, weights, model, recompute
        self.stages, self.chunks, self.pool = comm.size, len(part.chunks), part.pool
        self.where = where or Placement(self.stages, self.chunks)
        self.in_flight: dict[tuple[int, int], InFlight] = {}  # by micro-batch number and chunk
        self.left: dict[tuple[int, int], Left] = {}  # likewise
        self.handed: dict[int, Array] = {}  # from one chunk of this stage to another, by tag
        self.leaving: list[tuple[Request | None, Callable[[], None]]] = []
        self.most_in_flight = 0
        self.done = StageTotals()
        self.begin()

    def begin(self, shown: int | None = None) -> None:
        """Begin a step. shown: number of the last spans to keep; None: all."""
        self.spans: deque[Span] = deque(maxlen=shown)
        self.started: Any = None  # start of the first action
        self.busy = 0.0

    def end(self, apart_seconds: float = 0.0) -> None:
        """End the step after all sends have completed. apart_seconds: seconds of the step spent on other work."""
        for request, give in self.leaving:
            if request is not None:
                request.wait()
            give()
        self.leaving = []
        if self.spans:
            seconds = self.spans[-1].stop - apart_seconds - self.started
            self.done = StageTotals(self.done.seconds + seconds, self.done.busy + self.busy)

    def run(self, actions: Iterable[Action], batches: Sequence[Batch]) -> float:
        """Run actions on micro-batches, the same on all stages; return the sum of losses, 0 on stages without the loss.
        A backward leaves its weight gradients to the action W, if there is one."""
        self.begin()
        loss, actions = 0.0, list(actions)
        split = split_backwards(actions)
        for kind, number, chunk in actions:
            if kind == "F":
                loss += self.forward(number, chunk, batches[number])
            elif kind == "B":
                self.backward(number, chunk, (number, chunk) in split)
            else:
                self.weight_gradients(number, chunk)
        self.end()
        return loss

    def forward_backward(self, batch: Batch) -> float:
        """Run forward and backward of a single batch; return its sum of losses as `run` does."""
        chunks = range(self.chunks)
        return self.run([*(Action("F", 0, c) for c in chunks), *(Action("B", 0, c) for c in reversed(chunks))], [batch])

    def warm_up(self, batch: Batch) -> None:
        """Run forward and backward without recording them."""
        self.forward_backward(batch)
        self.done = StageTotals()

    def forward(self, number: int, chunk: int, batch: Batch) -> float:
        """Run forward of a micro-batch; return its sum of losses, 0 on stages without the loss."""
        x, shape = self._input("F", number, chunk, batch), None
        with self._computing(Action("F", number, chunk), 1 / 3):
            y, tape = self._forward(self.weights, x, chunk, batch)
        if self._last(chunk):
            loss, sent = y[0], None
        else:
            loss, shape, sent = 0.0, y.shape, self._send(y, "F", number, chunk, 1)
        if self.recompute:
            self.part.release(tape[:-1])
            self.leaving.append((sent, lambda: self.part.release(tape[-1:])))  # y stays until it has left
        own = None if self.recompute else tape
        self.in_flight[number, chunk] = InFlight(batch, x, own, shape, sent, self.weights)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight) + len(self.left))
        self._sweep()
        return loss

    def backward(self, number: int, chunk: int, split: bool = False) -> None:
        """Run backward of a micro-batch. split: True to leave its weight gradients for `weight_gradients`."""
        batch, x, tape, shape, sent, weights = self.in_flight.pop((number, chunk))
        dy = None
        if not self._last(chunk):
            dy = self._receive(shape, "B", number, chunk, 1)
            if sent is not None:
                sent.wait()  # already received, as dy is the answer
        self._sweep()
        left = Left(weights, [])
        fraction = (1 / 3 if split else 2 / 3) + (1 / 3 if tape is None else 0)
        with self._computing(Action("B", number, chunk), fraction):
            if tape is None:
                with self.part.unchanged():
                    _, tape = self._forward(weights, x, chunk, batch)
            own = left.products if split else None
            dx: Any = self.part.backward(weights, tape, dy, self.part.numbers[chunk], own)
        if split:
            self.left[number, chunk] = left
        if not self._first(chunk):
            self.pool.give(x)
            to = self._send(dx, "B", number, chunk, -1)
            if to is not None:
                self.leaving.append((to, lambda: self.pool.give(dx)))

    def weight_gradients(self, number: int, chunk: int) -> None:
        """Compute the weight gradients of a micro-batch that its backward has left."""
        with self._computing(Action("W", number, chunk), 1 / 3):
            self.part.weight_gradients(*self.left.pop((number, chunk)))

    def use(self, number: int, weights: Weights) -> None:
        """Set the weights for the backward of a micro-batch in flight."""
        self.in_flight[number, 0] = self.in_flight[number, 0]._replace(weights=weights)

    def score(self, batch: Batch) -> tuple[float, float]:
        """Return (sum of losses, score) of a batch on the stage of the loss, zeros elsewhere; collective."""
        result = 0.0, 0.0
        for chunk in range(self.chunks):
            x = self._input("S", 0, chunk, batch)
            y, tape = self._forward(self.weights, x, chunk, batch, keep=False)
            if self._last(chunk):
                result = y
            else:
                sent = self._send(y, "S", 0, chunk, 1)
                if sent is not None:
                    sent.wait()
            self.part.release(tape)
            if not self._first(chunk):
                self.pool.give(x)
        return result

    def costs(self, bookkeeping: Communicator) -> dict:
        """Return entries of the summary: idle share of the stages (None without a step), most in flight on each rank.
        A stage is idle when it computes nothing in the time of a step, which is the longest one from a stage's first
        start to its last end. Collective on bookkeeping."""
        with self.comm.inside("gather the times of stages"):
            done = [StageTotals(*each) for each in self.comm.mpi.allgather(self.done)]
        with bookkeeping.inside("gather the numbers in flight"):
            most = bookkeeping.mpi.allgather(self.most_in_flight)
        whole, busy = self.stages * max(each.seconds for each in done), sum(each.busy for each in done)
        return {"idle_share": 1 - busy / whole if whole else None, "in_flight_per_rank": most}

    def gather_spans(self) -> list[list[Span]] | None:
        """Return on rank 0 all stages' spans of the last step, in seconds from its start; else None. Collective."""
        node = ranks_of_node(self.comm.mpi)
        with self.comm.inside("compare clocks"):
            offset = clock_offset(self.comm.mpi, node) / 1e9
        node.Free()
        with self.comm.inside("gather the spans"):
            stages = self.comm.mpi.gather([each.moved(offset) for each in self.spans])
        if stages is None:
            return None
        origin = min((each.start for spans in stages for each in spans), default=0.0)
        return [[each.moved(-origin) for each in spans] for spans in stages]

    def _first(self, chunk: int) -> bool:
        return self.where.virtual(self.comm.rank, chunk) == 0

    def _last(self, chunk: int) -> bool:
        return self.where.virtual(self.comm.rank, chunk) == self.where.last

    def _peer(self, chunk: int, step: int) -> tuple[int, int]:
        """Return (stage, chunk) of the chunk of the model before (step -1) or after (1) a chunk of this stage."""
        return self.where.place(self.where.virtual(self.comm.rank, chunk) + step)

    def _forward(
        self, weights: Weights, x: Array, chunk: int, batch: Batch, keep: bool = True
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        targets = self.part.targets(batch) if self._last(chunk) else None
        return self.part.forward(weights, x, self.part.numbers[chunk], targets, keep, batch)

    def _tag(self, kind: str, number: int, chunk: int) -> int:
        return (len(KINDS) * (number * self.chunks + chunk) + KINDS.index(kind)) % TAGS

    def _input(self, kind: str, number: int, chunk: int, batch: Batch) -> Array:
        """Return the batch's x on the first stage; elsewhere the array that the stage before sends."""
        if self._first(chunk):
            return self.part.inputs(batch)
        return self._receive(self.part.input_shape(chunk, len(batch.y)), kind, number, chunk, -1)

    def _receive(self, shape: Any, kind: str, number: int, chunk: int, step: int) -> Array:
        """Return what the chunk before (step -1) or after (1) sends to a chunk of this stage."""
        (source, _), tag = self._peer(chunk, step), self._tag(kind, number, chunk)
        if source == self.comm.rank:
            return self.handed.pop(tag)
        array = self.pool.take(*shape)
        self.comm.wait(array, source, tag)
        return array

    def _send(self, array: Array, kind: str, number: int, chunk: int, step: int) -> Request | None:
        """Send an array to the chunk before (step -1) or after (1); None: that is on this stage, and has it.
        The array of a backward is handed over itself; others belong to a layer, and are copied."""
        to, there = self._peer(chunk, step)
        tag = self._tag(kind, number, there)
        if to != self.comm.rank:
            return self.comm.ipush(array, to, tag)
        if kind != "B":
            copy = self.pool.take(*array.shape)
            copy[...] = array
            array = copy
        self.handed[tag] = array
        return None

    def _sweep(self) -> None:
        leaving, self.leaving = self.leaving, []
        for request, give in leaving:
            if request is None or request.test():
                give()
            else:
                self.leaving.append((request, give))

    @contextlib.contextmanager
    def _computing(self, action: Action, fraction: float) -> Iterator[None]:
        """Record an action's span, and stretch it for stragglers."""
        begun = time.perf_counter_ns()
        with stretched(self.model, fraction / self.chunks, self.comm.traffic):
            yield
        ended = time.perf_counter_ns()
        span = Span(action, begun / 1e9, ended / 1e9)
        self.spans.append(span)
        self.busy += span.stop - span.start
        self.started = span.start if self.started is None else self.started
        name = {"F": "forward", "B": "backward", "W": "weight gradients"}[action.kind]
        self.comm.timeline.add(name, begun, ended, **{"micro-batch": action.microbatch, "chunk": action.chunk})
