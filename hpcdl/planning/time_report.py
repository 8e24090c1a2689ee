"""Tables of time forecasts: parts of each line's step, examples per second, and remarks about the machine."""

from hpcdl.formatting import counted, table
from hpcdl.machine.load import SPARE
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.scale_report import duration
from hpcdl.planning.step_time import Forecast

HEADER = ["line", "ranks", "a step", "compute", "messages", "bubble", "queue", "start", "hidden", "examples/s"]


def times(forecasts: list[Forecast], machine: Machine) -> list[str]:
    """Return the table of forecasts, and remarks below it."""
    rows = [HEADER]
    for each in forecasts:
        parts = each.parts
        own = parts.compute, parts.messages, parts.bubble, parts.queue, parts.start, parts.hidden
        cells = [duration(parts.seconds), *(duration(value) if value else "-" for value in own)]
        rows.append([each.line, str(each.case.ranks), *cells, f"{parts.rate:,.0f}"])
    return [*table(rows), *remarks(forecasts, machine)]


def trust(others: float, cores: int) -> str:
    """Return a line on how far forecasts by a measured machine are off (figures of docs/planning.md). others: cores
    that other processes took while it was measured, of `cores`."""
    if others < SPARE:
        return "on two idle cores 40 such forecasts were off by 6 % in the median, and 36 of them by at most 19 %"
    return (
        f"this machine is busy: other processes use {others:.1f} of {counted(cores, 'core')}; beside a dozen of them "
        "such forecasts were off by 52 % in the median, by 6 % on idle cores: measure on a quiet machine"
    )


def rate(value: float) -> str:
    """Return examples per second as a text; below 100 with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def remarks(forecasts: list[Forecast], machine: Machine) -> list[str]:
    """Return remarks about shared cores, and about models not measured on as many ranks."""
    lines = []
    for ranks in sorted({each.case.ranks for each in forecasts}):
        here, sharing = min(ranks, machine.links.ranks_per_node), machine.sharing(ranks)
        of_these = [each for each in forecasts if each.case.ranks == ranks]
        computing = [each for each in of_these if not each.case.options.pretend_compute]
        if sharing > 1 and computing:
            lines.append(
                f"{here} ranks on {counted(machine.cores, 'core')} of a node: computing takes {sharing:.3g} times as "
                "long (--pretend-compute sleeps instead)"
            )
        guessed = [each for each in of_these if not each.exact]
        if guessed:
            specs = ", ".join(dict.fromkeys(each.case.spec for each in guessed))
            lines.append(f"{specs}: not measured on {counted(ranks, 'rank')}; forecast by the machine file's numbers")
    return lines
