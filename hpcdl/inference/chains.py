"""Markov chains that sample a posterior: a chain is a group of ranks with an iterate and samples of it.

    iterate w        the same on all ranks of a chain
    samples          w after the steps burn_in + thin, burn_in + 2 thin, ...; the first rank of a chain keeps them
    parameters       the posterior mean, sum of a_t w_t / sum of a_t over the samples of all chains, a_t the rate of
                     step t; it is scored and saved. Before the first sample: the mean of all chains' iterates
    R-hat            of each parameter, without weights: near 1 if the chains and their halves agree (r_hat.py)

A sample is weighted by its step's rate, for a small step adds less information than a large one. (Welling and Teh,
"Bayesian learning via stochastic gradient Langevin dynamics", ICML 2011, equation 11)"""

from pathlib import Path
from typing import Any

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
from hpcdl.optim import Optimizer
from hpcdl.runs.folder import Folder
from hpcdl.runs.ownership import Ownership
from hpcdl.runs.segments import Legs

MOST = 1000  # most samples of a chain
FEWEST = 4  # for an R-hat: two of each half


class PerChain:
    """An array equal on all ranks of a chain. leaders: first rank of each chain. mine: number of this rank's chain."""

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
    """Return `mine` of each chain's first rank (`leaders`), stacked (chains, ...), on rank 0; else None. Collective."""
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
    """The state of a rank of chain `number`. w: the iterate. burn_in: steps without samples; thin: steps per sample."""

    def __init__(
        self, model: Any, w: Array, optimizer: Optimizer, ranks: int, number: int, chains: int, burn_in: int, thin: int
    ):
        super().__init__(model, device_of(w).empty(w.size, w.dtype), optimizer)
        self.parameters[:] = w
        self.w, self.number, self.burn_in, self.thin = w, number, burn_in, thin
        self.leaders = [part.start for part in chunks(ranks, chains)]
        self.total = np.zeros(w.size)  # the weighted sum of samples; on the first rank of a chain
        self.steps: list[int] = []
        self.weights: list[float] = []
        self.samples: list[np.ndarray] = []

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        super().join(bookkeeping, memory)
        memory.hold("parameters", self.w)

    @property
    def leads(self) -> bool:
        """True if this rank, the first one of its chain, keeps the samples of the chain."""
        return self.peers.rank == self.leaders[self.number]

    def tracked(self) -> dict[str, Tracked]:
        return {"parameters": Same(self.parameters), "iterate": PerChain(self.w, self.leaders, self.number)}

    def due(self, steps: int) -> list[int]:
        """Return the numbers of the steps, of the first `steps`, after which a sample is taken."""
        return list(range(self.burn_in + self.thin, steps + 1, self.thin))

    def refuse_too_many(self, steps: int) -> None:
        """Raise UsageError if `steps` steps take more samples than MOST, or than fit into memory."""
        wanted, after = max(0, steps - self.burn_in) // self.thin, steps - self.burn_in
        if wanted > MOST:
            least = -(-after // MOST)
            known = f"{wanted} samples of a chain are too many, {MOST} are kept at most"
            raise UsageError(f"{known}: take --thin {least} or more")
        needed = len(self.leaders) * wanted * self.w.size * self.w.dtype.itemsize
        refuse_beyond(f"{wanted} samples of each of {len(self.leaders)} chains", needed, available())

    def take(self, step: int, rate: float) -> None:
        """Take a sample after step `step`, if one is due. rate: of this step, the weight of the sample. Local."""
        if step <= self.burn_in or (step - self.burn_in) % self.thin:
            return
        self.steps.append(step)
        self.weights.append(rate)
        if self.leads:
            self._keep(device_of(self.w).host(self.w).copy(), rate)

    def _keep(self, sample: np.ndarray, weight: float) -> None:
        self.samples.append(sample)
        self.total += weight * sample.astype(np.float64)

    def refresh(self) -> None:
        """Set `parameters` to the posterior mean so far, bitwise equal on all ranks. Collective."""
        super().refresh()
        mine = self.total / sum(self.weights) if self.steps else device_of(self.w).host(self.w).astype(np.float64)
        mean = mine / len(self.leaders) if self.leads else np.zeros_like(mine)
        self.peers.all_reduce(mean)
        device_of(self.parameters).copy_in(self.parameters, mean.astype(self.parameters.dtype))

    def scores(self, data: Any) -> dict:
        """Return the scores, also the largest and the median R-hat of all parameters if `r_hat` gives them."""
        scores_by_name, r_hat = super().scores(data), self.r_hat()
        if r_hat is not None:
            scores_by_name |= {"r_hat_max": float(r_hat.max()), "r_hat_median": float(np.median(r_hat))}
        return scores_by_name

    def r_hat(self) -> np.ndarray | None:
        """Return the rank-normalized split R-hat of each parameter; None: fewer than FEWEST samples. Collective."""
        if len(self.steps) < FEWEST:
            return None
        values, shares = np.zeros(self.w.size), chunks(self.w.size, len(self.leaders))
        if self.leads:
            mine, others = np.array(self.samples), [c for c in range(len(self.leaders)) if c != self.number]
            sent = [self.peers.ipush(np.ascontiguousarray(mine[:, shares[c]]), self.leaders[c]) for c in others]
            of = np.empty((len(self.leaders), *mine[:, shares[self.number]].shape), mine.dtype)
            of[self.number] = mine[:, shares[self.number]]
            for each in [self.peers.iwait(of[c], self.leaders[c]) for c in others] + sent:
                each.wait()
            values[shares[self.number]] = rank_normalized_r_hat(of)
        self.peers.all_reduce(values)
        return values

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        """Gather the ranks' costs before a checkpoint, and write all samples so far. Raises TrainingError."""
        super().gather_costs(legs, folder)
        mine = np.array(self.samples, self.w.dtype).reshape(len(self.samples), self.w.size)
        vectors = gathered(self.peers, mine, self.leaders, self.number)
        failed, why = np.zeros(1), ""
        if vectors is not None and folder.path is not None:
            try:
                Samples(np.array(self.steps, np.int64), vectors, np.array(self.weights)).write(folder.path)
            except Exception as error:  # any error of h5py: all ranks must raise it
                failed[0], why = 1, reason(error)
        self.peers.broadcast(failed)
        if failed[0]:
            raise TrainingError(f"{folder.path}/{FILE} cannot be written: {why}; {folder.kept()}")

    def restore(self, step: int, resume: str) -> None:
        """Read the samples up to this step from the resumed run `resume`; AgreedError if any is missing. Collective."""
        self.steps, stored = self.due(step), None
        if not self.steps:
            return
        with refuse_together(self.peers.mpi):
            if self.peers.rank == 0:
                folder = folder_of(resume)
                stored = Samples.read(Path(folder), step, self.w.size, np.dtype(self.w.dtype))
                if stored.steps.tolist() != self.steps or len(stored.vectors) != len(self.leaders):
                    raise UsageError(f"{folder}/{FILE} does not hold the samples of the checkpoint of step {step}")
        weights = np.array([self.optimizer.schedule(step - 1) for step in self.steps], np.float64)
        if stored is not None and stored.weights is not None:  # older files have none
            weights[:] = stored.weights
        self.peers.broadcast(weights)
        self.weights = weights.tolist()
        for number, leader in enumerate(self.leaders):
            if self.peers.rank == 0 and stored is not None and leader > 0:
                self.peers.push(np.ascontiguousarray(stored.vectors[number]), leader)
            elif self.peers.rank == leader:
                mine = np.empty((len(self.steps), self.w.size), self.w.dtype) if stored is None else stored.vectors[0]
                if stored is None:
                    self.peers.wait(mine, 0)
                for sample, weight in zip(mine, weights, strict=True):
                    self._keep(sample, weight)
