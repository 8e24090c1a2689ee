"""Pipeline parallelism: layers lie on consecutive ranks, and the micro-batches of a batch follow each other through.

    stage 0    F0 F1 F2 F3             B0    B1    B2    B3     update
    stage 1       F0 F1 F2 F3       B0    B1    B2    B3        update
    stage 2          F0 F1 F2 B0 F3 B1    B2    B3              update          (1F1B draws this better: --draw)

A schedule (hpcdl/strategies/pipeline_schedules.py) says in which order a stage does forwards and backwards; the stage
(hpcdl/parallel/stage.py) does them, and the messages between. With naive, gpipe, 1f1b and interleaved the gradients of
all micro-batches are summed before the update, so that the steps are those of sequential SGD.

    idle, p stages, m micro-batches     naive (p-1)/p     gpipe, 1f1b (p-1)/(m+p-1)     interleaved (p-1)/(vm+p-1)
    in flight on stage s                naive 1           gpipe m                       1f1b min(m, p-s)

recompute: keep no more of a micro-batch than its input, and make the rest anew before its backward, for a third more
computing (GPipe).

PipeDream does not wait for the update: each micro-batch is a batch of its own, and an update follows each backward.

    stage s, at forward k     w  with updates 0 .. k - (p-1-s) - 1 in it: p-1-s updates old, once the pipeline is full
                              stash a copy of w for backward k
             at backward k    gradient at the stashed w;  w <- w - lr * gradient

The stash makes forward and backward of a batch use the same weights; it costs p-1-s copies of them. The pipeline fills
once, again after a resumption, so that a resumed run is not the same to the bit, and in part when the ranks agree about
the run, every 8 p micro-batches: only then is a signal, or the time limit, noticed.

(Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019; Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM", SC 2021)
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hpcdl.kernels.device import Array
from hpcdl.strategies.description import Cut, Strategy
from hpcdl.strategies.pipeline_options import PipelineOptions, check_pipeline
from hpcdl.strategies.pipeline_schedules import actions_of, pictures

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.data import Batch, Data
    from hpcdl.optim import Optimizer
    from hpcdl.parallel.cut_model import CutModel
    from hpcdl.parallel.stage import Stage
    from hpcdl.runs.run import Run

SHOWN = 24  # steps of PipeDream that are drawn
MEET = 8  # all stages meet after so many micro-batches for each stage, for that empties the pipeline


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    schedule: str = "1f1b",
    microbatches: int = 4,
    chunks: int = 1,
    recompute: bool = False,
    balance: str = "parameters",
    draw: bool = False,
) -> Array:
    """Train on all ranks of `comm`; returns the parameters of this rank's layers."""
    from hpcdl.parallel.pipelined import PipelineGroups, pipelined

    groups, ahead = run.until_end(PipelineGroups(comm)), comm.size - 1 if schedule == "pipedream" else 0
    held, stage = pipelined(run, model, data, optimizer, groups, chunks, balance, recompute, ahead=ahead)
    run.report(schedule=schedule, microbatches=microbatches, chunks=chunks, recompute=recompute)
    run.begin("pipeline", held, data)

    if schedule == "pipedream":
        pipedream(comm, data, run, held, stage)
    else:
        for batch in run.batches(data, held.share):
            held.zero_gradient()
            actions = actions_of(schedule, comm.size, comm.rank, microbatches, chunks)
            loss = stage.run(actions, batch.split(microbatches))
            held.update(batch.total)
            run.record(loss, batch.total)
            run.boundary()
    run.report(**stage.costs(held.peers))
    if draw:
        run.say(pictures(schedule, comm.size, microbatches, chunks, stage.gather_spans()))
    return held.parameters


def pipedream(comm: Communicator, data: Data, run: Run, held: CutModel, stage: Stage) -> None:
    """The loop of PipeDream: a step of the run is the backward, and the update, of one micro-batch."""
    from hpcdl.comm.progress import activity
    from hpcdl.parallel.stash import Stash

    stash = Stash(stage, held.shards, versions=comm.size - 1 - comm.rank)
    first, oldest, stopwatch = run.step, 0, run.stopwatch
    size, per_epoch, _ = run.plan(data)
    in_flight: dict[int, tuple[int, int, float]] = {}  # examples, updates before forward, loss; by micro-batch
    cursor = data.cursor(size, held.share, ahead=False)
    run.agree_seldom(MEET * comm.size)
    stage.begin(SHOWN)  # all of it is one step
    with run.going_on():
        for kind, k, _ in actions_of("pipedream", comm.size, comm.rank, max(1, run.steps - first)):
            if run.over:
                break
            if first + k >= run.steps:  # told to stop, it was not begun
                continue
            done = run.step
            with stopwatch.step():
                if kind == "F":
                    with stopwatch.fetching():
                        batch = kept(cursor.take(*divmod(first + k, per_epoch)))
                    in_flight[k] = batch.total, done, stage.forward(k, 0, batch)
                    stash.forward(k)
                else:
                    held.zero_gradient()
                    stage.backward(k, 0)
                    stash.backward(k)
                    total, updates, loss = in_flight.pop(k)
                    oldest = max(oldest, done - updates)
                    held.update(total)
                    run.record(loss, total)
                    run.boundary()
        stage.end(stopwatch.apart_seconds)
    with activity.inside("gather the ages", held.peers):
        run.report(weights_updates_old=held.peers.mpi.allgather(oldest))


def kept(batch: Batch) -> Batch:
    """The batch with arrays of its own, for those of the data are used again."""
    return dataclasses.replace(batch, x=batch.x.copy(), y=batch.y.copy())


def fits(options: PipelineOptions, ranks: int, model: Any) -> None:
    from hpcdl.parallel.cut_model import check_same_rows

    check_same_rows(options, ranks)
    check_pipeline(options, ranks, model)


def cut(options: PipelineOptions, ranks: int) -> Cut:
    return Cut((1, ranks, 1), **options.cut)


STRATEGY = Strategy(
    "train-pipeline",
    PipelineOptions,
    train,
    cut=cut,
    check=fits,
    small="--model mlp:{widths} --microbatches 4 --batch-size 16",
)
