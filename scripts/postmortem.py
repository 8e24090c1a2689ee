"""Which rank hangs or has failed, where, and who waits for whom: hpcdl postmortem runs/a

Reads what the ranks of a run have recorded in its folder (flight/), also when they have been killed, or while they
run; one process is enough, without MPI. A run that ends in good order removes its recordings (docs/debugging.md)."""

from dataclasses import dataclass
from pathlib import Path

from hpcdl.errors import UsageError, line
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.reports.postmortem import ended_well, recordings, story, table
from hpcdl.runs.options import not_negative, option


@dataclass
class PostmortemOptions:
    """Options of postmortem: the run, and how much of it is shown."""

    folder: str = option(..., "folder of the run")
    last: int = option(0, "list so many of the last operations of each rank; 0: none")
    rank: int = option(-1, "list the operations of this rank only; -1: of all ranks")
    which: int = option(0, "number of the start that is shown, if the run was started again; 0: the last one")

    def __post_init__(self):
        not_negative(self, "last")


def main(arguments=None):
    with one_process("postmortem"):
        options = parse(PostmortemOptions, "postmortem", __doc__, arguments)
        folder = Path(options.folder)
        if ended_well(folder):
            lines = [f"{folder}: the run has ended in good order, and has left no recordings"]
        else:
            found = recordings(folder, options.which)
            known = ", ".join(map(str, sorted(found)))
            if options.rank != -1 and options.rank not in found:
                raise UsageError(f"--rank {options.rank}: there are only recordings of ranks {known}")
            lines = story(folder, found)
            for rank in sorted(found) if options.last else []:
                lines += table(found[rank], options.last) if options.rank in (-1, rank) else []
        print("\n".join(map(line, lines)), flush=True)


if __name__ == "__main__":
    main()
