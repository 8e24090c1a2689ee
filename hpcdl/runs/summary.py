"""Reports by a run on itself: started.json at its begin, for watching; summary.json and a printed table at its end."""

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import auto
from hpcdl.comm.progress import exempt
from hpcdl.data.mixture import counts_of
from hpcdl.errors import TrainingError
from hpcdl.memory import KINDS
from hpcdl.models.mixture import counted_choices
from hpcdl.models.model import unwrapped
from hpcdl.programs import of_strategy
from hpcdl.runs.closing_table import as_table
from hpcdl.runs.context import RunSetup
from hpcdl.runs.folder import environment, summary_of
from hpcdl.runs.saving import keep_legs
from hpcdl.runs.segments import summed

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

log = logging.getLogger("hpcdl")
STARTED, STARTED_VERSION = "started.json", 1
SCHEMA_VERSION = 2
MOST_PAIRS = 100_000  # (sender, receiver): with more, the summary does not say who has sent to whom


def started(setup: RunSetup, first: int, steps: int, hosts: list[str]) -> dict:
    """Return started.json of a leg that begins after step `first`. steps: the last step as planned. Entries: started,
    and ends (when Slurm ends the job, or null), in seconds since 1970, UTC; time_limit in seconds, 0: none; hosts of
    the ranks that train; job: Slurm's job number, or null."""
    ends = os.environ.get("SLURM_JOB_END_TIME", "")
    return {
        "schema_version": STARTED_VERSION,
        **setup.described(),
        "program": of_strategy(setup.strategy),
        "first_step": first,
        "steps": steps,
        "steps_per_epoch": setup.per_epoch,
        "started": time.time(),
        "time_limit": setup.options.time_limit,
        "ends": int(ends) if ends.isdecimal() else None,
        "hosts": hosts,
        "job": os.environ.get("SLURM_JOB_ID"),
        "environment": environment(),
    }


def conclude(
    everyone: Communicator,
    measurements: dict,
    leads: bool = False,
    trace: Path | None = None,
    stopped: str | None = None,
) -> tuple[list[dict] | None, str | None]:
    """Gather each rank's `measurements` on the rank that `leads`, and write the trace there. Return them (None
    elsewhere) and why the run has ended, as the leading rank knows it. Collective over all ranks, serving ones, too."""
    with everyone.inside("gather the summary"):
        # No allreduce of objects: mpi4py passes them on a communicator of its own, which no revocation reaches, and a
        # rank would wait there for ever for one that has learned of a failure (recovery/ulfm_recovery.py).
        told = everyone.mpi.allgather((len(measurements["sent_to_per_rank"]), leads))
        if sum(pairs for pairs, _ in told) > MOST_PAIRS:
            measurements = measurements | {"sent_to_per_rank": None}
        root = [leading for _, leading in told].index(True)
        ranks = everyone.mpi.gather(measurements, root)
        stopped = everyone.mpi.bcast(stopped, root)
    if everyone.timeline.limit:
        everyone.timeline.write(trace, root)
    return ranks, stopped


def finish(run: "Run") -> None:
    """End a run after its loop: write trace and summary, and print the table or how to resume; collective over all
    ranks. Raises TrainingError if replicas that must agree do not."""
    trace = run.folder.path and run.folder.path / "trace.json"
    measured = run.legs.measured() | {"choices": counted_choices(unwrapped(run.model))}
    ranks, reason = conclude(run.everyone, measured, run.comm.rank == 0, trace, run.stopped)
    run.stop(reason, known=True)
    if ranks is not None:
        legs = run.legs.so_far(run.progress, ranks, sorted({rank["host"] for rank in ranks}))
        if run.folder.path is not None and run.saved == run.step and not all(run.legs.table):
            with exempt():
                keep_legs(run.folder, legs)
    if run.stopped != "signal":
        run.agree = run.held.agree(run.bookkeeping)
    differed = False  # True if the replicas of a finished run did not agree at its end
    if run.folder.left is not None:
        if ranks is not None:
            run.summary = summary_of(run.folder.left)
            differed = (run.summary or {}).get("replicas_agree") is False
        differed = run.bookkeeping.mpi.bcast(differed)
        what = f"the run in {run.folder.left} has ended after step {run.step}"
        run.display.line(f"nothing is left to do: {what}; ask for more steps or epochs to go on")
    elif run.stopped == "signal":
        where = f"go on with --resume {run.folder.path}" if run.folder.path else "nothing was saved (no --out)"
        run.display.line(f"stopped by a signal after step {run.step} of {run.steps}; {where}")
    elif ranks is not None:
        run.summary = summarize(run, ranks, legs)
        with exempt():
            run.folder.write("summary.json", run.summary)
        if not run.display.console.quiet:
            run.display.console.print(as_table(run.summary))
    log.info("ended after step %d: %s", run.step, run.stopped)
    if run.agree is not False:
        run.folder.landed(run.stopped != "signal")
    run.folder.close()
    if run.agree is False:
        raise TrainingError("the replicas do not agree: their parameters differ; --check replicas=10 finds the step")
    if differed:
        raise TrainingError(
            f"the replicas did not agree when the run in {run.folder.left} ended, and what it has saved may be wrong; "
            "go on from an earlier checkpoint, as --resume FOLDER/checkpoint-STEP.h5"
        )


def summarize(run: "Run", ranks: list[dict], legs: list[dict]) -> dict:
    """Return the summary. ranks: what each rank has `measured` in this leg. legs: all legs of the run.

    Seconds are measured by stopwatch.py; compute_seconds: of steps, without communication. A count of messages is null
    where a library's own collective hides them. traffic_per_rank splits calls, bytes, messages and seconds by
    operation. On GPUs, device_per_rank names the devices, exchange says how their vectors travel, and
    device_memory_bytes_per_rank what CuPy took of their memory. memory_bytes_per_rank: peaks of what steps held, by
    kind (hpcdl/memory.py). allreduce is null where steps call none."""
    algorithm = run.reported.get("allreduce", run.comm.allreduce if reduces(ranks) else None)
    scores = {name: run.scores.get(name) for name in ("test_loss", "test_accuracy")}
    summary = {
        "schema_version": SCHEMA_VERSION,
        **run.setup.described(),
        "device": "cuda" if any("device_per_rank" in rank for rank in ranks) else "cpu",
        "epochs": run.step / run.per_epoch,
        "steps": run.step,
        "allreduce": algorithm,
        "stopped": run.stopped,
        "train_loss": run.progress.train_loss,
        **scores,
        **run.scores,
        "seconds": run.seconds,
        "examples_per_second": run.rate,
        "blas_threads": run.threads.used,
        "replicas_agree": run.agree,
        "checkpoints_failed": run.saver.failed,
        **counts_of(run.data, run.step, run.per_epoch, run.batch),
        **run.reported,
        "allreduce_by_length": by_length(run.comm) if algorithm == run.comm.allreduce else None,
        "options": dataclasses.asdict(run.options) | run.setup.used,
    }
    names = dict.fromkeys(name for rank in ranks for name in rank)  # servers use no GPU, and say nothing of it
    for name in ("memory", "host", "choices"):
        names.pop(name, None)
    summary |= of_experts(ranks)
    summary |= {name: [rank.get(name) for rank in ranks] for name in names} | summed(legs)
    summary["memory_bytes_per_rank"] = {kind: [rank["memory"][kind] for rank in ranks] for kind in KINDS}
    if summary["device"] != "cpu":
        ours = summary["allreduce"] == run.comm.allreduce  # else the strategy has another, which is staged
        summary["exchange"] = run.comm.exchange if ours else "staged"
    if None in summary["sent_to_per_rank"]:
        summary["sent_to_per_rank"] = None
    summary["legs"] = legs
    summary["environment"] = environment()
    return summary


def of_experts(ranks: list[dict]) -> dict[str, dict[str, list[int]]]:
    """Return the choices and the drops of each expert in this leg, for each mixture; {} for a model without experts."""
    choices = [rank["choices"] for rank in ranks if rank.get("choices")]
    if not choices:
        return {}
    totals = {layer: sum(each[layer] for each in choices).tolist() for layer in choices[0]}
    names = "expert_tokens", "expert_dropped"
    return {name: {layer: both[k] for layer, both in totals.items()} for k, name in enumerate(names)}


def reduces(ranks: list[dict]) -> bool:
    """True if steps called an all-reduce that sent something; on one rank, if they called one."""
    sign = "bytes" if len(ranks) > 1 else "calls"
    return any(rank["traffic_per_rank"].get("all_reduce", {}).get(sign) for rank in ranks)


def by_length(comm: Communicator) -> list[dict] | None:
    """Return which algorithm `auto` takes up to which length of a vector; None for any other all-reduce."""
    limits = [*auto.LIMITS, None]
    found = [{"up_to_bytes": limit, "algorithm": name} for limit, name in zip(limits, comm.by_length, strict=False)]
    return found or None
