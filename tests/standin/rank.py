"""A rank that runs one program after another, as if each had ranks of its own: python rank.py FOLDER

Imports and compiled kernels are most of a short run, so the tests that ask what a program prints and writes share their
ranks (`run_on` in tests/conftest.py). How ranks start, and how they die, is asked by tests that launch them.

A rank connects to the socket FOLDER/door. For each line that comes, [script, arguments, folder] as JSON, it answers a
line with the status that the program left with and the seconds of processor time that it took; what it printed is then
in FOLDER/NUMBER.out and .err. An exception that nobody catches ends the world, as it ends any job of hpcdl."""

import contextlib
import json
import os
import runpy
import socket
import sys
from pathlib import Path

from hpcdl.launch.start import start_mpi


@contextlib.contextmanager
def printed(path: Path, stream):
    """Send what is printed to `stream`, also by libraries, into a file for a while."""
    stream.flush()
    before = os.dup(stream.fileno())
    with path.open("wb") as file:
        os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        stream.flush()
        os.dup2(before, stream.fileno())
        os.close(before)


def status_of(script: str, arguments: list[str]) -> int:
    """Run the script as its user starts it, and return the status that it leaves with.
    The next one has modules of its own where they lie in its folder."""
    sys.argv = [script, *arguments]
    before, path = set(sys.modules), [*sys.path]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{os.getcwd()}{os.sep}"):
                del sys.modules[name]
    return 0


def main(folder: Path) -> None:
    start_mpi()
    from mpi4py import MPI

    number, busy = MPI.COMM_WORLD.rank, 0.0
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(str(folder / "door"))
        with door.makefile("rw") as lines:
            for line in lines:
                script, arguments, where = json.loads(line)
                os.chdir(where)
                with printed(folder / f"{number}.out", sys.stdout), printed(folder / f"{number}.err", sys.stderr):
                    status = status_of(script, arguments)
                before, busy = busy, sum(os.times()[:4])
                print(status, busy - before, file=lines, flush=True)
    MPI.Finalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # the interpreter would take its time to forget all that was compiled
