"""Pipeline parallelism: layers lie on consecutive ranks, and the micro-batches of a batch follow each other.

    stage 0    F0 F1 F2 F3             B0    B1    B2    B3     update
    stage 1       F0 F1 F2 F3       B0    B1    B2    B3        update
    stage 2          F0 F1 F2 B0 F3 B1    B2    B3              update          (1F1B draws this better: --draw)

With all schedules but pipedream (pipeline_schedules.py, zero_bubble.py) the gradients of all micro-batches are summed
before the update: the steps are those of sequential SGD. recompute: see hpcdl/parallel/stage.py; it costs a third more
computing.

PipeDream does not wait for the update: each micro-batch is a batch of its own, and an update follows each backward.

    stage s, at forward k     w  with updates 0 .. k - (p-1-s) - 1 in it: p-1-s updates old, once the pipeline is full
                              stash a copy of w for backward k
             at backward k    gradient at the stashed w;  w <- w - lr * gradient

The stash (hpcdl/parallel/stash.py) costs p-1-s copies of w. The pipeline fills anew after a resumption, so that a
resumed run is not the same to the bit. The pipeline partly empties every 8 p micro-batches, when the ranks agree
about the run: only then is a signal, or the time limit, noticed.

(Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019)"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hpcdl.kernels.device import Array
from hpcdl.strategies.description import Communicator, Cut, Data, Optimizer, Run, Strategy
from hpcdl.strategies.pipeline_options import PipelineOptions, check_pipeline
from hpcdl.strategies.pipeline_schedules import actions_of, pictures, placement

if TYPE_CHECKING:
    from hpcdl.parallel.cut_model import CutModel
    from hpcdl.parallel.stage import Stage

SHOWN = 24  # actions of PipeDream that are drawn
MEET = 8  # micro-batches per stage between two meetings of all stages, each of which empties the pipeline


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
    """Train on all ranks of `comm`; return the parameters of this rank's layers."""
    from hpcdl.parallel.pipelined import pipelined

    ahead, where = comm.size - 1 if schedule == "pipedream" else 0, placement(schedule, comm.size, chunks)
    held, stage = pipelined(run, model, data, optimizer, None, where, balance, recompute, ahead=ahead)
    run.report(schedule=schedule, microbatches=microbatches, chunks=where.chunks, recompute=recompute)
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
    """Run the loop of PipeDream: a step of the run is the backward, and the update, of one micro-batch."""
    from hpcdl.parallel.stash import Stash

    stash = Stash(stage, held.shards, versions=comm.size - 1 - comm.rank)
    first, oldest, stopwatch = run.step, 0, run.stopwatch
    size, per_epoch, _ = run.plan(data)
    in_flight: dict[int, tuple[int, int, float]] = {}  # examples, updates before forward, loss; by micro-batch
    cursor = data.cursor(size, held.share, ahead=False)
    run.agree_seldom(MEET * comm.size)
    stage.begin(SHOWN)  # the whole run is one step of the stage
    with run.going_on():
        for kind, k, _ in actions_of("pipedream", comm.size, comm.rank, max(1, run.steps - first)):
            if run.over:
                break
            if first + k >= run.steps:  # the run is to end before this micro-batch
                continue
            done = run.step
            with stopwatch.step():
                if kind == "F":
                    with stopwatch.fetching():
                        batch = cursor.take(*divmod(first + k, per_epoch))
                    batch = dataclasses.replace(batch, x=batch.x.copy(), y=batch.y.copy())  # data reuses its arrays
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
    with held.peers.inside("gather the ages"):
        run.report(weights_updates_old=held.peers.mpi.allgather(oldest))


def fits(options: PipelineOptions, ranks: int, model: Any) -> None:
    from hpcdl.parallel.cut_model import check_same_rows

    check_same_rows(options, ranks)
    check_pipeline(options, ranks, model)


def cut(options: PipelineOptions, ranks: int) -> Cut:
    return Cut((1, ranks, 1), **options.cut)


SMALL = "--model mlp:{widths} --microbatches 4 --batch-size 16"
STRATEGY = Strategy("train-pipeline", PipelineOptions, train, cut=cut, check=fits, small=SMALL)
