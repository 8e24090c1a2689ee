"""Thread teams of HOGWILD!: the threads of a rank that update one vector without locks.

    team = ThreadTeam(form, data, w, optimizer, decays, threads=2, locking="none", batch=1, words=words_for(2))
    loss = team.round(source, rate)             all threads, each over its chunk of the rows `source`

Each thread calls a compiled loop (kernels/hogwild.py) that releases the GIL; meanwhile the calling thread handles
signals. All threads, even of several processes, share w, adagrad's sums of squares, and synchronization words."""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.chunks import chunk, chunks
from hpcdl.csr import CSR
from hpcdl.data import Data
from hpcdl.data.placement import MemoryRows, read_only_view
from hpcdl.errors import UsageError
from hpcdl.kernels import hogwild as kernels
from hpcdl.kernels.bind import prepare
from hpcdl.memory import Memory
from hpcdl.models.linear_form import LinearForm
from hpcdl.optim import Optimizer
from hpcdl.runs import signals

PAUSE = 0.05  # seconds between two checks for signals
SPINS = 1000  # polls of a lock between two yields, if every thread has its own core


class ThreadTeam:
    """Threads that update w (features * outputs + outputs,) of a linear model by rows in memory, with sgd or adagrad.
    decays (features + 1,): decay of a coordinate by an example that touches it, for sparse rows. locking: of
    kernels.hogwild.LOCKINGS. batch: examples of an update. words: `words_for(count)`, shared by all `count` threads;
    first: number of this team's first one. crowded: True if threads outnumber cores. turns: most updates of a thread in
    a round; 0: the most in this team. Raises UsageError for rows not in memory, and as `check_exchange`."""

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
        check_exchange(exchange_every, locking)
        rows = data.rows_in_memory
        self.threads, self.batch, self.count, self.turns = threads, batch, count or threads, turns
        self.stop = on_own_lines(kernels.LINE, np.int64)
        self.numbers = np.zeros(kernels.NUMBERS, w.dtype)
        self.numbers[kernels.EPS] = getattr(optimizer, "eps", 0.0)
        self.numbers[kernels.DECAY], self.numbers[kernels.SCALE] = optimizer.weight_decay, rows.scale
        self.exchange_every = exchange_every if self.count > 1 else 0
        self.how = how = np.zeros((threads, kernels.HOW), np.int64)
        how[:, [kernels.KIND, kernels.FEATURES, kernels.OUTPUTS]] = form
        how[:, [kernels.BATCH, kernels.LOCKING]] = batch, kernels.LOCKINGS[locking]
        how[:, kernels.THREAD] = range(first, first + threads)
        how[:, [kernels.THREADS, kernels.SPINS]] = self.count, 1 if crowded else SPINS
        how[:, [kernels.SHIFT, kernels.EXCHANGE]] = kernels.shift_for(form.features), self.exchange_every
        how[:, kernels.ADAGRAD] = bool(optimizer.state)
        self.counts = [on_own_lines(kernels.COUNTS, np.int64) for _ in range(threads)]
        state = next(iter(optimizer.state.values()), np.empty(0, w.dtype))
        labels, targets = answers(rows, form, w.dtype)
        before: tuple  # arguments common to all threads
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

    def round(self, source: np.ndarray, rate: float, interruptible: bool = False) -> Any:
        """Let all threads process their chunks of the rows `source`; return the sum of losses.
        None if a signal has interrupted an interruptible round, which is then incomplete."""
        self.numbers[kernels.RATE] = rate
        source, parts = read_only_view(source), chunks(len(source), self.threads)
        turns = self.turns or -(-len(source[chunk(len(source), self.threads, 0)]) // self.batch)
        self.how[:, kernels.TURNS] = turns
        futures: list[Future] = [
            self.pool.submit(self.loop, *(*before, source[part], *after))
            for part, (before, after) in zip(parts, self.arguments, strict=True)
        ]
        for future in futures:
            while not future.done():
                with contextlib.suppress(Late):
                    future.exception(PAUSE)
                failed = any(each.done() and each.exception() is not None for each in futures)
                if failed or (interruptible and signals.received):  # other threads may wait for the failed one
                    self.stop[0] = 1
        self.how[:, kernels.FIRST_TURN] += self.count * turns
        losses = [future.result() for future in futures]
        return None if self.stop[0] else float(sum(losses))

    def take_counts(self) -> np.ndarray:
        """Return the threads' counters since the last call, in the order of kernels.hogwild."""
        total = np.sum(self.counts, axis=0)
        total[kernels.STALEST] = max(each[kernels.STALEST] for each in self.counts)
        for each in self.counts:
            each[:] = 0
        return total

    def weigh(self, memory: Memory) -> None:
        """Count the memory of the threads' replicas."""
        if self.exchange_every:
            for (w, s), (_, base, _, base_s) in self.vectors:
                for kind, array in ("parameters", w), ("parameters", base), ("optimizer", s), ("optimizer", base_s):
                    memory.hold(kind, array)

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()


def check_exchange(every: int, locking: str) -> None:
    """Raise UsageError for a negative `every`, or a locking that has no effect when threads exchange."""
    if every < 0:
        raise UsageError(f"--exchange-every must not be negative, and is {every}")
    if every and locking != "none":
        raise UsageError(
            f"--exchange-every {every}: --locking {locking} is for threads that write to one vector; exchanges lose "
            "nothing; take --locking none"
        )


def vectors_of(w: np.ndarray, state: np.ndarray, exchange_every: int) -> tuple[tuple, tuple]:
    """Return a thread's (w, state), and for exchanges (shared w, last merged w, shared state, last merged state).
    Without exchanges a thread's (w, state) are the shared vectors, and the four are arrays of length 0."""
    if not exchange_every:
        return (w, state), (np.empty(0, w.dtype),) * 4
    own, base, own_state, base_state = (np.empty_like(each) for each in (w, w, state, state))
    return (own, own_state), (w, base, state, base_state)


def words_for(threads: int) -> np.ndarray:
    """Return the initial synchronization words, in this process's memory, for `threads` threads that share them."""
    return np.zeros(kernels.words_for(threads), np.int64)


def on_own_lines(shape: int | tuple[int, int], dtype: DTypeLike) -> np.ndarray:
    """Return zeros in cache lines that hold nothing else: a write to a line delays other threads that read it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(size + 2 * kernels.BYTES, np.uint8)
    begin = -room.ctypes.data % kernels.BYTES
    return room[begin : begin + size].view(dtype).reshape(shape)


def answers(rows: MemoryRows, form: LinearForm, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return labels (rows,) and regression targets (rows, outputs), one of them empty."""
    if rows.y_kind == np.int64:
        return read_only_view(rows.y), read_only_view(np.empty((0, form.outputs), dtype))
    y = rows.y
    if rows.standard is not None:
        y = y.copy()
        rows.standard.apply_target(y)
    return read_only_view(np.empty(0, np.int64)), read_only_view(np.ascontiguousarray(y.reshape(len(y), -1), dtype))


def scaled(rows: MemoryRows, dtype: np.dtype) -> CSR:
    """Return the sparse rows in the model's type and scale, copied only if necessary."""
    x: CSR = rows.x
    if x.dtype == dtype and rows.scale == 1:
        return x
    return CSR(read_only_view(x.data.astype(dtype) * dtype.type(rows.scale)), x.indices, x.indptr, x.shape)


def scratch(rows: MemoryRows, form: LinearForm, w: np.ndarray, batch: int) -> list[np.ndarray]:
    """Return one thread's private buffers, in the order of the loops' arguments."""
    features, outputs, dtype = form.features, form.outputs, w.dtype
    stripes = np.zeros((features >> kernels.shift_for(features)) + 1, np.uint8)
    outs = [on_own_lines((1, outputs), dtype) for _ in range(2)]  # every update writes them
    if rows.sparse:
        longest = int(np.diff(rows.x.indptr).max(initial=0))
        most = min(features, batch * longest) + 1
        numbers = np.zeros(features, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)
        return [*outs, *numbers, *(np.empty(most * outputs, dtype) for _ in range(2)), stripes]
    row = np.ones(features + 1, dtype)
    numbers_of_all = np.arange(features + 1, dtype=np.int32)
    return [*outs, row, numbers_of_all, *(np.empty(w.size, dtype) for _ in range(2)), stripes]


def touched(rows: MemoryRows, source: np.ndarray) -> np.ndarray:
    """Return how many of the sparse rows `source` have each feature: (features,)."""
    x: CSR = rows.x
    chosen = np.zeros(len(rows), bool)
    chosen[source] = True
    each = np.repeat(chosen, np.diff(x.indptr))
    return np.bincount(x.indices[: len(each)][each], minlength=x.shape[1]).astype(np.int64)
