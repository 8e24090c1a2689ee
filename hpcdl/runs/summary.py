"""summary.json: what a run was, what it reached, what it cost each rank; and the table printed at its end."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI
from rich.table import Table

from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.errors import TrainingError, printable
from hpcdl.memory import KINDS
from hpcdl.models import name_of
from hpcdl.runs.folder import environment
from hpcdl.runs.legs import measured, summed
from hpcdl.runs.position import keep_legs
from hpcdl.runs.wrapped import plain
from hpcdl.words import counted

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

log = logging.getLogger("hpcdl")
SCHEMA_VERSION = 1


def conclude(
    everyone: Communicator,
    measurements: dict,
    leads: bool = False,
    trace: Path | None = None,
    stopped: str | None = None,
) -> tuple[list[dict] | None, str | None]:
    """Gather what the run cost each rank on the rank that leads, and write the trace there; collective over all ranks.

    Returns what was gathered (None elsewhere), and why the run has ended, as the rank that leads knows it. `finish`
    calls it, and so does a rank that only served the run.
    """
    with activity.inside("gather the summary", everyone):
        root = everyone.mpi.allreduce(everyone.rank if leads else everyone.size, MPI.MIN)
        ranks = everyone.mpi.gather(measurements, root)
        stopped = everyone.mpi.bcast(stopped, root)
    if everyone.timeline.limit:
        everyone.timeline.write(trace, root)
    return ranks, stopped


def finish(run: "Run") -> None:
    """End a run whose loop has ended: write trace and summary and print the table; collective over all ranks.

    If a signal stopped the run it says how to go on instead. Raises TrainingError where ranks that must hold the same
    do not.
    """
    trace = run.folder.path and run.folder.path / "trace.json"
    ranks, run.stopping.reason = conclude(run.everyone, measured(run), run.comm.rank == 0, trace, run.stopped)
    if ranks is not None:
        legs = run.legs.so_far(run, ranks, sorted({rank["host"] for rank in ranks}))
        with activity.known():
            keep_legs(run, legs)
    if run.folder.left is not None:
        if ranks is not None:
            run.summary = run.folder.summary_of_left()
        what = f"the run in {run.folder.left} has ended after step {run.step}"
        run.display.line(f"nothing is left to do: {what}; ask for more steps or epochs to go on")
    elif run.stopped == "signal":
        where = f"go on with --resume {run.folder.path}" if run.folder.path else "nothing was saved (no --out)"
        run.display.line(f"stopped by a signal after step {run.step} of {run.steps}; {where}")
    else:
        run.agree = run.held.agree(run.bookkeeping)
        if ranks is not None:
            run.summary = summarize(run, ranks, legs, run.agree)
            with activity.known():
                run.folder.write("summary.json", run.summary)
            run.display.console.print(as_table(run.summary))
    log.info("ended after step %d: %s", run.step, run.stopped)
    run.folder.close()
    if run.agree is False:
        raise TrainingError("the replicas do not agree: the ranks hold different parameters, which must not be")


def summarize(run: "Run", ranks: list[dict], legs: list[dict], agree: bool | None) -> dict:
    """The summary as a dictionary; `ranks` holds what each rank has `measured` in this leg; `legs` all of them.

    communication_seconds is the time inside the communicator's calls during steps; idle_seconds is the part of it that
    was blocked until messages had come; compute_seconds is the rest of the steps. data_seconds is the time in which a
    step waited for its batch. A count of messages is null where a library's own collective hides them.
    traffic_per_rank splits calls, bytes, messages and seconds by operation. On GPUs, device_per_rank names them,
    exchange says how their vectors travel, and device_memory_bytes_per_rank what CuPy took of their memory.
    memory_bytes_per_rank: peaks of what steps held, by kind (hpcdl/memory.py), where the strategy counts it.
    """
    options, data = run.options, run.data
    scores = {name: run.scores.get(name) for name in ("test_loss", "test_accuracy")}
    summary = {
        "schema_version": SCHEMA_VERSION,
        "strategy": run.strategy,
        "ranks": run.everyone.size,
        "workers": run.workers,
        "data": data.name,
        "model": name_of(plain(run.model)),
        "parameters": int(run.model.layout.size),
        "dtype": str(run.model.layout.dtype),
        "device": "cuda" if any("device_per_rank" in rank for rank in ranks) else "cpu",
        "epochs": run.step / run.per_epoch,
        "steps": run.step,
        "batch_size": run.batch,
        "seed": options.seed,
        "allreduce": run.comm.allreduce,
        "stopped": run.stopped,
        "train_loss": run.metrics.known_loss,
        **scores,
        **run.scores,
        "seconds": run.seconds,
        "examples_per_second": run.rate,
        "replicas_agree": agree,
        **run.reported,
    }
    names = dict.fromkeys(name for rank in ranks for name in rank)  # servers use no GPU, and say nothing of it
    for name in ("memory", "host"):
        names.pop(name, None)
    summary |= {name: [rank.get(name) for rank in ranks] for name in names} | summed(legs)
    if all("memory" in rank for rank in ranks):
        summary["memory_bytes_per_rank"] = {kind: [rank["memory"][kind] for rank in ranks] for kind in KINDS}
    if summary["device"] != "cpu":
        ours = summary["allreduce"] == run.comm.allreduce  # else the strategy has another, which is staged
        summary["exchange"] = run.comm.exchange if ours else "staged"
    summary["legs"] = legs
    summary["environment"] = environment()
    return summary


def as_table(summary: dict) -> Table:
    """The result of a run for people."""
    table = Table(
        title=f"{summary['strategy']} on {counted(summary['ranks'], 'rank')}", title_justify="left", show_header=False
    )
    table.add_row(
        "model", f"{summary['model']}, {counted(summary['parameters'], 'parameter', ',')}, {summary['dtype']}"
    )
    table.add_row("data", printable(summary["data"]))
    if "exchange" in summary:
        table.add_row("device", ", ".join(sorted(set(filter(None, summary["device_per_rank"])))))
        table.add_row("messages from there", summary["exchange"])
    if "rounds" in summary:
        asked = f"{summary['clients_per_round']:,} of {counted(summary['clients'], 'client', ',')}"
        table.add_row("rounds", f"{summary['rounds']:,} of {asked}")
        if "rounds_to_accuracy" in summary:
            table.add_row("rounds to accuracy", str(summary["rounds_to_accuracy"] or "not reached"))
        if summary.get("rounds_abandoned"):
            table.add_row("rounds abandoned", f"{summary['rounds_abandoned']:,}, with too few answers for secure sums")
        if summary.get("epsilon") is not None:
            table.add_row("privacy", f"epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}")
    else:
        table.add_row(
            "steps",
            f"{summary['steps']:,} of {counted(summary['batch_size'], 'example')}, "
            f"{counted(summary['epochs'], 'epoch', 'g')}",
        )
    for name in ("train_loss", "validation_loss", "validation_accuracy", "test_loss", "test_accuracy", "test_rmse"):
        if summary.get(name) is not None:
            value = f"{summary[name]:.2%}" if name.endswith("accuracy") else f"{summary[name]:.4f}"
            table.add_row(name.replace("_", " "), value)
    table.add_row("seconds", f"{summary['seconds']:.2f} ({summary['examples_per_second']:,.0f} examples/s)")
    if summary["allreduce"] is not None:
        table.add_row("all-reduce", summary["allreduce"])
    if summary.get("compress", "none") != "none":
        table.add_row("messages in", summary["compress"])
    sent, messages = summary["bytes_sent_per_rank"], summary["messages_per_rank"]
    table.add_row("sent per rank", f"{span(sent, '.2f', 1e6)} MB")
    if None not in messages:
        table.add_row("messages per rank", span(messages, ",.0f"))
    for name in ("compute", "communication", "idle"):
        seconds = summary[f"{name}_seconds_per_rank"]
        table.add_row(f"{name} per rank", f"{span(seconds, '.2f')} s")
    table.add_row("peak memory per rank", f"{span(summary['peak_memory_bytes_per_rank'], ',.0f', 2**20)} MiB")
    for kind, held in summary.get("memory_bytes_per_rank", {}).items():
        table.add_row(f"{kind} per rank", f"{span(held, ',.2f', 2**20)} MiB")
    if summary["replicas_agree"] is not None:
        table.add_row("replicas agree", "yes" if summary["replicas_agree"] else "NO")
    if "consensus_distance" in summary:
        table.add_row("consensus distance", f"{summary['consensus_distance']:.3g}")
    if summary.get("replica_test_accuracy"):
        table.add_row("test accuracy of replicas", span(summary["replica_test_accuracy"], ".2%"))
    if summary["stopped"] != "finished":
        table.add_row("ended by", summary["stopped"])
    return table


def span(values: list, form: str, unit: float = 1) -> str:
    """One number, or the smallest and the largest of several, in a unit; and of how many ranks it is not known."""
    there = [each / unit for each in values if each is not None]
    if not there:
        return "unknown"
    low, high = format(min(there), form), format(max(there), form)
    missing = f" ({len(values) - len(there)} unknown)" if len(there) < len(values) else ""
    return (low if low == high else f"{low} to {high}") + missing
