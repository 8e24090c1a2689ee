"""Measurements of a machine for forecasts of time (machine_sheet.py), on all ranks of a job together; collective.

    links          ping-pong of the first two ranks of a node, and of the first ranks of nodes (machine/network.py)
    collectives    each operation at some lengths, repeatedly, through the communicator that trains
    models         drawing a batch, a gradient, each layer's forward and backward, an update; all ranks at once

A loop gives the mean of its turns, since ranks that share a core wait for each other as in training. A measurement is
the first quartile of several loops, since other load only makes loops longer."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.comm.compression import compressed, methods
from hpcdl.comm.node_memory import cores, ranks_of_node
from hpcdl.comm.overlap import Overlap, buckets
from hpcdl.comm.progress import inside
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.kernels.reduce import add_into
from hpcdl.machine.network import LONG, LinkSpeed, measure_links
from hpcdl.machine.threads import Threads
from hpcdl.models import for_data
from hpcdl.models.layered import FlatWeights, Layered
from hpcdl.models.part import ModelPart
from hpcdl.planning.machine_sheet import Curve, MeasuredModel, RowTimes, Section, rounded
from hpcdl.planning.message_time import UNSHARED, one_matrix
from hpcdl.random import Random
from hpcdl.runs.options import Options

SIZES = [256, 4 << 10, 32 << 10, 256 << 10, 2 << 20]  # bytes
MESSAGES = UNSHARED, "reduce_scatter", "all_gather", "message", "exchange"
LOOPS, SECONDS, FEWEST = 5, 0.012, 2  # of a measurement: loops, seconds of a loop, fewest turns of a loop
DRAWN = 50  # most batches to draw
NAP = 0.004  # seconds of the sleep whose lateness is measured
TRIAL = "mlp:256,128"  # on digits, to measure `progress`


def measure(comm: MPI.Intracomm, lines: list[tuple[Options, set[int]]], operations: Sequence[str]) -> dict[str, Any]:
    """Measure the machine; return a section and the numbers of its sheet, in the form of JSON, equal on all ranks.
    lines: (options, numbers of rows) of each model. The numbers near and far are [latency, bandwidth] of links within
    and between nodes; None: not measured."""
    node = ranks_of_node(comm)
    nodes = comm.allreduce(int(node.rank == 0))
    firsts = [rank for rank in comm.allgather(comm.rank if node.rank == 0 else -1) if rank >= 0]
    seconds = comm.allgather(comm.rank if node.rank == 1 else -1)
    there = min(comm.allgather(cores(node)))
    near = [rank for rank in (0, *(each for each in seconds if each >= 0))][:2]
    close = measure_links(comm, near) if len(near) == 2 and near[1] < comm.bcast(node.size) else []
    far = measure_links(comm, firsts[:2]) if nodes > 1 else []
    node.Free()
    with Threads(comm):
        collectives = measure_collectives(comm, operations)
        models = [measure_model(comm, options, rows) for options, rows in lines]
        rates = measure_rates(comm) | {"late": measure_late(comm), "progress": measure_progress(comm)}
    links = {name: link_numbers(speeds[0]) if speeds else None for name, speeds in (("near", close), ("far", far))}
    return {"section": rounded(Section(comm.size, nodes, collectives, {}, models)), "cores": there, **links, **rates}


def link_numbers(link: LinkSpeed) -> list[float]:
    """Return [latency, bandwidth] of a link; the latency is subtracted from the long message's time."""
    passing = LONG / link.bandwidth - link.latency
    return [link.latency, LONG / passing if passing > 0 else link.bandwidth]


def timed(comm: MPI.Intracomm, turn: Callable[[], Any], loops: int = LOOPS) -> float:
    """Return the seconds of a `turn` on the slowest rank: the first quartile of the loops' means. Collective."""
    turn()
    begun = time.perf_counter()
    turn()
    once = comm.allreduce(time.perf_counter() - begun, MPI.MAX)
    turns = max(FEWEST, min(2000, int(SECONDS / max(once, 1e-7))))
    means = []
    for _ in range(loops if once < 1 else 1):
        comm.Barrier()
        begun = time.perf_counter()
        for _ in range(turns):
            turn()
        means.append((time.perf_counter() - begun) / turns)
    return float(comm.allreduce(float(np.quantile(means, 0.25)), MPI.MAX))


def measure_collectives(world: MPI.Intracomm, names: Sequence[str]) -> dict[str, Curve]:
    """Return the seconds by bytes of each of these operations. Collective."""
    curves: dict[str, Curve] = {}
    if world.size == 1:
        return curves
    for name in [each for each in names if each not in MESSAGES and not compresses(each)]:
        with inside(f"all-reduce by {name}"):
            comm = Communicator(world, name)
            curves[name] = {}
            for size in SIZES:
                vector = comm.empty(size // 4, np.float32)
                vector[:] = 0
                curves[name][size] = timed(world, functools.partial(comm.all_reduce, vector))
            comm.free()
    comm = Communicator(world, "auto")
    for name in [each for each in names if each in MESSAGES or compresses(each)]:
        with inside(f"measure {name}"):
            curves[name] = {size: timed(world, operation(comm, name, size)) for size in SIZES}
            if name == "message":  # a turn is a round trip
                curves[name] = {size: seconds / 2 for size, seconds in curves[name].items()}
    comm.free()
    return curves


def all_operations() -> list[str]:
    """Return the operations that can be measured: all-reduces, messages, methods of compression as they are."""
    return [*ALGORITHMS, *MESSAGES, *(name for name, method in methods().items() if method.phases is None)]


def compresses(name: str) -> bool:
    """Return True if an operation is an all-reduce by a method of compression."""
    return name.partition(":")[0] in methods()


def operation(comm: Communicator, name: str, size: int) -> Callable[[], Any]:
    """Return a function that runs the operation `name` on `size` bytes once."""
    vector, other = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if compresses(name):
        state = compressed(name, vector.size, vector.dtype, layout=one_matrix(vector.size))
        return lambda: comm.all_reduce_compressed(vector, state)
    if name == UNSHARED:
        return lambda: comm.all_reduce(vector)
    if name in ("reduce_scatter", "all_gather"):
        return lambda: getattr(comm, name)(vector)

    def rally() -> None:
        """Send the vector to the partner, and get it back."""
        partner = comm.rank ^ 1
        turns: Any = (comm.push, comm.wait) if comm.rank < partner else (comm.wait, comm.push)
        for turn in turns if partner < comm.size else ():
            turn(vector, partner)

    def exchange() -> None:
        requests = [comm.iwait(other, left), comm.ipush(vector, right)]
        for request in requests:
            request.wait()
        add_into(vector, other)

    return rally if name == "message" else exchange


def measure_model(comm: MPI.Intracomm, options: Options, wanted: Iterable[int]) -> MeasuredModel:
    """Measure a model's gradients by rows (wanted), and an update. Collective. Raises UsageError like a training."""
    data: Any = open_data(
        options.data, comm=comm, dtype=options.dtype, seed=options.seed, validation=options.validation
    )
    model = for_data(options.model, data, options.dtype, loss=options.loss)
    w = model.device.array(model.initialize(Random(options.seed)))
    g, size = model.device.zeros(w.size, w.dtype), comm.size
    optimizer = options.make_optimizer(model, size, data)

    def update() -> None:
        g[:] = 0
        optimizer.update(w, g, scale=1.0)

    with inside(f"measure {options.model}"):
        took = timed(comm, update)
        rows = {}
        for n in sorted({max(1, min(each, data.examples // size)) for each in wanted}):
            draw = comm.allreduce(drawing(data.batches(0, n * size, (comm.rank, size))), MPI.MAX)
            batch = next(each := data.batches(0, n * size, (comm.rank, size)))
            gradient = timed(comm, functools.partial(model.loss_and_gradient, w, batch, g))
            layers = by_layer(comm, model, w, batch, gradient) if isinstance(model, Layered) else []
            rows[n] = RowTimes(draw, gradient, layers)
            each.close()
    data.close()
    texts = options.model, options.data, str(options.dtype), options.optimizer
    return MeasuredModel(*texts, int(w.size), took, rows)


def drawing(batches: Any) -> float:
    """Return the seconds to draw a batch: the first quartile of up to DRAWN draws."""
    taken = []
    for _ in range(DRAWN):
        begun = time.perf_counter()
        if next(batches, None) is None:
            break
        taken.append(time.perf_counter() - begun)
    batches.close()
    return float(np.quantile(taken[1:] or taken, 0.25))  # the first draws the order of the epoch


def by_layer(comm: MPI.Intracomm, model: Layered, w: Any, batch: Any, whole: float) -> list[tuple[float, float]]:
    """Return the seconds (forward, backward) of each layer, scaled to the sum `whole`; [] if unknown. Collective."""
    try:
        part = ModelPart(model)
    except UsageError:
        return []
    g, count = model.device.zeros(part.size, part.dtype), len(model.layers)
    weights, targets = FlatWeights(part, w, g), part.targets(batch)
    taken: Any = []
    turns = max(3, min(50, int(LOOPS * SECONDS / max(whole, 1e-7))))
    turns = comm.bcast(turns)
    for turn in range(turns + 1):
        x, saved_layers, clock = batch.x, [], np.zeros((count, 2))
        for i in range(count):
            begun = time.perf_counter()
            x, saved = part.forward(weights, x, range(i, i + 1), targets if i == count - 1 else None, batch=batch)
            clock[i, 0] = time.perf_counter() - begun
            saved_layers.append(saved)
        dy = None
        for i in reversed(range(count)):
            begun = time.perf_counter()
            dy = part.backward(weights, saved_layers[i], dy, range(i, i + 1))
            clock[i, 1] = time.perf_counter() - begun
        taken += [clock] * bool(turn)  # the first touches the memory
    taken = np.quantile(taken, 0.25, axis=0)
    comm.Allreduce(MPI.IN_PLACE, taken)
    taken *= whole / taken.sum()
    return [(float(a), float(b)) for a, b in taken]


def measure_rates(comm: MPI.Intracomm) -> dict[str, float]:
    """Return bytes added, flops of a matrix product, and bytes moved, per second and rank. Collective."""
    a, b = np.zeros(1 << 18, np.float32), np.zeros(1 << 18, np.float32)
    added = timed(comm, lambda: add_into(a, b))
    m = np.ones((64, 64), np.float32)  # as small as those of layers here
    product = timed(comm, lambda: m @ m)
    return {"adding": a.nbytes / added, "flops": 2 * 64**3 / product, "memory": 3 * a.nbytes / added}


def measure_late(comm: MPI.Intracomm) -> float:
    """Return the seconds by which the last of the sleeping ranks wakes late. Collective."""
    delays = []
    for _ in range(20):
        comm.Barrier()
        begun = time.perf_counter()
        time.sleep(NAP)
        delays.append(comm.allreduce(time.perf_counter() - begun - NAP, MPI.MAX))
    return max(0.0, float(np.quantile(delays, 0.25)))


def measure_progress(world: MPI.Intracomm) -> float | None:
    """Return the share of buckets' all-reduces that overlaps with computing; None on one rank. Collective."""
    if world.size == 1:
        return None
    data: Any = open_data("digits", comm=world)
    model = for_data(TRIAL, data, "float32")
    comm = Communicator(world, "auto")
    w, gradient = model.initialize(Random(0)), comm.empty(model.size, np.float32)
    batch = next(batches := data.batches(0, 64 * world.size, (world.rank, world.size)))

    def backward(g: Any, on_ready: Any) -> None:
        g[:] = 0
        model.loss_and_gradient(w, batch, g, on_ready)

    overlap = Overlap(comm, gradient, buckets(model.layout, 64 << 10))
    overlap.try_out(backward)
    plain, overlapped = overlap.trial["plain_step_seconds"], overlap.trial["overlapped_step_seconds"]
    alone = overlap.trial["exchange_alone_seconds"]
    batches.close()
    data.close()
    comm.free()
    return float(np.clip((plain - overlapped) / alone, 0, 1)) if alone > 0 else 0.0
