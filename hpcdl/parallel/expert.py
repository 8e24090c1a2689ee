"""Expert parallelism: the experts of each mixture are cut over E ranks, and tokens travel to their experts and back.

    E = 2, experts A B | C D      rank 0: A B          rank 1: C D
    rows of tokens, by expert     a b b | c d          a | c c d           counts differ from batch to batch
    at their owners               a a b b              c c c d d           by expert, then by rank: products run here
    back at the tokens            a b b | c d          a | c c d           times gates, summed for each token

Ranks have whole sequences, other ones, and copies of all tensors but the experts'; the gradients of these need no sum
along the axis. Of D E shares of a batch the rank (d, e) has number d E + e: the rows of an expert are in the order of
one rank. An exchange is pairwise, E - 1 messages of each rank, also empty ones. For a mixture and micro-batch of width
w, with R rows for experts of other ranks and Q rows from other ranks (on even routes both are S (E-1) / E, of S choices
that are not dropped):

                forward                                        backward
    counts      an all-to-all of rows of experts / E numbers
    to owners   R rows of w                                    R rows of w, R gates
    to tokens   Q rows of w                                    Q rows of w, Q numbers for the gates
    messages    2 (E-1), and those of the all-to-all           4 (E-1)

Recomputation repeats forward. The rows at their owners are kept for backward. (Lepikhin et al., "GShard: scaling giant
models with conditional computation and automatic sharding", ICLR 2021; Rajbhandari et al., "DeepSpeed-MoE", 2022)"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.kernels.device import Array
from hpcdl.models.group import ExpertGroup, ExpertRows
from hpcdl.models.mixture import mixtures_of
from hpcdl.models.part import require_layers
from hpcdl.models.pool import Pool


def check_experts(model: Any, ranks: int) -> None:
    """Raise UsageError, with numbers that would do, if `ranks` ranks cannot share the experts of the model."""
    if ranks == 1:
        return
    require_layers(model)
    counts = {layer.experts.count for layer in mixtures_of(model)}
    if not counts:
        raise UsageError(f"expert parallelism shares the experts of mixtures: take --model gpt:experts={2 * ranks}")
    for count in counts:
        if count % ranks:
            fitting = [n for n in range(2, count + 1) if count % n == 0]
            less = count // ranks * ranks
            more = f"{less} or {less + ranks}" if less else f"{ranks}"
            others = f"expert={' or '.join(map(str, fitting))}, or " if fitting else ""
            raise UsageError(
                f"{ranks} ranks cannot share {counted(count, 'expert')} evenly; take {others}{more} experts"
            )


class OwnedRows(ExpertRows):
    """The rows at the owner of experts. counts: (ranks, experts), of each rank for each own expert. leaving, arriving:
    rows that this rank sends to each rank, and gets from it. blocks: for each expert and rank, the place of their rows
    by rank, then expert, and by expert, then rank."""

    def __init__(self, leaving: list[int], counts: np.ndarray, forecast: bool = False):
        super().__init__(np.cumsum(counts.sum(axis=0)).tolist())
        self.leaving, self.arriving, self.forecast = leaving, counts.sum(axis=1).tolist(), forecast
        self.blocks: list[tuple[slice, slice]] = []
        if forecast:  # there are no elements to move
            return
        by_rank = np.array(runs(counts.reshape(-1).tolist()), object).reshape(counts.shape)
        self.blocks = list(zip(by_rank.T.reshape(-1), runs(counts.T.reshape(-1).tolist()), strict=True))


class SharedExperts(ExpertGroup):
    """The ranks of `comm`, each with the same number of experts. messages, bytes: sent since `clear`, but for what the
    communicator does not count, as evaluations. rows: of each layer, those of this rank's experts in each forward pass
    of this step. most: those of the step in which activations were at their peak."""

    def __init__(self, comm: Communicator):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.clear()

    def clear(self) -> None:
        self.messages = self.bytes = 0
        self.rows: dict[str, list[int]] = {}
        self.most: dict[str, list[int]] = {}
        self.peak = 0

    def owned(self, sent: ExpertRows) -> OwnedRows:
        counts = np.diff(np.array(sent.ends, np.int64), prepend=0).reshape(self.size, -1)
        leaving = counts.sum(axis=1).tolist()
        self.comm.all_to_all(counts)
        return OwnedRows(leaving, counts, sent.forecast)

    def note(self, mixture: str, owned: ExpertRows) -> None:
        if self.comm.traffic.counting:
            self.rows.setdefault(mixture, []).append(owned.taken)

    def end_step(self, pool: Pool) -> None:
        peak = pool.memory.peak["activations"] if pool.memory is not None else 0
        if peak > self.peak:
            self.peak, self.most = peak, self.rows
        self.rows = {}

    def to_owners(self, arrays: Sequence[Array], owned: Any, pool: Pool) -> list[Array]:
        arrived = self._exchanged(arrays, owned.leaving, owned.arriving, pool)
        return [moved(each, owned.blocks, pool) for each in arrived]

    def to_tokens(self, arrays: Sequence[Array], owned: Any, pool: Pool) -> list[Array]:
        leaving = [moved(each, [places[::-1] for places in owned.blocks], pool) for each in arrays]
        return self._exchanged(leaving, owned.arriving, owned.leaving, pool)

    def _exchanged(
        self, arrays: Sequence[Array], leaving: Sequence[int], arriving: Sequence[int], pool: Pool
    ) -> list[Array]:
        """Send leaving[r] rows of each array to rank r, in order of ranks; return the arriving[r] rows from rank r, in
        the same order. The messages of all arrays are in flight at once. The arrays go to the pool."""
        found, requests, counts = [], [], self.comm.traffic.counting
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        here, there = runs(leaving), runs(arriving)
        for tag, array in enumerate(arrays):
            rows = pool.take(sum(arriving), array.shape[1])
            rows[there[self.rank]] = array[here[self.rank]]
            requests += [self.comm.iwait(rows[there[r]], r, tag) for r in reversed(others)]
            requests += [self.comm.ipush(array[here[r]], r, tag) for r in others]
            if counts:
                self.messages += len(others)
                self.bytes += sum(array[here[r]].nbytes for r in others)
            found.append(rows)
        for request in requests:
            request.wait()
        for array in arrays:
            pool.give(array)
        return found


def moved(array: Array, places: Sequence[tuple[slice, slice]], pool: Pool) -> Array:
    """Return an array from the pool with the rows of `array`, which goes to the pool. places: in `array`, and there."""
    rows = pool.take(*array.shape)
    for here, there in places:
        rows[there] = array[here]
    pool.give(array)
    return rows


def runs(counts: Sequence[int]) -> list[slice]:
    """Return the places of runs of these lengths, one after another."""
    return [slice(start, end) for start, end in pairwise(accumulate(counts, initial=0))]


def sent_along(experts: Any, own: Communicator) -> dict[str, Any]:
    """Return entries of the summary, equal on all ranks: messages and bytes of tokens' rows, and of what goes with
    them, in training, of all ranks, without counts of rows and sums of gradients; and of each mixture the rows of
    each rank's experts in the forward passes of the step with the rank's most activations. Collective on `own`."""
    with own.inside("gather the rows of experts"):
        each = own.mpi.allgather((experts.messages, experts.bytes, experts.most))
    messages, moved_bytes = (sum(rank[k] for rank in each) for k in (0, 1))
    names = sorted({name for rank in each for name in rank[2]})
    rows = {name: [rank[2].get(name, []) for rank in each] for name in names}
    return {"expert": {"messages": messages, "bytes": moved_bytes}, "expert_rows": rows}
