"""The training-data server: a rank that holds examples and makes batches of them for workers, which hold none.

    worker    ask 1 | compute on 0 ...... | has 1: ask 2 | compute on 1 ...... | has 2: ask 3 | ...
                v                  ^              v                  ^
    server    send 1 | make 2 .....               send 2 | make 3 .....

A worker requests its next batch before it computes on the current one. The server prefetches: while idle it makes the
batch that follows in the order. So a worker waits for one transfer at most, and for none if the network moves data
while it computes. The readers of hpcdl/data on the server make the same batches that the worker would have made itself.

Bytes per batch: rows * (features * itemsize + label + 8) from the server, for sparse rows elements * (itemsize + 4) +
rows * (label + 16); 64 from the worker. (Reader processes: Dean et al., "Large scale distributed deep networks", NIPS
2012; Audibert et al., "tf.data service", SoCC 2023)
"""

import json
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox, fill
from hpcdl.comm.requests import Request
from hpcdl.data import Data
from hpcdl.data.cursor import next_position
from hpcdl.data_server.data_messages import (
    ANSWER,
    BATCH,
    CLOSE,
    DIGEST,
    HEADER,
    INDEX,
    MOST_ROWS,
    REQUEST,
    ROWS,
    SIGNAL,
    SPLITS,
    STEP,
    TAKE,
    WORDS,
    BatchFormat,
    Outbox,
    digest_answer,
    number_answer,
)
from hpcdl.errors import UsageError, refuse_beyond
from hpcdl.memory import available
from hpcdl.parameter_server.request_checks import wrong
from hpcdl.runs import signals

MOST_LINES = 64  # most (batch size, share) pairs of a client, which uses a few
TRUSTED = 2  # consecutive requests after which the next batch is prefetched
SETTLED = 1.0  # seconds after which a signal for all ranks has reached the workers, too


def introduce(everyone: Communicator, opened: Data, clients: Sequence[int]) -> None:
    """Send the description of the data set to the clients, which construct their `RemoteData` meanwhile."""
    text = describe(opened)
    for client in clients:
        everyone.push(np.array([len(text)]), client, ANSWER)
        everyone.push(text, client, ANSWER)


def serve(everyone: Communicator, opened: Data, clients: Sequence[int]) -> int:
    """Answer the requests of the ranks `clients` of `everyone` until each has closed; return their largest status.

    opened: the data set. A request that cannot be answered raises UsageError here.
    """
    server, status, left = BatchServer(everyone, opened, clients), 0, set(clients)
    while left:
        client, operation, *arguments = server.receive()
        if operation == CLOSE:
            left.remove(client)
            if not 0 <= arguments[0] <= 255:
                raise wrong(client, f"an end with status {arguments[0]}")
            status = max(status, arguments[0])
        else:
            server.answer(client, operation, *arguments)
    server.close()
    return status


def describe(data: Data) -> np.ndarray:
    """Return the description of the data for workers, as bytes of JSON."""
    description = {
        "name": data.name,
        "features": data.features,
        "classes": data.classes,
        "order": data.order,
        "dtype": data.dtype.name,
        "y_dtype": data.train.source.y_kind.name,
        "examples": {name: split.examples for name in SPLITS if (split := getattr(data, name)) is not None},
        "statistics": {name: vector.tolist() for name, vector in data.statistics.items()},
        "outputs": data.outputs,
        "sparse": data.sparse,
        "meaning": data.schema.describe(),
        "source": data.source,
        "scales": data.scales,
    }
    return np.frombuffer(json.dumps(description).encode(), np.uint8)


class BatchServer:
    """The state of a data server: the examples, and the sequences of batches of each client."""

    def __init__(self, everyone: Communicator, data: Data, clients: Sequence[int]):
        self.comm, self.data, self.inbox = everyone, data, Inbox(everyone, REQUEST, clients, WORDS, np.int64)
        self.form = BatchFormat(
            data.train.source.width, data.dtype, data.train.source.y_kind, data.outputs, data.sparse
        )
        self.lines: dict[tuple[int, int, int, int], ClientBatches] = {}  # by (client, batch size, rank, size)
        self.most_elements: dict[int, int] = {}  # by number of sparse rows: the most elements of so many
        self.sent: dict[int, Request] = {}  # the last answer by client, in flight
        self.replies: dict[int, Callable[..., np.ndarray]] = {
            MOST_ROWS: self._most_rows,
            BATCH: self._batch,
            ROWS: self._rows,
            TAKE: self._take,
            DIGEST: self._digest,
        }
        self.signalled: float | None = None  # time of a signal to this rank

    def receive(self) -> tuple[int, ...]:
        """Return the next request, (client, words); make batches while there is none."""
        arrived = self.inbox.arrived
        self.comm.wait_until(arrived, lambda: not arrived() and self.make(), patient=True)
        client = arrived()[0]  # the client that was served longest ago
        request = self.inbox.take(client)
        if request[0] != CLOSE:
            self.inbox.listen(client)
        return client, *map(int, request)

    def make(self) -> bool:
        """Prefetch one batch; return False if there is none to make."""
        return any(line.make() for line in self.lines.values())

    def answer(self, client: int, operation: int, *arguments: int) -> None:
        """Answer a request."""
        if operation not in self.replies:
            raise wrong(client, f"operation {operation}, and there are {len(self.replies) + 1}")
        if client in self.sent:
            self.sent[client].wait()  # its buffer may be reused for the next batch
        message = self.replies[operation](client, *arguments)
        message[:HEADER].view(np.int64)[SIGNAL] = self._signal()
        if self.data.sparse and operation in (ROWS, TAKE):
            self.comm.ipush(message[:HEADER], client, ANSWER).wait()  # the size of the answer
        self.sent[client] = self.comm.ipush(message, client, ANSWER)

    def _signal(self) -> int:
        """Return the number of a signal that only this rank may have received; 0: none."""
        if not signals.received:
            return 0
        self.signalled = self.signalled or time.monotonic()
        settled = time.monotonic() - self.signalled > SETTLED
        return signal.Signals[signals.received[0]].value if settled else 0

    def _most_rows(self, client: int, batch_size: int, rank: int, size: int, *_: int) -> np.ndarray:
        rows = self.data.most_rows(batch_size, (rank, size))
        if not self.data.sparse:
            return number_answer(rows)
        if rows not in self.most_elements:
            self.most_elements[rows] = self.data.train.source.most_elements(rows)
        return number_answer(rows, self.most_elements[rows])

    def _digest(self, client: int, *_: int) -> np.ndarray:
        return digest_answer(self.data.digest)

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
        examples = self._examples(client, split)
        if not 0 <= first <= last <= examples:
            raise wrong(client, f"rows {first} to {last} of {examples}")
        return self._taken(split, np.arange(first, last))

    def _take(self, client: int, split: int, count: int, *_: int) -> np.ndarray:
        examples = self._examples(client, split)
        if count < 0:
            raise wrong(client, f"{count} rows")
        refuse_beyond(f"what rank {client} asks for, {count:,} rows,", self.form.size(count), available())
        index = np.empty(count, np.int64)
        fill(self.comm, index, client, INDEX)
        if count and not 0 <= index.min() <= index.max() < examples:
            raise wrong(client, f"rows {index.min()} to {index.max()} of {examples}")
        return self._taken(split, index)

    def _examples(self, client: int, split: int) -> int:
        """Return the number of examples of a split; an error for the client if there is no such split."""
        examples = getattr(self.data, SPLITS[split]) if 0 <= split < len(SPLITS) else None
        if examples is None:
            raise wrong(client, f"rows of split {split}, which there is not")
        return int(examples.examples)

    def _taken(self, split: int, index: np.ndarray) -> np.ndarray:
        if self.data.sparse:
            x, y = getattr(self.data, SPLITS[split]).take(index)
            message, answer = self.form.packed(x, y, index)
            answer.header[: SIGNAL + 1] = len(index), 0, 0, 0, 0
            return message
        message = self.form.empty(len(index))
        answer = self.form.parts(message, len(index))
        answer.x[:], answer.y[:] = getattr(self.data, SPLITS[split]).take(index)
        answer.header[: STEP + 1] = len(index), 0, 0, 0
        return message[: self.form.places(len(index))[1]]

    def close(self) -> None:
        """Complete the sends, and end the threads."""
        for sent in self.sent.values():
            sent.wait()
        for line in self.lines.values():
            line.close()


class ClientBatches:
    """The sequence of batches of a client, with prefetching of the next one.

    There is no prefetching, and no thread, for a client whose steps are not consecutive (asynchronous workers draw
    their steps).
    """

    expected: tuple[int, int] | None
    predicted: tuple[int, int] | None
    ready: np.ndarray | None

    def __init__(self, data: Any, form: BatchFormat, batch_size: int, share: tuple[int, int]):
        self.make_cursor = lambda ahead: data.cursor(batch_size, share, ahead, lambda count: Outbox(form, count))
        self.steps = data.steps_per_epoch(batch_size)
        self.cursors: dict[bool, Any] = {}  # by `ahead`; their batches are messages
        self.consecutive = TRUSTED  # consecutive requests so far
        self.expected = self.predicted = self.ready = None

    def take(self, epoch: int, step: int, ahead: bool) -> np.ndarray:
        """Return the message with this batch. ahead: the client takes consecutive steps."""
        if self.expected is not None:
            self.consecutive = self.consecutive + 1 if self.expected == (epoch, step) else 0
        message = (
            self.ready if self.predicted == (epoch, step) and self.ready is not None else self._take(epoch, step, ahead)
        )
        self.expected = next_position(epoch, step, self.steps)
        self.predicted, self.ready = self.expected if ahead and self.consecutive >= TRUSTED else None, None
        return message

    def _take(self, epoch: int, step: int, ahead: bool) -> np.ndarray:
        ahead = ahead and self.consecutive >= TRUSTED
        if ahead not in self.cursors:
            self.cursors[ahead] = self.make_cursor(ahead)
        return self.cursors[ahead].take(epoch, step)

    def make(self) -> bool:
        """Make the expected batch; return False if it is made already, or none is expected."""
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
