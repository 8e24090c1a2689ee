"""Chunks: the steps that travel from an actor to a remote replay memory, with priorities of transitions (Ape-X).

    actor     recorder.add(observations, actions, *stepped[1:])                    like a replay memory
              when recorder.full: transitions = recorder.transitions()             for their |TD errors|
                                  message = recorder.take(errors).packed()         one typed vector
    replay    Chunk.unpacked(message, ...).add_to(replay, first=its first stream)

A chunk holds each of its frames once, and none of earlier chunks: the memory keeps the state of each stream. So an
actor sends all chunks to one memory, in order, which then holds the same as by `Replay.add`. A chunk completes the
transitions that begin in the last n steps of the chunk before, and all of its own but those that begin in its last n
steps.

    vector    rows, cut, complete, streams as int64 | priorities float32 | rewards float32 | actions int32
              | flags uint8 | frames | frames of the cut          each aligned to 8 bytes"""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.rl.replay import NONE, Replay, Sample

HEADER = 4  # int64
Kinds: TypeAlias = dict[str, tuple[tuple[int, ...], DTypeLike]]  # shapes and types of arrays, by name


class Chunk(NamedTuple):
    """Steps of several streams, row by row: one step of each stream, then the next step of each, and so on.
    frames (rows, *frame), finals (cut, *frame), actions int32, rewards float32, flags uint8 (rows,): see
    Replay.add_frames. priorities float32: |TD errors| of the transitions that become complete, in their order."""

    frames: np.ndarray
    finals: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    flags: np.ndarray
    priorities: np.ndarray
    streams: int

    def packed(self) -> np.ndarray:
        counts = len(self.flags), len(self.finals), len(self.priorities)
        arrays = self._asdict() | {"header": np.array([*counts, self.streams])}
        return packed(arrays, chunk_kinds(*counts, self.frames.shape[1:], self.frames.dtype))

    @classmethod
    def unpacked(cls, message: np.ndarray, frame: tuple[int, ...], dtype: DTypeLike) -> "Chunk":
        """Return the chunk in a vector of bytes, as views; frame, dtype: of the memory that receives it."""
        rows, cut, complete, streams = map(int, message[: 8 * HEADER].view(np.int64))
        _, *arrays = unpacked(message, chunk_kinds(rows, cut, complete, frame, dtype)).items()
        return cls(streams=streams, **dict(arrays))

    def add_to(self, replay: Replay, first: int = 0) -> np.ndarray:
        """Add the steps to the streams from `first` on; return the serials of transitions that become complete."""
        return replay.add_frames(self[:5], first, self.streams, self.priorities)


def chunk_kinds(rows: int, cut: int, complete: int, frame: tuple[int, ...], dtype: DTypeLike) -> Kinds:
    """Return shape and type of a chunk's arrays, by name, in the order of the vector."""
    return {
        "header": ((HEADER,), np.int64),
        "priorities": ((complete,), np.float32),
        "rewards": ((rows,), np.float32),
        "actions": ((rows,), np.int32),
        "flags": ((rows,), np.uint8),
        "frames": ((rows, *frame), dtype),
        "finals": ((cut, *frame), dtype),
    }


def unpacked(message: np.ndarray, kinds: Kinds) -> dict[str, np.ndarray]:
    """Return the arrays of these `kinds` in a vector of bytes, as views."""
    offset, arrays = 0, {}
    for name, (shape, dtype) in kinds.items():
        length = math.prod(shape) * np.dtype(dtype).itemsize
        arrays[name] = message[offset : offset + length].view(dtype).reshape(shape)
        offset += -(-length // 8) * 8
    return arrays


def empty_message(kinds: Kinds) -> np.ndarray:
    """Return a vector of zero bytes, with room for arrays of these kinds; each is aligned to 8 bytes."""
    lengths = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in kinds.values()]
    return np.zeros(sum(-(-length // 8) * 8 for length in lengths), np.uint8)


def packed(arrays: dict[str, np.ndarray], kinds: Kinds) -> np.ndarray:
    """Return the arrays, whose shapes and types are `kinds`, as a vector of bytes."""
    message = empty_message(kinds)
    for name, view in unpacked(message, kinds).items():
        view[...] = arrays[name]
    return message


def sendable_errors(errors: np.ndarray) -> np.ndarray:
    """Return |TD errors| as float32 for sending; NaN, infinity and overflow become the largest number.
    The learners end such a run together, by its loss; a memory alone could not end it."""
    most = float(np.finfo(np.float32).max)
    finite: np.ndarray = np.minimum(np.nan_to_num(errors, nan=most, posinf=most), most).astype(np.float32)
    return finite


class ChunkRecorder:
    """Collects an actor's steps until they are sent; `steps` steps of each stream make a chunk.
    Other arguments: of a small `Replay`, which holds the transitions whose errors become priorities."""

    def __init__(self, steps: int, shape: tuple, dtype: Any, *, streams: int = 1, n_step: int = 3, **about: Any):
        capacity = 2 * streams * (steps + n_step + about.get("stack", 1) + 1)
        self.memory = Replay(capacity, shape, dtype, streams=streams, n_step=n_step, **about)
        self.steps, self.streams, frame = steps, streams, self.memory.frame
        rows = steps * streams
        self.frames, self.finals = np.empty((rows, *frame), dtype), np.empty((rows, *frame), dtype)
        self.actions, self.rewards = np.empty(rows, np.int32), np.empty(rows, np.float32)
        self.flags, self.rows, self.cut = np.empty(rows, np.uint8), 0, 0
        self.completed: list[np.ndarray] = []

    @property
    def full(self) -> bool:
        return self.rows == len(self.flags)

    def add(self, *step: np.ndarray) -> None:
        """Add one step of each stream, like Replay.add; the recorder must not be full."""
        some, columns = slice(self.rows, self.rows + self.streams), self.memory.columns(*step)
        self.frames[some], last, self.actions[some], self.rewards[some], self.flags[some] = columns
        self.finals[self.cut : self.cut + len(last)] = last
        self.completed.append(self.memory.add_frames(columns, 0, self.streams))
        self.rows, self.cut = some.stop, self.cut + len(last)

    def transitions(self) -> Sample:
        """Return the transitions completed since the last chunk, in the order of their priorities."""
        serials = np.concatenate([np.empty(0, np.int64), *self.completed])
        return self.memory.gather(serials % self.memory.capacity)

    def take(self, errors: np.ndarray | None) -> Chunk:
        """Return the steps since the last chunk, full or not, as a chunk. errors: TD error of each of `transitions()`;
        None: without priorities; the memory takes its largest so far. ValueError if the number of errors is wrong."""
        errors = NONE if errors is None else errors
        if errors is not NONE and len(errors) != sum(map(len, self.completed)):
            raise ValueError("errors should have one number for each completed transition")
        rows, finals = slice(self.rows), self.finals[: self.cut].copy()
        of_rows = {name: getattr(self, name)[rows].copy() for name in ("frames", "actions", "rewards", "flags")}
        made = Chunk(finals=finals, priorities=sendable_errors(errors), streams=self.streams, **of_rows)
        self.rows, self.cut, self.completed = 0, 0, []
        return made
