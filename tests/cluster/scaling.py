"""All-reduce time against hosts, size and latency, beside the cost model: python tests/cluster/scaling.py (as root)

Prints the tables of docs/scaling.md; --plot FILE.svg draws them. The hosts are emulated (hosts.py); each has two ranks,
of which the algorithms that know nothing of hosts use one, and `hierarchical` both. In one launch for each latency they
take turns on the first 2, 3, ... hosts, in an order drawn by lot.

All emulated hosts have one clock, so a turn starts at a time that all have agreed on, and its time is that of the rank
that is last; a turn for which a rank comes too late is repeated. The ranks outnumber the cores, which those of real
hosts do not: so each takes its algorithm's steps itself, and naps between looking whether a message has come."""

import argparse
import ctypes
import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from hosts import Hosts
from mpi4py import MPI

from hpcdl.comm import failure
from hpcdl.comm.allreduce import algorithm
from hpcdl.comm.collective_schedule import ready
from hpcdl.comm.node_memory import node_memory
from hpcdl.errors import UsageError
from hpcdl.runs.folder import environment

NAMES = ["naive", "direct", "ring", "tree", "recursive", "hierarchical", "mpi"]
SIZES = {"4 kB": 4_000, "256 kB": 256_000, "4 MB": 4_000_000}
LONG = 1_000_000  # bytes from which on a turn takes up to two seconds: fewer of them, on fewer numbers of hosts
JUMBO = 9000  # bytes of a frame
TRIES = 3  # for each turn, of which some come too late
LONGEST_NAP, RESTING = 100e-6, 5e-3  # seconds: of a rank that waits for a message; of one that has no part
PIECE = 512 << 10  # bytes that `hierarchical` exchanges at once
FINE_TIMERS = 29  # PR_SET_TIMERSLACK


# -- the cost model: a message of n bytes takes alpha + n beta ---------------------------------------------------------


def recursive(hosts, n, alpha, beta):
    return 2 * math.ceil(math.log2(hosts)) * alpha + 2 * (hosts - 1) / hosts * n * beta


def hierarchical(hosts, n, alpha, beta):
    whole, rest = divmod(n, PIECE)  # piece after piece, by one rank of each host
    return whole * recursive(hosts, PIECE, alpha, beta) + (recursive(hosts, rest, alpha, beta) if rest else 0)


MODELS = {
    "naive": lambda hosts, n, alpha, beta: 2 * alpha + 2 * (hosts - 1) * n * beta,
    "direct": lambda hosts, n, alpha, beta: alpha + (hosts - 1) * n * beta,
    "ring": lambda hosts, n, alpha, beta: 2 * (hosts - 1) * (alpha + n / hosts * beta),
    "tree": lambda hosts, n, a, b: 2 * math.floor(math.log2(hosts)) * a + 2 * math.ceil(math.log2(hosts)) * n * b,
    "recursive": recursive,
    "hierarchical": hierarchical,
    # The bound of any all-reduce, to which the additions come:
    "auto": lambda hosts, n, alpha, beta: max(2 * (hosts - 1) / hosts * n * beta, math.ceil(math.log2(hosts)) * alpha),
}


# -- on the ranks ------------------------------------------------------------------------------------------------------


def measure(plan: dict) -> dict:
    """All turns of one launch; on rank 0 alpha and the seconds of each, by size, hosts and algorithm."""
    ctypes.CDLL(None).prctl(FINE_TIMERS, 1, 0, 0, 0)  # naps as short as they are said to be
    world, per_host, slack = MPI.COMM_WORLD, plan["per_host"], 0.01 + 4e-3 * plan["ms"]
    host, first = divmod(world.rank, per_host)
    found = {"alpha": ping_pong(world, per_host), "seconds": {}}
    for count in range(2, world.size // per_host + 1):
        part = world.Split(0 if host < count else MPI.UNDEFINED, world.rank)
        if host < count:
            alone = part.Split(0 if first == 0 else MPI.UNDEFINED, world.rank)
            comms = {"hierarchical": part}
            contenders = [Contender(name, comms.get(name, alone), plan["sizes"]) for name in plan["names"]]
            race(part, contenders, min(map(int, plan["sizes"])), 1, slack)  # make connections
            for size, repeats in plan["sizes"].items():
                if int(size) < LONG or count in ((2, 4, 8) if plan["ms"] else (2, 3, 4, 6, 8)):
                    times = race(part, contenders, int(size), repeats, slack)
                    found["seconds"].setdefault(size, {})[count] = times
        wait([world.Ibarrier()], RESTING)
    return found


class Contender:
    """An algorithm on its communicator; with MPI.COMM_NULL, this rank has no part in it."""

    def __init__(self, name, comm, sizes):
        self.name, self.comm, self.steps = name, comm, algorithm(name).steps
        if comm != MPI.COMM_NULL:
            longest = max(map(int, sizes)) // 4
            memory = node_memory(comm) if name == "hierarchical" else None
            vector = memory.empty(longest, np.dtype(np.float32)) if memory is not None else None
            self.vector = np.empty(longest, np.float32) if vector is None else vector

    def __call__(self, size: int) -> None:
        if self.comm != MPI.COMM_NULL:
            for step in self.steps(self.comm, self.vector[: size // 4]):
                wait(step)

    def fill(self, size: int) -> None:
        if self.comm != MPI.COMM_NULL:
            self.vector[: size // 4] = 1

    def check(self, size: int) -> None:
        if self.comm != MPI.COMM_NULL and not (self.vector[: size // 4] == self.comm.size).all():
            raise ArithmeticError(f"{self.name}: wrong sums of {size} bytes on {self.comm.size} ranks")


def race(comm, contenders, size: int, repeats: int, slack: float) -> dict[str, list[float]]:
    """Seconds of each turn of each algorithm; the same on all ranks."""
    taken, order = {each.name: [] for each in contenders}, np.random.default_rng(size)
    for _ in range(repeats):
        for each in order.permutation(contenders):
            for _ in range(TRIES):
                seconds = turn(comm, each, size, slack)
                if seconds is not None:
                    taken[each.name].append(seconds)
                    break
    return taken


def turn(comm, contender, size: int, slack: float) -> float | None:
    """Seconds until the last rank is done, from a time on that is agreed; None where a rank was too late for it."""
    contender.fill(size)
    start = largest(comm, [time.perf_counter()])[0] + slack
    late = time.perf_counter() > start
    while (left := start - time.perf_counter()) > 0:
        time.sleep(left)
    contender(size)
    seconds, late = largest(comm, [time.perf_counter() - start if contender.comm != MPI.COMM_NULL else 0, late])
    contender.check(size)
    return None if late else seconds


def largest(comm, values) -> np.ndarray:
    """The largest of each value over all ranks."""
    values = np.array(values, np.float64)
    wait([comm.Iallreduce(MPI.IN_PLACE, values, MPI.MAX)], 10 * LONGEST_NAP)
    return values


def wait(step, longest: float = LONGEST_NAP) -> None:
    """Wait for a step in naps, each a sixteenth of the time that it has taken already."""
    begun = time.perf_counter()
    while not ready(step):
        time.sleep(min(longest, (time.perf_counter() - begun) / 16))


def ping_pong(world, per_host: int) -> float:
    """Seconds that a message of 4 bytes takes from host 0 to host 1, median."""
    ball, other = np.zeros(1, np.float32), {0: per_host, per_host: 0}.get(world.rank)
    taken = []
    if other is not None:
        for _ in range(30):
            start = time.perf_counter()
            for step in (world.Isend, world.Irecv) if world.rank == 0 else (world.Irecv, world.Isend):
                wait([step(ball, other)])
            taken.append((time.perf_counter() - start) / 2)
    wait([world.Ibarrier()], RESTING)
    return statistics.median(taken[10:] or [0])


# -- tables and picture ------------------------------------------------------------------------------------------------


def report(result: dict) -> None:
    """Print what was measured beside the model, and how it grows from the fewest hosts to the most."""
    about, grown = result["about"], []
    print(f"{about['mpi']}, numpy {about['numpy']}, {about['machine']}; links of {result['mbits']:g} Mbit/s")
    heads = " | ".join(result["names"]) + " |\n|"
    for text, size in SIZES.items():
        for ms, found in result["launches"].items():
            rows = found["seconds"].get(str(size), {})
            if not rows:
                continue
            print(f"\n{text}, latency {ms} ms (alpha = {1e3 * found['alpha']:.2f} ms)\n")
            print(f"| hosts | {heads}" + "---|" * (1 + len(result["names"])))
            for hosts, times in rows.items():
                cells = [cell(each, model(result, ms, name, int(hosts), size)) for name, each in times.items()]
                print(f"| {hosts} | " + " | ".join(cells) + " |")
            few, most = min(rows, key=int), max(rows, key=int)
            cells = [growth(result, ms, name, size, few, most) for name in result["names"]]
            grown.append(f"| {text} | {ms} ms | {few} to {most} | " + " | ".join(cells) + " |")
    print("\ngrowth: the time on the most hosts divided by that on the fewest, measured / model\n")
    print(f"| size | latency | hosts | {heads}" + "---|" * (3 + len(result["names"])))
    print(*grown, sep="\n")


def growth(result: dict, ms: str, name: str, size: int, few: str, most: str) -> str:
    rows = result["launches"][ms]["seconds"][str(size)]
    if not (rows[few][name] and rows[most][name]):
        return "too late"
    measured = statistics.median(rows[most][name]) / statistics.median(rows[few][name])
    expected = [model(result, ms, name, int(hosts), size) for hosts in (most, few)]
    return f"{measured:.1f}" + (f" / {expected[0] / expected[1]:.1f}" if expected[1] else "")


def model(result: dict, ms: str, name: str, hosts: int, size: int) -> float | None:
    """Milliseconds that the cost model gives; None for what it does not know."""
    if name not in MODELS:
        return None
    if name == "hierarchical" and result["per_host"] == 1:  # which then exchanges whole vectors
        name = "recursive"
    return 1e3 * MODELS[name](hosts, size, result["launches"][ms]["alpha"], 8e-6 / result["mbits"])


def cell(times, expected: float | None) -> str:
    """Median, half the range in per cent of it, and what the model says."""
    if not times:
        return "too late"
    median = 1e3 * statistics.median(times)
    spread = 1e3 * (max(times) - min(times)) / 2 / median
    return f"{number(median)} ±{spread:.0%}" + (f" / {number(expected)}" if expected else "")


def number(value: float) -> str:
    """With a digit behind the point where it says something."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def draw(result: dict, path: str) -> None:
    """Time against hosts, lowest and highest latency: measured (points, lowest to highest) and the model (lines)."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'hpcdl[report]'") from None
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "hpcdl", "font.sans-serif": ["DejaVu Sans"]}
    latencies = sorted(result["launches"], key=float)
    columns = list(dict.fromkeys([latencies[0], latencies[-1]]))
    sizes = [text for text, size in SIZES.items() if str(size) in result["launches"][latencies[0]]["seconds"]]
    figure = Figure(figsize=(4.5 * len(columns), 3 * len(sizes)), layout="constrained")
    panels = figure.subplots(len(sizes), len(columns), squeeze=False)
    for row, text in zip(panels, sizes, strict=True):
        for panel, ms in zip(row, columns, strict=True):
            for color, name in enumerate(result["names"]):
                curves(panel, result, ms, SIZES[text], name, f"C{color}")
            panel.set(title=f"{text}, latency {ms} ms", xlabel="hosts", ylabel="ms", ylim=(0, None))
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, metadata={"Date": None})


def curves(panel, result: dict, ms: str, size: int, name: str, color: str) -> None:
    """One algorithm: points with their range, and the model's line."""
    rows = {int(hosts): row[name] for hosts, row in result["launches"][ms]["seconds"][str(size)].items() if row[name]}
    hosts, times = list(rows), [1e3 * np.array(each) for each in rows.values()]
    middle = np.array([np.median(each) for each in times])
    ranges = [middle - [each.min() for each in times], [each.max() for each in times] - middle]
    panel.errorbar(hosts, middle, ranges, fmt="o", markersize=3, linewidth=0.8, color=color, label=name)
    if name in MODELS and hosts:
        line = range(min(hosts), max(hosts) + 1)
        panel.plot(line, [model(result, ms, name, each, size) for each in line], color=color, linewidth=0.8)


# -- the program -------------------------------------------------------------------------------------------------------


def main(arguments=None):
    if MPI.COMM_WORLD.size > 1:  # what this program itself has launched
        failure.install()
        found = measure(json.loads(sys.argv[1]))
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=int, default=8, help="at most (%(default)s)")
    add("--per-host", type=int, default=2, help="ranks on each, for `hierarchical` (%(default)s)")
    add("--mbits", type=float, default=200, help="rate of the links, each way (%(default)s)")
    add("--ms", default="0,1,10", help="latencies of one way (%(default)s)")
    add("--repeats", type=int, default=5, help="turns of each algorithm; of 4 MB, 2 less (%(default)s)")
    add("--algorithms", default=",".join(NAMES), help="(%(default)s)")
    add("--json", metavar="FILE", help="keep the result there")
    add("--read", metavar="FILE", help="take the result from there instead of measuring")
    add("--plot", metavar="FILE.svg", help="draw time against hosts")
    options = parser.parse_args(arguments)
    result = json.loads(Path(options.read).read_text()) if options.read else launch(options)
    if options.json:
        Path(options.json).write_text(json.dumps(result))
    report(result)
    if options.plot:
        draw(result, options.plot)


def launch(options) -> dict:
    """Bring up the hosts for each latency, and measure."""
    names, latencies = options.algorithms.split(","), options.ms.split(",")
    for name in names:
        if algorithm(name).steps is None:
            why = "write it as a generator (hpcdl/comm/collective_schedule.py)"
            raise UsageError(f"--algorithms {name} has no steps: {why}")
    if options.hosts < 2 or options.per_host < 1 or options.repeats < 1 or options.mbits <= 0:
        raise UsageError("it takes 2 hosts or more, a rank on each, one repeat, and links of more than 0 Mbit/s")
    if not all(ms.replace(".", "", 1).isdecimal() for ms in latencies):
        raise UsageError(f"--ms {options.ms}: write milliseconds with commas between, as in 0,1,10")
    sizes = {str(size): max(1, options.repeats - 2 * (size >= LONG)) for size in SIZES.values()}
    result = {"mbits": options.mbits, "per_host": options.per_host, "names": names, "about": environment()}
    result["launches"] = {}
    for ms in latencies:
        start = time.perf_counter()
        plan = {"ms": float(ms), "per_host": options.per_host, "sizes": sizes, "names": names}
        with Hosts(options.hosts, options.mbits, float(ms), JUMBO) as hosts:
            done = hosts.mpiexec(options.hosts, options.per_host, __file__, json.dumps(plan), timeout=1200)
        result["launches"][ms] = json.loads(done.stdout.splitlines()[-1])
        print(f"latency {ms} ms: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return result


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        sys.exit(f"scaling: error: {error}")
