"""A worker's view of a data set that a data server holds, with the interface of `hpcdl.data.Data`.
The worker has buffers for three batches: the current one, the previous one, which is still valid, and the next one."""

import contextlib
import json
import math
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
from hpcdl.data.mixture import Mixture
from hpcdl.data.schema import Schema
from hpcdl.data_server.data_messages import ANSWER, REQUEST, SPLITS, BatchFormat, Operation
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU
from hpcdl.runs import signals


class RemoteData(Data):
    """The data set that rank `server` of `everyone` serves. Construct it while that rank calls `introduce`."""

    train: Any  # RemoteSplit; test and validation may be None
    test: Any
    validation: Any
    _digest: str | None
    _free: Any  # [(arguments, cursor)] of the last epoch, or []

    def __init__(self, everyone: Communicator, server: int):
        self.comm, self.server, self.closed = everyone, server, False
        length = np.empty(1, np.int64)
        everyone.wait(length, server, ANSWER.tag)
        text = np.empty(length[0], np.uint8)
        everyone.wait(text, server, ANSWER.tag)
        about = json.loads(text.tobytes())
        for name in ("name", "classes", "order", "source", "sparse"):
            setattr(self, name, about[name])
        self.features, self.outputs = tuple(about["features"]), tuple(about["outputs"])
        self.dtype, self.device, self._digest = np.dtype(about["dtype"]), CPU, None
        self.schema, self._scales = Schema.read(about["meaning"], "a data server"), about["scales"]
        self.vocabulary, counts = self.schema.vocabulary, about["class_counts"]
        self._class_counts = None if counts is None else np.array(counts, np.int64)
        width, y_dtype = math.prod(self.features), np.dtype(about["y_dtype"])
        self.form = BatchFormat(width, self.dtype, y_dtype, self.outputs, self.sparse)
        self.statistics = {name: np.array(vector) for name, vector in about["statistics"].items()}
        self.train, self.test, self.validation = (
            RemoteSplit(self, k, about["examples"][name]) if name in about["examples"] else None
            for k, name in enumerate(SPLITS)
        )
        self.mixture = about["mixture"] and Mixture(**about["mixture"])
        self.examples = self.mixture.examples if self.mixture else self.train.examples
        self._shares, self._free = None, []
        self._cursors: weakref.WeakSet[RemoteCursor] = weakref.WeakSet()

    def request(self, message: np.ndarray, operation: int, *arguments: int) -> Request:
        """Send a request, and post the receive of its answer into `message`; return the pending receive."""
        coming = self.comm.iwait(message, self.server, ANSWER.tag)
        self.tell(operation, *arguments)
        return coming

    def tell(self, operation: int, *arguments: int) -> None:
        """Send a request, and wait until it is sent."""
        request = REQUEST.header(operation=operation)
        request["arguments"][: len(arguments)] = arguments
        REQUEST.send(self.comm, self.server, request)[0].wait()

    def request_header(self, operation: int, *arguments: int) -> np.ndarray:
        """Send a request; receive a header alone as its answer, and return it."""
        header = ANSWER.header()
        self.request(ANSWER.vector(header), operation, *arguments).wait()
        self.record_signal(int(header["signal"]))
        return header

    @property
    def digest(self) -> str:
        if self._digest is None:
            self._digest = ANSWER.vector(self.request_header(Operation.DIGEST))[:2].tobytes().hex()
        return self._digest

    @property
    def scales(self) -> tuple[float, float, float] | None:
        return self._scales

    @property
    def class_counts(self) -> np.ndarray | None:
        return self._class_counts

    def most_rows(self, batch_size: int, share: tuple[int, int]) -> int:
        return self.largest_batch(batch_size, share)[0]

    def largest_batch(self, batch_size: int, share: tuple[int, int]) -> tuple[int, int]:
        """Return (most rows of a batch of this share, most elements that so many sparse rows have; dense: 0)."""
        header = self.request_header(Operation.MOST_ROWS, batch_size, *share)
        return int(header["rows"]), int(header["elements"])

    def cursor(  # type: ignore[override]  # the server has the buffers
        self, batch_size: int, share: tuple[int, int] = (0, 1), ahead: bool = True
    ) -> "RemoteCursor":
        """Return a cursor with random access, cursor.take(epoch, step). ahead: `take` also requests the next batch."""
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
        """Tell the server that this worker ends with this status; afterwards do nothing."""
        if self.closed:
            return
        self.closed = True
        for cursor in self._cursors:
            cursor.close()
        self.tell(Operation.CLOSE, status)

    def record_signal(self, number: int) -> None:
        """Record that this rank, too, has received the signal `number`, which the server received; 0: no signal."""
        if number and not signals.received:
            signals.received.append(signal.Signals(number).name)


class RemoteSplit:
    """A split whose rows are fetched from the server on demand, with the interface of `hpcdl.data.Split`."""

    def __init__(self, data: RemoteData, number: int, examples: int):
        self.data, self.number, self.examples = data, number, examples

    def rows(self, start: int, stop: int) -> tuple[Any, np.ndarray]:
        self._check(start, stop - 1)
        return self._receive(max(0, stop - start), Operation.ROWS, self.number, start, stop)

    def take(self, index: ArrayLike) -> tuple[Any, np.ndarray]:
        index = np.array(index, np.int64)
        if len(index):
            self._check(index.min(), index.max())
        (sent,) = REQUEST.send_payloads(self.data.comm, self.data.server, index)
        received = self._receive(len(index), Operation.TAKE, self.number, len(index))
        sent.wait()
        return received

    def _check(self, first: int, last: int) -> None:
        if first <= last and (first < 0 or last >= self.examples):
            raise IndexError(f"row numbers go from 0 to {self.examples - 1}, not {first} to {last}")

    def _receive(self, rows: int, *request: int) -> tuple[Any, np.ndarray]:
        form = self.data.form
        elements = int(self.data.request_header(*request)["elements"]) if form.sparse else 0
        message = form.message(rows, elements=elements)
        if form.sparse:
            self.data.comm.wait(message, self.data.server, ANSWER.tag)
        else:
            self.data.request(message, *request).wait()
        answer = form.parts(message, rows, elements)
        self.data.record_signal(int(answer.header["signal"]))
        return answer.x, answer.y


class RemoteCursor:
    """Batches of a server with random access, with the interface of `hpcdl.data.cursor.Cursor`."""

    requested: tuple[int, int] | None
    pending: Any  # Request | None

    def __init__(self, data: RemoteData, steps: int, batch_size: int, share: tuple[int, int], ahead: bool):
        self.data, self.steps, self.batch_arguments, self.ahead = data, steps, (batch_size, *share), ahead
        (rows, elements), form = data.largest_batch(batch_size, share), data.form
        self.messages = [form.message(rows, data.device, elements) for _ in range(2 + ahead)]
        self.buffers = DeviceBuffers(data.device, 0, form)
        self.requested = self.pending = None  # the batch in flight, (epoch, step), and its pending receive

    def take(self, epoch: int, step: int) -> Batch:
        if not 0 <= step < self.steps:
            raise UsageError(f"an epoch of {self.steps} steps has no step {step}")
        if self.requested != (epoch, step):
            self.close()
            self._request(epoch, step)
        with self.data.comm.timeline.span("wait for data"):
            self.pending.wait(doze=True)
        self.requested = self.pending = None
        message = self.messages[0]
        rows, total, _, _, signal_number, elements, _ = ANSWER.read(message).item()
        answer = self.data.form.parts(message, rows, elements)
        self.data.record_signal(signal_number)
        if self.ahead:
            self._request(*next_position(epoch, step, self.steps))
        return self.buffers.hand_out(Batch(answer.x, answer.y, total, epoch, step, answer.index))

    def _request(self, epoch: int, step: int) -> None:
        """Request this batch into the least recently used message, which becomes the first of `messages`."""
        self.messages.insert(0, self.messages.pop())
        self.requested = epoch, step
        about = *self.batch_arguments, self.ahead, epoch, step
        self.pending = self.data.request(self.messages[0], Operation.BATCH, *about)

    def close(self) -> None:
        """If a batch is in flight, wait for it and discard it; its buffer is free again."""
        if self.pending is not None:
            self.pending.wait()
            self.messages.append(self.messages.pop(0))
        self.requested = self.pending = None
