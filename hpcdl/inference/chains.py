"""Chains that draw from a posterior: each a group of ranks, its own iterate, and samples of it now and then.

    iterate w        the same on all ranks of a chain
    samples          w after the steps burn_in + thin, burn_in + 2 thin, ...; the first rank of a chain keeps them
    parameters       the mean of all samples of all chains, each weighted by the rate of its step: the posterior mean,
                     which is scored and saved; before there is a sample, the mean of the iterates
    R-hat            of each parameter: how much the chains, and the halves of each, differ; 1 where they do not

The iterate after a small step tells less that is new than one after a large step, so a sample counts by its step's
rate: E f = sum of a_t f(w_t) / sum of a_t. (Welling and Teh, "Bayesian learning via stochastic gradient Langevin
dynamics", ICML 2011, equation 11)

R-hat is that of `r_hat.py`, in which samples have no weights.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdl.checkpoint.rollback import folder_of
from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.chunks import chunks
from hpcdl.comm import Communicator, refuse_together
from hpcdl.errors import TrainingError, UsageError, reason, refuse_beyond
from hpcdl.inference.posterior_samples import FILE, Samples
from hpcdl.inference.r_hat import rank_normalized_r_hat
from hpcdl.kernels.device import Array, device_of
from hpcdl.memory import Memory, available
from hpcdl.runs.folder import Folder
from hpcdl.runs.ownership import Ownership
from hpcdl.runs.segments import Legs

if TYPE_CHECKING:
    from hpcdl.optim import Optimizer

MOST = 1000  # samples of a chain that are kept
FEWEST = 4  # for an R-hat: two of each half


class PerChain:
    """`array` is the same on all ranks of a chain. leaders: the first rank of each chain; mine: this rank's chain."""

    def __init__(self, array: Array, leaders: list[int], mine: int):
        self.array, self.leaders, self.mine = array, leaders, mine

    def stored(self, name: str) -> str:
        return f"chains/{name}"

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return (len(self.leaders), self.array.size), self.array.dtype

    def gather(self, comm: Communicator) -> np.ndarray | None:
        return gathered(comm, device_of(self.array).host(self.array), self.leaders, self.mine)

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        rows = np.empty(self.form(comm.size)[0], self.array.dtype) if whole is None else np.ascontiguousarray(whole)
        comm.broadcast(rows)
        device_of(self.array).copy_in(self.array, rows[self.mine])


def gathered(comm: Communicator, mine: np.ndarray, leaders: list[int], chain: int) -> np.ndarray | None:
    """The array of each chain, (chains, ...), on rank 0, from their first ranks; None elsewhere. Collective."""
    if comm.rank > 0:
        if comm.rank == leaders[chain]:
            comm.push(mine, 0)
        return None
    rows = np.empty((len(leaders), *mine.shape), mine.dtype)
    rows[0] = mine
    for number in range(1, len(leaders)):
        comm.wait(rows[number], leaders[number])
    return rows


class Chains(Ownership):
    """What a rank holds of the chain `number` of so many; w: its iterate."""

    def __init__(
        self,
        model: Any,
        w: Array,
        optimizer: "Optimizer",
        ranks: int,
        number: int,
        chains: int,
        burn_in: int,
        thin: int,
    ):
        super().__init__(model, device_of(w).empty(w.size, w.dtype), optimizer)
        self.parameters[:] = w
        self.w, self.number, self.burn_in, self.thin = w, number, burn_in, thin
        self.leaders = [part.start for part in chunks(ranks, chains)]
        self.total = np.zeros(w.size)  # the weighted sum of samples; on the first rank of a chain
        self.steps: list[int] = []
        self.weights: list[float] = []
        self.kept: list[np.ndarray] = []

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        """All ranks exchange by `bookkeeping`, in messages that are counted apart."""
        super().join(bookkeeping, memory)
        memory.hold("parameters", self.w)

    @property
    def leads(self) -> bool:
        """Whether this rank keeps its chain's samples."""
        return self.peers.rank == self.leaders[self.number]

    def tracked(self) -> dict[str, Tracked]:
        """The posterior mean, and the iterate of each chain; samples have a file of their own."""
        return {"parameters": Same(self.parameters), "iterate": PerChain(self.w, self.leaders, self.number)}

    def due(self, steps: int) -> list[int]:
        """After which of the first `steps` steps a sample is taken."""
        return list(range(self.burn_in + self.thin, steps + 1, self.thin))

    def refuse_too_many(self, steps: int) -> None:
        """Raise UsageError where so many steps would bring more samples than are kept, or than there is room for."""
        wanted, after = max(0, steps - self.burn_in) // self.thin, steps - self.burn_in
        if wanted > MOST:
            least = -(-after // MOST)
            known = f"{wanted} samples of a chain are too many, {MOST} are kept at most"
            raise UsageError(f"{known}: --thin {least} or more")
        needed = len(self.leaders) * wanted * self.w.size * self.w.dtype.itemsize
        refuse_beyond(f"{wanted} samples of each of {len(self.leaders)} chains", needed, available())

    def take(self, step: int, rate: float) -> None:
        """The first `step` steps are done, the last at this rate: take a sample where one is due; local."""
        if step <= self.burn_in or (step - self.burn_in) % self.thin:
            return
        self.steps.append(step)
        self.weights.append(rate)
        if self.leads:
            self._keep(device_of(self.w).host(self.w).copy(), rate)

    def _keep(self, sample: np.ndarray, weight: float) -> None:
        self.kept.append(sample)
        self.total += weight * sample.astype(np.float64)

    def refresh(self) -> None:
        """parameters <- the posterior mean so far, the same bits on all ranks; collective."""
        super().refresh()
        mine = self.total / sum(self.weights) if self.steps else device_of(self.w).host(self.w).astype(np.float64)
        mean = mine / len(self.leaders) if self.leads else np.zeros_like(mine)
        self.peers.all_reduce(mean)
        device_of(self.parameters).copy_in(self.parameters, mean.astype(self.parameters.dtype))

    def scores(self, data: Any) -> dict:
        """With R-hat: the largest, and the median, of all parameters."""
        found, r_hat = super().scores(data), self.r_hat()
        if r_hat is not None:
            found |= {"r_hat_max": float(r_hat.max()), "r_hat_median": float(np.median(r_hat))}
        return found

    def r_hat(self) -> np.ndarray | None:
        """Rank-normalized split R-hat of each parameter; None where samples are too few. Collective.

        The first rank of each chain finds R-hat for its share of the parameters; the others send it their samples.
        """
        if len(self.steps) < FEWEST:
            return None
        found, shares = np.zeros(self.w.size), chunks(self.w.size, len(self.leaders))
        if self.leads:
            mine, others = np.array(self.kept), [c for c in range(len(self.leaders)) if c != self.number]
            sent = [self.peers.ipush(np.ascontiguousarray(mine[:, shares[c]]), self.leaders[c]) for c in others]
            of = np.empty((len(self.leaders), *mine[:, shares[self.number]].shape), mine.dtype)
            of[self.number] = mine[:, shares[self.number]]
            for each in [self.peers.iwait(of[c], self.leaders[c]) for c in others] + sent:
                each.wait()
            found[shares[self.number]] = rank_normalized_r_hat(of)
        self.peers.all_reduce(found)
        return found

    # -- the file ----------------------------------------------------------------------------------------------------

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        """Before a checkpoint, with what each rank has spent: write the samples, so that they are never behind it."""
        super().gather_costs(legs, folder)
        mine = np.array(self.kept, self.w.dtype).reshape(len(self.kept), self.w.size)
        vectors = gathered(self.peers, mine, self.leaders, self.number)
        failed, why = np.zeros(1), ""
        if vectors is not None and folder.path is not None:
            try:
                Samples(np.array(self.steps, np.int64), vectors, np.array(self.weights)).write(folder.path)
            except Exception as error:  # whatever h5py raises: all ranks are to know
                failed[0], why = 1, reason(error)
        self.peers.broadcast(failed)
        if failed[0]:
            raise TrainingError(f"{folder.path}/{FILE} cannot be written: {why}; {folder.kept()}")

    def restore(self, step: int, resume: str) -> None:
        """Take the samples up to this step from the run that is gone on from; collective.

        Raises AgreedError where they are not all there.
        """
        self.steps, found = self.due(step), None
        if not self.steps:
            return
        with refuse_together(self.peers.mpi):
            if self.peers.rank == 0:
                folder = folder_of(resume)
                found = Samples.read(Path(folder), step, self.w.size, np.dtype(self.w.dtype))
                if found.steps.tolist() != self.steps or len(found.vectors) != len(self.leaders):
                    raise UsageError(f"{folder}/{FILE} does not hold the samples of step {step}'s checkpoint")
        weights = np.array([self.optimizer.schedule(step - 1) for step in self.steps], np.float64)
        if found is not None and found.weights is not None:  # older files have none
            weights[:] = found.weights
        self.peers.broadcast(weights)
        self.weights = weights.tolist()
        for number, leader in enumerate(self.leaders):
            if self.peers.rank == 0 and found is not None and leader > 0:
                self.peers.push(np.ascontiguousarray(found.vectors[number]), leader)
            elif self.peers.rank == leader:
                mine = np.empty((len(self.steps), self.w.size), self.w.dtype) if found is None else found.vectors[0]
                if found is None:
                    self.peers.wait(mine, 0)
                for sample, weight in zip(mine, weights, strict=True):
                    self._keep(sample, weight)
