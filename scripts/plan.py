"""Say what a training will cost before it runs: hpcdl plan memory "-n 4: train-grid --grid data=2,tensor=2"

    plan.py memory                                what the state of BERT-large, GPT-2 XL, Turing-NLG and GPT-3 takes
    plan.py memory "-n 4: train-pipeline ..."     bytes of each rank by kind, of any line that could be run
    plan.py memory runs/a                         the same of a run that has ended, beside what it held
    plan.py memory --model gpt2-xl --ranks 16 --fit 16GiB     the grids that fit, best first
    plan.py time "-n 4: train-pipeline ..."       seconds of a step by their parts, examples a second, on this machine
    plan.py best --ranks 4 --model mlp:512        strategies and grids that fit, fastest first
    plan.py check                                 how far such forecasts are off: runs a matrix of lines
    plan.py scaling runs/1 runs/2 runs/4          speed-up, serial fraction, what more ranks would bring, what is lost
    plan.py simulate allreduce gossip             steps on up to 100,000 ranks with stragglers, by strategy
    plan.py simulate --fastest                    the fastest all-reduce by number of ranks and bytes

`plan.py NAME --help` lists the options. One process is enough, and MPI is not needed."""

import contextlib
import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcdl.errors import UsageError, line, parse_bytes, unknown
from hpcdl.formatting import dashed
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse, parse_command_line
from hpcdl.launch.start import start_mpi
from hpcdl.plugins import names_in_line, refuse_untrusted
from hpcdl.programs import TRAINS
from hpcdl.runs.options import not_negative, option, positive

DEFAULT = "--optimizer=adam"  # optimizer of a named configuration


@dataclass
class MemoryOptions:
    """Options of `plan memory`."""

    lines: list[str] = option(list, "lines as they would be run, in quotes, after -n RANKS:, or folders of runs")
    model: str = option(
        "", "a named configuration: bert-large, gpt2-xl, turing-nlg, gpt3, llama3-8b or -70b, mixtral-8x7b, deepseek-v3"
    )
    ranks: int = option(0, "ranks of a line without -n; with --fit: ranks of the grids")
    fit: str = option("", "list the grids of --ranks on which each rank has this memory, as 32GiB")
    bits: Literal["32", "16"] = option("32", "with --fit: 32: as the model is; 16: 16 bit with master weights")
    batch_size: int = option(0, "with --model and --fit: examples of a step; 0: four per rank")

    def __post_init__(self):
        not_negative(self, "ranks", "batch_size")
        if self.model and self.lines:
            raise UsageError("give lines, which name their models, or --model NAME, not both")
        if self.fit and not self.ranks:
            raise UsageError("--fit needs --ranks, the number of ranks")
        if self.fit and not (self.model or len(self.lines) == 1):
            raise UsageError("--fit takes one model: --model NAME, or one line of train-grid")


def memory(options: MemoryOptions, trust: tuple[str, ...]) -> list[str]:
    """Say what each rank of a training will hold, and which grids fit."""
    start_mpi(stoppable=False)  # forecasts call the strategies, which need MPI
    from hpcdl.launch.command_lines import read_command
    from hpcdl.planning import memory_report
    from hpcdl.strategies.workload import Workload

    ranks = options.ranks or 1
    if not options.lines and not options.fit:
        return memory_report.configuration(options.model) if options.model else memory_report.configurations()
    if options.fit:
        room = parse_bytes(options.fit)
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
        half = options.bits == "16"
        return memory_report.grid_report(case, room, half)
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
    """Options of `plan scaling`."""

    runs: list[str] = option(..., "folders of runs of one training on 1, 2, 4, ... ranks")
    further: int = option(2, "sizes to predict beyond the largest, each twice the one before")
    picture: str = option("", "draw speed-up against ranks into this file, .png or .svg")

    def __post_init__(self):
        if not 0 <= self.further <= 20:
            raise UsageError(f"--further is 0 to 20 sizes, not {self.further}")


def scaling(options: ScalingOptions, trust: tuple[str, ...]) -> list[str]:
    """Say how runs scale with their ranks, and what limits them."""
    from hpcdl.planning.scaling import report
    from hpcdl.planning.scaling import scaling as measured

    found = measured(options.runs, options.further)
    lines = report(found)
    if options.picture:
        from hpcdl.reports.scaling_pictures import write_speed_up

        title = f"Speed-up, {'weak' if found.weak else 'strong'} scaling"
        write_speed_up(found.sizes, found.predicted, title, Path(options.picture))
        lines.append(f"picture: {options.picture}")
    return lines


@dataclass
class SimulateOptions:
    """Options of `plan simulate`."""

    strategies: list[str] = option(list, "as allreduce:algorithm=tree, gossip, servers:consistency=async,count=8")
    ranks: str = option("", "numbers of ranks, with commas between; default: 100,1000,10000,100000")
    fastest: bool = option(
        False,
        "the fastest all-reduce by ranks (default: 2, 4, ..., 65536) and bytes instead; one rank on each node. Times "
        "are closed forms, which tests compare with simulations of up to 64 ranks",
    )
    steps: int = option(100, "steps to simulate; the table shows means over these steps")
    parameters: float = option(25e6, "parameters of the model, 4 bytes each")
    compute: float = option(0.1, "seconds that a rank computes in a step, in the mean")
    straggler: str = option("lognormal:sigma=0.1", "how --compute varies: none, lognormal, exponential, pareto, slow")
    cluster: str = option("", "YAML file with latency, bandwidth, ranks_per_node, ...; default: 2 us, 12.5 GB/s, 1")
    seed: int = option(0, "seed of the random times")
    fails_after: float = option(0.0, "hours between two failures of a node, for how often to save; 0: no failures")
    checkpoint: float = option(60.0, "with --fails-after: seconds that a checkpoint takes")
    restart: float = option(300.0, "with --fails-after: seconds until a job that failed is at work again")
    hours: float = option(240.0, "with --fails-after: hours of work of the job that is simulated")
    picture: str = option("", "write seconds against ranks, or with --fastest the map, to this file, .png or .svg")
    json: str = option("", "write all numbers to this file")

    def __post_init__(self):
        default = ",".join(str(2**k) for k in range(1, 17)) if self.fastest else "100,1000,10000,100000"
        numbers = [each.strip() for each in (self.ranks or default).split(",")]
        if not all(each.isdecimal() and 0 < int(each) <= 10**6 for each in numbers):
            raise UsageError(f"--ranks {self.ranks}: numbers from 1 to 1,000,000, with commas between")
        self.sizes = [int(each) for each in numbers]
        positive(self, "steps", "parameters", "compute", "checkpoint", "hours")
        not_negative(self, "fails_after", "restart")
        if self.fastest and (self.strategies or self.fails_after or self.json):
            raise UsageError("--fastest compares all-reduces only: leave out strategies, --fails-after and --json")


def simulate(options: SimulateOptions, trust: tuple[str, ...]) -> list[str]:
    """Say what a step takes on up to 100,000 ranks, and how often to save."""
    from hpcdl.planning import scale_report
    from hpcdl.planning.cluster import Cluster
    from hpcdl.planning.step_simulation import Noise, StepWork
    from hpcdl.reports import scaling_pictures

    if options.picture:
        scaling_pictures.check(Path(options.picture))

    cluster = Cluster.read(options.cluster) if options.cluster else Cluster()
    if options.fastest:
        if cluster.ranks_per_node > 1:
            raise UsageError("--fastest has no exact times for several ranks on a node: give a cluster with one")
        said, names = scale_report.fastest_table(cluster, options.sizes)
        if options.picture:
            scaling_pictures.write_fastest(Path(options.picture), options.sizes, [*scale_report.LENGTHS], names)
        return said
    work = StepWork(options.compute, 4 * options.parameters, Noise.read(options.straggler), options.seed)
    strategies = options.strategies or ["allreduce"]
    found = scale_report.simulate_all(strategies, cluster, work, options.sizes, options.steps)
    said = scale_report.table(found, options.sizes)
    if options.fails_after:
        times = options.fails_after, options.checkpoint, options.restart, options.hours
        said += ["", *scale_report.checkpoint_table(options.sizes, cluster, *times)]
    if options.picture:
        scaling_pictures.write_simulation(Path(options.picture), scale_report.curves(found), options.compute)
    if options.json:
        about = {"cluster": dataclasses.asdict(cluster), "options": dataclasses.asdict(options)}
        scale_report.write(Path(options.json), found, about)
    return said


@dataclass
class MachineOptions:
    """Options of the machine for which times are forecast."""

    machine: str = option("", "YAML file of a machine, measured or from a data sheet; default: this one, measured now")
    measure: str = option("", "measure this machine for these lines, and write it to this YAML file")
    launcher: str = option("", "command that starts ranks, to which -n RANKS is added; default: mpiexec, on this host")

    def __post_init__(self):
        if self.machine and self.measure:
            raise UsageError("give --machine, which reads a file, or --measure, which writes one, not both")


@dataclass
class TimeOptions(MachineOptions):
    """Options of `plan time`."""

    lines: list[str] = option(list, "lines as they would be run, in quotes, after -n RANKS:")
    ranks: int = option(0, "ranks of a line without -n")

    def __post_init__(self):
        super().__post_init__()
        if not self.lines:
            raise UsageError('give a line, as hpcdl plan time "-n 2: train-allreduce --model mlp:256"')
        not_negative(self, "ranks")


def refuse_seconds(seconds: float) -> None:
    """Raise UsageError unless 0 < seconds <= 3600."""
    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds is a number greater than 0, and at most 3600, not {seconds}")


@dataclass
class BestOptions(MachineOptions):
    """Options of `plan best`, the search for the best strategy."""

    ranks: int = option(0, "number of ranks")
    model: str = option("mlp:256,128", "model, as in the programs that train, or a named configuration, as gpt3")
    data: str = option("digits", "its data set")
    batch_size: int = option(32, "examples of a step, all ranks together")
    optimizer: str = option("momentum", "optimizer, as in the programs that train")
    fit: str = option("", "memory of a rank, as 16GiB; default: its part of this machine's memory")
    same_steps: bool = option(False, "only strategies that take the same steps as one rank")
    check: bool = option(False, "run the first three for some steps, and show their times beside the forecasts")
    seconds: float = option(1.0, "with --check: about how long each of three runs takes")

    def __post_init__(self):
        super().__post_init__()
        refuse_seconds(self.seconds)
        positive(self, "ranks")


@dataclass
class ForecastCheckOptions(MachineOptions):
    """Options of `plan check`."""

    matrix: list[str] = option(list, "a YAML file, a list of lines with -n RANKS:; default: 40 lines on 1 to 4 ranks")
    repeat: int = option(3, "how often each line is run")
    seconds: float = option(1.0, "about how long a run takes")

    def __post_init__(self):
        super().__post_init__()
        if len(self.matrix) > 1:
            raise UsageError("give one file of lines, not several")
        positive(self, "repeat")
        refuse_seconds(self.seconds)


def case_of(text, ranks):
    """Return the workload of a line on `ranks` ranks."""
    from hpcdl.launch.command_lines import read_command
    from hpcdl.strategies.workload import Workload

    return Workload.of(read_command(1, f"-n {ranks}: {text}", {}, sys.maxsize), parse)


def machine_for(options, lines):
    """Return the machine of --machine; without it, this machine, measured for `lines`, pairs of (line, ranks)."""
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


def trust_in(options):
    """Return a line on how far forecasts are off, by the load of this machine before it is measured; "": it is not."""
    from hpcdl.machine.load import load
    from hpcdl.planning.time_report import trust

    if options.machine or options.launcher:
        return ""
    spare, cores = load.available(1), len(os.sched_getaffinity(0))  # waits
    return "" if spare is None else trust(max(0.0, cores - spare), cores)


def told(text):
    """Print progress on stderr; the plan goes to stdout."""
    print(f"plan: {line(text)}", file=sys.stderr, flush=True)


def time(options: TimeOptions, trust: tuple[str, ...]) -> list[str]:
    """Say what a step of a training takes, by its parts, before it runs."""
    start_mpi()  # forecasts call the strategies, which need MPI
    from hpcdl.planning import forecast_error, time_report

    lines = [forecast_error.parse_placement(text, options.ranks) for text in options.lines]
    remark = trust_in(options)
    machine = machine_for(options, [(text, ranks) for ranks, text in lines])
    return time_report.times(forecast_error.make_forecasts(lines, machine, case_of), machine) + [remark] * bool(remark)


def best(options: BestOptions, trust: tuple[str, ...]) -> list[str]:
    """Say which strategies and grids fit and are fastest, and try the first ones."""
    start_mpi()  # forecasts call the strategies, which need MPI
    from hpcdl.memory import available
    from hpcdl.models.configurations import CONFIGURATIONS
    from hpcdl.planning import autotune as finding
    from hpcdl.planning import forecast_error
    from hpcdl.planning.probe_jobs import make_starter

    names = ["model", *([] if options.model in CONFIGURATIONS else ["data"]), "batch_size", "optimizer"]
    model = " ".join(f"--{dashed(name)} {shlex.quote(str(getattr(options, name)))}" for name in names)
    room = parse_bytes(options.fit) if options.fit else (available() or 1 << 62) / options.ranks
    asked = [(f"{text} {model}", options.ranks) for text, same in finding.program_lines(options.ranks)]
    case_of(*asked[0])  # an error in the model is one of all lines
    lines = [(text, options.ranks) for text in finding.grid_lines(model, options.ranks, room, case_of)[:1]]
    for each in reversed(asked):
        with contextlib.suppress(UsageError):  # a program that cannot run this model is not measured
            case_of(*each)
            lines.insert(0, each)
    remark = trust_in(options)
    machine = machine_for(options, lines)
    found, refused = finding.candidates(model, options.ranks, room, machine, case_of)
    found = [each for each in found if each.same_steps or not options.same_steps]
    if not options.check:
        return finding.report(found, refused, options.ranks, model, remark=remark)
    first = [each.forecast for each in found[:3]]
    taken = forecast_error.measure_forecasts(first, 3, options.seconds, make_starter(options.launcher), told)
    if failed := [each for each in taken if each.failed]:
        raise UsageError(f"{failed[0].forecast.line} cannot be run: {failed[0].failed}")
    return finding.report(found, refused, options.ranks, model, [each.measured for each in taken], remark)


def check(options: ForecastCheckOptions, trust: tuple[str, ...]) -> list[str]:
    """Say how far forecasts of time are off, by runs of a matrix of lines."""
    start_mpi()  # forecasts call the strategies, which need MPI
    from hpcdl.planning import forecast_error
    from hpcdl.planning.probe_jobs import make_starter

    lines = forecast_error.read_matrix(options.matrix[0]) if options.matrix else forecast_error.MATRIX
    for _, text in lines if options.matrix else ():
        refuse_untrusted(names_in_line(text), options.matrix[0], trust)
    remark = trust_in(options)
    machine = machine_for(options, [(text, ranks) for ranks, text in lines])
    found = forecast_error.make_forecasts(lines, machine, case_of)
    start = make_starter(options.launcher)
    checked = forecast_error.measure_forecasts(found, options.repeat, options.seconds, start, told)
    return forecast_error.report(checked) + [remark] * bool(remark)


# Functions that return the lines of a plan for its options; their docstrings are the help.
PLANS = {plan.__name__: plan for plan in (memory, time, best, check, scaling, simulate)}


def main(arguments=None):
    """Print the plan; bad input is one line on stderr and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with one_process("plan"):
        if not arguments or arguments[0] in ("-h", "--help"):
            print("usage: hpcdl plan NAME [OPTIONS]; hpcdl plan NAME --help\n")
            print("\n".join(f"  {name:10}{plan.__doc__}" for name, plan in PLANS.items()))
            return
        name, *rest = arguments
        if name not in PLANS:
            raise unknown("plan", name, PLANS)
        plan = PLANS[name]
        found = parse_command_line(plan.__annotations__["options"], f"plan {name}", plan.__doc__, rest)
        print("\n".join(map(line, plan(found.options, found.trust))), flush=True)


if __name__ == "__main__":
    main()
