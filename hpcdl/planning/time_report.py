"""Tables of time forecasts: parts of each line's step, examples per second, and remarks about the machine."""

from typing import NamedTuple

from hpcdl.formatting import counted, table
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.parts import StepParts
from hpcdl.planning.scale_report import duration
from hpcdl.planning.step_time import forecast_step
from hpcdl.strategies.workload import Workload

HEADER = ["line", "ranks", "a step", "compute", "messages", "bubble", "queue", "start", "hidden", "examples/s"]


class Forecast(NamedTuple):
    """The forecast of a command line. exact: True if its model was measured on the same number of ranks."""

    line: str
    ranks: int
    case: Workload
    parts: StepParts
    exact: bool


def forecast(text: str, case: Workload, machine: Machine) -> Forecast:
    """Return the forecast of a line. UsageError if there is none."""
    step = forecast_step(case, machine)
    return Forecast(text, case.ranks, case, step.parts, step.exact)


def times(forecasts: list[Forecast], machine: Machine) -> list[str]:
    """Return the table of forecasts, and remarks below it."""
    rows = [HEADER]
    for each in forecasts:
        parts = each.parts
        own = parts.compute, parts.messages, parts.bubble, parts.queue, parts.start, parts.hidden
        cells = [
            duration(parts.seconds),
            *(duration(value) if value else "-" for value in own),
            f"{parts.rate:,.0f}",
        ]
        rows.append([each.line, str(each.ranks), *cells])
    return [*table(rows), *remarks(forecasts, machine)]


def rate(value: float) -> str:
    """Return examples per second as a text; below 100 with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def remarks(forecasts: list[Forecast], machine: Machine) -> list[str]:
    """Return remarks about shared cores, and models not measured on as many ranks."""
    lines = []
    for ranks in sorted({each.ranks for each in forecasts}):
        here, sharing = min(ranks, machine.links.ranks_per_node), machine.sharing(ranks)
        of_these = [each for each in forecasts if each.ranks == ranks]
        computing = [each for each in of_these if not each.case.options.pretend_compute]
        if sharing > 1 and computing:
            lines.append(
                f"{here} ranks on {counted(machine.cores, 'core')} of a node: computing takes {sharing:.3g} times as "
                "long (--pretend-compute sleeps instead)"
            )
        guessed = [each for each in of_these if not each.exact]
        if guessed:
            models = ", ".join(dict.fromkeys(each.case.spec for each in guessed))
            lines.append(
                f"{models}: not measured on {counted(ranks, 'rank')}; foretold from what the machine file says"
            )
    return lines
