"""The state of a slice of a parameter store: its values, and what the pushes that come make of them; no messages.

    take_in     a push: apply it at once, or keep it until its round is complete
    end_steps   apply the rounds that are complete, and tell the lead of the steps

The same pushes in the same order make the same bits of the same state: so a server and those that hold replicas of its
slice (replication.py) agree.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hpcdl.comm.operations import SUM
from hpcdl.kernels.device import CPU
from hpcdl.memory import Memory
from hpcdl.parameter_server.clocks import Clocks, Delay
from hpcdl.parameter_server.sparse_keys import Touched, VectorRows, added
from hpcdl.parameter_server.store_messages import Push


class SliceState:
    """`values`, a slice of the vector, as the pushes of the clients of `clocks` change it.

    update(values, pushed, push): applies the pushed values to the part of the slice, in place; False: it has not, and
    there is no new version. delay: how many versions late values are applied. memory: counts the slice, its copies and
    what is received. rows: how clients' keys name elements of the slice, which is `held` of the vector
    (sparse_keys.py).
    """

    update: Any  # a function, which may have a member `state`

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
        self.values, self.clocks, self.lead, self.update = values, clocks, clocks.lead, update
        self.memory = memory or Memory()
        self.memory.hold("parameters", values)
        self.delay = Delay(delay)
        self.round: dict[int, tuple[np.ndarray, Push]] = {}  # of each client that has pushed: its buffer and its push
        self.losses: dict[int, tuple[float, float]] = {}  # of the steps under way: the sum of losses, and the examples
        self.snapshot: np.ndarray | None = None  # a copy of the values as they are now
        self.buffers: list[np.ndarray] = []  # to receive pushes in

    def end_steps(self) -> None:
        """Apply the rounds that are complete, and tell the lead of the steps."""
        for step in self.clocks.complete():
            self.apply_round()
            self.step_done(step)

    def step_done(self, step: int) -> None:
        """Tell the lead of a step whose pushes are applied; its losses are there until it knows."""
        self.lead.done(*self.losses.get(step, (0.0, 0.0)))
        self.losses.pop(step, None)

    def take_in(self, push: Push, buffer: np.ndarray) -> None:
        """Apply a push, or keep it until its round is complete; `buffer` begins with its values."""
        step = self.clocks.step_of(push)
        self.lead.admit(push._replace(step=step))
        self.clocks.pushed(push)
        loss, total = self.losses.get(step, (0.0, 0.0))
        self.losses[step] = loss + push.loss, max(total, push.total)
        if self.clocks.consistency.in_rounds:
            self.round[push.client] = buffer, push
        else:
            self._apply(buffer[: push.size], push, [push])
            self.buffers.append(buffer)

    def apply_round(self) -> None:
        """Apply the sum of the round's pushes, added in the order of the clients: the same bits in every run."""
        if not self.round:
            return
        buffers, pushes = zip(*(self.round.pop(client) for client in sorted(self.round)), strict=True)
        whole: Any = slice(0, self.values.size)
        total = buffers[0]
        if all(isinstance(push.part, Touched) for push in pushes):
            values = [buffer[: push.size] for buffer, push in zip(buffers, pushes, strict=True)]
            assert self.rows is not None
            whole, total = added(self.rows, self.held, [push.part for push in pushes], values)
        elif all(push.part == whole for push in pushes):
            for buffer in buffers[1:]:
                SUM(total, buffer)
        else:
            total = self._for_now("gradients", CPU.zeros(self.values.size, self.values.dtype))
            for buffer, push in zip(buffers, pushes, strict=True):
                total[push.part] += buffer[: push.size]
        count = sum(push.count for push in pushes)
        self._apply(total, pushes[0]._replace(part=whole, count=count, total=count), pushes)
        self.buffers += buffers

    def _apply(self, values: np.ndarray, push: Push, of: Iterable[Push]) -> None:
        """Apply the values, or, with a delay, those of so many versions before; of: the pushes they are made of."""
        if self.delay.versions:
            values = self._for_now("gradients", values.copy())
        for due in self.delay.enter((values, push, of)):
            self._update(*due)

    def apply_delayed(self) -> None:
        """Apply what is delayed: nothing that was pushed is lost."""
        for due in self.delay.rest():
            self._update(*due)

    def _update(self, values: np.ndarray, push: Push, of: Iterable[Push]) -> None:
        which = push.part.elements if isinstance(push.part, Touched) else push.part
        part = self.values[which]  # of numbers of elements a copy
        if self.update(part, values, self.clocks.described(push)) is False:
            return
        if isinstance(push.part, Touched):
            self.values[which] = part
        self.clocks.applied(of)
        self.snapshot = None

    def buffer(self) -> np.ndarray:
        """An array as long as the slice, for the values of a push."""
        if self.buffers:
            return self.buffers.pop()
        return self.memory.hold("gradients", CPU.empty(self.values.size, self.values.dtype))

    def _snapshot(self) -> np.ndarray:
        """The slice as it is now; one copy for all who get the same version."""
        if self.snapshot is None:
            self.snapshot = self._for_now("parameters", self.values.copy())
        return self.snapshot

    def _for_now(self, kind: str, array: np.ndarray) -> np.ndarray:
        return self.memory.hold_until_freed(kind, array)

    def vector(self, which: int) -> np.ndarray:
        """0: the values; 1, 2, ...: a vector of the update's own state."""
        return self.values if which == 0 else list(self.update.state.values())[which - 1]
