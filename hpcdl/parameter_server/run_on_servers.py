"""A run whose parameters lie on servers: rank 0, the first of them, runs it, and gives out the steps.

Keeper       on rank 0: leads the store (step_coordinator.py), and lets it give out no step beyond the next checkpoint
OnServers    what a run asks who holds its parameters (hpcdl/runs/ownership.py), which rank 0 gathers
asked        what a worker asks the store before a step
"""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import mean, pack, unpack
from hpcdl.checkpoint.state import Elsewhere, Tracked
from hpcdl.comm import Communicator
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import CPU, Array
from hpcdl.optim import Optimizer
from hpcdl.optim.optimizer import AVERAGE
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.step_coordinator import Lead, LedStore, Notes
from hpcdl.parameter_server.store_messages import Push
from hpcdl.runs.averaging import exchange
from hpcdl.runs.on_one_rank import OnOneRank
from hpcdl.runs.run import Run
from hpcdl.runs.stopwatch import Stopwatch

NOTE = 1024  # a note is so many bytes long, or twice as many, ...


def asked(
    comm: Communicator, store: ParameterStore, stopwatch: Stopwatch, ask: Callable, *arguments: Any
) -> int | None:
    """What the store answers: a step, or None where none is left."""
    blocked, apart = comm.traffic.blocked_seconds, store.apart_seconds
    step: int | None = ask(*arguments)
    if comm.rank > 0:  # what rank 0 has spent on scores and checkpoints meanwhile is no part of a step
        stopwatch.excuse(min(store.apart_seconds - apart, comm.traffic.blocked_seconds - blocked))
    return step


class OnServers(OnOneRank):
    """The parameters and the optimizer's state lie on the servers, of which rank 0 gathers what is scored and saved.

    loaded: of a run that is gone on with, vectors of the state by number, to be given to the servers.
    """

    keeper: Any  # Keeper, and None but on rank 0
    own_beside: np.ndarray | None = None  # what this rank's model held before its scores were those of all workers

    def __init__(
        self, model: Any, parameters: Array | None, optimizer: Optimizer, works: bool, keeper: "Keeper | None"
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
            f"optimizer/{name}": Elsewhere(
                partial(self._read, which), partial(self.loaded.__setitem__, which), self.parameters
            )
            for which, name in enumerate(self.optimizer.state, 1)
        }
        return super().tracked() | state

    def _read(self, which: int) -> np.ndarray:
        """A vector of the optimizer's state, whole; the parameters in place of their mean, where that is shown."""
        vector = CPU.empty(self.parameters.size, self.parameters.dtype)
        self.keeper.gather(vector, 0 if self.average_shown and which == self.average else which)
        return vector

    def show_average(self) -> None:
        """The servers hold both as they are."""

    def hide_average(self) -> None:
        """What was loaded changes back, before it is given to the servers."""
        if not self.average_shown and self.average in self.loaded:
            exchange(self.parameters, self.loaded[self.average])

    def hand_out(self, workers: list[int]) -> None:
        """Workers have pulled the iterates; give them what rank 0 has saved. Collective."""
        comm = self.everyone
        for rank in workers if comm.rank == 0 else ():
            comm.push(self.parameters, rank)
        if comm.rank in workers:
            comm.wait(self.parameters, 0)

    def refresh(self) -> None:
        if self.keeper.over or not self.average_shown:  # at the end what is delayed is applied, and so in the mean
            self.keeper.gather(self.parameters)
        if self.average_shown:
            self.keeper.gather(self.parameters, self.average)
        if told := self.keeper.told_beside:
            self.own_beside = pack(self.model) if self.own_beside is None else self.own_beside
            unpack(self.model, mean(self.model, [*([self.own_beside] if self.works else []), *told.values()]))
        legs = self.keeper.run.legs
        legs.sent = self.sent(legs.comm.traffic)  # the servers have told, too

    def take_back(self) -> None:
        """What the model holds beside its parameters is this rank's own again, where it works on."""
        if self.own_beside is not None and not self.keeper.over:
            unpack(self.model, self.own_beside)
        self.own_beside = None

    def horizon(self, step: int) -> int:
        return self.keeper.store.granted


class Keeper(Lead):
    """On rank 0: runs the run, and decides which steps may be given out: none beyond the next checkpoint."""

    store: LedStore
    held: OnServers

    def __init__(self, run: Run, notes: bool = False):
        """notes: whether it is to be known what who takes its place has to know."""
        self.run, self.notes, self.noted = run, Notes() if notes else None, run.step
        self.told_beside: dict[int, np.ndarray] = {}  # of each worker: what its model holds beside its parameters

    @property
    def over(self) -> bool:
        """Whether the run is."""
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
        """The run cannot go on: what has been given out is computed, as after a signal, and nothing comes of it."""
        self.held.failure = error
        self.steps = self.limit = self.store.granted

    def note(self) -> tuple[bytes, int]:
        """How far the run is, and of the steps since the last note the losses that are not yet agreed on."""
        if self.notes is None:
            return b"", 0
        about = self.run.note(self.noted)
        self.noted = about["step"]
        noted = json.dumps(about).encode()
        noted = noted.ljust(NOTE * -(-len(noted) // NOTE))  # counts do not depend on how long numbers are
        self.notes.add(self.noted, noted, about["known"])
        return noted, about["known"]

    def signalled(self) -> None:
        self.run.signalled = True

    def told(self, rank: int, numbers: np.ndarray) -> None:
        self.told_beside[rank] = numbers

    def sent(self, rank: int, bytes: float, messages: float) -> None:
        self.held.note_sent(rank, bytes, messages)

    def gather(self, whole: np.ndarray, which: int = 0) -> None:
        """whole <- the servers' vectors after the run's step; when it is over, the values with all that is delayed."""
        self.store.gather(whole, which, self.run.step, finish=which == 0 and self.over)
