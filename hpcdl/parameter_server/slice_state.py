"""State of a slice of a parameter store: its values and the effect of pushes on them; no messages.

The same pushes in the same order give the same bits, so a server and its replicas (replication.py) agree."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hpcdl.comm.operations import SUM
from hpcdl.kernels.device import CPU
from hpcdl.memory import Memory
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.sparse_keys import Touched, VectorRows, sum_touched
from hpcdl.parameter_server.store_messages import Push


class SliceState:
    """`values`, a slice of the vector, which pushes of the clients of `clocks` change, `delay` versions late.
    update(values, pushed, push): applies pushed values to a part of the slice, in place; False: nothing applied. rows:
    maps keys to elements. held: place of the slice in the vector. memory: counts the slice and its buffers."""

    update: Any  # a function, which may have a member `state`
    rows: Any  # VectorRows | None
    keeps_losses = False  # True if losses of complete steps stay

    def __init__(
        self,
        values: np.ndarray,
        clocks: Clocks,
        update: Callable,
        delay: int = 0,
        memory: Memory | None = None,
        rows: VectorRows | None = None,
        held: slice | None = None,
    ):
        self.rows, self.held = rows, held or slice(0, values.size)
        self.values, self.clocks, self.update = values, clocks, update
        self.memory = memory or Memory()
        self.memory.hold("parameters", values)
        self.delay, self.delayed = delay, deque()  # type: int, deque[tuple[np.ndarray, Push, Iterable[Push]]]
        self.not_finite: Push | None = None  # on rank 0: the first push whose loss is no finite number
        self.round: dict[int, tuple[np.ndarray, Push]] = {}  # by client: buffer and push of this round
        self.losses: dict[int, tuple[float, float]] = {}  # by step under way: sum of losses, examples
        self.snapshot: np.ndarray | None = None  # copy of the present values
        self.buffers: list[np.ndarray] = []  # free receive buffers

    def end_steps(self) -> Iterator[tuple[float, float]]:
        """Apply the complete rounds; yield (sum of losses, examples) of each complete step."""
        for step in self.clocks.complete():
            self.apply_round()
            yield self.losses.get(step, (0.0, 0.0))
            if not self.keeps_losses:
                self.losses.pop(step, None)

    def take_in(self, push: Push, buffer: np.ndarray) -> None:
        """Apply a push, or store it until its round is complete; `buffer` begins with its values."""
        step = self.clocks.step_of(push)
        if self.clocks.led and self.not_finite is None and not math.isfinite(push.loss):
            self.not_finite = push._replace(step=step)
            self.clocks.stop()
        self.clocks.pushed(push)
        loss, total = self.losses.get(step, (0.0, 0.0))
        self.losses[step] = loss + push.loss, max(total, push.total)
        if self.clocks.consistency.in_rounds:
            self.round[push.client] = buffer, push
        else:
            self._apply(buffer[: push.size], push, [push])
            self.buffers.append(buffer)

    def apply_round(self) -> None:
        """Apply the sum of the round's pushes, added in client order: the same bits in every run."""
        if not self.round:
            return
        buffers, pushes = zip(*(self.round.pop(client) for client in sorted(self.round)), strict=True)
        whole: Any = slice(0, self.values.size)
        total = buffers[0]
        if all(isinstance(push.part, Touched) for push in pushes):
            values = [buffer[: push.size] for buffer, push in zip(buffers, pushes, strict=True)]
            whole, total = sum_touched(self.rows, self.held, [push.part for push in pushes], values)
        elif all(push.part == whole for push in pushes):
            for buffer in buffers[1:]:
                SUM(total, buffer)
        else:
            total = self.memory.hold_until_freed("gradients", CPU.zeros(self.values.size, self.values.dtype))
            for buffer, push in zip(buffers, pushes, strict=True):
                total[push.part] += buffer[: push.size]
        count = sum(push.count for push in pushes)
        self._apply(total, pushes[0]._replace(part=whole, count=count, total=count), pushes)
        self.buffers += buffers

    def _apply(self, values: np.ndarray, push: Push, of: Iterable[Push]) -> None:
        """Apply the values; with a delay store them, and apply older ones. of: the pushes whose sum the values are."""
        if self.delay:
            values = self.memory.hold_until_freed("gradients", values.copy())
        self.delayed.append((values, push, of))
        if len(self.delayed) > self.delay:
            self._update(*self.delayed.popleft())

    def apply_delayed(self) -> None:
        """Apply all delayed updates: no push is lost."""
        while self.delayed:
            self._update(*self.delayed.popleft())

    def _update(self, values: np.ndarray, push: Push, of: Iterable[Push]) -> None:
        which = push.part.elements if isinstance(push.part, Touched) else push.part
        part = self.values[which]  # a copy if `which` is an index array
        if self.update(part, values, self.clocks.described(push)) is False:
            return
        if isinstance(push.part, Touched):
            self.values[which] = part
        self.clocks.applied(of)
        self.snapshot = None

    def buffer(self) -> np.ndarray:
        """Return an array as long as the slice, for the values of a push."""
        if self.buffers:
            return self.buffers.pop()
        return self.memory.hold("gradients", CPU.empty(self.values.size, self.values.dtype))

    def _snapshot(self) -> np.ndarray:
        """Return a copy of the slice, shared by all messages of the same version."""
        if self.snapshot is None:
            self.snapshot = self.memory.hold_until_freed("parameters", self.values.copy())
        return self.snapshot

    @property
    def vectors(self) -> list[np.ndarray]:
        """All vectors that an update may change: the values (0), and the update's state (1, 2, ...)."""
        return [self.values, *getattr(self.update, "state", {}).values()]
