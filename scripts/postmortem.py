"""Which rank hangs or has failed, where, and who waits for whom: python scripts/postmortem.py runs/a

Reads what the ranks of a run have recorded in its folder (flight/), also when they have been killed, or while they
run; one process is enough, without MPI. Recordings are there until a run ends in good order (docs/debugging.md).
"""

from dataclasses import dataclass
from pathlib import Path

from hpcdl.errors import UsageError, line
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.reports.postmortem import ended_well, recordings, story, table
from hpcdl.runs.options import option


@dataclass
class PostmortemOptions:
    """Which run, and how much of it is shown."""

    folder: str = option(..., "folder of the run")
    last: int = option(0, "operations of each rank that are listed, the last ones; 0: none")
    rank: int = option(-1, "list those of this rank alone; -1: of all")
    which: int = option(0, "of a run that was started again, the number of the try that is shown; 0: the last one")

    def __post_init__(self):
        if self.last < 0:
            raise UsageError(f"--last is a number of operations, not {self.last}")


def main(arguments=None):
    with one_process("postmortem"):
        options = parse(PostmortemOptions, "postmortem", __doc__, arguments)
        folder = Path(options.folder)
        if ended_well(folder):
            lines = [f"{folder}: the run has ended in good order, and has left no recordings"]
        else:
            lines = told(folder, options)
        print("\n".join(map(line, lines)), flush=True)


def told(folder, options):
    """The story of the run, and lists of operations."""
    found = recordings(folder, options.which)
    if options.rank != -1 and options.rank not in found:
        raise UsageError(f"--rank {options.rank}: there are recordings of ranks {', '.join(map(str, sorted(found)))}")
    lines = story(folder, found)
    for rank in sorted(found) if options.last else []:
        if options.rank in (-1, rank):
            lines += table(found[rank], options.last)
    return lines


if __name__ == "__main__":
    main()
