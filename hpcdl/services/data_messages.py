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
"""

import math
from typing import NamedTuple

import numpy as np

from hpcdl.data import Batch
from hpcdl.kernels.device import CPU, LINE, Device

REQUEST, INDEX, ANSWER = 30001, 30002, 30003  # tags
MOST_ROWS, BATCH, ROWS, TAKE, DIGEST, CLOSE = range(6)
SPLITS = ("train", "test", "validation")
WORDS = 8  # int64 of a request, and of an answer's header
HEADER = 8 * WORDS  # bytes: one cache line
TOTAL, EPOCH, STEP, SIGNAL = range(1, 5)  # words of the header, after the number of rows


def up(size: int) -> int:
    """The next multiple of a cache line."""
    return -(-size // LINE) * LINE


class Answer(NamedTuple):
    """An answer's parts, views of its message."""

    header: np.ndarray
    x: np.ndarray
    y: np.ndarray
    index: np.ndarray  # type: ignore[assignment]  # tuple.index is of no use here


class Form:
    """How examples of so many features and of these types lie in an answer; outputs: the shape of a row's y."""

    def __init__(self, width: int, dtype: np.dtype, y_dtype: np.dtype, outputs: tuple[int, ...] = ()):
        self.width, self.dtype, self.y_dtype, self.outputs = width, np.dtype(dtype), np.dtype(y_dtype), outputs
        self.y_bytes = math.prod(outputs) * self.y_dtype.itemsize  # of a row

    def places(self, rows: int) -> tuple[int, int, int]:
        """Where y and the index of so many rows begin, and where the index ends: bytes."""
        y = HEADER + up(rows * self.width * self.dtype.itemsize)
        index = y + up(rows * self.y_bytes)
        return y, index, index + 8 * rows

    def empty(self, rows: int, device: Device = CPU) -> np.ndarray:
        """A message with room for so many rows; copies from it to the device are fast."""
        return device.pinned(self.places(rows)[-1], np.uint8)

    def parts(self, message: np.ndarray, rows: int) -> Answer:
        """The parts of a message with so many rows."""
        y, index, end = self.places(rows)
        x = message[HEADER : HEADER + rows * self.width * self.dtype.itemsize].view(self.dtype)
        return Answer(
            message[:HEADER].view(np.int64),
            x.reshape(rows, self.width),
            message[y : y + rows * self.y_bytes].view(self.y_dtype).reshape(rows, *self.outputs),
            message[index:end].view(np.int64),
        )


def number(value: int) -> np.ndarray:
    """An answer that is a number, in the place of the rows, and nothing else."""
    return np.array([value] + [0] * (WORDS - 1), np.int64).view(np.uint8)


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

    def __init__(self, form: Form, count: int):
        self.form, self.host, self.turn = form, self, 0
        self.messages = [(form.empty(0), 0)] * count
        self.given: list[tuple[np.ndarray, Answer] | None] = [None] * count

    def next(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """x and y of the next message."""
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
        message, answer = next(given for given in self.given if given and given[1].x is batch.x)
        answer.header[: STEP + 1] = len(batch.y), batch.total, batch.epoch, batch.step
        answer.index[:] = batch.index
        return message[: self.form.places(len(batch.y))[-1]]
