"""The survey of a machine: jobs of ranks that measure (probe_jobs.py) give its data sheet (machine_sheet.py).

    1. models, links and collectives, on each number of ranks of the given lines
    2. a short training of a small model by each program; the time missing in its forecast is the program's `start`

For forecasts on several nodes, add ranks_per_node and the links between nodes to a sheet measured on one node."""

import dataclasses
import math
import shlex
import statistics
from collections.abc import Callable
from typing import Any

from hpcdl.errors import LoneError, UsageError
from hpcdl.formatting import counted
from hpcdl.planning.cluster import Cluster
from hpcdl.planning.dry_run import cut_of
from hpcdl.planning.machine_sheet import Machine, Section, read_section
from hpcdl.planning.measuring import all_operations
from hpcdl.planning.message_time import UNSHARED
from hpcdl.planning.probe_jobs import Start, run
from hpcdl.planning.step_time import ASLEEP, Read, calibrate_start, program_name, refuse_unknown
from hpcdl.strategies.description import CODING, SMALL
from hpcdl.strategies.workload import Workload

ON_ONE_NODE = 4096  # ranks_per_node of a machine measured on one node
AT_ONCE = 8  # most measuring ranks per core
STEPS, REPEAT = 200, 3  # of a program's small training
NAP, NAPS = 4, 50  # milliseconds of a pretended gradient, and steps


def small_line(case: Workload, name: str) -> str:
    """Return the line of the small training for a program's `start`. name: by step_time.program_name."""
    strategy, (_, _, mode) = case.strategy, name.removesuffix(ASLEEP).partition(" ")
    own = {each: shlex.quote(getattr(case.options, each)) for each in ("data", "model")}
    more = [strategy.small.format(ranks=case.ranks, widths=",".join(["16"] * max(4, case.ranks)), **own)]
    more += [strategy.modes[mode]] if mode else []
    more += [f"--pretend-compute {NAP}"] if name.endswith(ASLEEP) else []
    return " ".join([strategy.program, *more])


def rows_of(case: Workload) -> set[int]:
    """Return the numbers of rows of gradients to measure for a forecast."""
    options = case.options
    if case.strategy.step is None:
        cut = cut_of(case)
        many = cut.microbatches if cut.schedule not in ("", "one batch", "pipedream") else options.accumulate
        rows = case.share(0, cut.shares) / max(1, many)
        lengths = {rows, rows / cut.sharing}
    else:
        lengths = {rows / options.accumulate for rows, _ in case.strategy.step(case).gradients}
    wanted = {max(1, round(each)) for each in lengths}
    return wanted | {max(1, each // 4) for each in wanted} | {1}


def operations_of(case: Workload) -> set[str]:
    """Return the collectives that a forecast uses (message_time.py)."""
    operations = {"auto", "tree", "message", case.options.allreduce}
    if case.strategy.step is None:
        return operations | {"reduce_scatter", "all_gather", UNSHARED}
    calls = case.strategy.step(case).calls
    return operations | {call.operation.removeprefix(CODING) for call in calls} - {"all_reduce"}


def survey(
    lines: list[tuple[str, int]], read: Read, start: Start | None, cores: int, say: Callable = print, whole: bool = True
) -> Machine:
    """Measure what forecasts of these (line, ranks) need. say: prints progress. cores: more than AT_ONCE ranks per core
    are refused; 0: no limit. whole: measure all collectives, for other lines, too. Raises UsageError, LoneError."""
    operations: set[str] = set()
    wanted: dict[int, dict[str, tuple[str, set[int]]]] = {}
    small: dict[int, dict[str, str]] = {}  # lines of small trainings, by ranks and program
    for text, ranks in lines:
        if cores and ranks > AT_ONCE * cores:
            raise UsageError(
                f"{ranks:,} ranks are too many to measure on {cores} cores: give a data sheet, --machine FILE.yaml, or "
                "a --launcher that starts ranks on other hosts"
            )
        case = read(text, ranks)
        refuse_unknown(case)
        name = program_name(case)
        line = small.setdefault(ranks, {})[name] = small_line(case, name)
        operations |= operations_of(case)
        for each in (text, line):
            add(wanted.setdefault(ranks, {}), each, read(each, ranks))
    if set(wanted) == {1}:  # one rank measures no links
        text = f"train-allreduce {SMALL}"
        add(wanted.setdefault(2, {}), text, read(text, 2))
        small[2] = {}
    own = sorted(operations - set(all_operations()))  # a user's all-reduces; methods with settings
    answers: dict[int, dict[str, Any]] = {}
    for ranks, models in sorted(wanted.items()):
        say(f"measuring on {counted(ranks, 'rank')}: {counted(len(models), 'model')}")
        job = {
            "models": [[text, sorted(rows)] for text, rows in models.values()],
            "lines": [[line, NAPS if name.endswith(ASLEEP) else STEPS] for name, line in sorted(small[ranks].items())],
            "repeat": REPEAT,
            "operations": [*(each for each in all_operations() if whole or each in operations), *own],
        }
        answers[ranks] = run(ranks, job, start)
    return with_starts(machine_of(answers), {n: (small[n], answers[n]["runs"]) for n in answers}, read)


def add(models: dict[str, tuple[str, set[int]]], text: str, case: Workload) -> None:
    """Add the numbers of rows that a line needs to the numbers that are measured for its model (models)."""
    options = case.options
    key = repr((case.spec, options.data, options.dtype, options.optimizer))
    before = models.get(key, (text, set()))
    models[key] = before[0], before[1] | rows_of(case)


def machine_of(answers: dict[int, dict[str, Any]]) -> Machine:
    """Return the machine by the answers of jobs, by number of ranks, without the `start` of programs."""
    measurements = [each["measured"] for _, each in sorted(answers.items())]
    near = next((each["near"] for each in measurements if each["near"]), None)
    far = next((each["far"] for each in measurements if each["far"]), None)
    inside, between = near or far, far or near
    if between is None or inside is None:
        raise LoneError("the measuring jobs have not measured a link between two ranks")
    sections = tuple(read_section(each["section"]) for each in measurements)
    most = max(each.per_node for each in sections)
    one = measurements[0]
    (latency, bandwidth), (node_latency, node_bandwidth) = between, inside
    on_node = most if far else ON_ONE_NODE
    links = Cluster(on_node, latency, bandwidth, node_latency, node_bandwidth, one["adding"])
    links = no_faster(links, [each for each in sections if each.nodes == 1])
    progress = [each["progress"] for each in measurements if each["progress"] is not None]
    late = max(each["late"] for each in measurements)
    return Machine(one["cores"], links, one["flops"], one["memory"], 0.0, late, min(progress, default=1.0), sections)


def no_faster(links: Cluster, inside: list[Section]) -> Cluster:
    """Limit the bandwidth within a node to twice that of long messages: the best ping-pong may be a clock's jump."""
    curves = [each.collectives["message"] for each in inside if "message" in each.collectives]
    reached = max((longest / curve[longest] for curve in curves for longest in [max(curve)]), default=math.inf)
    near = min(links.node_bandwidth, 2 * reached)
    between = links.bandwidth if links.ranks_per_node < ON_ONE_NODE else near
    return dataclasses.replace(links, node_bandwidth=near, bandwidth=between)


def with_starts(machine: Machine, runs: dict[int, tuple[dict[str, str], list]], read: Read) -> Machine:
    """Return the machine with each program's `start`, from runs: lines by name, seconds per step in order of names."""
    sections: list[Section] = []
    starts: list[float] = []
    for section in machine.measured:
        lines, taken = runs[section.ranks]
        programs = {}
        for (name, line), seconds in zip(sorted(lines.items()), taken, strict=True):
            if isinstance(seconds, str):
                raise LoneError(f"{line} on {section.ranks} ranks: {seconds}")
            case = read(line, section.ranks)
            programs[name] = calibrate_start(case, machine, statistics.median(seconds))
        starts += programs.values()
        sections.append(section._replace(programs=programs))
    return dataclasses.replace(machine, measured=tuple(sections), start=statistics.median(starts) if starts else 0.0)
