"""Chunks: the steps that travel from an actor to a remote replay memory, with priorities of transitions (Ape-X).

    actor     recorder.add(observations, actions, *stepped[1:])                    like a replay memory
              when recorder.full: transitions = recorder.transitions()             for their |TD errors|
                                  message = recorder.take(errors).packed()         one typed vector
    replay    Chunk.unpacked(message, ...).add_to(replay, first=its first stream)

A chunk holds each frame once and nothing of earlier chunks: its first steps continue where the actor's last chunk
ended, since the memory keeps the state of each stream. So the chunks of an actor go to the same memory in order, and
the result is that of `Replay.add` for the same steps. The transitions that become complete begin with those of the last
n steps of the previous chunk, and leave out those of this one's last n.

    vector    rows, cut, complete, streams as int64 | priorities float32 | rewards float32 | actions int32
              | flags uint8 | frames | frames of the cut          each aligned to 8 bytes

(Horgan et al., "Distributed prioritized experience replay", ICLR 2018)
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.rl.replay import NONE, Replay, Sample, ends

HEADER = 4  # int64


class Chunk(NamedTuple):
    """Steps of several streams, row by row: one of each, then the next of each, ...

    frames (rows, *frame), finals (cut, *frame), actions int32, rewards float32, flags uint8 (rows,) as add_frames of a
    replay memory takes them; priorities float32: |TD errors| of the transitions that become complete, in their order.
    """

    frames: np.ndarray
    finals: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    flags: np.ndarray
    priorities: np.ndarray
    streams: int

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays in the order of the vector."""
        names = ("priorities", "rewards", "actions", "flags", "frames", "finals")
        return {name: getattr(self, name) for name in names}

    def packed(self) -> np.ndarray:
        """Return the chunk as one vector of bytes."""
        header = np.array([len(self.flags), len(self.finals), len(self.priorities), self.streams], np.int64)
        pieces = [header, *self.arrays().values()]
        message, offset = np.zeros(sum(padded(piece.nbytes) for piece in pieces), np.uint8), 0
        for piece in pieces:
            message[offset : offset + piece.nbytes] = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            offset += padded(piece.nbytes)
        return message

    @classmethod
    def unpacked(cls, message: np.ndarray, frame: tuple[int, ...], dtype: DTypeLike) -> "Chunk":
        """Return the chunk in a vector of bytes, as views; frame, dtype: of the memory that receives it."""
        rows, cut, complete, streams = map(int, message[: 8 * HEADER].view(np.int64))
        kinds: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "priorities": ((complete,), np.dtype(np.float32)),
            "rewards": ((rows,), np.dtype(np.float32)),
            "actions": ((rows,), np.dtype(np.int32)),
            "flags": ((rows,), np.dtype(np.uint8)),
            "frames": ((rows, *frame), np.dtype(dtype)),
            "finals": ((cut, *frame), np.dtype(dtype)),
        }
        offset, arrays = 8 * HEADER, dict[str, np.ndarray]()
        for name, (shape, kind) in kinds.items():
            length = int(np.prod(shape)) * kind.itemsize
            arrays[name] = message[offset : offset + length].view(kind).reshape(shape)
            offset += padded(length)
        return cls(streams=streams, **arrays)

    def add_to(self, replay: Replay, first: int = 0) -> np.ndarray:
        """Add the steps to the streams from `first` on; return the serials of transitions that become complete."""
        columns = self.frames, self.finals, self.actions, self.rewards, self.flags
        return replay.add_frames(*columns, first, self.streams, self.priorities)


def padded(length: int) -> int:
    """Return a length in bytes rounded up to a multiple of 8."""
    return -(-length // 8) * 8


def sendable_errors(errors: np.ndarray) -> np.ndarray:
    """Return |TD errors| as float32 for sending: NaN, infinity and overflow become the largest number.

    A run with such errors ends by its loss, as all learners agree; a memory alone could not end it.
    """
    most = float(np.finfo(np.float32).max)
    finite: np.ndarray = np.minimum(np.nan_to_num(errors, nan=most, posinf=most), most).astype(np.float32)
    return finite


def bytes_at_most(steps: int, streams: int, n_step: int, frame_bytes: int) -> int:
    """Return the length of the longest message of `steps` steps of each stream: every step ends an episode."""
    rows = steps * streams
    parts = [4 * (rows + streams * n_step), 4 * rows, 4 * rows, rows, rows * frame_bytes, rows * frame_bytes]
    return 8 * HEADER + sum(map(padded, parts))


class ChunkRecorder:
    """An actor's last steps, until they are sent: `steps` of each of its streams are a chunk.

    The rest as of Replay: a small one holds what the priorities are computed from.
    """

    def __init__(
        self,
        steps: int,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        streams: int = 1,
        stack: int = 1,
        n_step: int = 3,
        gamma: float = 0.99,
    ):
        capacity = 2 * streams * (steps + n_step + stack + 1)
        self.memory = Replay(capacity, shape, dtype, streams=streams, stack=stack, n_step=n_step, gamma=gamma)
        self.steps, self.streams, frame = steps, streams, self.memory.frame
        rows = steps * streams
        self.frames, self.finals = np.empty((rows, *frame), dtype), np.empty((rows, *frame), dtype)
        self.actions, self.rewards = np.empty(rows, np.int32), np.empty(rows, np.float32)
        self.flags, self.rows, self.cut = np.empty(rows, np.uint8), 0, 0
        self.completed: list[np.ndarray] = []

    @property
    def full(self) -> bool:
        """Whether it holds a chunk."""
        return self.rows == len(self.flags)

    def add(
        self,
        observations: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        final: np.ndarray,
    ) -> None:
        """Add one step of each stream, as Replay.add; not where it is full."""
        if self.full:
            raise ValueError("the recorder is full: take() the chunk first")
        some = slice(self.rows, self.rows + self.streams)
        cut, self.flags[some] = ends(terminated, truncated)
        last = self.memory.frame_rows(final[cut])
        self.frames[some] = self.memory.frame_rows(observations)
        self.finals[self.cut : self.cut + len(last)] = last
        self.actions[some], self.rewards[some] = actions, rewards
        given = self.frames[some], last, self.actions[some], self.rewards[some], self.flags[some]
        self.completed.append(self.memory.add_frames(*given, 0, self.streams))
        self.rows, self.cut = some.stop, self.cut + len(last)

    def transitions(self) -> Sample:
        """Those that have become complete since the last chunk, in the order of the priorities."""
        serials = np.concatenate([np.empty(0, np.int64), *self.completed])
        return self.memory.gather(serials % self.memory.capacity)

    def take(self, errors: np.ndarray | None) -> Chunk:
        """The steps since the last chunk, also where they are fewer than one.

        errors: those of `transitions()`; None: the memory knows no priorities, or takes the largest so far.
        """
        errors = NONE if errors is None else errors
        if errors is not NONE and len(errors) != sum(map(len, self.completed)):
            raise ValueError("the errors are not as many as the transitions")
        made = Chunk(
            self.frames[: self.rows].copy(),
            self.finals[: self.cut].copy(),
            self.actions[: self.rows].copy(),
            self.rewards[: self.rows].copy(),
            self.flags[: self.rows].copy(),
            sendable_errors(errors),
            self.streams,
        )
        self.rows, self.cut, self.completed = 0, 0, []
        return made

    def restart(self) -> None:
        """Begin new episodes, as where an actor begins anew; the memory that got its chunks must `cut` its streams."""
        self.memory.cut()
        self.rows, self.cut, self.completed = 0, 0, []
