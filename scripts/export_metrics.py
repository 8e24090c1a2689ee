"""Metrics of old runs for other tools: python scripts/export_metrics.py runs/a --to tensorboard

What --log writes while a run goes on, made of metrics.jsonl: metrics.csv, or a folder tensorboard/ of events,
in the run's folder or elsewhere (--out). Each FOLDER is a run's, or holds runs. One process is enough, without MPI.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcdl.errors import UsageError, line
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.reports.exporting import Target, export
from hpcdl.reports.load import runs_of
from hpcdl.runs.metric_logs import CSV, EVENTS, need_tensorboard
from hpcdl.runs.options import option


@dataclass
class ExportOptions:
    """What is exported, and where to."""

    folder: list[str] = option(list, "folders of runs, or with runs below them")
    to: Literal["csv", "tensorboard"] = option("csv", "a table, or TensorBoard's events")
    out: str = option("", "of one run, NAME.csv or a folder for the events; of several, a folder for all of them")
    force: bool = option(False, "replace what is there of us already")


def main(arguments=None):
    """Export one run after the other, and say of each what it had, and what of it was broken."""
    with one_process("export-metrics"):
        options = parse(ExportOptions, "export-metrics", __doc__, arguments)
        if options.to == "tensorboard":
            need_tensorboard("--to tensorboard")
        targets = targets_of(options)
        for target in targets:
            target.check(options.force)
        for target in targets:
            print(line(export(target)), flush=True)


def targets_of(options: ExportOptions) -> list[Target]:
    """What is to be written of which run."""
    runs = runs_of(options.folder)
    table = options.to == "csv"
    if not options.out:
        return [Target(run, run / (CSV if table else EVENTS), table) for run in runs.values()]
    out = Path(options.out)
    if len(runs) == 1:
        if table and out.suffix != ".csv":
            raise UsageError(f"--out {out}: the name should end in .csv")
        return [Target(run, out, table) for run in runs.values()]
    return [Target(run, out / (f"{name}.csv" if table else name), table) for name, run in runs.items()]


if __name__ == "__main__":
    main()
