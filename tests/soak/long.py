"""A long run, and what it holds while it goes on: mpiexec -n 2 python tests/soak/long.py STEPS [EVERY [OPTION ...]]

A small model learns for so many steps, with trace, metrics, flight recorder and a checkpoint after every EVERY steps
(1,000). As often each rank notes what it holds: memory, open files, files in /dev/shm that it maps, communicators,
requests in flight and left behind, Python's objects. After the first EVERY steps nothing may grow but what docs/runs.md
says does: metrics.jsonl by a line a step and one an evaluation. Ends with status 1 where something has."""

import gc
import json
import os
import re
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.comm.requests import Request
from hpcdl.runs.run import Run
from hpcdl.scripts import train_allreduce

WORLD = MPI.COMM_WORLD
SETTLED = 10_000  # steps of a run from which on it has as much memory as it will take
SPANS = 1_000  # that the trace keeps of each rank
OPTIONS = ["--model", "mlp:8", "--batch-size", "16", "--allreduce", "ring", "--trace", str(SPANS), "--progress", "none"]
FLAT = "files", "shm", "communicators", "requests"  # may not differ at all
MIB = 1 << 20
MORE = {"memory": 8 * MIB, "objects": 20_000}  # so much may: allocators keep some, calls are looked up for each length
PART = re.compile(r"checkpoint(-[0-9]+)?\.h5")


def held(run: Run) -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    there = gc.get_objects()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "step": run.step,
        "memory": resident * resource.getpagesize(),
        "files": len(os.listdir("/proc/self/fd")),
        "shm": len(set(re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text()))),
        "communicators": sum(type(each) is Communicator and each.mpi != MPI.COMM_NULL for each in there),
        "requests": sum(isinstance(each, Request) for each in there) + len(activity.in_flight + activity.abandoned),
        "objects": len(there),
        "spans": len(run.comm.timeline.spans),
        "metrics": sum(path.stat().st_size for path in run.folder.path.glob("metrics.jsonl")),
        "checkpoints": len([path for path in run.folder.path.iterdir() if PART.fullmatch(path.name)]),
    }


def watch(every: int) -> list[dict[str, int]]:
    """Let each step that is a multiple of `every` note what is held, behind its boundary; the list of these notes."""
    notes, boundary = [], Run.boundary

    def noting(run: Run) -> None:
        boundary(run)
        if run.step % every == 0:
            notes.append(held(run))

    Run.boundary = noting
    return notes


def grown(notes: list[dict[str, int]]) -> list[str]:
    """What a rank holds more of at its end, or anywhere between, than when it first took note."""
    first, found = notes[0], []
    for name in FLAT:
        if other := {each[name] for each in notes} - {first[name]}:
            found.append(f"{name}: {first[name]} at step {first['step']}, then {sorted(other)}")
    for name, more in MORE.items() if notes[-1]["step"] >= SETTLED else ():
        if notes[-1][name] > first[name] + more:
            found.append(f"{name}: {first[name]:,} at step {first['step']}, {notes[-1][name]:,} at the end")
    return found


def table(notes: list[dict[str, int]], rows: int = 6) -> str:
    """Some of the notes as a table, the first and the last among them."""
    chosen = [notes[round(i * (len(notes) - 1) / (rows - 1))] for i in range(rows)] if len(notes) > rows else notes
    lines = ["| " + " | ".join(chosen[0]) + " |", "|---" * len(chosen[0]) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(f"{value:,}" for value in each.values()) + " |" for each in chosen)])


def main(steps: str, every: str = "1000", *options: str) -> None:
    notes, folder = watch(int(every)), Path(WORLD.bcast(tempfile.mkdtemp()))
    saved = ["--steps", steps, "--checkpoint-every", every, "--out", str(folder / "run")]
    train_allreduce.main([*OPTIONS, *saved, *options])
    held_by = WORLD.gather((notes, grown(notes)))
    if held_by is None:
        return
    try:
        summary = json.loads((folder / "run" / "summary.json").read_text())
        trace = json.loads((folder / "run" / "trace.json").read_text())
        lines = sum(1 for _ in (folder / "run" / "metrics.jsonl").open())
        print(table(held_by[0][0]))
        spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
        print(f"{summary['steps']:,} steps; metrics.jsonl: {lines:,} lines; trace.json: {len(spans):,} spans, ", end="")
        print(f"{(folder / 'run' / 'trace.json').stat().st_size / MIB:.1f} MiB; {summary['seconds']:.0f} s of steps")
        wrong = [f"rank {rank}: {each}" for rank, (_, found) in enumerate(held_by) for each in found]
        if summary["steps"] != int(steps) or len(notes) != int(steps) // int(every):
            wrong.append(f"{summary['steps']} steps and {len(notes)} notes of {steps}")
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").open())
        if [line["step"] for line in lines if "test_loss" not in line] != [*range(1, int(steps) + 1)]:
            wrong.append("metrics.jsonl: not each step is there once")
        if len(spans) > SPANS * WORLD.size:
            wrong.append(f"trace.json: {len(spans)} spans")
    finally:
        shutil.rmtree(folder)
    print("long: flat" if not wrong else "\n".join(f"long: {each}" for each in wrong), flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
