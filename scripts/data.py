"""Look at data sets, and verify them: hpcdl data show digits

    data.py show FILE|FOLDER     rows, types, columns with ranges and missing values, classes, a few rows or pictures
    data.py verify FILE|FOLDER   read all of it, and compare checksums and digest; exit status 1 if a part is damaged

A data set is a name (digits, text), an HDF5 file, or a folder of shards. No more than 8 MiB of it are held in memory.
One process is enough; MPI is not needed."""

import json
import sys
from dataclasses import dataclass
from typing import Literal

from hpcdl.data.digest import damage
from hpcdl.data.format import find_data_file, read_info
from hpcdl.data.formats.contents import contents
from hpcdl.data.shards import is_folder, shard_paths
from hpcdl.errors import line
from hpcdl.files import json_value
from hpcdl.formatting import counted
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.machine.display import console
from hpcdl.reports.data_view import data_view
from hpcdl.runs.options import not_negative, option


@dataclass
class ShowOptions:
    """Options of data: the action, and the data set."""

    action: Literal["show", "verify"] = option(..., "show or verify")
    data: str = option(..., "a name (digits, text), an HDF5 file, or a folder of shards")
    rows: int = option(3, "with show: number of rows, or pictures, to print")
    json: bool = option(False, "with show: print JSON")

    def __post_init__(self):
        not_negative(self, "rows")


def main(arguments=None):
    """Show or verify a data set; exit with 1 if it is damaged."""
    with one_process("data"):
        options = parse(ShowOptions, "data", __doc__, arguments)
        path = find_data_file(options.data)
        good = verify(str(path)) if options.action == "verify" else show(path, options)
        sys.exit(0 if good else 1)


def show(path, options):
    """Print what the data set holds; return True."""
    found = contents(read_info(path), options.rows)
    if options.json:
        print(json.dumps(json_value(found), indent=1, ensure_ascii=False))
    else:
        screen = console()
        for each in data_view(found, screen.width, screen.is_terminal):
            screen.print(each)
    return True


def verify(path):
    """Read all of the data set, and print a line for each part that is damaged; return True if none is."""
    damaged = 0
    for problem in damage(path):
        damaged += 1
        print(line(problem), flush=True)
    if damaged and is_folder(path):
        print(line(f"{path}: {counted(damaged, 'problem')} found"))
    if not damaged:
        info, shards = read_info(path), len(shard_paths(path))
        where = f"in {counted(shards, 'shard')}" if shards else "in one file"
        print(line(f"{path}: {counted(sum(info.rows.values()), 'row', ',')} {where}: good"))
    return not damaged


if __name__ == "__main__":
    main()
