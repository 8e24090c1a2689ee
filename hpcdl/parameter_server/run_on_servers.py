"""A run with its parameters on servers: rank 0, the first server, runs it and gives out the steps.

RunCoordinator  on rank 0: the lead of the store (step_coordinator.py); gives out no step beyond the next checkpoint
OnServers       ownership (hpcdl/runs/ownership.py) of parameters that rank 0 gathers
request_step    a worker's request to the store before a step
"""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import mean, pack, unpack
from hpcdl.checkpoint.state import RemoteVector, Tracked
from hpcdl.comm import Communicator
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import CPU, Array
from hpcdl.optim import Optimizer
from hpcdl.optim.optimizer import AVERAGE
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.step_coordinator import Lead, LedStore, Notes
from hpcdl.parameter_server.store_messages import Push
from hpcdl.runs.on_one_rank import OnOneRank
from hpcdl.runs.ownership import exchange
from hpcdl.runs.run import Run
from hpcdl.runs.stopwatch import Stopwatch

NOTE = 1024  # length of a note in bytes: a multiple of this


def request_step(
    comm: Communicator, store: ParameterStore, stopwatch: Stopwatch, ask: Callable, *arguments: Any
) -> int | None:
    """Call `ask` and return its step, or None if none is left; the lead's own work is not counted as waiting."""
    blocked, apart = comm.traffic.blocked_seconds, store.apart_seconds
    step: int | None = ask(*arguments)
    if comm.rank > 0:  # rank 0's scores and checkpoints are not part of a step
        stopwatch.excuse(min(store.apart_seconds - apart, comm.traffic.blocked_seconds - blocked))
    return step


class OnServers(OnOneRank):
    """Ownership of parameters and optimizer state on servers; rank 0 gathers them for scores and checkpoints.

    loaded: state vectors of a resumed run by number, for the servers.
    """

    keeper: Any  # RunCoordinator, and None but on rank 0
    own_beside: np.ndarray | None = None  # this rank's buffers before those of all workers were averaged

    def __init__(
        self, model: Any, parameters: Array | None, optimizer: Optimizer, works: bool, keeper: "RunCoordinator | None"
    ):
        super().__init__(model, parameters, optimizer, works)
        self.keeper = keeper
        if keeper is not None:
            keeper.held = self
        self.loaded: dict[int, np.ndarray] = {}
        self.average = 1 + list(optimizer.state).index(AVERAGE) if optimizer.average_from is not None else 0

    def tracked(self) -> dict[str, Tracked]:
        if not self.leads:
            return {}
        state: dict[str, Tracked] = {
            f"optimizer/{name}": RemoteVector(
                partial(self._read, which), partial(self.loaded.__setitem__, which), self.parameters
            )
            for which, name in enumerate(self.optimizer.state, 1)
        }
        return super().tracked() | state

    def _read(self, which: int) -> np.ndarray:
        """Return a whole vector of the optimizer's state; if the mean is shown, the parameters in its place."""
        vector = CPU.empty(self.parameters.size, self.parameters.dtype)
        self.keeper.gather(vector, 0 if self.average_shown and which == self.average else which)
        return vector

    def show_average(self) -> None:
        """Do nothing: the servers hold both vectors unchanged."""

    def hide_average(self) -> None:
        """Exchange loaded parameters and mean, before they are given to the servers."""
        if not self.average_shown and self.average in self.loaded:
            exchange(self.parameters, self.loaded[self.average])

    def hand_out(self, workers: list[int]) -> None:
        """Send rank 0's saved parameters to workers, which hold pulled iterates. Collective."""
        comm = self.everyone
        for rank in workers if comm.rank == 0 else ():
            comm.push(self.parameters, rank)
        if comm.rank in workers:
            comm.wait(self.parameters, 0)

    def refresh(self) -> None:
        if self.keeper.over or not self.average_shown:  # at the end delayed updates are applied, also to the mean
            self.keeper.gather(self.parameters)
        if self.average_shown:
            self.keeper.gather(self.parameters, self.average)
        if told := self.keeper.told_beside:
            self.own_beside = pack(self.model) if self.own_beside is None else self.own_beside
            unpack(self.model, mean(self.model, [*([self.own_beside] if self.works else []), *told.values()]))
        legs = self.keeper.run.legs
        legs.sent = self.sent(legs.comm.traffic)  # includes the servers' reports

    def take_back(self) -> None:
        """Restore this rank's own buffers if it continues to work."""
        if self.own_beside is not None and not self.keeper.over:
            unpack(self.model, self.own_beside)
        self.own_beside = None

    def horizon(self, step: int) -> int:
        return self.keeper.store.granted


class RunCoordinator(Lead):
    """The lead on rank 0: runs the run, and limits the steps given out to those before the next checkpoint."""

    store: LedStore
    held: OnServers

    def __init__(self, run: Run, notes: bool = False):
        """notes: True if state for a successor is noted."""
        self.run, self.notes, self.noted = run, Notes() if notes else None, run.step
        self.told_beside: dict[int, np.ndarray] = {}  # buffers of each worker's model

    @property
    def over(self) -> bool:
        """True if the run is over."""
        return self.run.over

    def begin(self, store: LedStore, step: int) -> None:
        self.store, self.beside = store, len(pack(self.held.model))
        self._decide()

    def _decide(self) -> None:
        self.steps, self.limit = self.run.horizon
        self.apart_seconds = self.run.stopwatch.apart_seconds

    def admit(self, push: Push) -> None:
        if not math.isfinite(push.loss) and self.held.failure is None:
            self._fail(self.run.not_finite(push.step + 1, push.client))

    def done(self, loss: float, total: float) -> None:
        if self.held.failure is not None:
            return
        self.run.record(loss, int(total))
        try:
            self.run.boundary()
        except TrainingError as error:
            self._fail(error)
        else:
            self.held.take_back()
            self._decide()

    def _fail(self, error: TrainingError) -> None:
        """Stop the run with an error: steps already given out are computed without effect."""
        self.held.failure = error
        self.steps = self.limit = self.store.granted

    def note(self) -> tuple[bytes, int]:
        """Return the run's state, and the losses since the last note that are not agreed on yet."""
        if self.notes is None:
            return b"", 0
        about = self.run.note(self.noted)
        self.noted = about["step"]
        noted = json.dumps(about).encode()
        noted = noted.ljust(NOTE * -(-len(noted) // NOTE))  # byte counts do not depend on the digits of numbers
        self.notes.add(self.noted, noted, about["known"])
        return noted, about["known"]

    def signalled(self) -> None:
        self.run.signalled = True

    def told(self, rank: int, numbers: np.ndarray) -> None:
        self.told_beside[rank] = numbers

    def sent(self, rank: int, bytes: float, messages: float) -> None:
        self.held.note_sent(rank, bytes, messages)

    def gather(self, whole: np.ndarray, which: int = 0) -> None:
        """Set `whole` to the servers' vectors after the run's step; at its end, with delayed updates applied."""
        self.store.gather(whole, which, self.run.step, finish=which == 0 and self.over)
