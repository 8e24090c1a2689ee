"""Metrics of old runs for other tools: hpcdl export-metrics runs/a --to tensorboard

Makes of metrics.jsonl what --log writes during a run: metrics.csv, or a folder tensorboard/ of events, in the run's
folder or elsewhere (--out). Each FOLDER is a run's, or holds runs. One process is enough, without MPI."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcdl.errors import UsageError, line
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.reports.exporting import Target, export
from hpcdl.reports.load import runs_of
from hpcdl.runs.metric_logs import CSV, EVENTS, need_package
from hpcdl.runs.options import option


@dataclass
class ExportOptions:
    """Options of export-metrics: what is exported, and where to."""

    folder: list[str] = option(list, "folders of runs, or with runs below them")
    to: Literal["csv", "tensorboard"] = option("csv", "a table, or TensorBoard's events")
    out: str = option("", "for one run NAME.csv, or a folder for the events; for several runs a folder for all of them")
    force: bool = option(False, "replace an earlier output")


def main(arguments=None):
    """Export the runs one after another; print for each what the run had, and what was damaged."""
    with one_process("export-metrics"):
        options = parse(ExportOptions, "export-metrics", __doc__, arguments)
        if options.to == "tensorboard":
            need_package("tensorboard", "--to tensorboard")
        targets = targets_of(options)
        for target in targets:
            target.check(options.force)
        for target in targets:
            print(line(export(target)), flush=True)


def targets_of(options: ExportOptions) -> list[Target]:
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
