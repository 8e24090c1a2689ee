"""The threads of a rank that work on one vector without locks, and the words by which they know of each other.

    team = ThreadTeam(form, data, w, optimizer, decays, threads=2, locking="none", batch=1, words=words_for(2))
    loss = team.round(source, rate)             all threads, each over its chunk of the rows `source`

The threads are Python's; each calls one compiled loop (kernels/hogwild.py), which needs nothing of the interpreter, so
that they run on cores of their own. Meanwhile the thread that called waits, so that signals are heard.

What all threads share are three arrays: the vector w, adagrad's sums of squares and the words, made by `words_for`.
They may be threads of several processes: `first` is the number of this team's first thread among all `count`.

exchange_every: each thread works on a replica of w, and of adagrad's sums, and adds what it has changed to w after so
many of its updates and at the end of each round; 0, and where there is one thread in all: they work on w itself.
"""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any

import numpy as np

from hpcdl.chunks import chunk, chunks
from hpcdl.csr import CSR
from hpcdl.data import Data
from hpcdl.data.placement import MemoryRows, read_only_view
from hpcdl.errors import UsageError
from hpcdl.kernels import hogwild as kernels
from hpcdl.kernels import hogwild_locks as locks
from hpcdl.kernels.bind import prepare
from hpcdl.memory import Memory
from hpcdl.models.linear_form import LinearForm
from hpcdl.optim import Optimizer
from hpcdl.optim.adagrad import Adagrad
from hpcdl.optim.sgd import SGD
from hpcdl.runs import signals

PAUSE = 0.05  # seconds between two looks at signals
SPINS = 1000  # looks at a lock between two offers of the core, where every thread has a core of its own


class ThreadTeam:
    """Threads that update w (features * outputs + outputs,), of a model of this form, by rows that lie in memory.

    decays (features + 1,): by how much each example pulls the coordinates that it touches, where rows are sparse.
    locking: one of kernels.hogwild.LOCKINGS. batch: examples of an update. words: `words_for(count)`, which all `count`
    threads share, of which this team's first has the number `first`. crowded: whether threads outnumber the cores.
    turns: the updates of a thread in a round, at most, where they are written in turn; 0: as this team has them.
    UsageError for an optimizer that is neither sgd nor adagrad, where rows are not in memory, and for a locking of what
    is written at once where threads exchange.
    """

    def __init__(
        self,
        form: LinearForm,
        data: Data,
        w: np.ndarray,
        optimizer: Optimizer,
        decays: np.ndarray | None = None,
        *,
        threads: int,
        locking: str,
        batch: int,
        words: np.ndarray,
        first: int = 0,
        count: int = 0,
        crowded: bool = False,
        turns: int = 0,
        exchange_every: int = 0,
    ):
        check_rule(optimizer)
        check_exchange(exchange_every, locking)
        rows = data.rows_in_memory
        self.threads, self.batch, self.count, self.turns = threads, batch, count or threads, turns
        self.stop = np.zeros(locks.LINE, np.int64)
        self.numbers = np.zeros(locks.NUMBERS, w.dtype)
        self.numbers[locks.EPS] = getattr(optimizer, "eps", 0.0)
        self.numbers[locks.DECAY], self.numbers[locks.SCALE] = optimizer.weight_decay, rows.scale
        self.exchange_every = exchange_every if self.count > 1 else 0
        self.how = [self._settings(form, locking, first + thread, 1 if crowded else SPINS) for thread in range(threads)]
        self.counts = [np.zeros(locks.COUNTS, np.int64) for _ in range(threads)]
        for how in self.how:
            how[locks.ADAGRAD] = bool(optimizer.state)
        state = next(iter(optimizer.state.values()), np.empty(0, w.dtype))
        labels, targets = answers(rows, form, w.dtype)
        before: tuple  # what all threads read, and what they share
        after: tuple
        if rows.sparse:
            x = scaled(rows, w.dtype)
            decays = np.empty(0, w.dtype) if decays is None else decays
            before, after = (x.data, x.indices, x.indptr, labels, targets), (decays,)
        else:
            mean, factor = (np.empty(0, w.dtype),) * 2
            if rows.standard is not None:
                mean, factor = rows.standard.mean, rows.standard.factor
            before, after = (rows.x, mean, factor, labels, targets), ()
        self.vectors = [vectors_of(w, state, self.exchange_every) for _ in range(threads)]
        self.arguments = [
            (before, (*own, *after, apart, words, self.stop, how, self.numbers, *scratch(rows, form, w, batch), counts))
            for (own, apart), how, counts in zip(self.vectors, self.how, self.counts, strict=True)
        ]
        nothing = read_only_view(np.empty(0, np.int64))
        before, after = self.arguments[0]
        self.loop = prepare(kernels.ROUNDS["sparse" if rows.sparse else "dense"], *before, nothing, *after)
        self.pool = ThreadPoolExecutor(threads, "hogwild")

    def _settings(self, form: LinearForm, locking: str, thread: int, spins: int) -> np.ndarray:
        how = np.zeros(locks.HOW, np.int64)
        how[locks.KIND], how[locks.FEATURES], how[locks.OUTPUTS] = form
        how[locks.BATCH], how[locks.LOCKING] = self.batch, locks.LOCKINGS[locking]
        how[locks.THREAD], how[locks.THREADS], how[locks.SPINS] = thread, self.count, spins
        how[locks.SHIFT], how[locks.EXCHANGE] = locks.shift_for(form.features), self.exchange_every
        return how

    def round(self, source: np.ndarray, rate: float, interruptible: bool = False) -> Any:
        """All threads work through their chunks of the rows `source`; returns the sum of losses, a float.

        None where it is interruptible and a signal came: then the round is not whole.
        """
        self.numbers[locks.RATE] = rate
        source, parts = read_only_view(source), chunks(len(source), self.threads)
        turns = self.turns or -(-len(source[chunk(len(source), self.threads, 0)]) // self.batch)
        for how in self.how:
            how[locks.TURNS] = turns
        futures: list[Future] = [
            self.pool.submit(self.loop, *(*before, source[part], *after))
            for part, (before, after) in zip(parts, self.arguments, strict=True)
        ]
        for future in futures:
            while not future.done():
                with contextlib.suppress(Late):
                    future.exception(PAUSE)
                failed = any(each.done() and each.exception() is not None for each in futures)
                if failed or (interruptible and signals.received):  # others may wait for one that has failed
                    self.stop[0] = 1
        for how in self.how:
            how[locks.FIRST_TURN] += self.count * turns
        losses = [future.result() for future in futures]
        return None if self.stop[0] else float(sum(losses))

    def take_counts(self) -> np.ndarray:
        """What all threads have counted since the last call, as kernels.hogwild names it."""
        total = np.sum(self.counts, axis=0)
        total[locks.STALEST] = max(each[locks.STALEST] for each in self.counts)
        for each in self.counts:
            each[:] = 0
        return total

    def weigh(self, memory: Memory) -> None:
        """Count the replicas of the threads, and what they took over last."""
        if self.exchange_every:
            for (w, s), (_, base, _, base_s) in self.vectors:
                for kind, array in ("parameters", w), ("parameters", base), ("optimizer", s), ("optimizer", base_s):
                    memory.hold(kind, array)

    def close(self) -> None:
        """No more rounds."""
        self.pool.shutdown()


def check_rule(optimizer: Optimizer) -> None:
    """Raise UsageError for a rule that moves coordinates which no example touches, or looks at the whole gradient."""
    if type(optimizer) not in (SGD, Adagrad):
        name = type(optimizer).__name__.lower()
        raise UsageError(f"HOGWILD! moves the coordinates of an example alone: take sgd or adagrad, not {name}")
    if optimizer.average_from is not None:
        raise UsageError("HOGWILD! keeps no mean of parameters, of which each update would move all: no --average")
    if optimizer.clip_norm:
        raise UsageError("HOGWILD! knows no norm of a gradient: leave out --clip-norm")


def check_exchange(every: int, locking: str) -> None:
    """Raise UsageError for threads that exchange every so many updates under a lock that they have no use for."""
    if every < 0:
        raise UsageError(f"--exchange-every must not be negative, and is {every}")
    if every and locking != "none":
        raise UsageError(
            f"--exchange-every {every}: --locking {locking} is for what is written to one vector at once, and an "
            "exchange loses nothing; take none"
        )


def vectors_of(w: np.ndarray, state: np.ndarray, exchange_every: int) -> tuple[tuple, tuple]:
    """A thread's w and state, and for exchanges: the common w, what was taken over of it last, the same of the state.

    Without exchanges, they are the common ones, and the rest is empty. A round begins with a copy of what is common.
    """
    if not exchange_every:
        return (w, state), (np.empty(0, w.dtype),) * 4
    own, base, own_state, base_state = (np.empty_like(each) for each in (w, w, state, state))
    return (own, own_state), (w, base, state, base_state)


def words_for(threads: int) -> np.ndarray:
    """The words that so many threads of one process share, as they are at the beginning."""
    return np.zeros(locks.words_for(threads), np.int64)


def answers(rows: MemoryRows, form: LinearForm, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Labels (rows,) and values to predict (rows, outputs), one of which is empty."""
    if rows.y_kind == np.int64:
        return read_only_view(rows.y), read_only_view(np.empty((0, form.outputs), dtype))
    y = rows.y
    if rows.standard is not None:
        y = y.copy()
        rows.standard.apply_target(y)
    return read_only_view(np.empty(0, np.int64)), read_only_view(np.ascontiguousarray(y.reshape(len(y), -1), dtype))


def scaled(rows: MemoryRows, dtype: np.dtype) -> CSR:
    """Sparse rows as the model sees them: those at hand, or a copy where they have another type or scale."""
    x: CSR = rows.x
    if x.dtype == dtype and rows.scale == 1:
        return x
    return CSR(read_only_view(x.data.astype(dtype) * dtype.type(rows.scale)), x.indices, x.indptr, x.shape)


def scratch(rows: MemoryRows, form: LinearForm, w: np.ndarray, batch: int) -> list[np.ndarray]:
    """What one thread has for itself, in the order of the loops' arguments."""
    features, outputs, dtype = form.features, form.outputs, w.dtype
    stripes = np.zeros((features >> locks.shift_for(features)) + 1, np.uint8)
    outs = [np.empty((1, outputs), dtype) for _ in range(2)]
    if rows.sparse:
        longest = int(np.diff(rows.x.indptr).max(initial=0))
        most = min(features, batch * longest) + 1
        numbers = np.zeros(features, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)
        return [*outs, *numbers, *(np.empty(most * outputs, dtype) for _ in range(2)), stripes]
    row = np.ones(features + 1, dtype)
    numbers_of_all = np.arange(features + 1, dtype=np.int32)
    return [*outs, row, numbers_of_all, *(np.empty(w.size, dtype) for _ in range(2)), stripes]


def touched(rows: MemoryRows, source: np.ndarray) -> np.ndarray:
    """How many of the rows `source`, sparse ones, have each feature: (features,)."""
    x: CSR = rows.x
    chosen = np.zeros(len(rows), bool)
    chosen[source] = True
    each = np.repeat(chosen, np.diff(x.indptr))
    return np.bincount(x.indices[: len(each)][each], minlength=x.shape[1]).astype(np.int64)
