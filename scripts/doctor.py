"""Say what would hurt a run here: hpcdl doctor; mpiexec -n 4 hpcdl doctor; srun hpcdl doctor

Started alone, it looks at this machine; under a launcher, at all ranks and the network between them, too. Each row says
what was found, and whether that is ok, worth a note, or hurts; advice on rows that are not ok follows (docs/doctor.md).
Exit status: 1 if something would hurt a run. If the ranks are no single world, the first one says so in one line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from hpcdl.checkpoint.export import check_output_file
from hpcdl.errors import TrainingError
from hpcdl.launch.start import Program
from hpcdl.machine.display import console
from hpcdl.machine.world import exit_process, library, split_world
from hpcdl.runs.options import option

if TYPE_CHECKING:
    from hpcdl.machine.doctor import CheckRow

COLOURS = {"ok": "green", "note": "yellow", "hurts": "bold red"}


@dataclass
class DoctorOptions:
    """Options of doctor: what is checked, and where the result goes."""

    quick: bool = option(False, "leave out the network")
    timeout: float = option(60.0, "seconds that a rank may wait in a communication until the job is ended; 0: no limit")
    json: str = option("", "file for the rows: NAME.json")


def run(world, arguments):
    from hpcdl.comm import Communicator
    from hpcdl.launch.launch_consistency import reading
    from hpcdl.machine.doctor import HURTS, CheckRow, examine

    with reading(world) as parse:
        options = parse(DoctorOptions, "doctor", __doc__, arguments)
        check_output_file("--json", options.json, (".json",))
    problem = split_world(world.size, os.environ, library())
    if problem is not None:
        found, advice, number = problem
        if number == 0:
            write(options, [CheckRow("world", found, HURTS, advice)], world.size)
        exit_process(f"{found}; {advice}", number, 1)
    comm = Communicator(world, "mpi", options.timeout)
    rows = examine(comm.mpi, options.quick)
    comm.free()
    if world.rank == 0:
        show(rows)
        write(options, rows, world.size)
    hurting = world.bcast([row.what for row in rows if row.verdict == HURTS])
    if hurting:
        raise TrainingError(f"this would hurt a run: {', '.join(dict.fromkeys(hurting))}")


def show(rows: list[CheckRow]) -> None:
    """Print the table and, below it, the advice on each row that is not ok."""
    from hpcdl.machine.doctor import HURTS

    table = Table("what", "", "found", box=None, pad_edge=False)
    table.columns[2].overflow = "fold"
    for row in rows:
        table.add_row(row.what, Text(row.verdict, COLOURS[row.verdict]), row.found)
    shown = console()
    shown.print(table)
    for row in rows:
        if row.advice:
            shown.print(f"\n{row.what}: {row.advice}", soft_wrap=True, highlight=False)
    if all(row.verdict != HURTS for row in rows):  # else the last line says what would, beside the status
        shown.print("\nnothing would hurt a run", soft_wrap=True, highlight=False)


def write(options: DoctorOptions, rows: list[CheckRow], ranks: int) -> None:
    from hpcdl.launch.benchmark_table import write_json
    from hpcdl.machine.doctor import HURTS

    status = int(any(row.verdict == HURTS for row in rows))
    write_json("doctor", options, [row._asdict() for row in rows], ranks=ranks, status=status)


main = Program("doctor", DoctorOptions, __doc__, run, stoppable=False, status=1)


if __name__ == "__main__":
    main()
