"""Stragglers: ranks that compute more slowly on purpose, to measure the cost of waiting for the slowest rank.

`RANK:FACTOR` always slows one rank down; `random:P:FACTOR` slows any rank down with probability P per gradient, drawn
from (seed, rank, count), so that a run can be repeated. With `pretend_compute` a gradient takes at least so many
milliseconds, mostly asleep, so that ranks that share a core keep the timing of ranks with a core each."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from hpcdl.comm.trace import Traffic
from hpcdl.data import Batch
from hpcdl.errors import UsageError
from hpcdl.faults.inject import LONGEST
from hpcdl.kernels.device import Array
from hpcdl.models.model import ModelWrapper, wrapper_of
from hpcdl.random import Random

SLOWEST = 1e6  # largest factor: more would stall the run


def with_stragglers(model: Any, options: Any, rank: int, workers: range) -> Any:
    """Return the model, slowed down as --straggler and --pretend-compute say. workers: the ranks that compute."""
    factor, probability = parse(options.straggler, rank, workers)
    if factor == 1 and not options.pretend_compute:
        return model
    return StragglerModel(model, factor, probability, options.pretend_compute / 1000, Random(options.seed), rank)


def stretched(model: Any, fraction: float, traffic: Traffic) -> AbstractContextManager[None]:
    """Context in which a part of `model` computes `fraction` of a gradient, slowed down like the model. The backward
    pass is two thirds of a gradient. traffic: of the communicator; seconds in its calls do not count as computing."""
    slow = wrapper_of(model, StragglerModel)
    return slow.stretch(fraction, traffic) if slow else contextlib.nullcontext()


def parse(straggler: str, rank: int, workers: range) -> tuple[float, float]:
    """Return this rank's slowdown factor (1: none), and its probability per gradient. Raises UsageError."""
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
        which = f"ranks {workers[0]} to {workers[-1]} are workers" if len(workers) > 1 else f"rank {workers[0]} is"
        raise UsageError(f"--straggler {straggler}: rank {slow} is no worker; {which}")
    return (numbers[0], 1) if slow == rank else (1, 0)


def sleep_for(seconds: float) -> None:
    """Sleep for so many seconds, if positive, limited to what the system accepts."""
    time.sleep(min(max(0.0, seconds), LONGEST))


class StragglerModel(ModelWrapper):
    """A model whose gradient takes at least `min_seconds` and, with this probability, `factor` times as long."""

    def __init__(self, model: Any, factor: float, probability: float, min_seconds: float, random: Random, rank: int):
        super().__init__(model)
        self.factor, self.probability, self.min_seconds = factor, probability, min_seconds
        self.random, self.rank, self.count = random, rank, 0

    @contextlib.contextmanager
    def stretch(self, fraction: float, traffic: Traffic) -> Iterator[None]:
        """Context that takes at least `fraction` of a gradient's time, longer if the rank straggles; as `stretched`."""
        factor = self.factor if self._straggles() else 1
        begun, talked = time.perf_counter(), traffic.seconds
        yield
        computed = time.perf_counter() - begun - (traffic.seconds - talked)
        sleep_for(factor * max(computed, self.min_seconds * fraction) - computed)

    def _straggles(self) -> bool:
        struck = self.random("straggler", self.rank, self.count).random() < self.probability
        self.count += 1
        return struck

    def loss_and_gradient(
        self, parameters: Array, batch: Batch, gradient: Array, on_ready: Callable[[slice], object] | None = None
    ) -> float:
        factor, begun = self.factor if self._straggles() else 1, time.perf_counter()
        done, notified, slept = 0, 0.0, 0.0

        def fall_behind() -> None:
            """Sleep until the time matches the part of the gradient that is done; a third of it is the forward pass."""
            nonlocal slept
            before = time.perf_counter()
            computed = before - begun - notified - slept
            pretended = factor * max(computed, self.min_seconds * (1 + 2 * done / gradient.size) / 3)
            sleep_for(pretended - computed - slept)
            slept += time.perf_counter() - before

        def ready(part: slice) -> None:
            nonlocal done, notified
            assert on_ready is not None
            start, stop, _ = part.indices(gradient.size)
            done += stop - start
            fall_behind()
            before = time.perf_counter()
            on_ready(part)
            notified += time.perf_counter() - before

        loss = self.model.loss_and_gradient(parameters, batch, gradient, on_ready and ready)
        done = gradient.size
        fall_behind()
        return loss
