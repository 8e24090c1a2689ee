"""Overlap of communication and computation: the all-reduce of the gradient runs during the backward pass.

The backward pass completes the gradient from the last layer to the first. When all layers of a bucket are complete, its
all-reduce starts, and whenever another layer is complete, the all-reduces in flight advance:

    without    | forward | backward 3 | backward 2 | backward 1 | all-reduce 3 2 1 | update |
    with       | forward | backward 3 | backward 2 | backward 1 |  1  | update |
                                      |-- all-reduce 3 --|              bucket 1 is complete when nothing is left to
                                                   |- all-reduce 2 -|   compute: it is exposed, and so is the time to
                                                                        test and start requests between the layers

B buckets send as many values as one all-reduce, up to the rounding of chunks, and pay B times its latencies. Buckets
are equal on all ranks and start in one order, because MPI matches collective calls by their order. Only the order of
additions differs from one all-reduce. While a rank computes, messages progress only as far as the MPI library or the
network moves them without calls, so the hidden share is measured (`Overlap.costs`). (Li et al., "PyTorch distributed:
experiences on accelerating data parallel training", VLDB 2020)"""

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.compression import Compressed
from hpcdl.comm.node_memory import cores, ranks_of_node
from hpcdl.comm.requests import Request
from hpcdl.errors import UsageError
from hpcdl.random import Random

MIB = 1 << 20
FEWEST, MOST, SECONDS = 3, 15, 1.0  # turns of a trial, and the seconds that decide between them


def buckets(layout: Any, size: float) -> list[slice]:
    """Cut the vector of `layout` from its end into runs of whole layers; each but the last has `size` bytes or more."""
    cut, stop = [], layout.size
    for start in sorted({0} | {part.start for _, part in layout.layer_slices}, reverse=True):
        if start == 0 or (stop - start) * layout.dtype.itemsize >= size:
            cut.append(slice(start, stop))
            stop = start
    return cut


def seconds_of(turn: Callable[[], tuple[float, ...]], own: Communicator) -> list[float]:
    """Return the seconds that turns measure: medians of several turns, means over the ranks of `own`. Collective."""
    turn()  # warm-up: touches the memory
    longest = np.array([sum(turn())])
    own.all_reduce(longest, "max")
    turns = int(min(MOST, max(FEWEST, SECONDS / longest[0])))
    median = np.median([turn() for _ in range(turns)], axis=0)
    own.all_reduce(median, "mean")
    return median.tolist()


def try_compression(comm: Communicator, gradient: np.ndarray, state: Compressed) -> tuple[dict[str, float], str]:
    """Measure all-reduces with and without compression, of random numbers in the place of the gradient. Return the
    seconds, and that compression loses, or "". Collective."""
    own = comm.duplicate("trial")
    vector, state = own.empty(like=gradient), state.fresh()
    values = Random(0)("trial of compression").standard_normal(vector.size).astype(vector.dtype)

    def seconds(reduce: Callable[..., object], *more: Compressed) -> float:
        vector[:] = values
        own.barrier()
        start = time.perf_counter()
        reduce(vector, *more)
        return time.perf_counter() - start

    def turn() -> tuple[float, float]:
        return seconds(own.all_reduce), seconds(own.all_reduce_compressed, state)

    with comm.timeline.span("try compression"):
        plain, compressed = seconds_of(turn, own)
    own.free()
    trial = {"plain_seconds": plain, "compressed_seconds": compressed}
    if compressed <= plain:
        return trial, ""
    both = f"an all-reduce takes {1e3 * compressed:.3g} ms with it, {1e3 * plain:.3g} ms without"
    return trial, f"compression loses: {both}; on this network leave out --compress"


class AfterBackward:
    """The all-reduce of the whole gradient after the backward pass. state: a `Compressed`; None: no compression."""

    ready = None  # no callback

    def __init__(self, comm: Communicator, gradient: np.ndarray, state: Compressed | None = None):
        self.comm, self.gradient, self.state = comm, gradient, state

    def finish(self) -> None:
        """Replace the gradient by its sum over all ranks."""
        if self.state is None:
            self.comm.all_reduce(self.gradient)
        else:
            self.comm.all_reduce_compressed(self.gradient, self.state)


class Overlap:
    """The all-reduces of one gradient's buckets. cut: the buckets from the end of the vector, equal on all ranks;
    together they cover it. state: a `Compressed` of the whole gradient; each bucket uses its part."""

    def __init__(self, comm: Communicator, gradient: np.ndarray, cut: list[slice], state: Compressed | None = None):
        self.comm, self.gradient, self.cut, self.state = comm, gradient, cut, state
        start: Any = comm.iall_reduce if state is None else comm.iall_reduce_compressed
        states = [[] if state is None else [state.part(part)] for part in cut]
        self.starters = [functools.partial(start, gradient[part], *own) for part, own in zip(cut, states, strict=True)]
        self.in_flight: deque[Request] = deque()
        self.steps = 0
        self.trial: dict[str, float] = {}
        self.exchange = comm.traffic["all_reduce"]
        self.before = self.exchange.seconds
        self.started, self.missing = 0, [part.stop - part.start for part in cut]  # elements of each bucket

    def ready(self, part: slice) -> None:
        """Start the buckets that slice `part` of the gradient, now final, completes; advance the all-reduces in flight.
        The slices of a step may leave gaps, which `finish` sends; UsageError if two slices overlap."""
        start, stop, _ = part.indices(self.gradient.size)
        new = stop - start
        for i, bucket in enumerate(self.cut[self.started :], self.started):
            if bucket.stop <= start:
                break
            common = max(0, min(stop, bucket.stop) - max(start, bucket.start))
            self.missing[i] -= common
            new -= common
        if new or min(self.missing) < 0:
            raise UsageError(f"on_ready was called twice for some of the elements {start} to {stop} of the gradient")
        while self.started < len(self.cut) and self.missing[self.started] == 0:
            self._start()
        while self.in_flight and self.in_flight[0].test():
            self.in_flight.popleft()

    def _start(self) -> None:
        self.in_flight.append(self.starters[self.started]())
        self.started += 1

    def finish(self) -> None:
        """Start the remaining buckets and wait for all: the gradient is then the sum over all ranks."""
        while self.started < len(self.cut):
            self._start()
        while self.in_flight:
            self.in_flight.popleft().wait()
        self.steps += 1
        self.started, self.missing = 0, [part.stop - part.start for part in self.cut]

    def try_out(self, backward: Callable[..., object]) -> str | None:
        """Measure steps with and without overlap, on another vector. Return why overlap loses; None if it does not.
        Collective. backward(gradient, on_ready): computes the gradient of a step."""
        own = self.comm.duplicate("trial")
        with self.comm.timeline.span("try overlap"):
            self.trial = self._time_steps(own, backward)
        node = ranks_of_node(own.mpi)
        ranks, places = node.size, cores(node)
        node.Free()
        own.free()
        plain, overlapped = self.trial["plain_step_seconds"], self.trial["overlapped_step_seconds"]
        if overlapped <= plain:
            return None
        reason = f"no core is spare: {ranks} ranks on {places} cores" if ranks >= places else "try another --bucket-mib"
        if len(self.cut) == 1:
            reason = "the gradient is one bucket, which no computing is left to hide; try a smaller --bucket-mib"
        both = f"a step takes {1e3 * overlapped:.3g} ms with it, {1e3 * plain:.3g} ms without"
        return f"overlap loses: {both}; {reason}"

    def _time_steps(self, own: Communicator, backward: Callable[..., object]) -> dict[str, float]:
        """Return the seconds of a step without and with overlap, and of the exchange alone: means of ranks' medians."""
        gradient, exchange = own.empty(like=self.gradient), own.traffic["all_reduce"]
        state = None if self.state is None else self.state.fresh()
        plain, overlapped = AfterBackward(own, gradient, state), Overlap(own, gradient, self.cut, state)

        def step(way: AfterBackward | Overlap) -> float:
            own.barrier()
            start = time.perf_counter()
            backward(gradient, way.ready)
            way.finish()
            return time.perf_counter() - start

        def alone() -> float:
            own.barrier()
            before = exchange.seconds
            overlapped.finish()  # no part was reported: all buckets start at once
            return exchange.seconds - before

        def turn() -> tuple[float, float, float]:
            return step(plain), step(overlapped), alone()

        names = "plain_step_seconds", "overlapped_step_seconds", "exchange_alone_seconds"
        return dict(zip(names, seconds_of(turn, own), strict=True))

    def costs(self, own: Communicator) -> dict:
        """Return the entries of the summary, equal on all ranks; collective on `own`.
        hidden_fraction: 1 - exposed / alone, at least 0; None: not measured. alone: seconds of the exchange without
        computing (in the trial). exposed: seconds of a step in communicator calls, with waits. Means over ranks."""
        hidden, more = None, {}
        if self.trial and self.steps:
            exposed = np.array([(self.exchange.seconds - self.before) / self.steps])
            own.all_reduce(exposed, "mean")
            hidden = float(np.clip(1 - exposed[0] / self.trial["exchange_alone_seconds"], 0, 1))
            more = self.trial | {"exchange_exposed_seconds": float(exposed[0])}
        return {"hidden_fraction": hidden, "overlap": {"buckets": len(self.cut)} | more}
