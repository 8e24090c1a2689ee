"""Chains that draw from a posterior: each a group of ranks, its own iterate, and samples of it now and then.

    iterate w        the same on all ranks of a chain
    samples          w after the steps burn_in + thin, burn_in + 2 thin, ...; the first rank of a chain keeps them
    parameters       the mean of all samples of all chains, the posterior mean, which is scored and saved; before there
                     is a sample, of the iterates
    R-hat            of each parameter: whether the chains, and the halves of each, are alike, 1 where they are

Split R-hat: the M = 2 chains halves of n samples, with means m_i and variances s_i^2,

    W = mean of s_i^2      B/n = variance of m_i       R-hat = sqrt(((n - 1)/n W + B/n) / W)

(Gelman and Rubin, "Inference from iterative simulation using multiple sequences", Statistical Science 1992; Vehtari,
Gelman, Simpson, Carpenter and Buerkner, "Rank-normalization, folding, and localization: an improved R-hat", Bayesian
Analysis 2021, of which the halves are taken, and no ranks.)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator, refuse_together
from hpcdl.errors import TrainingError, UsageError, reason, refuse_beyond
from hpcdl.kernels.device import Array, device_of
from hpcdl.memory import Memory, available
from hpcdl.runs.held import Held
from hpcdl.runs.rewind import folder_of
from hpcdl.runs.samples import FILE, Samples
from hpcdl.runs.state import Same, Tracked

if TYPE_CHECKING:
    from hpcdl.optim import Optimizer
    from hpcdl.runs.run import Run

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


class Chains(Held):
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
        self.total = np.zeros(w.size)
        self.steps: list[int] = []
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
        """The posterior mean, and of each chain the iterate and the sum of its samples."""
        return {
            "parameters": Same(self.parameters),
            "iterate": PerChain(self.w, self.leaders, self.number),
            "sum_of_samples": PerChain(self.total, self.leaders, self.number),
        }

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

    def take(self, step: int) -> None:
        """The first `step` steps are done: take a sample where one is due; local."""
        if step <= self.burn_in or (step - self.burn_in) % self.thin:
            return
        sample = device_of(self.w).host(self.w).copy()
        self.total += sample
        self.steps.append(step)
        if self.leads:
            self.kept.append(sample)

    def refresh(self) -> None:
        """parameters <- the posterior mean so far, the same bits on all ranks; collective."""
        super().refresh()
        mine = self.total / len(self.steps) if self.steps else device_of(self.w).host(self.w).astype(np.float64)
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
        """Split R-hat of each parameter; None where samples are too few. Collective."""
        n, size = len(self.steps) // 2, self.w.size
        if len(self.steps) < FEWEST:
            return None
        halves = [self.kept[:n], self.kept[-n:]] if self.leads else []
        means = [np.mean(half, axis=0, dtype=np.float64) for half in halves]
        spreads = [
            sum(np.square(sample - mean) for sample in half) / (n - 1) for half, mean in zip(halves, means, strict=True)
        ]
        count = 2 * len(self.leaders)
        sums = np.concatenate([sum(means, np.zeros(size)), sum(spreads, np.zeros(size))])
        self.peers.all_reduce(sums)
        middle, within = sums[:size] / count, sums[size:] / count
        between = sum((np.square(mean - middle) for mean in means), np.zeros(size)) / (count - 1)
        self.peers.all_reduce(between)
        whole = (n - 1) / n * within + between
        return np.sqrt(np.divide(whole, within, out=np.ones(size), where=within > 0))

    # -- the file ----------------------------------------------------------------------------------------------------

    def gather_costs(self, run: "Run") -> None:
        """Before a checkpoint, with what each rank has spent: write the samples, so that they are never behind it."""
        super().gather_costs(run)
        mine = np.array(self.kept, self.w.dtype).reshape(len(self.kept), self.w.size)
        vectors = gathered(self.peers, mine, self.leaders, self.number)
        failed, why = np.zeros(1), ""
        if vectors is not None and run.folder.path is not None:
            try:
                Samples(np.array(self.steps, np.int64), vectors).write(run.folder.path)
            except Exception as error:  # whatever h5py raises: all ranks are to know
                failed[0], why = 1, reason(error)
        self.peers.broadcast(failed)
        if failed[0]:
            raise TrainingError(f"{run.folder.path}/{FILE} cannot be written: {why}; {run.folder.kept()}")

    def restore(self, run: "Run") -> None:
        """Take the samples up to the run's step from the folder that it goes on from; collective.

        Raises AgreedError where they are not all there.
        """
        self.steps, found = self.due(run.step), None
        if not self.steps:
            return
        with refuse_together(self.peers.mpi):
            if self.peers.rank == 0:
                folder = folder_of(run.options.resume)
                found = Samples.read(Path(folder), run.step, self.w.size, np.dtype(self.w.dtype))
                if found.steps.tolist() != self.steps or len(found.vectors) != len(self.leaders):
                    raise UsageError(f"{folder}/{FILE} does not hold the samples of step {run.step}'s checkpoint")
        for number, leader in enumerate(self.leaders):
            if self.peers.rank == 0 and found is not None and leader > 0:
                self.peers.push(np.ascontiguousarray(found.vectors[number]), leader)
            elif self.peers.rank == leader:
                mine = np.empty((len(self.steps), self.w.size), self.w.dtype) if found is None else found.vectors[0]
                if found is None:
                    self.peers.wait(mine, 0)
                self.kept = list(mine)
