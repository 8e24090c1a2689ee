"""A run with its parameters on servers: rank 0, the first server, runs it and gives out the steps.

No step is given out beyond the next checkpoint. `OnServers.count` records each complete step, and is its boundary."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import buffer_packer, mean, pack, unpack
from hpcdl.checkpoint.state import RemoteVector, Tracked
from hpcdl.comm import Communicator
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import CPU, Array
from hpcdl.optim import Optimizer
from hpcdl.optim.optimizer import AVERAGE
from hpcdl.parameter_server.clocks import Horizon
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.slice_server import Beside
from hpcdl.runs.on_one_rank import OnOneRank
from hpcdl.runs.ownership import exchange
from hpcdl.runs.run import Run
from hpcdl.runs.stopwatch import Stopwatch

NOTE = 1024  # length of a note in bytes: a multiple of this


def request_step(
    comm: Communicator, store: ParameterStore, stopwatch: Stopwatch, ask: Callable, *arguments: Any
) -> int | None:
    """Call `ask` and return its step, or None if none is left; rank 0's own work is not counted as waiting."""
    blocked, apart = comm.traffic.blocked_seconds, store.apart_seconds
    step: int | None = ask(*arguments)
    if comm.rank > 0:  # rank 0's scores and checkpoints are not part of a step
        stopwatch.excuse(min(store.apart_seconds - apart, comm.traffic.blocked_seconds - blocked))
    return step


class OnServers(OnOneRank):
    """Ownership of parameters and optimizer state on servers; rank 0 gathers them for scores and checkpoints.
    store: from `follow` on. loaded: state vectors of a resumed run by number, for the servers. beside: what pushes
    carry to rank 0, the buffers of a worker's model; None without buffers. residuals: number of workers whose
    compressed pushes leave residuals."""

    store: ParameterStore
    noted = 0  # the step of the last note
    own_buffers: np.ndarray | None = None  # this rank's buffers, while the model has the workers' mean

    def __init__(
        self, run: Run, model: Any, parameters: Array | None, optimizer: Optimizer, works: bool, residuals: int = 0
    ):
        super().__init__(model, parameters, optimizer, works)
        self.residuals, self.loaded_residuals = residuals, np.empty(0)
        self.run, self.buffers = run, dict[int, np.ndarray]()  # by worker
        self.loaded: dict[int, np.ndarray] = {}
        self.average = 1 + list(optimizer.state).index(AVERAGE) if optimizer.average_from is not None else 0
        packer = buffer_packer(model)
        self.beside = None if packer is None else Beside(len(pack(model)), packer, self.buffers.__setitem__)

    def horizon_of_store(self) -> Horizon:
        """Return how far workers may go: to the next checkpoint."""
        return Horizon(*self.run.horizon, self.run.stopwatch.apart_seconds)

    def follow(self, store: ParameterStore) -> None:
        """Take the store; if the run continues from another, give it that run's optimizer state. Collective."""
        self.store = store
        if self.leads:
            self.others_sent = store.server.sent
            store.server.each_step = self.count
        if self.goes_on:
            for which in range(1, 1 + len(self.optimizer.state)):
                store.scatter(self.loaded.get(which), which)
            if self.residuals:
                store.scatter_residuals(self.loaded_residuals)

    def count(self, loss: float, total: float) -> None:
        """Record a complete step, on rank 0; this is the step's boundary."""
        self.run.record(loss, int(total))
        self.run.boundary(self.store.signalled)
        if self.store.server.copies.careful:
            self.note()
        if self.own_buffers is not None and not self.run.over:
            unpack(self.model, self.own_buffers)
            self.own_buffers = None

    def note(self) -> None:
        """Send the other servers the run's position, and the losses since the last note that are not agreed on yet."""
        about = self.run.note(self.noted)
        self.noted = about["step"]
        noted = json.dumps(about).encode()
        noted = noted.ljust(NOTE * -(-len(noted) // NOTE))  # byte counts do not depend on the digits of numbers
        self.store.server.copies.note(noted, about["known"])

    def tracked(self) -> dict[str, Tracked]:
        if not self.leads:
            return {}
        state: dict[str, Tracked] = {
            f"optimizer/{name}": RemoteVector(
                partial(self._read, which), partial(self.loaded.__setitem__, which), self.parameters
            )
            for which, name in enumerate(self.optimizer.state, 1)
        }
        if self.residuals:
            rows = np.broadcast_to(np.zeros(1, self.parameters.dtype), (self.residuals, self.parameters.size))
            load = partial(setattr, self, "loaded_residuals")
            state["residuals"] = RemoteVector(lambda: self.store.gather_residuals(), load, rows)
        return super().tracked() | state

    def _read(self, which: int) -> np.ndarray:
        """Return a whole vector of the optimizer's state; while the mean is shown, the parameters in its place."""
        vector = CPU.empty(self.parameters.size, self.parameters.dtype)
        self._gather(vector, 0 if self.average_shown and which == self.average else which)
        return vector

    def _gather(self, whole: np.ndarray, which: int = 0) -> None:
        """Set `whole` to the servers' vectors as of the run's step; at the run's end, with delayed updates applied."""
        self.store.gather(whole, which, self.run.step, finish=which == 0 and self.run.over)

    def show_average(self) -> None:
        """Do nothing: the servers hold both vectors unchanged."""

    def hide_average(self) -> None:
        """Exchange loaded parameters and mean, before the servers get them."""
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
        if self.run.over or not self.average_shown:  # at the end delayed updates are applied, also to the mean
            self._gather(self.parameters)
        if self.average_shown:
            self._gather(self.parameters, self.average)
        if self.buffers:
            self.own_buffers = pack(self.model) if self.own_buffers is None else self.own_buffers
            unpack(self.model, mean(self.model, [*([self.own_buffers] if self.works else []), *self.buffers.values()]))
        legs = self.run.legs
        legs.sent = self.sent(legs.comm.traffic)  # includes the servers' reports

    def horizon(self, step: int) -> int:
        return self.store.server.clocks.granted

    def fail(self, error: TrainingError) -> None:
        """Give out no more steps; steps that are given out already are computed without effect."""
        super().fail(error)
        self.store.server.clocks.stop()

    def raise_failure(self) -> None:
        """Raise as `OnOneRank` does, and for a push whose loss was not finite."""
        if self.leads and self.failure is None and (push := self.store.server.not_finite) is not None:
            self.failure = self.run.not_finite(push.step + 1, push.client)
        super().raise_failure()
