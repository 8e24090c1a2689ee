"""Minibatch SGD with all-reduce: data-parallel training in which N ranks take the very steps of one.

    rank 0: w <- initial values; broadcast w
    for t = 0, 1, 2, ...
        on each rank, its share B_r of the minibatch B = B_1 + ... + B_N of b examples:
            g_r <- sum over i in B_r of grad f(w; x_i, y_i)
        g <- all-reduce sum of g_1, ..., g_N
        on each rank: w <- w - lr / b * g             (or the rule of the optimizer)

The sum of the shares' gradients is the batch's gradient, so all ranks hold the same w at every step, and N changes
nothing but the time and the order of additions. Shares may be uneven or empty. Each step costs one all-reduce of as
many values as there are parameters: 2 (N-1)/N of them sent per rank by a ring.

compress: float16 or bfloat16 halves the bytes (hpcdl/comm/compressed.py). g is then rounded; what is rounded away each
rank adds to its g_r of the next step (error feedback), and no more of it is ever missing than of one step.

overlap: g is reduced in buckets of layers (hpcdl/comm/overlap.py), from the last layer on, while grad f of the layers
before is being computed. The steps are the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import option
from hpcdl.strategies.description import Call, StepCost, Strategy

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.comm.overlap import Overlap
    from hpcdl.data import Batch, Data
    from hpcdl.memory import Memory
    from hpcdl.optim import Optimizer
    from hpcdl.runs.run import Run
    from hpcdl.strategies.workload import Workload


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
) -> Array:
    """Train on all ranks of `comm`; returns the parameters, the same flat vector on each.

    noise_scale: tell, from |g_r|^2 and |g|^2, up to which batch more examples pay (hpcdl/runs/noise_scale.py).
    """
    from hpcdl.checkpoint.state import PerRank
    from hpcdl.comm.compressed import Compressed
    from hpcdl.comm.overlap import MIB, AfterBackward, Overlap, buckets
    from hpcdl.runs.noise_scale import NoiseScale, Observed
    from hpcdl.runs.ownership import Whole

    share = comm.rank, comm.size
    parameters = run.initial(model)
    gradient = comm.empty(like=parameters)
    state = None if compress == "none" else Compressed(gradient.size, gradient.dtype, compress)
    if state is not None:
        run.track("residual", PerRank(state.residual))
        run.report(allreduce="compressed")
    run.report(compress=compress)
    noise = NoiseScale() if noise_scale else None
    held = Whole(model, parameters, optimizer) if noise is None else Observed(model, parameters, optimizer, noise)
    run.begin("all_reduce", held, data)

    exchange: Any = AfterBackward(comm, gradient, state)
    if overlap:
        exchange = Overlap(comm, gradient, buckets(model.layout, bucket_mib * MIB), state)
        if comm.size > 1 and not run.over:
            size, per_epoch, _ = run.plan(data)
            epoch, start = divmod(run.step, per_epoch)
            batches: Any = data.batches(epoch, size, share, start)
            with contextlib.closing(batches):
                run.say(try_out(exchange, model, parameters, next(batches)))
    for batch in run.batches(data, share):
        gradient[:] = 0
        loss = model.loss_and_gradient(parameters, batch, gradient, exchange.ready)
        if noise is not None:
            noise.own(gradient, len(batch.y))
        exchange.finish()
        run.share(loss)
        if noise is not None:
            noise.summed(gradient, batch.total)
        optimizer.update(parameters, gradient, scale=1 / batch.total)
        run.record(loss, batch.total)
        run.boundary()
    if overlap:
        run.report(**exchange.costs(held.peers))
    return parameters


def try_out(overlap: Overlap, model: Any, parameters: Array, first: Batch) -> str:
    """Measure on the first batch to come whether overlap pays; a line where it does not."""
    from hpcdl.checkpoint.buffers import buffers_restored

    def backward(gradient: Array, on_ready: Callable[[slice], None] | None) -> None:
        gradient[:] = 0
        model.loss_and_gradient(parameters, first, gradient, on_ready)

    with buffers_restored(model):
        return overlap.try_out(backward) or ""


@dataclass(frozen=True)
class AllReduceOptions(SurvivingOptions):
    compress: Literal["none", "float16", "bfloat16"] = option(
        "none", "send gradients in 16 bits, with error feedback, by an all-reduce made for it instead of --allreduce"
    )
    overlap: bool = option(False, "reduce the gradient in buckets of layers while the layers before are computed")
    bucket_mib: float = option(1.0, "MiB that a bucket of --overlap has at least; layers are not cut")
    noise_scale: bool = option(False, "measure the gradient noise scale: the largest batch that is worth taking")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.bucket_mib > 0 and math.isfinite(self.bucket_mib)):
            raise UsageError(f"--bucket-mib must be greater than 0, not {self.bucket_mib}")

    @property
    def advice(self) -> str:
        if self.compress == "float16":
            return "its messages hold nothing above 65504: --compress bfloat16 may help, or a smaller --lr"
        return super().advice


def fits(options: AllReduceOptions, ranks: int, model: Any) -> None:
    if options.noise_scale:
        from hpcdl.runs.noise_scale import refuse_no_parts

        refuse_no_parts(ranks, options.global_batch(ranks, ranks), options.overlap)  # full: it has an example for each


def held(case: Workload, rank: int, memory: Memory) -> None:
    """As a sequential run of the rank's share; of --compress also what is rounded away."""
    residual = case.options.compress != "none"
    case.hold_step(memory, case.share(rank, case.size), optimizer=len(case.vectors) + residual)


def step(case: Workload) -> StepCost:
    """A gradient of the share, and an all-reduce of K values after it; or one of each bucket, beside the backward."""
    from hpcdl.comm.overlap import MIB, buckets

    options, rows = case.options, case.largest
    operation = options.compress if options.compress != "none" else "all_reduce"
    cut = buckets(case.model.layout, options.bucket_mib * MIB) if options.overlap else [slice(0, case.length)]
    calls = [Call(operation, (part.stop - part.start) * case.dtype.itemsize) for part in cut]
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
