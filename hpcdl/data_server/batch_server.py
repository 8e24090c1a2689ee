"""The training-data server: a rank that holds examples and makes batches of them for workers, which hold none.

    worker    ask 1 | compute on 0 ...... | has 1: ask 2 | compute on 1 ...... | has 2: ask 3 | ...
                v                  ^              v                  ^
    server    send 1 | make 2 .....               send 2 | make 3 .....

A worker requests its next batch before it computes on the current one, and the idle server makes the batch that follows
in the order. So a worker waits for one transfer at most, and for none if the network moves data while it computes. The
batches are those that the worker would make itself.

Bytes per batch: the server sends rows * (features * itemsize + label + 8), or elements * (itemsize + 4) + rows * (label
+ 16) if rows are sparse, and a header; the worker sends 64. (Reader processes: Dean et al., "Large scale distributed
deep networks", NIPS 2012; Audibert et al., "tf.data service", SoCC 2023)"""

import json
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.framing import Inbox
from hpcdl.comm.requests import Request
from hpcdl.data import Data
from hpcdl.data.cursor import next_position
from hpcdl.data_server.data_messages import ANSWER, REQUEST, SPLITS, BatchFormat, Operation, Outbox, header_answer
from hpcdl.errors import UsageError, refuse_beyond
from hpcdl.memory import available
from hpcdl.parameter_server.request_checks import wrong
from hpcdl.runs import signals

MOST_LINES = 64  # most (batch size, share) pairs of a client, which uses a few
TRUSTED = 2  # consecutive requests after which the next batch is prefetched
SETTLED = 1.0  # seconds after which a signal for all ranks has reached the workers, too


def introduce(everyone: Communicator, opened: Data, clients: Sequence[int]) -> None:
    """Send the description of the data set `opened` to the clients, which construct their `RemoteData` meanwhile."""
    text = describe(opened)
    for client in clients:
        everyone.push(np.array([len(text)]), client, ANSWER.tag)
        everyone.push(text, client, ANSWER.tag)


def serve(everyone: Communicator, opened: Data, clients: Sequence[int]) -> int:
    """Answer the requests of the ranks `clients` of `everyone` until each has sent CLOSE; return the largest status
    sent. opened: the data set. A request that cannot be answered raises UsageError here."""
    server, status, left = BatchServer(everyone, opened, clients), 0, set(clients)
    while left:
        client, operation, *arguments = server.receive()
        if operation == Operation.CLOSE:
            left.remove(client)
            if not 0 <= arguments[0] <= 255:
                raise wrong(client, f"CLOSE with status {arguments[0]}, which is not from 0 to 255")
            status = max(status, arguments[0])
        else:
            server.answer(client, operation, *arguments)
    server.close()
    return status


def describe(data: Data) -> np.ndarray:
    """Return the description of the data for workers, as bytes of JSON."""
    plain = ("name", "features", "classes", "order", "outputs", "sparse", "source", "scales")
    description = {name: getattr(data, name) for name in plain} | {
        "dtype": data.dtype.name,
        "y_dtype": data.train.source.y_kind.name,
        "examples": {name: split.examples for name in SPLITS if (split := getattr(data, name)) is not None},
        "statistics": {name: vector.tolist() for name, vector in data.statistics.items()},
        "meaning": data.schema.describe(),
        "mixture": data.mixture and data.mixture.describe(),
        "class_counts": None if data.class_counts is None else data.class_counts.tolist(),
    }
    return np.frombuffer(json.dumps(description).encode(), np.uint8)


class BatchServer:
    """The state of a data server: its data set, and each client's sequences of batches."""

    def __init__(self, everyone: Communicator, data: Data, clients: Sequence[int]):
        self.comm, self.data, self.inbox = everyone, data, Inbox(everyone, REQUEST, clients)
        self.form = BatchFormat(*data.train.form)
        self.lines: dict[tuple[int, int, int, int], ClientBatches] = {}  # by (client, batch size, rank, size)
        self.most_elements: dict[int, int] = {}  # the most elements of so many sparse rows, by number of rows
        self.sent: dict[int, Request] = {}  # the last answer by client, in flight
        self.replies: dict[int, Callable[..., np.ndarray]] = {
            Operation.MOST_ROWS: self._most_rows,
            Operation.BATCH: self._batch,
            Operation.ROWS: self._rows,
            Operation.TAKE: self._take,
            Operation.DIGEST: self._digest,
        }
        self.signalled: float | None = None  # time of a signal to this rank

    def receive(self) -> tuple[int, ...]:
        """Return the next request, (client, operation, arguments...); prefetch batches until one arrives."""
        arrived = self.inbox.arrived
        self.comm.wait_until(arrived, lambda: not arrived() and self.make(), patient=True)
        client = arrived()[0]  # the client that was served longest ago
        request = REQUEST.vector(self.inbox.take(client)).tolist()
        if request[0] != Operation.CLOSE:
            self.inbox.listen(client)
        return client, *request

    def make(self) -> bool:
        """Prefetch one batch; return False if there is none to make."""
        return any(line.make() for line in self.lines.values())

    def answer(self, client: int, operation: int, *arguments: int) -> None:
        """Answer a client's request; UsageError for one that cannot be answered."""
        if operation not in self.replies:
            raise wrong(client, f"operation {operation}, but operations go from 0 to {len(self.replies)}")
        if client in self.sent:
            self.sent[client].wait()  # its buffer may be reused for the next batch
        message = self.replies[operation](client, *arguments)
        ANSWER.read(message)["signal"] = self._signal()
        if self.data.sparse and operation in (Operation.ROWS, Operation.TAKE):
            self.comm.ipush(message[: ANSWER.bytes], client, ANSWER.tag).wait()  # the size of the answer
        self.sent[client] = self.comm.ipush(message, client, ANSWER.tag)

    def _signal(self) -> int:
        """Return the number of a signal noticed SETTLED seconds ago, which perhaps only this rank received; 0: none."""
        if not signals.received:
            return 0
        self.signalled = self.signalled or time.monotonic()
        settled = time.monotonic() - self.signalled > SETTLED
        return signal.Signals[signals.received[0]].value if settled else 0

    def _most_rows(self, client: int, batch_size: int, rank: int, size: int, *_: int) -> np.ndarray:
        rows = self.data.most_rows(batch_size, (rank, size))
        if self.data.sparse and rows not in self.most_elements:
            self.most_elements[rows] = self.data.train.source.most_elements(rows)
        return header_answer(rows=rows, elements=self.most_elements.get(rows, 0))

    def _digest(self, client: int, *_: int) -> np.ndarray:
        rows, total = np.frombuffer(bytes.fromhex(self.data.digest), np.int64)
        return header_answer(rows=rows, total=total)

    def _batch(
        self, client: int, batch_size: int, rank: int, size: int, ahead: int, epoch: int, step: int, *_: int
    ) -> np.ndarray:
        key = client, batch_size, rank, size
        if epoch < 0 or ahead not in (0, 1):
            raise wrong(client, f"epoch {epoch}, ahead {ahead}")
        if key not in self.lines:
            if sum(each[0] == client for each in self.lines) == MOST_LINES:
                raise wrong(client, f"batches that are cut in more than {MOST_LINES} ways")
            self.lines[key] = ClientBatches(self.data, self.form, batch_size, (rank, size))
        return self.lines[key].take(epoch, step, bool(ahead))

    def _rows(self, client: int, split: int, first: int, last: int, *_: int) -> np.ndarray:
        part = self._split(client, split)
        if not 0 <= first <= last <= part.examples:
            raise wrong(client, f"rows {first} to {last} of {part.examples}")
        return self._taken(part, np.arange(first, last))

    def _take(self, client: int, split: int, count: int, *_: int) -> np.ndarray:
        part = self._split(client, split)
        if count < 0:
            raise wrong(client, f"{count} rows")
        refuse_beyond(f"what rank {client} asks for, {count:,} rows,", self.form.size(count), available())
        index = np.empty(count, np.int64)
        REQUEST.fill(self.comm, client, index)
        if count and not 0 <= index.min() <= index.max() < part.examples:
            raise wrong(client, f"rows {index.min()} to {index.max()} of {part.examples}")
        return self._taken(part, index)

    def _split(self, client: int, split: int) -> Any:
        part = getattr(self.data, SPLITS[split]) if 0 <= split < len(SPLITS) else None
        if part is None:
            raise wrong(client, f"rows of split {split}, which does not exist")
        return part

    def _taken(self, part: Any, index: np.ndarray) -> np.ndarray:
        x, y = part.take(index)
        message = self.form.packed(x, y, index)
        return message if self.data.sparse else message[: len(message) - index.nbytes]  # the worker knows the numbers

    def close(self) -> None:
        """Wait until all answers are sent, and end the threads."""
        for sent in self.sent.values():
            sent.wait()
        for line in self.lines.values():
            line.close()


class ClientBatches:
    """A sequence of batches of a client. The next batch is prefetched while the client takes consecutive steps. For
    other clients (asynchronous workers, which draw their steps) nothing is prefetched, and there is no thread."""

    expected: tuple[int, int] | None
    predicted: tuple[int, int] | None
    ready: np.ndarray | None

    def __init__(self, data: Any, form: BatchFormat, batch_size: int, share: tuple[int, int]):
        self.make_cursor = lambda ahead: data.cursor(batch_size, share, ahead, lambda count: Outbox(form, count))
        self.steps = data.steps_per_epoch(batch_size)
        self.cursors: dict[bool, Any] = {}  # by `ahead`; `take` of a cursor returns a message
        self.consecutive = TRUSTED  # consecutive requests so far
        self.expected = self.predicted = self.ready = None

    def take(self, epoch: int, step: int, ahead: bool) -> np.ndarray:
        """Return the message with this batch. ahead: True if the client intends to take consecutive steps."""
        if self.expected is not None:
            self.consecutive = self.consecutive + 1 if self.expected == (epoch, step) else 0
        ready = self.ready if self.predicted == (epoch, step) else None
        message = self._take(epoch, step, ahead) if ready is None else ready
        self.expected = next_position(epoch, step, self.steps)
        self.predicted, self.ready = self.expected if ahead and self.consecutive >= TRUSTED else None, None
        return message

    def _take(self, epoch: int, step: int, ahead: bool) -> np.ndarray:
        ahead = ahead and self.consecutive >= TRUSTED
        if ahead not in self.cursors:
            self.cursors[ahead] = self.make_cursor(ahead)
        return self.cursors[ahead].take(epoch, step)

    def make(self) -> bool:
        """Prefetch the batch that follows; return False if it is ready already, or cannot be predicted."""
        if self.predicted is None or self.ready is not None:
            return False
        try:
            self.ready = self._take(*self.predicted, True)
        except UsageError:  # a damaged file: raised again when the batch is requested
            self.predicted = None
        return True

    def close(self) -> None:
        """End the threads."""
        for cursor in self.cursors.values():
            cursor.close()
