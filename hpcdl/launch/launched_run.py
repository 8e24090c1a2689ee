"""A job that a plain Python process starts, as a notebook's cell: a program of hpcdl on several ranks, and its results.

    notebook         launch("train-gossip", ranks=4) ..... waits, prints what the job prints ..... run.metrics
    mpiexec -n 4                |o----o----o----o----o----o|

This process starts no MPI: the ranks are processes of the launcher's, and what they have found is read from the run's
folder. An interrupt (Ctrl-C, a notebook's stop) is passed on as USR1, which lets a run save; the next one kills it."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.errors import LoneError, UsageError, unknown
from hpcdl.files import parse_json
from hpcdl.formatting import dashed
from hpcdl.machine.launcher import OVERSUBSCRIBED, clean_environment, mpiexec
from hpcdl.metric_lines import MetricLines, is_evaluation
from hpcdl.programs import TRAINS, files, writes_folder

LAST_LINES = 30  # of a failed job's output, for a traceback
BAD_INPUT = 2  # the status of a program that refuses its options or data
ARRAYS = ("x", "y", "x_test", "y_test")  # of `data`


@dataclass(frozen=True)
class LaunchedRun:
    """A run that has ended. program: its name. folder: its files (docs/runs.md). output: the text that it printed."""

    program: str
    folder: Path
    output: str

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The object in summary.json: scores, costs of each rank, options; UsageError if the run has written none."""
        path = self.folder / "summary.json"
        try:
            found: dict[str, Any] = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
        return found

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Evaluations: for each name of their lines in metrics.jsonl (step, test_loss, bytes, ...) a float64 array, in
        order of the steps; NaN where a line lacks the name."""
        return self._arrays(evaluations=True)

    @cached_property
    def train_metrics(self) -> dict[str, np.ndarray]:
        """Steps: arrays as in `metrics` of the lines between evaluations (step, train_loss, learning_rate, ...)."""
        return self._arrays(evaluations=False)

    def _arrays(self, evaluations: bool) -> dict[str, np.ndarray]:
        path = self.folder / "metrics.jsonl"
        try:
            lines = [line for line in MetricLines(path) if is_evaluation(line) == evaluations]
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        names = dict.fromkeys(name for line in lines for name in line)

        def number(value: Any) -> float:
            return value if isinstance(value, int | float) else np.nan

        return {name: np.array([number(line.get(name)) for line in lines], float) for name in names}

    def predict(self, rows: Any, **options: Any) -> dict[str, np.ndarray]:
        """Return the predictions for new rows, as `hpcdl predict --out NAME.npz` writes them: `prediction` (numbers of
        classes, or values), `output` (of the model), `classes` (names), `row`. rows: an array (rows, features...), or
        what `predict` takes: a table's file, an HDF5 file. options: of `predict`."""
        with tempfile.TemporaryDirectory() as folder:
            if not isinstance(rows, str | os.PathLike):
                np.savez(f"{folder}/rows.npz", x=np.asarray(rows))
                rows = f"{folder}/rows.npz"
            words = [str(self.folder), str(rows), "--out", f"{folder}/predictions.npz", "--trust", str(self.folder)]
            run_program(["predict", *words, *_options(options)], 1)
            with np.load(f"{folder}/predictions.npz") as arrays:
                return dict(arrays)


def launch(
    program: str,
    *words: str,
    ranks: int = 1,
    data: Any = None,
    out: str | os.PathLike = "",
    show: bool = True,
    launcher: str = "",
    **options: Any,
) -> LaunchedRun:
    """Run a program that trains, `search` or `compare` on `ranks` ranks; return the run when it has ended.

    words: arguments without a name, as the lines of `compare`. data: as of --data, or arrays (x, y) or
    (x, y, x_test, y_test), which become the data file OUT-data.h5; of (x, y) a fifth of the rows is kept for the test.
    out: the folder; "": a new one in runs/. show: print what the job prints, as it comes. launcher: a command that
    takes -n RANKS; "": this Python's mpiexec. options: of the program, with underscores, as batch_size=64; a list for
    an option of several values, True for one without a value.

    Raises UsageError for what the program refuses, LoneError if the job fails, both with its line of error."""
    known = [name for name in files() if writes_folder(name)]
    program = program.replace("_", "-")
    if program not in known:
        raise UsageError(unknown("program", program, known))
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"ranks is a whole number of 1 or more, not {ranks!r}")
    resumed = options.get("resume", "")
    folder = Path(out or resumed or _new_folder(program))
    if out or not resumed:
        options["out"] = folder
    elif folder.is_file():  # a checkpoint
        folder = folder.parent
    if data is not None:
        options["data"] = data if isinstance(data, str | os.PathLike) else _data_file(data, folder)
    return LaunchedRun(program, folder, run_program([program, *words, *_options(options)], ranks, launcher, show))


def _new_folder(program: str) -> Path:
    stem = f"{program.removeprefix(TRAINS)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (Path("runs", stem + f"-{number}" * (number > 1)) for number in range(1, sys.maxsize))
    return next(path for path in names if not path.exists())


def _data_file(arrays: Any, folder: Path) -> Path:
    """Write arrays as a data file beside the run's folder; return its path."""
    if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 4):
        raise UsageError("data is a name, a file, or arrays (x, y) or (x, y, x_test, y_test)")
    path = folder.with_name(f"{folder.name}-data.h5")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ARRAYS if len(arrays) == 4 else ARRAYS[:2]
    with tempfile.TemporaryDirectory() as temporary:
        file = f"{temporary}/arrays.npz"
        np.savez(file, **{name: np.asarray(each) for name, each in zip(names, arrays, strict=True)})  # type: ignore[arg-type]
        run_program(["prepare-data", "npz", file, str(path), "--force"], 1)
    return path


def _options(options: dict[str, Any]) -> Iterator[str]:
    """Yield the words of a command line for options by name."""
    for name, value in options.items():
        if value is None or value is False:
            continue
        yield f"--{dashed(name)}"
        if value is not True:
            yield from map(str, value if isinstance(value, list | tuple) else [value])


def run_program(words: list[str], ranks: int, launcher: str = "", show: bool = False, **variables: str) -> str:
    """Run a program on `ranks` ranks; return what it printed. variables: added to this process's environment.
    Raises UsageError or LoneError if its status is not 0."""
    start = shlex.split(launcher) or [mpiexec()]
    command = [*start, "-n", str(ranks), sys.executable, "-m", "hpcdl", *words]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = OVERSUBSCRIBED | clean_environment() | variables
    try:
        # In a session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on.
        job = subprocess.Popen(command, env=environment, text=True, errors="replace", start_new_session=True, **pipes)
    except OSError as error:
        raise UsageError(f"{start[0]} cannot be started: {error.strerror}") from None
    printed: list[str] = []
    interrupted = False
    with job:
        while True:
            try:
                for text in job.stdout or ():
                    printed.append(text)
                    if show:
                        print(text, end="", flush=True)
                job.wait()
                break
            except KeyboardInterrupt:
                job.send_signal(signal.SIGINT if interrupted else signal.SIGUSR1)
                interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    if job.returncode:
        reason = next((text.strip() for text in printed if "error:" in text), "\n" + "".join(printed[-LAST_LINES:]))
        if job.returncode == BAD_INPUT:
            raise UsageError(reason)
        raise LoneError(f"{words[0]} on {ranks} ranks ended with status {job.returncode}: {reason}")
    return "".join(printed)
