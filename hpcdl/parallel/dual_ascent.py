"""Dual coordinate ascent on one rank's examples (strategies/coordinate_descent.py), and what a run saves and scores."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hpcdl.checkpoint.by_example import ByExample
from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.data import Batch, Data
from hpcdl.data.order.sampler import local_order
from hpcdl.errors import UsageError
from hpcdl.kernels import coordinate_descent as kernels
from hpcdl.kernels.bind import prepare
from hpcdl.kernels.linear import SQUARED
from hpcdl.memory import Memory
from hpcdl.models.linear_form import LinearForm
from hpcdl.optim import Optimizer
from hpcdl.runs.ownership import Whole


class Ascent:
    """This rank's examples with their dual variables, and the vector v of all, in float64. share: (rank, size).
    dual (own examples, outputs); v (outputs, features + 1), the bias last; numbers (own examples,): in the
    training set. Raises UsageError if rows are not in memory or augmented."""

    def __init__(
        self,
        data: Data,
        form: LinearForm,
        share: tuple[int, int],
        weight_decay: float,
        l1: float = 0.0,
        seed: int = 0,
        threads: int = 1,
        locking: str = "atomic",
    ):
        rows, source, index = data.in_place(0, share)
        if rows.augment is not None:
            raise UsageError("--augment: a dual variable belongs to an example that never changes; leave it out")
        order = np.argsort(index)
        self.numbers, self.source = index[order], np.ascontiguousarray(source[order], np.int64)
        self.loss, self.outputs, self.examples = form.loss, form.outputs, data.examples
        self.rank, self.seed, self.threads, self.atomic = share[0], seed, threads, threads > 1 and locking == "atomic"
        self.weight_decay, self.l1, self.threshold = weight_decay, l1, l1 / weight_decay
        self.weight = 1 / (weight_decay * data.examples)
        y = rows.y[self.source]
        if rows.standard is not None:
            rows.standard.apply_target(y)
        target = y.astype(np.float64).reshape(len(y), form.outputs)
        self.target = target if form.loss == SQUARED else 2 * target - 1
        self.dual = np.zeros_like(self.target)
        self.v = np.zeros((form.outputs, form.features + 1))
        scale = float(rows.scale)
        if rows.sparse:
            self.find_norms, self.go, self.certify = kernels.SPARSE
            self.rows: tuple[Any, ...] = rows.x.data, rows.x.indices, rows.x.indptr, scale, self.source
        else:
            factor, shift = np.full(form.features, scale), np.zeros(form.features)
            if rows.standard is not None:
                by = rows.standard.factor.astype(np.float64)
                factor, shift = scale * by, -rows.standard.mean.astype(np.float64) * by
            self.find_norms, self.go, self.certify = kernels.DENSE
            self.rows = rows.x, factor, shift, self.source
        self.norms = np.empty(len(self.source))
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None
        prepare(self.find_norms, *self.rows, self.norms)(*self.rows, self.norms)

    def compile(self) -> None:
        """Compile or load the kernels, without a change of the state."""
        nothing = np.empty(0, np.int64)
        prepare(self.go, *self._state(self.v), nothing, *self._problem(1), self.threshold, self.atomic)
        back = np.zeros_like(self.v)
        prepare(self.certify, *self.rows, self.target, self.dual, self.v, 0, 0, *self._problem(1), back)

    def visits(self, passes: float) -> int:
        """Return the examples in `passes` passes over this rank's examples: at least 1, or 0 if it has no examples."""
        own = len(self.numbers)
        return max(1, round(passes * own)) if own else 0

    def visit(self, start: int, count: int, sigma: float) -> float:
        """Take a step for each of `count` examples, from number `start` of all visits of this rank on; v becomes u.
        Return the sum of the losses, each before the step of its example. sigma: the factor sigma'."""
        loss, own = 0.0, len(self.numbers)
        while count:  # pass by pass: a permutation of all examples, or the rest of it
            turn, first = divmod(start, own)
            order = local_order(self.seed, own, turn, self.rank)[first : first + count]
            start, count = start + len(order), count - len(order)
            parts = [order[part] for part in chunks(len(order), self.threads)]
            given = [(*self._state(self.v), each, *self._problem(sigma), self.threshold, self.atomic) for each in parts]
            loss += sum(self._map(self.go, given))
        return float(loss)

    def sums(self, w: np.ndarray) -> np.ndarray:
        """Return this rank's summands of P at w and of D, float64: [losses, conjugates, v(a)...]."""
        found, parts = np.zeros(2 + self.v.size), chunks(len(self.numbers), self.threads)
        backs = [np.zeros_like(self.v) for _ in parts]
        given = [
            (*self.rows, self.target, self.dual, w, part.start, part.stop, *self._problem(1), back)
            for part, back in zip(parts, backs, strict=True)
        ]
        for both in self._map(self.certify, given):
            found[:2] += both
        for back in backs:
            found[2:] += back.reshape(-1)
        return found

    def certificate(self, w: np.ndarray, sums: np.ndarray) -> dict[str, float]:
        """Return P at w, D, the gap, and the drift of w, from the `sums` of all ranks."""
        losses, conjugates = (sums[:2] / self.examples).tolist()
        proved = self.weights(sums[2:].reshape(self.v.shape))
        squares, apart = float(np.sum(proved**2)), float(np.sum((w - proved) ** 2))
        primal = losses + self.weight_decay / 2 * float(np.sum(w**2)) + self.l1 * float(np.abs(w).sum())
        dual = -conjugates - self.weight_decay / 2 * squares
        drift = (apart / squares) ** 0.5 if squares else apart**0.5
        return {"duality_gap": primal - dual, "primal": primal, "dual": dual, "drift": drift}

    def weights(self, v: np.ndarray) -> np.ndarray:
        """Return the parameters w for v: its values, each moved towards 0 by the threshold, at most to 0."""
        return np.sign(v) * np.maximum(np.abs(v) - self.threshold, 0) if self.l1 else v

    def close(self) -> None:
        """End the threads."""
        if self.pool:
            self.pool.shutdown()

    def _map(self, kernel: Any, given: list[tuple]) -> list[Any]:
        return list(self.pool.map(lambda some: kernel(*some), given)) if self.pool else [kernel(*given[0])]

    def _state(self, v: np.ndarray) -> tuple[Any, ...]:
        return *self.rows, self.target, self.norms, self.dual, v

    def _problem(self, sigma: float) -> tuple[int, float]:
        return self.loss, sigma * self.weight


class Dual(Whole):
    """Owns the parameters, which all ranks compute from the same v, and the dual variables of this rank's examples."""

    def __init__(self, model: Any, parameters: np.ndarray, optimizer: Optimizer, mine: Ascent, comm: Communicator):
        super().__init__(model, parameters, optimizer)
        self.mine, self.comm = mine, comm

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        super().join(bookkeeping, memory)
        self.by_example = ByExample(bookkeeping, self.mine.dual, self.mine.numbers, self.mine.examples)

    def weigh(self, memory: Memory) -> None:
        """Count v, and the dual, target, norm and number of own examples, but no gradient and no optimizer vectors."""
        memory.hold("parameters", self.parameters)
        for vector in (self.mine.v, self.mine.dual, self.mine.target, self.mine.norms, self.mine.source):
            memory.hold("optimizer", vector)
        self.model.pool.memory = memory

    def tracked(self) -> dict[str, Tracked]:
        vectors: dict[str, Tracked] = {"parameters": Same(self.parameters), "dual/v": Same(self.mine.v)}
        return vectors | {"dual/variables": self.by_example}

    def scores(self, data: Any) -> dict:
        w = np.ascontiguousarray(self.parameters.reshape(-1, self.mine.outputs).T, np.float64)
        sums = self.mine.sums(w)
        self.peers.all_reduce(sums)
        return super().scores(data) | self.mine.certificate(w, sums)

    def warm_up(self, few: Batch) -> None:
        """Compile also the ascent's kernels, and the float64 mean, which nothing else needs."""
        super().warm_up(few)
        self.mine.compile()
        self.comm.all_reduce(np.zeros(self.mine.v.size), op="mean")
