"""Minibatch SGD with all-reduce: data-parallel training in which N ranks take the same steps as one.

    rank 0: w <- initial values; broadcast w
    for t = 0, 1, 2, ...
        on each rank, its share B_r of the minibatch B = B_1 + ... + B_N of b examples:
            g_r <- sum over i in B_r of grad f(w; x_i, y_i)
        g <- all-reduce sum of g_1, ..., g_N
        on each rank: w <- w - lr / b * g             (or the rule of the optimizer)

All ranks hold the same w at every step; N changes only the time and the order of additions. Shares may be uneven or
empty. A step costs one all-reduce of K values, one for each parameter: in a ring each rank sends 2 (N-1)/N K.
compress: a rank adds what its messages have left out to its next g_r (error feedback, hpcdl/comm/compression/).
overlap: g is reduced in buckets of layers while grad f of the layers before is computed (hpcdl/comm/overlap.py)."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import not_negative, option, positive
from hpcdl.strategies.compressing import CompressOptions, hold_kept, reduction_calls, track_state
from hpcdl.strategies.description import Communicator, Data, Memory, Optimizer, Run, StepCost, Strategy, Workload


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    compress: str = "none",
    overlap: bool = False,
    bucket_mib: float = 1.0,
    noise_scale: bool = False,
    compress_from: int = 0,
) -> Array:
    """Train on all ranks of `comm`; return the parameters, the same flat vector on each.
    noise_scale: estimate, from |g_r|^2 and |g|^2, the largest batch that pays (hpcdl/runs/noise_scale.py)."""
    from hpcdl.checkpoint.buffers import buffers_restored
    from hpcdl.comm.compression import TrainingContext, compressed, parse
    from hpcdl.comm.overlap import MIB, AfterBackward, Overlap, buckets, try_compression
    from hpcdl.runs.noise_scale import NoiseScale, Observed
    from hpcdl.runs.ownership import Whole

    share = comm.rank, comm.size
    parameters = run.initial(model)
    gradient = comm.empty(like=parameters)
    state, update = None, optimizer.update
    if compress != "none":
        state = compressed(compress, gradient.size, gradient.dtype, run.options.seed, model.layout, compress_from)
        track_state(run, state)
        update = functools.partial(state.update, optimizer)
    run.report(compress=compress)
    noise = NoiseScale() if noise_scale else None
    held = Whole(model, parameters, optimizer) if noise is None else Observed(model, parameters, optimizer, noise)
    run.begin("all_reduce", held, data)
    size, per_epoch, steps = run.plan(data)
    if state is not None:
        state.begin(optimizer.step)
        state.training = TrainingContext(optimizer, parameters, steps, per_epoch)

    exchange: Any = AfterBackward(comm, gradient, state)
    if overlap:
        exchange = Overlap(comm, gradient, buckets(model.layout, bucket_mib * MIB), state)
    lines = []  # what does not pay on this machine
    if comm.size > 1 and not run.over:
        if state is not None and not parse(compress)[0].optimizers:  # these begin with a warm-up
            trial, line = try_compression(comm, gradient, state)
            run.report(compression=trial)
            lines.append(line)
        if overlap:
            epoch, start = divmod(run.step, per_epoch)
            batches: Any = data.batches(epoch, size, share, start)
            with contextlib.closing(batches), buffers_restored(model):
                first = next(batches)

                def backward(gradient: Array, on_ready: Callable[[slice], None] | None) -> None:
                    gradient[:] = 0
                    model.loss_and_gradient(parameters, first, gradient, on_ready)

                lines.append(exchange.try_out(backward) or "")
    for line in lines:
        run.say(line)
    for batch in run.batches(data, share):
        gradient[:] = 0
        if state is not None:
            state.training.scale = 1 / batch.total
        loss = model.loss_and_gradient(parameters, batch, gradient, exchange.ready)
        if noise is not None:
            noise.own(gradient, len(batch.y))
        exchange.finish()
        run.share(loss)
        if noise is not None:
            noise.summed(gradient, batch.total)
        update(parameters, gradient, scale=1 / batch.total)
        run.record(loss, batch.total)
        run.boundary()
    if overlap:
        run.report(**exchange.costs(held.peers))
    return parameters


@dataclass(frozen=True)
class AllReduceOptions(CompressOptions, SurvivingOptions):
    compress_from: int = option(0, "compress matrices of at least so many bytes only; 0: the whole gradient")
    overlap: bool = option(False, "reduce the gradient in buckets of layers while the layers before are computed")
    bucket_mib: float = option(1.0, "least size of a bucket of --overlap in MiB; no layer is cut")
    noise_scale: bool = option(False, "measure the gradient noise scale: the largest batch that is worth taking")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "bucket_mib")
        not_negative(self, "compress_from")


def fits(options: AllReduceOptions, ranks: int, model: Any) -> None:
    if options.compress != "none":
        from hpcdl.comm.compression import check_model, large, parse

        check_model(options.compress, model.layout)
        if options.compress_from:
            large(model.layout, options.compress_from)
        refuse_without_gradients(options, parse(options.compress)[0])
    if options.noise_scale:
        from hpcdl.runs.noise_scale import refuse_no_parts

        refuse_no_parts(ranks, options.global_batch(ranks, ranks), options.overlap)  # full: an example for each rank


def refuse_without_gradients(options: AllReduceOptions, method: Any) -> None:
    """Raise UsageError for options that need whole gradients, if the method takes over a part of the optimizer."""
    if not method.optimizers:
        return
    who, given = f"--compress {method.name}", options.optimizer.partition(":")[0]
    if given not in method.optimizers:
        raise UsageError(f"{who} is a part of the optimizer {' or '.join(method.optimizers)}, not of {given}")
    for name in ("compress_from", "noise_scale"):
        if getattr(options, name):
            raise UsageError(f"{who} sends no gradients: leave out --{name.replace('_', '-')}")
    if options.clip_norm and (options.overlap or not method.clips):
        which = "one of --clip-norm and --overlap: a bucket" if method.clips else "--clip-norm: a rank"
        raise UsageError(f"{who}: leave out {which} does not know the norm of the gradient")


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` what a sequential run on the rank's share holds; with --compress also what messages leave out."""
    case.hold_step(memory, case.share(rank, case.size), optimizer=len(case.vectors))
    hold_kept(case, memory)


def step(case: Workload) -> StepCost:
    """Return the cost of the gradient of a rank's share, and of its all-reduce: of K values at once, or in buckets."""
    from hpcdl.comm.overlap import MIB, buckets

    options, rows = case.options, case.largest
    cut = buckets(case.model.layout, options.bucket_mib * MIB) if options.overlap else [slice(0, case.length)]
    calls = [call for part in cut for call in reduction_calls(options.compress, case, part)]
    if not options.overlap:
        return StepCost(case.batch, [(rows, 1)], calls, drawn=rows)
    return StepCost(case.batch, [(rows, 1)], calls, drawn=rows, hidden_by="backward", buckets=cut)


STRATEGY = Strategy(
    "train-allreduce",
    AllReduceOptions,
    train,
    held,
    step,
    check=fits,
    mode=lambda options: "overlap" if options.overlap else "",
    modes={"overlap": "--overlap --bucket-mib 0.001"},
)
