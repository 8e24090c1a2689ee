"""A data set that a data server holds: on a worker, in the place of `hpcdl.data.Data`, with the same members.

The worker has room for three batches: the one in use, the one before it, which is still valid, and the one on its way.
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

    train: Any  # RemoteSplit, and of the two that follow None where there is none
    test: Any
    validation: Any
    _free: Any  # what an epoch was asked for, and its cursor

    def __init__(self, everyone: Communicator, server: int):
        self.comm, self.server, self.closed = everyone, server, False
        length = np.empty(1, np.int64)
        everyone.wait(length, server, ANSWER)
        text = np.empty(length[0], np.uint8)
        everyone.wait(text, server, ANSWER)
        about = json.loads(text.tobytes())
        self.name, self.features, self.classes = about["name"], tuple(about["features"]), about["classes"]
        self.order, self._digest = about["order"], None
        self.dtype, self.device = np.dtype(about["dtype"]), CPU
        self.outputs, self.source, self.sparse = tuple(about["outputs"]), about["source"], about["sparse"]
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

    def ask(self, message: np.ndarray, operation: int, *arguments: int) -> Request:
        """Send a request, and be ready for its answer in `message`; the request to wait for."""
        request = np.zeros(WORDS, np.int64)
        request[: 1 + len(arguments)] = operation, *arguments
        coming = self.comm.iwait(message, self.server, ANSWER)
        self.comm.push(request, self.server, REQUEST)
        return coming

    @property
    def digest(self) -> str:
        """What tells these data from others; the server makes it, when it is asked for."""
        if self._digest is None:
            header = np.empty(WORDS, np.int64)
            self.ask(header, DIGEST).wait()
            self.heed(int(header[SIGNAL]))
            self._digest = digest_of(header)
        return self._digest

    @property
    def scales(self) -> tuple[float, float, float] | None:
        """As the server has told."""
        return self._scales

    def most_rows(self, batch_size: int, share: tuple[int, int]) -> int:
        """No batch of this share has more rows."""
        return self.most(batch_size, share)[0]

    def most(self, batch_size: int, share: tuple[int, int]) -> tuple[int, int]:
        """No batch of this share has more rows, nor, where they are sparse, more elements."""
        header = np.empty(WORDS, np.int64)
        self.ask(header, MOST_ROWS, batch_size, *share).wait()
        return int(header[0]), int(header[ELEMENTS])

    def cursor(  # type: ignore[override]  # the server has the buffers
        self, batch_size: int, share: tuple[int, int] = (0, 1), ahead: bool = True
    ) -> "RemoteCursor":
        """Batches one by one: cursor.take(epoch, step). ahead: the next one in the order is asked for before that."""
        self._check(share)
        cursor = RemoteCursor(self, self.steps_per_epoch(batch_size), batch_size, share, ahead)
        self._cursors.add(cursor)
        return cursor

    def _batches(self, epoch: int, batch_size: int, share: tuple[int, int], steps: range) -> Iterator[Batch]:
        what = batch_size, share, self.device
        kept, self._free = self._free, []
        cursor = kept.pop()[1] if kept and kept[0][0] == what else self.cursor(batch_size, share)
        for other in kept:
            other[1].close()
        try:
            for step in steps:
                yield cursor.take(epoch, step)
            self._free = [(what, cursor)]  # the first batch of the next epoch is on its way already
        except BaseException:  # closed early, too
            with contextlib.suppress(MPI.Exception):  # a server that is gone sends nothing any more
                cursor.close()
            raise

    def close(self, status: int = 0) -> None:
        """Tell the server that this worker ends, with this status."""
        if self.closed:
            return
        self.closed = True
        for cursor in self._cursors:
            cursor.close()
        request = np.array([CLOSE, status] + [0] * (WORDS - 2), np.int64)
        self.comm.push(request, self.server, REQUEST)

    def heed(self, number: int) -> None:
        """Take a signal that the server had, and this rank has not, for one of this rank's own."""
        if number and not signals.received:
            signals.received.append(signal.Signals(number).name)


class RemoteSplit:
    """The rows of one split, fetched from the server when they are asked for."""

    def __init__(self, data: RemoteData, number: int, examples: int | None):
        self.data, self.number = data, number
        self.examples: Any = examples  # None: the server has no such split

    def rows(self, start: int, stop: int) -> tuple[Any, np.ndarray]:
        """Rows start to stop: new arrays x (rows, features) in the model's type, or a CSR, and y (rows,)."""
        self._check(start, stop - 1)
        return self._receive(max(0, stop - start), ROWS, self.number, start, stop)

    def take(self, index: ArrayLike) -> tuple[Any, np.ndarray]:
        """The rows with these numbers, as `rows`; IndexError if one does not exist."""
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
            self.data.ask(header, *request).wait()
            elements = int(header[ELEMENTS])
        message = form.empty(rows, elements=elements)
        if form.sparse:
            self.data.comm.wait(message, self.data.server, ANSWER)
        else:
            self.data.ask(message, *request).wait()
        answer = form.parts(message, rows, elements)
        self.data.heed(int(answer.header[SIGNAL]))
        return answer.x, answer.y


class RemoteCursor:
    """Batches of a server one by one, in the place of `hpcdl.data.cursor.Cursor`.

    A batch is valid until the next but one is taken.
    """

    asked: tuple[int, int] | None
    coming: Any  # Request | None

    def __init__(self, data: RemoteData, steps: int, batch_size: int, share: tuple[int, int], ahead: bool):
        self.data, self.steps, self.what, self.ahead = data, steps, (batch_size, *share), ahead
        (rows, elements), form = data.most(batch_size, share), data.form
        self.messages = [form.empty(rows, data.device, elements) for _ in range(2 + ahead)]
        about = data.device, 0, form.width, data.dtype, form.y_dtype
        self.buffers = DeviceBuffers(*about, data.outputs, data.sparse)
        self.asked = self.coming = None  # what is on its way: (epoch, step), and the request to wait for

    def take(self, epoch: int, step: int) -> Batch:
        """That batch; UsageError for a step that an epoch does not have."""
        if not 0 <= step < self.steps:
            raise UsageError(f"an epoch of {self.steps} steps has no step {step}")
        if self.asked != (epoch, step):
            self.close()
            self._ask(epoch, step)
        with self.data.comm.timeline.span("wait for data"):
            self.coming.wait(doze=True)
        self.asked = self.coming = None
        message = self.messages[0]
        header = message[:HEADER].view(np.int64)
        answer = self.data.form.parts(message, int(header[0]), int(header[ELEMENTS]) * self.data.sparse)
        _, total, _, _, sign = map(int, answer.header[: SIGNAL + 1])
        self.data.heed(sign)
        if self.ahead:
            self._ask(*next_position(epoch, step, self.steps))
        return self.buffers.hand_out(Batch(answer.x, answer.y, total, epoch, step, answer.index))

    def _ask(self, epoch: int, step: int) -> None:
        """Have this batch sent into the message that was used longest ago, which is then the first one."""
        self.messages.insert(0, self.messages.pop())
        self.asked = epoch, step
        self.coming = self.data.ask(self.messages[0], BATCH, *self.what, self.ahead, epoch, step)

    def close(self) -> None:
        """Wait for what is on its way and not wanted; the next batch comes in its place."""
        if self.coming is not None:
            self.coming.wait()
            self.messages.append(self.messages.pop(0))
        self.asked = self.coming = None
