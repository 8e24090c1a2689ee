"""The messages between a worker and its data server: typed buffers, one message each way for a batch.

    request    8 int64: operation, arguments              answer
    MOST_ROWS  batch size, rank, size                     the most rows (and their elements) of a batch of this share
    BATCH      batch size, rank, size, ahead, epoch, step the batch
    ROWS       split, first, last                         rows of train, test or validation
    TAKE       split, count                               the rows whose numbers the payload holds
    DIGEST                                                the digest of the data, in `rows` and `total`
    CLOSE      status                                     no answer: the worker has ended

    dense      | 8 int64: rows, total, epoch, step, signal | x (rows, features) | y (rows,) | index (rows,) int64 |
    sparse     | header with elements | indptr (rows + 1,) int64 | y | index | columns (elements,) int32 | elements |

Each part of an answer begins on a cache line: the server gathers a batch into the message itself, and the worker
computes on the received buffer. Dense rows of ROWS and TAKE have no index. A worker's buffer for sparse rows fits a
batch of the longest rows (MOST_ROWS). To ROWS and TAKE of sparse rows the server answers by the header alone, so that
the worker can allocate, and then by the whole message. At first it sends the length and the text of `describe`."""

import enum
import math
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm.framing import Frame
from hpcdl.csr import COLUMN, CSR, START
from hpcdl.data import Batch
from hpcdl.data.batch import BatchBuffers, RowForm
from hpcdl.kernels.device import CPU, LINE, Device

# The payload of a request: row numbers. Both headers are one cache line of int64.
REQUEST = Frame(30001, ["operation", ("arguments", 7)], number=np.int64)
ANSWER = Frame(30003, ["rows", "total", "epoch", "step", "signal", "elements", ("unused", 2)], number=np.int64)
Operation = enum.IntEnum("Operation", "MOST_ROWS BATCH ROWS TAKE DIGEST CLOSE", start=0)
SPLITS = ("train", "test", "validation")


def up(size: int) -> int:
    """Round up to a multiple of a cache line."""
    return -(-size // LINE) * LINE


class Answer(NamedTuple):
    """The parts of an answer, as views of its message."""

    header: np.ndarray
    x: Any
    y: np.ndarray
    index: np.ndarray  # type: ignore[assignment]  # hides tuple.index


class BatchFormat(RowForm):
    """The layout of answers that hold rows of one form (`RowForm`)."""

    def layout(self, rows: int, elements: int = 0) -> list[tuple[slice, np.dtype, tuple[int, ...]]]:
        """Return (slice of bytes, type, shape) of each part behind the header. elements: of all rows, if sparse."""
        parts: list[Any] = [(self.y_dtype, (rows, *self.outputs)), (np.dtype(np.int64), (rows,))]
        if self.sparse:
            parts = [(START, (rows + 1,)), *parts, (COLUMN, (elements,)), (self.dtype, (elements,))]
        else:
            parts.insert(0, (self.dtype, (rows, self.width)))
        end, found = ANSWER.bytes, []
        for kind, shape in parts:
            start = up(end)
            end = start + math.prod(shape) * kind.itemsize
            found.append((slice(start, end), kind, shape))
        return found

    def size(self, rows: int, elements: int = 0) -> int:
        """Return the number of bytes of a message."""
        return self.layout(rows, elements)[-1][0].stop

    def message(self, rows: int, device: Device = CPU, elements: int = 0) -> np.ndarray:
        """Return a message buffer for `rows` rows, in host memory with fast copies to the device."""
        return device.pinned(self.size(rows, elements), np.uint8)

    def parts(self, message: np.ndarray, rows: int, elements: int = 0) -> Answer:
        """Return the parts of a message with `rows` rows."""
        views = [message[at].view(kind).reshape(shape) for at, kind, shape in self.layout(rows, elements)]
        x: Any = CSR(views[4], views[3], views[0], (rows, self.width)) if self.sparse else views[0]
        return Answer(ANSWER.read(message), x, *views[1:3])

    def packed(self, x: Any, y: np.ndarray, index: np.ndarray, **numbers: int) -> np.ndarray:
        """Return a message that holds these rows. numbers: further fields of its header."""
        nnz = x.nnz if self.sparse else 0
        message = self.message(len(y), elements=nnz)
        answer = self.parts(message, len(y), nnz)
        answer.header[...] = ANSWER.header(rows=len(y), elements=nnz, **numbers)
        if self.sparse:
            answer.x.indptr[0] = 0
            answer.x.put(x)
        else:
            answer.x[:] = x
        answer.y[:], answer.index[:] = y, index
        return message


def header_answer(**numbers: int) -> np.ndarray:
    """Return an answer that consists of a header. numbers: the fields of the header."""
    return ANSWER.vector(ANSWER.header(**numbers)).view(np.uint8)


class Outbox:
    """`count` message buffers, used in turn, with the interface of `hpcdl.data.batch.DeviceBuffers`."""

    def __init__(self, form: BatchFormat, count: int):
        self.form, self.host, self.turn = form, self, 0
        self.messages, self.answers = [form.message(0)] * count, [form.parts(form.message(0), 0)] * count
        self.sparse = BatchBuffers(count, form) if form.sparse else None

    def next(self, rows: int) -> tuple[Any, np.ndarray]:
        """Return x and y of the next message; or, for sparse rows, buffers that `hand_out` copies into a message."""
        if self.sparse is not None:
            return self.sparse.next(rows)
        self.turn = (self.turn + 1) % len(self.messages)
        if self.messages[self.turn].size < self.form.size(rows):
            self.messages[self.turn] = self.form.message(rows)
        answer = self.answers[self.turn] = self.form.parts(self.messages[self.turn], rows)
        return answer.x, answer.y

    def hand_out(self, batch: Batch) -> np.ndarray:
        """Return the complete message of this batch."""
        position = {"total": batch.total, "epoch": batch.epoch, "step": batch.step}
        if self.sparse is not None:
            return self.form.packed(batch.x, batch.y, batch.index, **position)
        turn, answer = next(pair for pair in enumerate(self.answers) if pair[1].x is batch.x)
        answer.header[...] = ANSWER.header(rows=len(batch.y), **position)
        answer.index[:] = batch.index
        return self.messages[turn][: self.form.size(len(batch.y))]
