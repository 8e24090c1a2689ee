"""Who holds the parameters of a run: three protocols, and an ownership that implements all of them.

    Saved          what a checkpoint holds, and parameters that are up to date
    Scored         the scores of an evaluation, and a first step that only compiles
    Meeting        the ranks that meet at boundaries, and what they agree on

    Whole          the same flat vectors on all ranks                                  here
    Replicas       each rank its own, and their average                                replicas.py
    CutModel       each rank a part                                                    hpcdl/parallel/cut_model.py
    OnOneRank      rank 0 runs the run by itself; vectors lie on servers, or elsewhere on_one_rank.py

With `--average from=5` the model of a run is the mean of its iterates, Polyak and Ruppert's averaging:

    from epoch E on, after each update:    average <- average + (w - average) / k,   k = 1, 2, 3, ...

At a constant rate the last iterate of SGD wanders about the optimum; the mean converges at the best possible rate
without a tuned schedule. (Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control
and Optimization 1992; Ruppert, 1988) The optimizer keeps the mean of what it updates (hpcdl/optim/optimizer.py),
without a message. While a run scores and saves, mean and iterates change places: in a checkpoint, `parameters` are the
mean, and `optimizer/average` the iterates."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from hpcdl.checkpoint.buffers import average, extra_of, share, tracked
from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.trace import Traffic
from hpcdl.csr import on
from hpcdl.data import Batch
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import CPU, Array, Device, device_of
from hpcdl.memory import Memory
from hpcdl.models.model import abilities_of, unwrapped
from hpcdl.optim import Optimizer
from hpcdl.optim.optimizer import AVERAGE
from hpcdl.runs.evaluation import Measures, evaluate, new_measures, scores, scores_of_all, text_scores
from hpcdl.runs.folder import Folder
from hpcdl.runs.segments import Legs


def exchange(a: Array, b: Array) -> None:
    """Swap the values of two vectors."""
    kept = device_of(a).empty(a.shape, a.dtype)
    kept[:] = a
    a[:] = b
    b[:] = kept


Weigh = Callable[[Memory], object]


class Saved(Protocol):
    """The state that checkpoints of a run hold."""

    still: bool  # True if no vector changes while the ranks score and save it at a boundary
    own: bool  # True if each rank has its own vectors, with which survivors go on (recovery_points.py)
    average_shown: bool  # True while `parameters` are the mean of the iterates

    def saved(self) -> dict[str, Tracked]:
        """Return what a checkpoint holds, by name: `tracked`, and the model's buffers (hpcdl/checkpoint/buffers.py)."""

    def refresh(self) -> None:
        """Bring `parameters` and the model's buffers up to date before they are scored or saved. Collective."""

    def show_average(self) -> None:
        """Swap the iterates and their mean, before a refresh; collective over the peers."""

    def hide_average(self) -> None:
        """Swap iterates and mean back, after a save or a load; collective over the peers."""

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        """Gather the costs of each rank, before a checkpoint in this folder; collective over the peers."""

    def resumed(self, everyone: Communicator) -> None:
        """Bring this rank up to date when the peers have loaded the state of a resumed run; collective."""


class Scored(Protocol):
    """Gives the scores of a run."""

    def scores(self, data: Any) -> dict:
        """Return the scores of an evaluation by name, on test rows and validation rows; collective over the peers."""

    def last_scores(self, data: Any) -> dict:
        """Return further scores, by name, for the last evaluation alone; collective over the peers."""

    def judged(self, found: dict, train_loss: float) -> float:
        """Return the value that should decrease: one of the scores `found`, or else `train_loss`."""

    def warm_up(self, few: Batch) -> None:
        """Compute a step on `few`, one example or none, to compile kernels or load them from the cache."""


class Meeting(Protocol):
    """The agreement of ranks at boundaries. peers: the ranks that meet there, known from `join` on."""

    peers: Communicator
    synchronized: Callable[[int], bool] | None  # True for a step at whose end the strategy lets all ranks meet

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        """Begin a run. bookkeeping: the communicator of all ranks. memory: counts the vectors held. Collective."""

    def agree(self, everyone: Communicator) -> bool | None:
        """Return True if all ranks with whole parameters have the same bits; None if they may differ. Collective."""

    def sent(self, traffic: Traffic) -> tuple[float, float]:
        """Return bytes and messages sent by this rank and by the ranks that it speaks for at boundaries."""

    def fail(self, error: TrainingError) -> None:
        """Raise the error: all peers have found at a boundary that the run cannot go on."""

    def horizon(self, step: int) -> int:
        """Return the last step in flight after `step`; a run that is told to stop ends with that step."""


class Ownership(Saved, Scored, Meeting):
    """What this rank holds of `model` and its optimizer. parameters: the flat vector that is scored; None: no such
    vector. weigh_gradients: counts the memory of gradients; None: count one gradient, as long as `parameters`."""

    still = True
    own = False
    average_shown = False
    synchronized: Callable[[int], bool] | None = None
    further: tuple[str, ...] = ()  # names of the scores that an evaluation has beside loss and accuracy or rmse
    parameters: Any  # Array | None: a strategy knows which

    def __init__(
        self, model: Any, parameters: Array | None, optimizer: Optimizer, weigh_gradients: Weigh | None = None
    ):
        self.model, self.parameters, self.optimizer = model, parameters, optimizer
        self.device: Device = abilities_of(model).device
        self.weigh_gradients = weigh_gradients or (lambda memory: memory.hold("gradients", self.parameters))

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        self.peers = bookkeeping
        share(self.model, bookkeeping)
        self.weigh(memory)

    def weigh(self, memory: Memory) -> None:
        """Count the memory of the vectors that this rank always holds: parameters, a gradient, the optimizer's."""
        if self.parameters is None:
            return
        memory.hold("parameters", self.parameters)
        self.weigh_gradients(memory)
        for vector in self.optimizer.state.values():
            memory.hold("optimizer", vector)
        if self.optimizer.workspace is not None:
            memory.hold("optimizer", self.optimizer.workspace)
        if abilities_of(self.model).pool:
            self.model.pool.memory = memory

    def tracked(self) -> dict[str, Tracked]:
        """Return the vectors of parameters and optimizer, by name."""
        raise NotImplementedError

    def saved(self) -> dict[str, Tracked]:
        return (tracked(extra_of(self.model)) if self.peers is not None else {}) | self.tracked()

    def refresh(self) -> None:
        average(self.model, self.peers)

    def resumed(self, everyone: Communicator) -> None:
        pass

    @property
    def iterate(self) -> Array:
        """The parameters that this rank trains, of which its optimizer keeps the mean."""
        return self.parameters

    def show_average(self) -> None:
        exchange(self.iterate, self.optimizer.state[AVERAGE])

    def hide_average(self) -> None:
        self.show_average()

    def evaluate(self, split: Any, classes: int, measures: Measures | None = None) -> np.ndarray:
        """Return [losses, right answers or squared errors, examples] of a split, summed over the peers; collective.
        measures: get this rank's rows."""
        sums = evaluate(self.model, self.parameters, split, classes, (self.peers.rank, self.peers.size), measures)
        self.peers.all_reduce(sums)
        return sums

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        legs.gather(self.peers)

    def sent(self, traffic: Traffic) -> tuple[float, float]:
        return traffic.sent_so_far

    def scores(self, data: Any) -> dict:
        found: dict = {}
        for name, split in (("test", data.test), ("validation", data.validation)):
            if split is not None:
                measures = new_measures(self.further, data, self.model, split)
                sums = self.evaluate(split, data.classes, measures)
                plain = scores(sums, data.classes, data.outputs, data.unit)
                found |= plain.named(name)
                of_text = text_scores(plain.loss, data.schema, "test" if name == "test" else "train")
                found |= {f"{name}_{each}": value for each, value in of_text.items()}
                if measures is not None:
                    more = scores_of_all(self.peers, measures, self.further)
                    found |= {f"{name}_{each}": value for each, value in more.items()}
        return found

    def last_scores(self, data: Any) -> dict:
        return {}

    def judged(self, found: dict, train_loss: float) -> float:
        return found.get("validation_loss", found.get("test_loss", train_loss))

    def agree(self, everyone: Communicator) -> bool | None:
        low, high = np.array([np.iinfo(np.int64).max]), np.array([0])
        if self.parameters is not None:
            low[0] = high[0] = fingerprint(self.device.host(self.parameters))
        everyone.all_reduce(low, op="min")
        everyone.all_reduce(high, op="max")
        return bool(low[0] == high[0])

    def warm_up(self, few: Batch) -> None:
        if self.parameters is not None and not abilities_of(self.model).buffers:  # a step would change buffers
            gradient = self.device.zeros(self.parameters.size, self.model.layout.dtype)
            unwrapped(self.model).loss_and_gradient(self.parameters, few, gradient)

    def fail(self, error: TrainingError) -> None:
        raise error

    def horizon(self, step: int) -> int:
        return step


class Whole(Ownership):
    """Every rank holds the same whole vectors."""

    def tracked(self) -> dict[str, Tracked]:
        state: dict[str, Tracked] = {"parameters": Same(self.parameters)}
        return state | {f"optimizer/{name}": Same(vector) for name, vector in self.optimizer.state.items()}


@contextlib.contextmanager
def averaged(held: Ownership, over: Callable[[], bool]) -> Iterator[None]:
    """Context in which `held` shows the mean, under --average; afterwards, too, if the run is `over` by then."""
    if held.optimizer.averaged and not held.average_shown:
        held.show_average()
        held.average_shown = True
    yield
    if held.average_shown and not over():
        held.hide_average()
        held.average_shown = False


def warm_up(held: Ownership, scored: Scored, data: Any, make_optimizer: Callable, comm: Any) -> None:
    """Compile, or load from the cache, what a step needs, before any clock runs. make_optimizer: `Run.make_optimizer`.
    comm: the run's; messages of the step are not counted, but a row from a data server is."""
    device, dtype = held.device, held.model.layout.dtype
    least = 0 if device is CPU else 1  # a launch of nothing compiles nothing
    if held.parameters is not None:
        x, y = (on(device, each[:least]) for each in data.train.rows(0, 1))
        with comm.traffic.uncounted():
            scored.warm_up(Batch(x, y, 1, epoch=0, step=0, index=np.arange(least)))
    optimizer = make_optimizer(held.model, data, least)
    optimizer.step = optimizer.average_from or 0
    optimizer.update(device.zeros(least, dtype), device.zeros(least, dtype))
    comm.compile_for(dtype)


def fingerprint(vector: np.ndarray) -> int:
    """Return a hash of the vector's bits, for comparisons."""
    contiguous: Any = np.ascontiguousarray(vector)  # a buffer, which mypy believes from Python 3.12 on
    return int.from_bytes(hashlib.blake2b(contiguous, digest_size=7).digest(), "little")
