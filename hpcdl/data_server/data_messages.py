"""What a worker and its data server say to each other: typed buffers, one message each way for a batch.

request   8 int64: operation, then its arguments

    MOST_ROWS  batch size, rank, size                     how many rows a batch of this share has at most
    BATCH      batch size, rank, size, ahead, epoch, step that batch
    ROWS       split, first, last                         these rows of train, test or validation
    TAKE       split, count                               the rows whose numbers follow in a message of their own
    CLOSE      status                                     nothing: the worker has ended

answer    one buffer of bytes, each part of which begins on a cache line

    | 8 int64: rows, total, epoch, step, signal | x (rows, features) | y (rows,) | index (rows,) int64 |

so that the server gathers a batch into the message itself, and the worker computes on what it has received. The index
is there for a BATCH only. Before all that the server has told what the data set is: the length of a text, and the text.

Of sparse rows (hpcdl/csr.py) the header also says how many elements there are, and three parts stand for x:

    | header | indptr (rows + 1,) int64 | y | index | columns (elements,) int32 | elements |

A worker has room for a batch of the longest rows, which MOST_ROWS tells it. To ROWS and TAKE the server answers by the
header alone first, so that the worker makes the room that is needed, and then by the whole.
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
    """The next multiple of a cache line."""
    return -(-size // LINE) * LINE


class Answer(NamedTuple):
    """An answer's parts, views of its message."""

    header: np.ndarray
    x: Any
    y: np.ndarray
    index: np.ndarray  # type: ignore[assignment]  # tuple.index is of no use here


class BatchFormat:
    """How examples of so many features and of these types lie in an answer; outputs: the shape of a row's y."""

    def __init__(
        self, width: int, dtype: np.dtype, y_dtype: np.dtype, outputs: tuple[int, ...] = (), sparse: bool = False
    ):
        self.width, self.dtype, self.y_dtype, self.outputs = width, np.dtype(dtype), np.dtype(y_dtype), outputs
        self.y_bytes, self.sparse = math.prod(outputs) * self.y_dtype.itemsize, sparse  # of a row

    def places(self, rows: int) -> tuple[int, int, int]:
        """Where y and the index of so many rows begin, and where the index ends: bytes."""
        x = START.itemsize * (rows + 1) if self.sparse else rows * self.width * self.dtype.itemsize
        y = HEADER + up(x)
        index = y + up(rows * self.y_bytes)
        return y, index, index + 8 * rows

    def elements(self, rows: int, elements: int) -> tuple[int, int, int]:
        """Where the columns and the elements of sparse rows begin, and where they end: bytes."""
        columns = up(self.places(rows)[-1])
        data = columns + up(elements * COLUMN.itemsize)
        return columns, data, data + elements * self.dtype.itemsize

    def size(self, rows: int, elements: int = 0) -> int:
        """Bytes of a message with so many rows; elements: of sparse ones."""
        return self.elements(rows, elements)[-1] if self.sparse else self.places(rows)[-1]

    def empty(self, rows: int, device: Device = CPU, elements: int = 0) -> np.ndarray:
        """A message with room for so many rows; copies from it to the device are fast."""
        return device.pinned(self.size(rows, elements), np.uint8)

    def parts(self, message: np.ndarray, rows: int, elements: int = 0) -> Answer:
        """The parts of a message with so many rows."""
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
        """A message with these sparse rows, and its parts."""
        message = self.empty(len(y), elements=x.nnz)
        answer = self.parts(message, len(y), x.nnz)
        answer.x.indptr[0] = 0
        answer.x.put(x)
        answer.y[:] = y
        answer.index[:] = index
        answer.header[ELEMENTS] = x.nnz
        return message, answer


def number(value: int, elements: int = 0) -> np.ndarray:
    """An answer that is a number, in the place of the rows, or two, and nothing else."""
    words = np.zeros(WORDS, np.int64)
    words[0], words[ELEMENTS] = value, elements
    return words.view(np.uint8)


def words_of(digest: str) -> np.ndarray:
    """An answer that is the digest of a data set, in the place of the rows and the examples, and nothing else."""
    words = np.zeros(WORDS, np.int64)
    words[:2].view(np.uint8)[:] = list(bytes.fromhex(digest))
    return words.view(np.uint8)


def digest_of(words: np.ndarray) -> str:
    """The digest that such an answer holds."""
    return words[:2].tobytes().hex()


class Outbox:
    """Messages that batches are made in, in the place of `hpcdl.data.batch.DeviceBuffers`: so many, used in turn."""

    def __init__(self, form: BatchFormat, count: int):
        self.form, self.host, self.turn = form, self, 0
        self.messages = [(form.empty(0), 0)] * count
        self.given: list[tuple[np.ndarray, Answer] | None] = [None] * count
        about = form.width, form.dtype, form.y_dtype
        self.sparse = BatchBuffers(count, *about, outputs=form.outputs, sparse=True) if form.sparse else None

    def next(self, rows: int) -> tuple[Any, np.ndarray]:
        """x and y of the next message; of sparse rows, whose elements are not counted yet, such as go into it."""
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
        """The message in which this batch was made, complete."""
        if self.sparse is not None:
            message, answer = self.form.packed(batch.x, batch.y, batch.index)
            answer.header[: SIGNAL + 1] = len(batch.y), batch.total, batch.epoch, batch.step, 0
            return message
        message, answer = next(given for given in self.given if given and given[1].x is batch.x)
        answer.header[: STEP + 1] = len(batch.y), batch.total, batch.epoch, batch.step
        answer.index[:] = batch.index
        return message[: self.form.places(len(batch.y))[-1]]
