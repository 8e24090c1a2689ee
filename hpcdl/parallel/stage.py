"""A pipeline stage: its layers, and the messages to its neighbours.

    forward     wait for x from the stage before, y = layers(x), push y to the stage after
    backward    wait for dy from the stage after, dx, push dx to the stage before

A schedule gives the order of both for all micro-batches. Pushes never block: sent arrays stay in place until they have
left, so that stages cannot deadlock, however little an MPI buffers. Receives block, and cause all the idle time.

    in flight    data from a micro-batch's forward to its backward: x, and the layers' saved data
    recompute    only x is in flight; backward recomputes the rest (Chen et al., "Training deep nets with sublinear
                 memory cost", 2016; GPipe does so)
    chunks       a stage may hold several chunks of layers, assigned in turn: chunk c of stage s is number
                 c * stages + s of all
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hpcdl.comm import Communicator
from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.comm.progress import activity
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
    """A micro-batch between its forward and its backward; tape: saved data, None if recomputed; shape: of y."""

    batch: Batch
    x: Array
    tape: list | None
    shape: Any  # tuple[int, ...] | None
    sent: Any  # Request | None
    weights: Weights


class StageTotals(NamedTuple):
    """Times of a stage over all steps: seconds from first start to last end, and seconds of computing in them."""

    seconds: float = 0.0
    busy: float = 0.0


class Stage:
    """A pipeline stage: the layers of `part`, whose chunks are assigned to the ranks of `comm` in turn.

    weights: provides the tensors (hpcdl/models/layered.py). model: the full model, possibly a StragglerModel
    (hpcdl/faults/straggler.py), which slows the stage down in proportion. `most_in_flight`: maximum of micro-batches
    times chunks in flight; `spans`: actions since `begin`; `done`: sums over all steps from `begin` to `end`, for
    `costs`.
    """

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
        """Begin a step; shown: number of spans to keep, the last ones; None: all."""
        self.spans: deque[Span] = deque(maxlen=shown)
        self.started: Any = None  # start of the first action
        self.busy = 0.0

    def end(self, apart_seconds: float = 0.0) -> None:
        """End the step after all sends have completed; apart_seconds: time in it that belongs to other work."""
        for request, give in self.leaving:
            if request is not None:
                request.wait()
            give()
        self.leaving = []
        if self.spans:
            seconds = self.spans[-1].stop - apart_seconds - self.started
            self.done = StageTotals(self.done.seconds + seconds, self.done.busy + self.busy)

    def run(self, actions: Iterable[Action], batches: Sequence[Batch]) -> float:
        """Run the schedule's actions; return the sum of losses, 0 on stages without the loss.

        batches: the micro-batches, equal on every stage.
        """
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
        """Run forward and backward of a single batch."""
        chunks = range(self.chunks)
        return self.run([*(Action("F", 0, c) for c in chunks), *(Action("B", 0, c) for c in reversed(chunks))], [batch])

    def warm_up(self, batch: Batch) -> None:
        """Run forward and backward without recording them."""
        self.forward_backward(batch)
        self.done = StageTotals()

    def forward(self, number: int, chunk: int, batch: Batch) -> float:
        """Run forward of a micro-batch; return its sum of losses, 0 on stages without the loss."""
        first, last = self._first(chunk), self._last(chunk)
        shape = None if first else self.part.input_shape(chunk, len(batch.y))
        x = batch.x if first else self._receive(shape, self.before, self._tag("F", number, chunk))
        with self._computing(Action("F", number, chunk), 1 / 3):
            y, tape = self._forward(self.weights, x, chunk, batch)
        if last:
            loss, shape, sent = y[0], None, None
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
            first, last = self._first(chunk), self._last(chunk)
            shape = None if first else self.part.input_shape(chunk, len(batch.y))
            x = batch.x if first else self._receive(shape, self.before, self._tag("S", 0, chunk))
            y, tape = self._forward(self.weights, x, chunk, batch, keep=False)
            if last:
                result = y
            else:
                self._send_on(y, "S", 0, chunk).wait()
            self.part.release(tape)
            if not first:
                self.pool.give(x)
        return result

    def costs(self, bookkeeping: Communicator) -> dict:
        """Return the entries of the summary: idle share of the stages, maximum micro-batches in flight on each rank.

        Idle time is all time without computing between the first start and the last end of a step: waits and message
        handling. Both ends are those of the first stage: in every schedule a step begins with its forward, and ends
        with its backward, after those of all others. Over all steps; None without a step. bookkeeping: a communicator
        of all ranks; a collective call on it.
        """
        with activity.inside("gather what the stages did", self.comm):
            done = [StageTotals(*each) for each in self.comm.mpi.allgather(self.done)]
        with activity.inside("gather what was in flight", bookkeeping):
            most = bookkeeping.mpi.allgather(self.most_in_flight)
        whole, busy = self.stages * done[0].seconds, sum(each.busy for each in done)
        return {"idle_share": 1 - busy / whole if whole else None, "in_flight_per_rank": most}

    def _clock_offset(self) -> float:
        """Return the seconds to add to this rank's clock to get that of the first stage; collective."""
        node = ranks_of_node(self.comm.mpi)
        with activity.inside("compare clocks", self.comm):
            offset = clock_offset(self.comm.mpi, node) / 1e9
        node.Free()
        return offset

    def gather_spans(self) -> list[list[Span]] | None:
        """Return all stages' spans of the last step on rank 0, in seconds from the first, else None; collective."""
        offset = self._clock_offset()
        with activity.inside("gather the spans", self.comm):
            spans = self.comm.mpi.gather(
                [each._replace(start=each.start + offset, stop=each.stop + offset) for each in self.spans]
            )
        if spans is None:
            return None
        origin = min((each.start for stage in spans for each in stage), default=0.0)
        return [
            [each._replace(start=each.start - origin, stop=each.stop - origin) for each in stage] for stage in spans
        ]

    # -- helpers -----------------------------------------------------------------------------------------------------

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
        """Return the tag of a message to this chunk of the receiving stage."""
        return (len(KINDS) * (number * self.chunks + chunk) + KINDS.index(kind)) % TAGS

    def _receive(self, shape: Any, source: int, tag: int) -> Array:
        array = self.pool.take(*shape)
        self.comm.wait(array, source, tag)
        return array

    def _send(self, array: Array, to: int, kind: str, number: int, chunk: int) -> Request:
        return self.comm.ipush(array, to, self._tag(kind, number, chunk))

    def _send_on(self, y: Array, kind: str, number: int, chunk: int) -> Request:
        """Send y to the next stage; from the last stage to the next chunk of the first one."""
        return self._send(y, self.after, kind, number, chunk + (self.comm.rank == self.stages - 1))

    def _sweep(self) -> None:
        """Release the buffers of completed sends."""
        still: list[tuple[Request | None, Callable[[], None]]] = []
        for request, give in self.leaving:
            if request is None or request.test():
                give()
            else:
                still.append((request, give))
        self.leaving = still

    @contextlib.contextmanager
    def _computing(self, action: Action, fraction: float) -> Iterator[None]:
        """Context that records an action's span, and stretches it for stragglers."""
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
