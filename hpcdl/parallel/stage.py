"""A pipeline stage: its layers, and the messages to its neighbours, in the order of a schedule.

    forward     wait for x from the stage before, y = layers(x), push y to the stage after
    backward    wait for dy from the stage after, compute dx, push dx to the stage before

Pushes never block: sent arrays stay in place until they have left, so that stages cannot deadlock, however little an
MPI buffers. Receives block, and cause all the idle time.

    in flight    data from a micro-batch's forward to its backward: x, and the layers' saved data
    recompute    only x is in flight; backward recomputes the rest (Chen et al., "Training deep nets with sublinear
                 memory cost", 2016; GPipe does so)
    chunks       of layers, assigned in turn: chunk c of stage s is number c * stages + s of all"""

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
from hpcdl.parallel.timetable import Action, Span

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


class StageTotals(NamedTuple):
    """Times of a stage, summed over steps: from a step's first action to its last, and of computing in between."""

    seconds: float = 0.0
    busy: float = 0.0


class Stage:
    """A pipeline stage: the layers of `part`, whose chunks are assigned to the ranks of `comm` in turn.
    weights: provides the tensors. model: the full model, possibly a StragglerModel. most_in_flight: largest number
    of pairs (micro-batch, chunk) in flight. spans: of the actions since `begin`. done: times of all steps."""

    def __init__(self, comm: Communicator, part: ModelPart, weights: Weights, model: Any, recompute: bool = False):
        self.comm, self.part, self.weights, self.model, self.recompute = comm, part, weights, model, recompute
        self.stages, self.chunks, self.pool = comm.size, len(part.chunks), part.pool
        self.before, self.after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self.in_flight: dict[tuple[int, int], InFlight] = {}  # by micro-batch number and chunk
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
        """Run actions on micro-batches, the same on all stages; return the sum of losses, 0 before the last stage."""
        self.begin()
        loss = 0.0
        for kind, number, chunk in actions:
            if kind == "F":
                loss += self.forward(number, chunk, batches[number])
            else:
                self.backward(number, chunk)
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
            loss, shape, sent = 0.0, y.shape, self._send_on(y, "F", number, chunk)
        if self.recompute:
            self.part.release(tape[:-1])
            self.leaving.append((sent, lambda: self.part.release(tape[-1:])))  # y stays until it has left
        own = None if self.recompute else tape
        self.in_flight[number, chunk] = InFlight(batch, x, own, shape, sent, self.weights)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self._sweep()
        return loss

    def backward(self, number: int, chunk: int) -> None:
        """Run backward of a micro-batch."""
        batch, x, tape, shape, sent, weights = self.in_flight.pop((number, chunk))
        dy = None
        if not self._last(chunk):
            dy = self._receive(shape, self.after, self._tag("B", number, chunk))
            sent.wait()  # already received, as dy is the answer
        self._sweep()
        with self._computing(Action("B", number, chunk), 2 / 3 + (1 / 3 if tape is None else 0)):
            if tape is None:
                with self.part.unchanged():
                    _, tape = self._forward(weights, x, chunk, batch)
            dx: Any = self.part.backward(weights, tape, dy, self.part.numbers[chunk])
        if not self._first(chunk):
            self.pool.give(x)
            to = self._send(dx, self.before, "B", number, chunk - (self.comm.rank == 0))
            self.leaving.append((to, lambda: self.pool.give(dx)))

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
                self._send_on(y, "S", 0, chunk).wait()
            self.part.release(tape)
            if not self._first(chunk):
                self.pool.give(x)
        return result

    def costs(self, bookkeeping: Communicator) -> dict:
        """Return entries of the summary: idle share of the stages (None without a step), most in flight on each rank.
        A stage is idle when it computes nothing, from first start to last end on stage 0. Collective on bookkeeping."""
        with self.comm.inside("gather the times of stages"):
            done = [StageTotals(*each) for each in self.comm.mpi.allgather(self.done)]
        with bookkeeping.inside("gather the numbers in flight"):
            most = bookkeeping.mpi.allgather(self.most_in_flight)
        whole, busy = self.stages * done[0].seconds, sum(each.busy for each in done)
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
        return self.comm.rank == 0 and chunk == 0

    def _last(self, chunk: int) -> bool:
        return self.comm.rank == self.stages - 1 and chunk == self.chunks - 1

    def _forward(
        self, weights: Weights, x: Array, chunk: int, batch: Batch, keep: bool = True
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        targets = self.part.targets(batch) if self._last(chunk) else None
        return self.part.forward(weights, x, self.part.numbers[chunk], targets, keep, batch)

    def _tag(self, kind: str, number: int, chunk: int) -> int:
        return (len(KINDS) * (number * self.chunks + chunk) + KINDS.index(kind)) % TAGS

    def _receive(self, shape: Any, source: int, tag: int) -> Array:
        array = self.pool.take(*shape)
        self.comm.wait(array, source, tag)
        return array

    def _input(self, kind: str, number: int, chunk: int, batch: Batch) -> Array:
        """Return the batch's x on the first stage; elsewhere the array that the stage before sends."""
        if self._first(chunk):
            return self.part.inputs(batch)
        return self._receive(self.part.input_shape(chunk, len(batch.y)), self.before, self._tag(kind, number, chunk))

    def _send(self, array: Array, to: int, kind: str, number: int, chunk: int) -> Request:
        return self.comm.ipush(array, to, self._tag(kind, number, chunk))

    def _send_on(self, y: Array, kind: str, number: int, chunk: int) -> Request:
        """Send y to the next stage; from the last stage to the next chunk of the first one."""
        return self._send(y, self.after, kind, number, chunk + (self.comm.rank == self.stages - 1))

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
        name = {"F": "forward", "B": "backward"}[action.kind]
        self.comm.timeline.add(name, begun, ended, **{"micro-batch": action.microbatch, "chunk": action.chunk})
