"""Make computing slower on purpose, to see what waiting for the slowest costs.

`RANK:FACTOR` slows one rank down always; `random:P:FACTOR` slows any rank down with probability P per gradient,
drawn from (seed, rank, count), so that a repeated run has the same stragglers. `pretend_compute`: a gradient takes
at least so many milliseconds; as sleeping needs no core, more ranks than cores then keep the timing that they would
have on cores of their own.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hpcdl.comm.trace import Traffic
from hpcdl.data import Batch
from hpcdl.errors import UsageError
from hpcdl.faults.clock import LONGEST
from hpcdl.kernels.device import Array
from hpcdl.models.model_wrapper import Wrapped
from hpcdl.random import Random

SLOWEST = 1e6  # times as long, at most: more is no straggler, but the end of the run


class Slowing(Protocol):
    """The options of a run that slow it down."""

    straggler: str
    pretend_compute: float  # milliseconds
    seed: int


def slowed(model: Any, options: Slowing, rank: int, workers: range) -> Any:
    """The model itself, or one whose `loss_and_gradient` takes as long as the options say; workers: who computes."""
    factor, probability = parse(options.straggler, rank, workers)
    if factor == 1 and not options.pretend_compute:
        return model
    return Slowed(model, factor, probability, options.pretend_compute / 1000, Random(options.seed), rank)


def stretched(model: Any, fraction: float, traffic: Traffic) -> AbstractContextManager[None]:
    """A context in which `fraction` of a gradient is computed, by a part of `model` that is slowed as the model is.

    traffic: of the communicator; the seconds that are spent in its calls inside are no computing. Two thirds of a
    gradient are its backward pass.
    """
    while isinstance(model, Wrapped):
        if isinstance(model, Slowed):
            return model.stretch(fraction, traffic)
        model = model.model
    return contextlib.nullcontext()


def parse(straggler: str, rank: int, workers: range) -> tuple[float, float]:
    """The factor for this rank and the probability with which it strikes."""
    if not straggler:
        return 1, 0
    refusal = UsageError(f"--straggler is RANK:FACTOR or random:PROBABILITY:FACTOR, not {straggler!r}")
    who, *texts = straggler.split(":")
    try:
        numbers = [float(text) for text in texts]
        slow = int(who) if who != "random" else None
    except ValueError:
        raise refusal from None
    if len(numbers) != (2 if slow is None else 1) or not 1 <= numbers[-1] <= SLOWEST:
        raise refusal
    if slow is None:
        if not 0 <= numbers[0] <= 1:
            raise refusal
        return numbers[1], numbers[0]
    if slow not in workers:
        which = f"the workers are ranks {workers[0]} to {workers[-1]}" if len(workers) > 1 else f"rank {workers[0]} is"
        raise UsageError(f"--straggler {straggler}: rank {slow} is no worker; {which}")
    return (numbers[0], 1) if slow == rank else (1, 0)


def rest(seconds: float) -> None:
    """Sleep so long, where that is above 0, but not longer than the system's clock can count."""
    time.sleep(min(max(0.0, seconds), LONGEST))


class Slowed(Wrapped):
    """A model whose gradient takes at least `least` seconds, and `factor` times as long when it straggles."""

    def __init__(self, model: Any, factor: float, probability: float, least: float, random: Random, rank: int):
        super().__init__(model)
        self.factor, self.probability, self.least = factor, probability, least
        self.random, self.rank, self.count = random, rank, 0

    @contextlib.contextmanager
    def stretch(self, fraction: float, traffic: Traffic) -> Iterator[None]:
        """What is inside takes at least its fraction of a gradient's time, and longer when it straggles."""
        factor = self.factor if self._struck() else 1
        begun, talked = time.perf_counter(), traffic.seconds
        yield
        computed = time.perf_counter() - begun - (traffic.seconds - talked)
        rest(factor * max(computed, self.least * fraction) - computed)

    def _struck(self) -> bool:
        """Whether it straggles this time."""
        struck = self.random("straggler", self.rank, self.count).random() < self.probability
        self.count += 1
        return struck

    def loss_and_gradient(
        self, parameters: Array, batch: Batch, gradient: Array, on_ready: Callable[[slice], object] | None = None
    ) -> float:
        factor, begun = self.factor if self._struck() else 1, time.perf_counter()
        done, told, slept = 0, 0.0, 0.0

        def fall_behind() -> None:
            """Sleep until computing has taken as long as it should by now; a third of it is the forward pass."""
            nonlocal slept
            before = time.perf_counter()
            computed = before - begun - told - slept
            pretended = factor * max(computed, self.least * (1 + 2 * done / gradient.size) / 3)
            rest(pretended - computed - slept)
            slept += time.perf_counter() - before

        def ready(part: slice) -> None:
            nonlocal done, told
            assert on_ready is not None
            start, stop, _ = part.indices(gradient.size)
            done += stop - start
            fall_behind()
            before = time.perf_counter()
            on_ready(part)
            told += time.perf_counter() - before

        loss = self.model.loss_and_gradient(parameters, batch, gradient, on_ready and ready)
        done = gradient.size
        fall_behind()
        return loss
