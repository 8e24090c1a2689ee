"""Make a page with pictures of runs, comparisons and searches: hpcdl report runs/a --out report.html

One HTML file that needs nothing from elsewhere: what the runs learned against steps, seconds and bytes, where their
time went, who sent what to whom (docs/report.md). One process is enough; it takes all cores, and MPI is not needed."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcdl.errors import line
from hpcdl.formatting import counted
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.reports.report import make
from hpcdl.runs.options import option


@dataclass
class ReportOptions:
    """Options of report: what is shown, and where the page goes."""

    folders: list[str] = option(..., "folders of runs, of comparisons or of searches, or folders above them")
    out: str = option("", "the page: NAME.html; by default report.html in the first folder")
    pictures: str = option("", "folder to write each picture to, too, as a file of its own")
    picture_format: Literal["png", "svg"] = option("png", "format of the files in --pictures")
    force: bool = option(False, "replace files of these names that no report has written")


def main(arguments=None):
    """Write the page and print what it shows; bad input is one line on stderr and exit status 2."""
    with one_process("report"):
        options = parse(ReportOptions, "report", __doc__, arguments)
        out = Path(options.out or Path(*options.folders[:1], "report.html"))
        pictures = Path(options.pictures) if options.pictures else None
        made = make(options.folders, out, pictures, options.picture_format, options.force)
        for each in made.missing:
            print(f"report: {line(each)}", file=sys.stderr)
        what = [counted(made.comparisons, "comparison")] if made.comparisons else []
        what += [counted(made.searches, "search")] if made.searches else []
        what += [counted(made.runs, "run")] if made.runs or not what else []
        print(line(f"{out}: {' and '.join(what)}, {counted(made.pictures, 'picture')}"), flush=True)


if __name__ == "__main__":
    main()
