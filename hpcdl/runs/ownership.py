"""Who holds the parameters of a run: what a run asks of it, and the simplest answer, everything on each rank.

    Whole          the same flat vectors on all ranks                                  here
    Replicas       each rank its own, and their average                                replicas.py
    CutModel       of each rank a part                                                 hpcdl/parallel/cut_model.py
    OnOneRank      rank 0 runs the run by itself; vectors lie on servers, or wherever  on_one_rank.py

A run asks what a checkpoint is to hold (`tracked`), for parameters that can be scored and saved (`refresh`), for their
scores (`evaluate`), whether ranks that must agree do (`agree`), for a step's computing before any clock runs
(`warm_up`), and to which step it goes on when it is told to stop (`horizon`). It says when parameters are to be the
mean of the iterates (`show_average`), where one is kept, and when these again (`hide_average`).

The mean of the iterates is the model of a run with `--average from=5`, Polyak and Ruppert's averaging:

    from epoch E on, after each update:    average <- average + (w - average) / k,   k = 1, 2, 3, ...

The last iterate of SGD at a constant rate wanders about the optimum; the mean of its iterates gets there, at the rate
of the best estimator there can be, without a schedule that has to be tuned. (Polyak and Juditsky, "Acceleration of
stochastic approximation by averaging", SIAM J. Control and Optimization 1992; Ruppert, 1988)

The optimizer keeps the mean, of what it updates and where that lies (hpcdl/optim/optimizer.py), so that it costs no
message under any strategy. Training goes on from the iterates. What is scored and saved is the mean: for that time the
two change places in memory, and so they do in a checkpoint, whose `parameters` are the mean and whose
`optimizer/average` are the iterates.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import average, extra_of, share, tracked
from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.operations import SUM
from hpcdl.comm.trace import Traffic
from hpcdl.csr import on
from hpcdl.data import Batch
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import CPU, Array, Device, device_of
from hpcdl.memory import Memory
from hpcdl.models.model import abilities_of, unwrapped
from hpcdl.optim import Optimizer
from hpcdl.optim.optimizer import AVERAGE
from hpcdl.runs.evaluation import evaluate, scores
from hpcdl.runs.folder import Folder
from hpcdl.runs.segments import Legs


def exchange(a: Array, b: Array) -> None:
    """Let two vectors have each other's values."""
    kept = device_of(a).empty(a.shape, a.dtype)
    kept[:] = a
    a[:] = b
    b[:] = kept


class Ownership:
    """What this rank holds of `model` and its optimizer. parameters: the flat vector that is scored, or None.

    `peers` are the ranks that meet at boundaries, once `join` has been called.
    """

    still = True  # whether nothing of it changes while the ranks of a boundary score and save it
    # whether each rank's vectors are its own, and ranks that are left go on with theirs
    # (hpcdl/recovery/recovery_points.py)
    own = False
    synchronized: Callable[[int], bool] | None = None  # after which steps, of those, the strategy lets all ranks meet
    average_shown = False  # whether parameters are the mean of the iterates now
    peers: Communicator
    parameters: Any  # Array | None: a strategy knows which

    def __init__(self, model: Any, parameters: Array | None, optimizer: Optimizer):
        self.model, self.parameters, self.optimizer = model, parameters, optimizer
        self.device: Device = abilities_of(model).device

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        """The run begins: `bookkeeping` are all ranks, `memory` counts what is held. A collective call."""
        self.peers = bookkeeping
        share(self.model, bookkeeping)
        self.weigh(memory)

    def weigh(self, memory: Memory) -> None:
        """Count what this rank holds from the beginning to the end: parameters, a gradient as long, the optimizer's."""
        if self.parameters is None:
            return
        for kind in ("parameters", "gradients"):
            memory.hold(kind, self.parameters)
        for vector in self.optimizer.state.values():
            memory.hold("optimizer", vector)
        if abilities_of(self.model).pool:
            self.model.pool.memory = memory

    def tracked(self) -> dict[str, Tracked]:
        """What a checkpoint holds of it, by name."""
        raise NotImplementedError

    def saved(self) -> dict[str, Tracked]:
        """That, and what the model holds beside its parameters (hpcdl/checkpoint/buffers.py)."""
        return (tracked(extra_of(self.model)) if self.peers is not None else {}) | self.tracked()

    def refresh(self) -> None:
        """Bring `parameters` up to date, and what the model holds beside them, before they are scored or saved.

        Collective over the peers.
        """
        average(self.model, self.peers)

    def resumed(self, everyone: Communicator) -> None:
        """The peers have loaded the state of the run that they go on with; collective."""

    @property
    def iterate(self) -> Array:
        """The parameters that this rank trains, of which its optimizer keeps the mean."""
        return self.parameters

    def show_average(self) -> None:
        """Let the iterates and their mean change places, before a refresh; collective over the peers."""
        exchange(self.iterate, self.optimizer.state[AVERAGE])

    def hide_average(self) -> None:
        """Let them change back, also when they have been loaded; collective over the peers."""
        self.show_average()

    def evaluate(self, split: Any, classes: int) -> np.ndarray:
        """[losses, right answers or squared errors, examples] of a split, summed over the peers; collective."""
        sums = evaluate(self.model, self.parameters, split, classes, (self.peers.rank, self.peers.size))
        self.peers.all_reduce(sums)
        return sums

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        """Let the run know what each rank has spent, before a checkpoint in this folder; collective over the peers."""
        legs.gather(self.peers)

    def sent(self, traffic: Traffic) -> tuple[float, float]:
        """Bytes and messages that this rank has sent, as traffic says, and those that it speaks for at boundaries."""
        return traffic.sent_so_far

    def scores(self, data: Any) -> dict:
        """The scores of an evaluation by name, on the test part and the validation part; collective over the peers."""
        found: dict = {}
        for name, split in (("test", data.test), ("validation", data.validation)):
            if split is not None:
                found |= scores(self.evaluate(split, data.classes), data.classes, data.outputs, data.unit).named(name)
        return found

    def last_scores(self, data: Any) -> dict:
        """Scores that only the last evaluation has, beside those; collective over the peers."""
        return {}

    def judged(self, found: dict, train_loss: float) -> float:
        """Of an evaluation's scores, what is to become smaller; train_loss: where there is none."""
        return found.get("validation_loss", found.get("test_loss", train_loss))

    def agree(self, everyone: Communicator) -> bool | None:
        """Whether all ranks that hold whole parameters hold the same, to the bit; None: they need not. Collective."""
        low, high = np.array([np.iinfo(np.int64).max]), np.array([0])
        if self.parameters is not None:
            low[0] = high[0] = fingerprint(self.device.host(self.parameters))
        everyone.all_reduce(low, op="min")
        everyone.all_reduce(high, op="max")
        return bool(low[0] == high[0])

    def warm_up(self, few: Batch) -> None:
        """A step's computing with the examples at hand, one or none: it compiles, or loads from the cache."""
        if self.parameters is not None and not abilities_of(self.model).buffers:  # which a step would change
            gradient = self.device.zeros(self.parameters.size, self.model.layout.dtype)
            unwrapped(self.model).loss_and_gradient(self.parameters, few, gradient)

    def fail(self, error: TrainingError) -> None:
        """A boundary has found that the run cannot go on, on all peers: raise the error."""
        raise error

    def horizon(self, step: int) -> int:
        """The last step that is under way after `step`, to which a run that is told to stop still goes."""
        return step


class Whole(Ownership):
    """Every rank holds all of it, and the same."""

    def tracked(self) -> dict[str, Tracked]:
        state: dict[str, Tracked] = {"parameters": Same(self.parameters)}
        return state | {f"optimizer/{name}": Same(vector) for name, vector in self.optimizer.state.items()}


@contextlib.contextmanager
def averaged(held: Ownership, over: Callable[[], bool]) -> Iterator[None]:
    """Meanwhile what is held is the mean, where there is one; so it stays when the run is over."""
    if held.optimizer.averaged and not held.average_shown:
        held.show_average()
        held.average_shown = True
    yield
    if held.average_shown and not over():
        held.hide_average()
        held.average_shown = False


def warm_up(
    held: Ownership, data: Any, make_optimizer: Callable[..., Optimizer], uncounted: AbstractContextManager
) -> None:
    """Compile, or load from the cache, what a step needs, before any clock runs.

    make_optimizer: `Run.make_optimizer`. uncounted: what a step sends is not counted; the row that it needs, and that a
    data server may send, is.
    """
    device, dtype = held.device, held.model.layout.dtype
    least = 0 if device is CPU else 1  # a launch of nothing compiles nothing
    if held.parameters is not None:
        x, y = (on(device, each[:least]) for each in data.train.rows(0, 1))
        with uncounted:
            held.warm_up(Batch(x, y, 1, epoch=0, step=0, index=np.arange(least)))
    optimizer = make_optimizer(held.model, data, least)
    optimizer.step = optimizer.average_from or 0
    optimizer.update(device.zeros(least, dtype), device.zeros(least, dtype))
    SUM(np.empty(0, dtype), np.empty(0, dtype))


def fingerprint(vector: np.ndarray) -> int:
    """A number that two vectors share only if they are the same bits."""
    contiguous: Any = np.ascontiguousarray(vector)  # a buffer, which mypy believes from Python 3.12 on
    return int.from_bytes(hashlib.blake2b(contiguous, digest_size=7).digest(), "little")
