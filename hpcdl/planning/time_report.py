"""Forecasts of time as tables: a line's parts and examples a second, and what is to be said of the machine."""

from typing import NamedTuple

from hpcdl.formatting import counted
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.parts import Parts
from hpcdl.planning.scale_report import shown
from hpcdl.planning.step_time import foretell
from hpcdl.planning.tables import table
from hpcdl.planning.workload import Workload

HEADER = ["line", "ranks", "a step", "compute", "messages", "bubble", "queue", "start", "hidden", "examples/s"]


class Forecast(NamedTuple):
    """A line and what is foretold of it. exact: its model was measured on just as many ranks."""

    line: str
    ranks: int
    case: Workload
    parts: Parts
    exact: bool


def forecast(text: str, case: Workload, machine: Machine) -> Forecast:
    """Of a line. UsageError where nobody knows."""
    told = foretell(case, machine)
    return Forecast(text, case.ranks, case, told.parts, told.exact)


def times(found: list[Forecast], machine: Machine) -> list[str]:
    """The table, and below it what a reader should know."""
    rows = [HEADER]
    for each in found:
        parts = each.parts
        own = parts.compute, parts.messages, parts.bubble, parts.queue, parts.start, parts.hidden
        cells = [shown(parts.seconds), *(shown(value) if value else "-" for value in own), f"{parts.rate:,.0f}"]
        rows.append([each.line, str(each.ranks), *cells])
    return [*table(rows), *remarks(found, machine)]


def rate(value: float) -> str:
    """Examples a second; of few three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def remarks(found: list[Forecast], machine: Machine) -> list[str]:
    """Where cores are shared, and what was not measured on as many ranks."""
    said = []
    for ranks in sorted({each.ranks for each in found}):
        here, sharing = min(ranks, machine.links.ranks_per_node), machine.sharing(ranks)
        of_these = [each for each in found if each.ranks == ranks]
        computing = [each for each in of_these if not each.case.options.pretend_compute]
        if sharing > 1 and computing:
            said.append(
                f"{here} ranks on {counted(machine.cores, 'core')} of a node: computing takes {sharing:.3g} times as "
                "long (--pretend-compute sleeps instead)"
            )
        guessed = [each for each in of_these if not each.exact]
        if guessed:
            models = ", ".join(dict.fromkeys(each.case.spec for each in guessed))
            said.append(f"{models}: not measured on {counted(ranks, 'rank')}; foretold from what the machine file says")
    return said
