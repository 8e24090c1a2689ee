"""Say what a training will cost before it runs: python scripts/plan.py memory "-n 4: train-grid --grid data=2,tensor=2"

    plan.py memory                                what the state of BERT-large, GPT-2 XL, Turing-NLG and GPT-3 takes
    plan.py memory "-n 4: train-pipeline ..."     bytes of each rank by kind, of any line that could be run
    plan.py memory runs/a                         the same of a run that has ended, beside what it held
    plan.py memory --model gpt2-xl --ranks 16 --fit 16GiB     the grids that fit, best first
    plan.py time "-n 4: train-pipeline ..."       seconds of a step by their parts, examples a second, on this machine
    plan.py best --ranks 4 --model mlp:512        strategies and grids that fit, fastest first
    plan.py check                                 how far such forecasts are off: each of a matrix is run
    plan.py scaling runs/1 runs/2 runs/4          speed-up, serial fraction, what more ranks would bring, what is lost
    plan.py simulate allreduce gossip             steps on up to 100,000 ranks with stragglers, by strategy

`plan.py NAME --help` lists the options. One process is enough, and MPI is not needed.
"""

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcdl.errors import UsageError, line, unknown
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse, parse_command_line
from hpcdl.launch.start import start_mpi
from hpcdl.plugins import names_in_line, refuse_untrusted
from hpcdl.programs import TRAINS
from hpcdl.runs.options import option

DEFAULT = "--optimizer=adam"  # of a model by its name, as its state is counted


@dataclass
class MemoryOptions:
    """What is asked about memory."""

    lines: list[str] = option(list, "lines as they would be run, in quotes, after -n RANKS:, or folders of runs")
    model: str = option("", "a named configuration: bert-large, gpt2-xl, turing-nlg or gpt3")
    ranks: int = option(0, "how many ranks, where a line does not say -n; with --fit, of the grids")
    fit: str = option("", "list the grids of --ranks on which each rank has this memory, as 32GiB")
    bits: Literal["32", "16"] = option("32", "with --fit: as the model is, or 16 bit with master weights")
    batch_size: int = option(0, "with --model and --fit: examples of a step; 0: four a rank")

    def __post_init__(self):
        for name in ("ranks", "batch_size"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} must not be negative, and is {getattr(self, name)}")
        if self.model and self.lines:
            raise UsageError("give lines, which name their models, or --model NAME, not both")
        if self.fit and not self.ranks:
            raise UsageError("--fit needs --ranks: how many there are")
        if self.fit and not (self.model or len(self.lines) == 1):
            raise UsageError("--fit takes one model: --model NAME, or one line of train-grid")


def memory(options: MemoryOptions, trust: tuple[str, ...]) -> list[str]:
    """Forecasts of memory."""
    start_mpi()  # as who trains needs it, of whom a forecast asks
    from hpcdl.launch.command_lines import read_command
    from hpcdl.planning import fitting, memory_report
    from hpcdl.strategies.workload import Workload

    ranks = options.ranks or 1
    if not options.lines and not options.fit:
        return memory_report.configuration(options.model) if options.model else memory_report.configurations()
    if options.fit:
        room = fitting.parse_bytes(options.fit)
        if options.model:
            memory_report.configuration(options.model)
        batch = options.batch_size or 4 * ranks
        named = f"train-grid --model {options.model} --batch-size {batch} {DEFAULT}"
        text = options.lines[0] if options.lines else named
        command = read_command(1, f"-n {ranks}: {text}", {}, ranks)
        strategy = command.training.strategy
        if strategy.program != "train-grid":
            raise UsageError(f"--fit looks for a grid: give a line of train-grid, not of {strategy.program}")
        grid = command.options(parse, "--out=none", f"--grid=data={ranks}", "--microbatches=1")
        case = Workload(strategy, grid, ranks, checked=False)
        return memory_report.grid_report(
            case, *fitting.fits(case, room, options.bits == "16"), room, options.bits == "16"
        )
    said = []
    for text in options.lines:
        if os.path.isdir(text):
            said += memory_report.run_report(text, trust)
        else:
            if not text.lstrip().startswith(("-n", TRAINS)):
                raise UsageError(f'{text} is neither the folder of a run nor a line, as "-n 4: train-allreduce"')
            text = text if text.lstrip().startswith("-n") else f"-n {ranks}: {text}"
            said += memory_report.workload_report(Workload.of(read_command(1, text, {}, sys.maxsize), parse))
    return said


@dataclass
class ScalingOptions:
    """What is asked about scaling."""

    runs: list[str] = option(..., "folders of runs of one training on 1, 2, 4, ... ranks")
    further: int = option(2, "sizes to foretell beyond the largest, each twice the one before")
    picture: str = option("", "draw speed-up against ranks into this file, .png or .svg")

    def __post_init__(self):
        if not 0 <= self.further <= 20:
            raise UsageError(f"--further is 0 to 20 sizes, not {self.further}")


def scaling(options: ScalingOptions, trust: tuple[str, ...]) -> list[str]:
    """The limits of parallelism."""
    from hpcdl.planning.scaling import report
    from hpcdl.planning.scaling import scaling as measured

    found = measured(options.runs, options.further)
    lines = report(found)
    if options.picture:
        from hpcdl.reports.scaling_picture import Points, write

        sizes, later = found.sizes, found.predicted
        intervals = [size.interval for size in later if size.interval is not None]
        low, high = zip(*intervals, strict=True) if intervals else ((), ())
        points = Points(
            [size.ranks for size in sizes],
            [size.speed_up for size in sizes],
            [size.ranks for size in later],
            [size.speed_up for size in later],
            low,
            high,
        )
        write(points, "Speed-up, " + ("weak" if found.weak else "strong") + " scaling", Path(options.picture))
        lines.append(f"picture: {options.picture}")
    return lines


@dataclass
class SimulateOptions:
    """What is simulated."""

    strategies: list[str] = option(list, "as allreduce:algorithm=tree, gossip, servers:consistency=async,count=8")
    ranks: str = option("100,1000,10000,100000", "how many ranks, with commas between")
    steps: int = option(100, "steps, of which the mean is told")
    parameters: float = option(25e6, "of the model, 4 bytes each")
    compute: float = option(0.1, "seconds that a rank computes in a step, in the mean")
    straggler: str = option("lognormal:sigma=0.1", "how that varies: none, lognormal, exponential, pareto, slow")
    cluster: str = option("", "YAML file with latency, bandwidth, ranks_per_node, ...; default: 2 us, 12.5 GB/s, 1")
    seed: int = option(0, "of the draws")
    fails_after: float = option(0.0, "hours between two failures of a node: how often to save; 0: none fails")
    checkpoint: float = option(60.0, "with --fails-after: seconds that a checkpoint takes")
    restart: float = option(300.0, "with --fails-after: seconds until a job that failed is at work again")
    hours: float = option(240.0, "with --fails-after: of work, of the job that is simulated")
    picture: str = option("", "write seconds against ranks to this file, .png or .svg")
    json: str = option("", "write all numbers to this file")

    def __post_init__(self):
        numbers = [each.strip() for each in self.ranks.split(",")]
        if not all(each.isdecimal() and 0 < int(each) <= 10**6 for each in numbers):
            raise UsageError(f"--ranks {self.ranks}: numbers from 1 to 1,000,000, with commas between")
        self.sizes = [int(each) for each in numbers]
        for name in ("steps", "parameters", "compute", "checkpoint", "hours"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise UsageError(f"--{name} must be a number greater than 0, not {value}")
        for name in ("fails_after", "restart"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise UsageError(f"--{name.replace('_', '-')} must not be negative, and is {value}")


def simulate(options: SimulateOptions, trust: tuple[str, ...]) -> list[str]:
    """What so many ranks would do."""
    from hpcdl.planning import scale_report
    from hpcdl.planning.cluster import Cluster
    from hpcdl.planning.step_simulation import Noise, StepWork
    from hpcdl.reports import scale_picture

    if options.picture:
        scale_picture.check(Path(options.picture))

    cluster = Cluster.read(options.cluster) if options.cluster else Cluster()
    work = StepWork(options.compute, 4 * options.parameters, Noise.read(options.straggler), options.seed)
    strategies = options.strategies or ["allreduce"]
    found = scale_report.simulate_all(strategies, cluster, work, options.sizes, options.steps)
    said = scale_report.table(found, options.sizes)
    if options.fails_after:
        times = options.fails_after, options.checkpoint, options.restart, options.hours
        said += ["", *scale_report.checkpoint_table(options.sizes, cluster, *times)]
    if options.picture:
        scale_picture.write(Path(options.picture), scale_report.curves(found), options.compute)
    if options.json:
        about = {"cluster": dataclasses.asdict(cluster), "options": dataclasses.asdict(options)}
        scale_report.write(Path(options.json), found, about)
    return said


@dataclass
class MachineOptions:
    """Of which machine times are foretold."""

    machine: str = option("", "YAML file of a machine, measured or a data sheet; default: this one, measured now")
    measure: str = option("", "measure this machine for these lines, and write it to this YAML file")
    launcher: str = option("", "what starts ranks, to which -n RANKS is added; default: mpiexec, on this host")

    def __post_init__(self):
        if self.machine and self.measure:
            raise UsageError("give --machine, which reads a file, or --measure, which writes one, not both")


@dataclass
class TimeOptions(MachineOptions):
    """What is asked about time."""

    lines: list[str] = option(list, "lines as they would be run, in quotes, after -n RANKS:")
    ranks: int = option(0, "how many ranks, where a line does not say -n")

    def __post_init__(self):
        super().__post_init__()
        if not self.lines:
            raise UsageError('give a line, as hpcdl plan time "-n 2: train-allreduce --model mlp:256"')
        if self.ranks < 0:
            raise UsageError(f"--ranks must not be negative, and is {self.ranks}")


def refuse_seconds(seconds: float) -> None:
    """Raise UsageError where a run cannot take so long."""
    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds is a number greater than 0, and at most 3600, not {seconds}")


@dataclass
class BestOptions(MachineOptions):
    """Among what the best is looked for."""

    ranks: int = option(0, "how many ranks")
    model: str = option("mlp:256,128", "a model, as of the programs that train, or a named configuration, as gpt3")
    data: str = option("digits", "its data set")
    batch_size: int = option(32, "examples of a step, all ranks together")
    optimizer: str = option("momentum", "as of the programs that train")
    fit: str = option("", "memory of a rank, as 16GiB; default: its part of what is free here")
    same_steps: bool = option(False, "only what takes the steps that one rank alone would take")
    check: bool = option(False, "run the first three for some steps, beside the forecast")
    seconds: float = option(1.0, "with --check: about how long each of three runs takes")

    def __post_init__(self):
        super().__post_init__()
        refuse_seconds(self.seconds)
        if self.ranks < 1:
            raise UsageError(f"--ranks, how many there are, is 1 or more, not {self.ranks}")


@dataclass
class ForecastCheckOptions(MachineOptions):
    """What is checked."""

    matrix: list[str] = option(list, "a YAML file, a list of lines with -n RANKS:; default: 40 lines on 1 to 4 ranks")
    repeat: int = option(3, "how often each line is run")
    seconds: float = option(1.0, "about how long a run takes")

    def __post_init__(self):
        super().__post_init__()
        if len(self.matrix) > 1:
            raise UsageError("give one file of lines")
        if self.repeat < 1:
            raise UsageError(f"--repeat is 1 or more, not {self.repeat}")
        refuse_seconds(self.seconds)


def case_of(text, ranks):
    """A line on so many ranks as forecasts see it."""
    from hpcdl.launch.command_lines import read_command
    from hpcdl.strategies.workload import Workload

    return Workload.of(read_command(1, f"-n {ranks}: {text}", {}, sys.maxsize), parse)


def machine_for(options, lines):
    """The machine that is named, or this one, measured for these (line, ranks)."""
    from hpcdl.errors import blamed_on
    from hpcdl.files import check_writable
    from hpcdl.planning.machine_sheet import Machine
    from hpcdl.planning.probe_jobs import make_starter
    from hpcdl.planning.surveying import survey

    if options.machine:
        return Machine.read(options.machine)
    if options.measure:
        with blamed_on(f"--measure {options.measure} cannot be written"):
            check_writable(options.measure)
    cores = 0 if options.launcher else len(os.sched_getaffinity(0))
    found = survey(lines, case_of, make_starter(options.launcher), cores, told, bool(options.measure))
    if options.measure:
        found.write(options.measure)
    return found


def told(text):
    """Say how far it is, beside what is printed at the end."""
    print(f"plan: {line(text)}", file=sys.stderr, flush=True)


def time(options: TimeOptions, trust: tuple[str, ...]) -> list[str]:
    """Forecasts of time."""
    start_mpi()  # as who trains needs it, of whom a forecast asks
    from hpcdl.planning import forecast_error, time_report

    lines = [forecast_error.parse_placement(text, options.ranks) for text in options.lines]
    machine = machine_for(options, [(text, ranks) for ranks, text in lines])
    return time_report.times(forecast_error.make_forecasts(lines, machine, case_of), machine)


def best(options: BestOptions, trust: tuple[str, ...]) -> list[str]:
    """What is fastest."""
    start_mpi()  # as who trains needs it, of whom a forecast asks
    from hpcdl.memory import available
    from hpcdl.models.configurations import CONFIGURATIONS
    from hpcdl.planning import autotune as finding
    from hpcdl.planning import fitting, forecast_error
    from hpcdl.planning.probe_jobs import make_starter

    told_of = {"model": options.model, "data": options.data, "batch-size": options.batch_size}
    told_of |= {"optimizer": options.optimizer}
    if options.model in CONFIGURATIONS:  # whose data nobody has
        del told_of["data"]
    model = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in told_of.items())
    room = fitting.parse_bytes(options.fit) if options.fit else (available() or 1 << 62) / options.ranks
    asked = [(f"{text} {model}", options.ranks) for text, same in finding.program_lines(options.ranks)]
    case_of(*asked[0])  # what is wrong with the model is so for all
    found_grids = finding.grid_lines(model, options.ranks, room, case_of)
    machine = machine_for(options, [*readable(asked), *((text, options.ranks) for text in found_grids[:1])])
    found, refused = finding.candidates(model, options.ranks, room, machine, case_of)
    found = [each for each in found if each.same_steps or not options.same_steps]
    if not options.check:
        return finding.report(found, refused, options.ranks, model)
    first = [each.forecast for each in found[:3]]
    taken = forecast_error.measure_forecasts(first, 3, options.seconds, make_starter(options.launcher), told)
    if failed := [each for each in taken if each.failed]:
        raise UsageError(f"{failed[0].forecast.line} cannot be run: {failed[0].failed}")
    return finding.report(found, refused, options.ranks, model, [each.measured for each in taken])


def readable(lines):
    """Those of the (line, ranks) that could be run."""
    for text, ranks in lines:
        with contextlib.suppress(UsageError):
            case_of(text, ranks)
            yield text, ranks


def check(options: ForecastCheckOptions, trust: tuple[str, ...]) -> list[str]:
    """Forecasts beside measurements."""
    start_mpi()  # as who trains needs it, of whom a forecast asks
    from hpcdl.planning import forecast_error
    from hpcdl.planning.probe_jobs import make_starter

    lines = forecast_error.read_matrix(options.matrix[0]) if options.matrix else forecast_error.MATRIX
    for _, text in lines if options.matrix else ():
        refuse_untrusted(names_in_line(text), options.matrix[0], trust)
    machine = machine_for(options, [(text, ranks) for ranks, text in lines])
    found = forecast_error.make_forecasts(lines, machine, case_of)
    return forecast_error.report(
        forecast_error.measure_forecasts(found, options.repeat, options.seconds, make_starter(options.launcher), told)
    )


class PlanCommand(NamedTuple):
    """A subcommand: its options, what makes its lines, and a sentence on it."""

    options: type
    made: Callable[[Any, tuple[str, ...]], list[str]]
    sentence: str


PLANS = {
    "memory": PlanCommand(MemoryOptions, memory, "Say what each rank of a training will hold, and which grids fit."),
    "time": PlanCommand(TimeOptions, time, "Say what a step of a training takes, by its parts, before it runs."),
    "best": PlanCommand(
        BestOptions, best, "Say which strategies and grids fit and are fastest, and try the first ones."
    ),
    "check": PlanCommand(
        ForecastCheckOptions, check, "Say how far forecasts of time are off: each of a matrix of lines is run."
    ),
    "scaling": PlanCommand(ScalingOptions, scaling, "Say how runs scale with their ranks, and what limits them."),
    "simulate": PlanCommand(
        SimulateOptions, simulate, "Say what a step takes on up to 100,000 ranks, and how often to save."
    ),
}


def main(arguments=None):
    """Print the plan; bad input is one line on stderr and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with one_process("plan"):
        if not arguments or arguments[0] in ("-h", "--help"):
            print("usage: hpcdl plan NAME [OPTIONS]; hpcdl plan NAME --help\n")
            print("\n".join(f"  {name:10}{plan.sentence}" for name, plan in PLANS.items()))
            return
        name, *rest = arguments
        if name not in PLANS:
            raise unknown("plan", name, PLANS)
        plan = PLANS[name]
        found = parse_command_line(plan.options, f"plan {name}", plan.sentence, rest)
        said = plan.made(found.options, found.trust)
        print("\n".join(map(line, said)), flush=True)


if __name__ == "__main__":
    main()
