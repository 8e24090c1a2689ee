"""A worker's view of a data set that a data server holds, with the interface of `hpcdl.data.Data`.

The worker has buffers for three batches: the current one, the previous one, which is still valid, and the next one.
"""

import contextlib
import json
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import ArrayLike

from hpcdl.comm import Communicator
from hpcdl.comm.requests import Request
from hpcdl.data import Batch, Data
from hpcdl.data.batch import DeviceBuffers
from hpcdl.data.cursor import next_position
from hpcdl.data.schema import Schema
from hpcdl.data_server.data_messages import (
    ANSWER,
    BATCH,
    CLOSE,
    DIGEST,
    ELEMENTS,
    HEADER,
    INDEX,
    MOST_ROWS,
    REQUEST,
    ROWS,
    SIGNAL,
    SPLITS,
    TAKE,
    WORDS,
    BatchFormat,
    digest_of,
)
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU
from hpcdl.runs import signals


class RemoteData(Data):
    """The data set that rank `server` of `everyone` serves; made while that rank calls `introduce` (batch_server.py).

    `close` tells the server that this worker has ended.
    """

    train: Any  # RemoteSplit; test and validation may be None
    test: Any
    validation: Any
    _free: Any  # arguments of the last epoch, and its cursor

    def __init__(self, everyone: Communicator, server: int):
        self.comm, self.server, self.closed = everyone, server, False
        length = np.empty(1, np.int64)
        everyone.wait(length, server, ANSWER)
        text = np.empty(length[0], np.uint8)
        everyone.wait(text, server, ANSWER)
        about = json.loads(text.tobytes())
        self.name, self.features, self.classes = (
            about["name"],
            tuple(about["features"]),
            about["classes"],
        )
        self.order, self._digest = about["order"], None
        self.dtype, self.device = np.dtype(about["dtype"]), CPU
        self.outputs, self.source, self.sparse = (
            tuple(about["outputs"]),
            about["source"],
            about["sparse"],
        )
        self.schema, self._scales = Schema.read(about["meaning"], "a data server"), about["scales"]
        self.form = BatchFormat(int(np.prod(self.features)), self.dtype, about["y_dtype"], self.outputs, self.sparse)
        self.statistics = {name: np.array(vector) for name, vector in about["statistics"].items()}
        splits = {name: RemoteSplit(self, k, about["examples"].get(name)) for k, name in enumerate(SPLITS)}
        self.train, self.test, self.validation = (
            split if split.examples is not None else None for split in splits.values()
        )
        self.examples = self.train.examples
        self._shares, self._free = None, []
        self._cursors: weakref.WeakSet[RemoteCursor] = weakref.WeakSet()

    def request(self, message: np.ndarray, operation: int, *arguments: int) -> Request:
        """Send a request, and post the receive of its answer into `message`; return the pending receive."""
        request = np.zeros(WORDS, np.int64)
        request[: 1 + len(arguments)] = operation, *arguments
        coming = self.comm.iwait(message, self.server, ANSWER)
        self.comm.push(request, self.server, REQUEST)
        return coming

    @property
    def digest(self) -> str:
        """The digest of the data, computed by the server on demand."""
        if self._digest is None:
            header = np.empty(WORDS, np.int64)
            self.request(header, DIGEST).wait()
            self.record_signal(int(header[SIGNAL]))
            self._digest = digest_of(header)
        return self._digest

    @property
    def scales(self) -> tuple[float, float, float] | None:
        """Scales of features and targets, from the server."""
        return self._scales

    def most_rows(self, batch_size: int, share: tuple[int, int]) -> int:
        """Return the largest number of rows of a batch of this share."""
        return self.largest_batch(batch_size, share)[0]

    def largest_batch(self, batch_size: int, share: tuple[int, int]) -> tuple[int, int]:
        """Return the largest numbers of rows, and of elements of sparse rows, of a batch of this share."""
        header = np.empty(WORDS, np.int64)
        self.request(header, MOST_ROWS, batch_size, *share).wait()
        return int(header[0]), int(header[ELEMENTS])

    def cursor(  # type: ignore[override]  # the server has the buffers
        self, batch_size: int, share: tuple[int, int] = (0, 1), ahead: bool = True
    ) -> "RemoteCursor":
        """Return a cursor with random access: cursor.take(epoch, step). ahead: it requests the next batch early."""
        self._check(share)
        cursor = RemoteCursor(self, self.steps_per_epoch(batch_size), batch_size, share, ahead)
        self._cursors.add(cursor)
        return cursor

    def _batches(self, epoch: int, batch_size: int, share: tuple[int, int], steps: range) -> Iterator[Batch]:
        what = batch_size, share, self.device
        previous, self._free = self._free, []
        cursor = previous.pop()[1] if previous and previous[0][0] == what else self.cursor(batch_size, share)
        for other in previous:
            other[1].close()
        try:
            for step in steps:
                yield cursor.take(epoch, step)
            self._free = [(what, cursor)]  # the first batch of the next epoch is in flight
        except BaseException:  # closed early, too
            with contextlib.suppress(MPI.Exception):  # a server that is gone sends nothing any more
                cursor.close()
            raise

    def close(self, status: int = 0) -> None:
        """Tell the server that this worker ends with this status."""
        if self.closed:
            return
        self.closed = True
        for cursor in self._cursors:
            cursor.close()
        request = np.array([CLOSE, status] + [0] * (WORDS - 2), np.int64)
        self.comm.push(request, self.server, REQUEST)

    def record_signal(self, number: int) -> None:
        """Record a signal that the server has received, and this rank has not, as this rank's own."""
        if number and not signals.received:
            signals.received.append(signal.Signals(number).name)


class RemoteSplit:
    """The rows of a split, fetched from the server on demand."""

    def __init__(self, data: RemoteData, number: int, examples: int | None):
        self.data, self.number = data, number
        self.examples: Any = examples  # None: the server has no such split

    def rows(self, start: int, stop: int) -> tuple[Any, np.ndarray]:
        """Return rows start to stop in new arrays: x (rows, features) in the model's type, or a CSR, and y (rows,)."""
        self._check(start, stop - 1)
        return self._receive(max(0, stop - start), ROWS, self.number, start, stop)

    def take(self, index: ArrayLike) -> tuple[Any, np.ndarray]:
        """Return the rows with these numbers, like `rows`; IndexError if one does not exist."""
        index = np.array(index, np.int64)
        if len(index):
            self._check(index.min(), index.max())
        sent = self.data.comm.ipush(index, self.data.server, INDEX)
        received = self._receive(len(index), TAKE, self.number, len(index))
        sent.wait()
        return received

    def _check(self, first: int, last: int) -> None:
        if first <= last and (first < 0 or last >= self.examples):
            raise IndexError(f"row numbers go from 0 to {self.examples - 1}, not {first} to {last}")

    def _receive(self, rows: int, *request: int) -> tuple[Any, np.ndarray]:
        form = self.data.form
        elements = 0
        if form.sparse:
            header = np.empty(WORDS, np.int64)
            self.data.request(header, *request).wait()
            elements = int(header[ELEMENTS])
        message = form.empty(rows, elements=elements)
        if form.sparse:
            self.data.comm.wait(message, self.data.server, ANSWER)
        else:
            self.data.request(message, *request).wait()
        answer = form.parts(message, rows, elements)
        self.data.record_signal(int(answer.header[SIGNAL]))
        return answer.x, answer.y


class RemoteCursor:
    """Batches of a server with random access, with the interface of `hpcdl.data.cursor.Cursor`.

    A batch is valid until the second next one is taken.
    """

    requested: tuple[int, int] | None
    pending: Any  # Request | None

    def __init__(self, data: RemoteData, steps: int, batch_size: int, share: tuple[int, int], ahead: bool):
        self.data, self.steps, self.batch_arguments, self.ahead = data, steps, (batch_size, *share), ahead
        (rows, elements), form = data.largest_batch(batch_size, share), data.form
        self.messages = [form.empty(rows, data.device, elements) for _ in range(2 + ahead)]
        layout = data.device, 0, form.width, data.dtype, form.y_dtype
        self.buffers = DeviceBuffers(*layout, data.outputs, data.sparse)
        self.requested = self.pending = None  # the batch in flight, (epoch, step), and its pending receive

    def take(self, epoch: int, step: int) -> Batch:
        """Return the batch of this step; UsageError for a step that an epoch does not have."""
        if not 0 <= step < self.steps:
            raise UsageError(f"an epoch of {self.steps} steps has no step {step}")
        if self.requested != (epoch, step):
            self.close()
            self._request(epoch, step)
        with self.data.comm.timeline.span("wait for data"):
            self.pending.wait(doze=True)
        self.requested = self.pending = None
        message = self.messages[0]
        header = message[:HEADER].view(np.int64)
        answer = self.data.form.parts(message, int(header[0]), int(header[ELEMENTS]) * self.data.sparse)
        _, total, _, _, sign = map(int, answer.header[: SIGNAL + 1])
        self.data.record_signal(sign)
        if self.ahead:
            self._request(*next_position(epoch, step, self.steps))
        return self.buffers.hand_out(Batch(answer.x, answer.y, total, epoch, step, answer.index))

    def _request(self, epoch: int, step: int) -> None:
        """Request this batch into the least recently used message, which is then the first one."""
        self.messages.insert(0, self.messages.pop())
        self.requested = epoch, step
        self.pending = self.data.request(self.messages[0], BATCH, *self.batch_arguments, self.ahead, epoch, step)

    def close(self) -> None:
        """Wait for a batch in flight and discard it; its buffer is used for the next one."""
        if self.pending is not None:
            self.pending.wait()
            self.messages.append(self.messages.pop(0))
        self.requested = self.pending = None
