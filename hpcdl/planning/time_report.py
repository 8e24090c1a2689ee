"""Tables of time forecasts: parts of each line's step, examples per second, and remarks about the machine."""

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
    """The forecast of a command line. exact: True if its model was measured on the same number of ranks."""

    line: str
    ranks: int
    case: Workload
    parts: Parts
    exact: bool


def forecast(text: str, case: Workload, machine: Machine) -> Forecast:
    """Return the forecast of a line. UsageError if there is none."""
    told = foretell(case, machine)
    return Forecast(text, case.ranks, case, told.parts, told.exact)


def times(found: list[Forecast], machine: Machine) -> list[str]:
    """Return the table of forecasts, and remarks below it."""
    rows = [HEADER]
    for each in found:
        parts = each.parts
        own = parts.compute, parts.messages, parts.bubble, parts.queue, parts.start, parts.hidden
        cells = [shown(parts.seconds), *(shown(value) if value else "-" for value in own), f"{parts.rate:,.0f}"]
        rows.append([each.line, str(each.ranks), *cells])
    return [*table(rows), *remarks(found, machine)]


def rate(value: float) -> str:
    """Return examples per second as a text; below 100 with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def remarks(found: list[Forecast], machine: Machine) -> list[str]:
    """Return remarks about shared cores, and models not measured on as many ranks."""
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
