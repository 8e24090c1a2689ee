"""The messages between a worker and its data server: typed buffers, one message each way for a batch.

request   8 int64: operation, then its arguments

    MOST_ROWS  batch size, rank, size                     returns the most rows of a batch of this share
    BATCH      batch size, rank, size, ahead, epoch, step returns the batch
    ROWS       split, first, last                         returns rows of train, test or validation
    TAKE       split, count                               returns the rows whose numbers follow in a second message
    CLOSE      status                                     no answer: the worker has ended

answer    one buffer of bytes, each part of which begins on a cache line

    | 8 int64: rows, total, epoch, step, signal | x (rows, features) | y (rows,) | index (rows,) int64 |

so the server gathers a batch into the message itself, and the worker computes on the received buffer. Only a BATCH has
an index. At the start the server sends the description of the data set: the length of a text, and the text.

For sparse rows (hpcdl/csr.py) the header also holds the number of elements, and three parts stand for x:

    | header | indptr (rows + 1,) int64 | y | index | columns (elements,) int32 | elements |

A worker's buffer fits a batch of the longest rows, by MOST_ROWS. The answer to ROWS and TAKE is the header first, so
that the worker can allocate, and then the whole message.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from hpcdl.csr import COLUMN, CSR, START
from hpcdl.data import Batch
from hpcdl.data.batch import BatchBuffers
from hpcdl.kernels.device import CPU, LINE, Device

REQUEST, INDEX, ANSWER = 30001, 30002, 30003  # tags
MOST_ROWS, BATCH, ROWS, TAKE, DIGEST, CLOSE = range(6)
SPLITS = ("train", "test", "validation")
WORDS = 8  # int64 of a request, and of an answer's header
HEADER = 8 * WORDS  # bytes: one cache line
TOTAL, EPOCH, STEP, SIGNAL, ELEMENTS = range(1, 6)  # words of the header, after the number of rows


def up(size: int) -> int:
    """Return the next multiple of a cache line."""
    return -(-size // LINE) * LINE


class Answer(NamedTuple):
    """An answer's parts, views of its message."""

    header: np.ndarray
    x: Any
    y: np.ndarray
    index: np.ndarray  # type: ignore[assignment]  # tuple.index is of no use here


class BatchFormat:
    """The layout of an answer. width: features of a row; outputs: shape of a row's y."""

    def __init__(
        self, width: int, dtype: np.dtype, y_dtype: np.dtype, outputs: tuple[int, ...] = (), sparse: bool = False
    ):
        self.width, self.dtype, self.y_dtype, self.outputs = width, np.dtype(dtype), np.dtype(y_dtype), outputs
        self.y_bytes, self.sparse = math.prod(outputs) * self.y_dtype.itemsize, sparse  # of a row

    def places(self, rows: int) -> tuple[int, int, int]:
        """Return the offsets of y and the index, and the end of the index, in bytes."""
        x = START.itemsize * (rows + 1) if self.sparse else rows * self.width * self.dtype.itemsize
        y = HEADER + up(x)
        index = y + up(rows * self.y_bytes)
        return y, index, index + 8 * rows

    def elements(self, rows: int, elements: int) -> tuple[int, int, int]:
        """Return the offsets of the columns and the elements of sparse rows, and the end, in bytes."""
        columns = up(self.places(rows)[-1])
        data = columns + up(elements * COLUMN.itemsize)
        return columns, data, data + elements * self.dtype.itemsize

    def size(self, rows: int, elements: int = 0) -> int:
        """Return the bytes of a message; elements: of sparse rows."""
        return self.elements(rows, elements)[-1] if self.sparse else self.places(rows)[-1]

    def empty(self, rows: int, device: Device = CPU, elements: int = 0) -> np.ndarray:
        """Return a message buffer for `rows` rows, in memory with fast copies to the device."""
        return device.pinned(self.size(rows, elements), np.uint8)

    def parts(self, message: np.ndarray, rows: int, elements: int = 0) -> Answer:
        """Return the parts of a message with `rows` rows."""
        y, index, end = self.places(rows)
        return Answer(
            message[:HEADER].view(np.int64),
            self._x(message, rows, elements),
            message[y : y + rows * self.y_bytes].view(self.y_dtype).reshape(rows, *self.outputs),
            message[index:end].view(np.int64),
        )

    def _x(self, message: np.ndarray, rows: int, elements: int) -> Any:
        if not self.sparse:
            x = message[HEADER : HEADER + rows * self.width * self.dtype.itemsize].view(self.dtype)
            return x.reshape(rows, self.width)
        columns, data, end = self.elements(rows, elements)
        starts = message[HEADER : HEADER + START.itemsize * (rows + 1)].view(START)
        indices = message[columns : columns + elements * COLUMN.itemsize].view(COLUMN)
        return CSR(message[data:end].view(self.dtype), indices, starts, (rows, self.width))

    def packed(self, x: CSR, y: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, Answer]:
        """Return a message with these sparse rows, and its parts."""
        message = self.empty(len(y), elements=x.nnz)
        answer = self.parts(message, len(y), x.nnz)
        answer.x.indptr[0] = 0
        answer.x.put(x)
        answer.y[:] = y
        answer.index[:] = index
        answer.header[ELEMENTS] = x.nnz
        return message, answer


def number_answer(value: int, elements: int = 0) -> np.ndarray:
    """Return an answer of one number, in place of the rows, or two."""
    words = np.zeros(WORDS, np.int64)
    words[0], words[ELEMENTS] = value, elements
    return words.view(np.uint8)


def digest_answer(digest: str) -> np.ndarray:
    """Return an answer with the digest of a data set, in place of rows and total."""
    words = np.zeros(WORDS, np.int64)
    words[:2].view(np.uint8)[:] = list(bytes.fromhex(digest))
    return words.view(np.uint8)


def digest_of(words: np.ndarray) -> str:
    """Return the digest of an answer."""
    return words[:2].tobytes().hex()


class Outbox:
    """`count` message buffers, used in turn, with the interface of `hpcdl.data.batch.DeviceBuffers`."""

    def __init__(self, form: BatchFormat, count: int):
        self.form, self.host, self.turn = form, self, 0
        self.messages = [(form.empty(0), 0)] * count
        self.given: list[tuple[np.ndarray, Answer] | None] = [None] * count
        about = form.width, form.dtype, form.y_dtype
        self.sparse = BatchBuffers(count, *about, outputs=form.outputs, sparse=True) if form.sparse else None

    def next(self, rows: int) -> tuple[Any, np.ndarray]:
        """Return x and y of the next message; for sparse rows buffers that `hand_out` copies into a message."""
        if self.sparse is not None:
            return self.sparse.next(rows)
        self.turn = (self.turn + 1) % len(self.messages)
        message, room = self.messages[self.turn]
        if room < rows:
            message = self.form.empty(rows)
            self.messages[self.turn] = message, rows
        answer = self.form.parts(message, rows)
        self.given[self.turn] = message, answer
        return answer.x, answer.y

    def hand_out(self, batch: Batch) -> np.ndarray:
        """Return the complete message of this batch."""
        if self.sparse is not None:
            message, answer = self.form.packed(batch.x, batch.y, batch.index)
            answer.header[: SIGNAL + 1] = len(batch.y), batch.total, batch.epoch, batch.step, 0
            return message
        message, answer = next(given for given in self.given if given and given[1].x is batch.x)
        answer.header[: STEP + 1] = len(batch.y), batch.total, batch.epoch, batch.step
        answer.index[:] = batch.index
        return message[: self.form.places(len(batch.y))[-1]]
