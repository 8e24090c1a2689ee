"""Errors of forecasts of time, over a matrix of command lines that are forecast and then run for some steps.

    error = forecast / measured - 1        of the seconds per step; reported: median and 90th percentile of |error|

Lines with the same number of ranks run in one job, in turns, so that disturbances of the machine affect all of them;
the median of a line's turns counts. Lines of MATRIX on 3 or 4 ranks, which may outnumber cores, pretend to compute."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from hpcdl.errors import UsageError, blamed_on
from hpcdl.formatting import counted, table
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.probe_jobs import Start, run
from hpcdl.planning.scale_report import duration
from hpcdl.planning.step_time import Forecast, Read, forecast_step

FEWEST, MOST = 20, 3000  # steps of a run
SMALL, LARGE, GPT = "--model mlp:32", "--model mlp:512,512,256", "--data text --model gpt:layers=2,width=64,heads=4"
PRETEND = "--pretend-compute 20"
MATRIX = [  # ranks, line
    (1, f"train-sequential {SMALL}"),
    (1, f"train-sequential {LARGE} --batch-size 128"),
    (1, "train-sequential --model softmax --batch-size 64"),
    (1, f"train-sequential {GPT} --batch-size 8"),
    (2, f"train-allreduce {SMALL}"),
    (2, "train-allreduce --model softmax --batch-size 256"),
    (2, f"train-allreduce {LARGE} --batch-size 64 --allreduce ring"),
    (2, f"train-allreduce {LARGE} --batch-size 256 --allreduce tree"),
    *((2, f"train-allreduce {LARGE} --batch-size 128 --allreduce {name}") for name in ("naive", "recursive", "shared")),
    (2, f"train-allreduce {LARGE} --batch-size 128 --compress bfloat16"),
    (2, f"train-allreduce {LARGE} --batch-size 128 --overlap --bucket-mib 0.5"),
    (2, f"train-allreduce {GPT} --batch-size 16"),
    (2, f"train-local-sgd {LARGE} --batch-size 128 --sync-every 4"),
    (2, f"train-gossip {LARGE} --batch-size 128"),
    *((2, f"train-fully-sharded {LARGE} --batch-size 128 --stage {stage}") for stage in (1, 2, 3)),
    (2, f"train-tensor-parallel {LARGE} --batch-size 128"),
    (2, f"train-tensor-parallel {GPT} --batch-size 16"),
    (2, f"train-pipeline {LARGE} --batch-size 128 --microbatches 4 --schedule gpipe"),
    (2, f"train-pipeline {GPT} --batch-size 16 --microbatches 8 --schedule 1f1b"),
    (2, f"train-parameter-server {LARGE} --batch-size 64"),
    (2, f"train-parameter-server {LARGE} --batch-size 64 --consistency async"),
    (3, f"train-allreduce {LARGE} --allreduce ring {PRETEND}"),
    (3, f"train-gossip {LARGE} --topology ring {PRETEND}"),
    (3, f"train-parameter-server {LARGE} {PRETEND}"),
    (3, f"train-parameter-server {LARGE} --consistency async --servers 1 {PRETEND}"),
    (3, f"train-pipeline {LARGE} --microbatches 6 --schedule 1f1b {PRETEND}"),
    (4, f"train-allreduce {LARGE} --allreduce tree {PRETEND}"),
    (4, f"train-allreduce {LARGE} --overlap {PRETEND}"),
    (4, f"train-local-sgd {LARGE} --sync-every 8 {PRETEND}"),
    (4, f"train-gossip {LARGE} --topology exponential {PRETEND}"),
    (4, f"train-fully-sharded {LARGE} --stage 3 {PRETEND}"),
    (4, f"train-pipeline {LARGE} --microbatches 8 --schedule gpipe {PRETEND}"),
    (4, f"train-pipeline {LARGE} --microbatches 4 --schedule naive {PRETEND}"),
    (4, f"train-grid {LARGE} --grid data=2,pipeline=2 --microbatches 4 {PRETEND}"),
    (4, f"train-grid {LARGE} --grid data=2,tensor=2 --microbatches 2 --stage 1 {PRETEND}"),
    (4, f"train-parameter-server {LARGE} --servers 2 --consistency ssp --staleness 2 {PRETEND}"),
]


class CheckedForecast(NamedTuple):
    """A forecast with measured seconds per step, one for each turn. failed: why the line could not run, or ""."""

    forecast: Forecast
    step_seconds: list[float]
    failed: str = ""

    @property
    def measured(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def error(self) -> float:
        return self.forecast.parts.seconds / self.measured - 1


def read_matrix(path: str) -> list[tuple[int, str]]:
    """Return (ranks, line) of each entry of a YAML list, such as - "-n 2: train-allreduce". Raises UsageError."""
    with blamed_on(f"{path} cannot be read"):
        text = Path(path).read_text()
    try:
        lines = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: the file is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(lines, list) or not lines or not all(isinstance(each, str) for each in lines):
        raise UsageError(f'{path}: the file must be a list of lines such as - "-n 2: train-allreduce"')
    return [parse_placement(each) for each in lines]


def parse_placement(text: str, ranks: int = 0) -> tuple[int, str]:
    """Split `-n 2: train-allreduce` into ranks and line. UsageError if neither the text nor `ranks` gives the ranks."""
    from hpcdl.launch.command_lines import PLACED

    match = PLACED.fullmatch(text)
    if match is None and not ranks:
        raise UsageError(f'{text!r} has no number of ranks: write "-n 2: {text}", or give --ranks')
    if match is not None and not int(match[1]):
        raise UsageError(f"{text!r}: a line runs on 1 rank or more")
    return (int(match[1]), match[2].strip()) if match is not None else (ranks, text.strip())


def steps_for(forecast: Forecast, seconds: float) -> int:
    """Return the number of steps that take about `seconds`, from FEWEST to MOST."""
    return int(min(MOST, max(FEWEST, seconds / max(forecast.parts.seconds, 1e-9))))


def measure_forecasts(
    forecasts: Sequence[Forecast], repeat: int, seconds: float, start: Start | None, say: Callable
) -> list[CheckedForecast]:
    """Run each forecast line `repeat` times for about `seconds`. LoneError if ranks cannot be started."""
    answers: dict[int, CheckedForecast] = {}
    for ranks in sorted({each.case.ranks for each in forecasts}):
        places = [i for i, each in enumerate(forecasts) if each.case.ranks == ranks]
        say(f"running {counted(len(places), 'line')} on {counted(ranks, 'rank')}")
        job = {"lines": [[forecasts[i].line, steps_for(forecasts[i], seconds)] for i in places], "repeat": repeat}
        for i, taken in zip(places, run(ranks, job, start)["runs"], strict=True):
            failed = taken if isinstance(taken, str) else ""
            answers[i] = CheckedForecast(forecasts[i], [] if failed else taken, failed)
    return [answers[i] for i in range(len(forecasts))]


def make_forecasts(lines: Sequence[tuple[int, str]], machine: Machine, read: Read) -> list[Forecast]:
    """Return a forecast of each line. A UsageError names the line."""
    forecasts = []
    for ranks, text in lines:
        try:
            forecasts.append(forecast_step(read(text, ranks), machine, line=text))
        except UsageError as error:
            raise UsageError(f"-n {ranks}: {text}: {error}") from None
    return forecasts


def report(checked: list[CheckedForecast]) -> list[str]:
    """Return the table of forecasts, and a summary of the errors."""
    rows = [["ranks", "line", "foretold", "measured", "error"]]
    for each in checked:
        cells = ["", each.failed] if each.failed else [duration(each.measured), f"{100 * each.error:+.0f} %"]
        rows.append([str(each.forecast.case.ranks), each.forecast.line, duration(each.forecast.parts.seconds), *cells])
    lines = table(rows, (0, 1))
    errors = np.abs([each.error for each in checked if not each.failed])
    if errors.size:
        middle, most = 100 * np.median(errors), 100 * np.quantile(errors, 0.9)
        lines.append(f"{counted(errors.size, 'line')}: median error {middle:.0f} %, 9 of 10 within {most:.0f} %")
    return lines
