"""List all runs below a folder, a line each: hpcdl runs runs --sort value --reverse

Each run has its strategy, model, data, ranks, steps, main score, seconds of steps, bytes that all ranks have sent, and
state: how it has ended, or that it runs, or is dead. One process is enough, without MPI."""

import json
from dataclasses import dataclass

from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.reports.load import runs_of
from hpcdl.reports.run_table import ordered, read_row, text_of
from hpcdl.runs.options import option


@dataclass
class RunsOptions:
    """Options of runs: where to look, in which order, in which form."""

    folder: list[str] = option(list, "folders of runs, or with runs below them")
    sort: str = option("run", "column by which rows are ordered, as value or bytes")
    reverse: bool = option(False, "order from large to small")
    json: bool = option(False, "print one JSON list of objects, with a column's name for each value")


def main(arguments=None):
    """Print a row for each run."""
    with one_process("runs"):
        options = parse(RunsOptions, "runs", __doc__, arguments)
        rows = ordered(
            [read_row(name, run) for name, run in runs_of(options.folder).items()], options.sort, options.reverse
        )
        if options.json:
            print(json.dumps([row._asdict() for row in rows], indent=1))
        else:
            print("\n".join(text_of(rows)))


if __name__ == "__main__":
    main()
