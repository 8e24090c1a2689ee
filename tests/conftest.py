"""Tests run on one rank and under mpiexec on several: a rank that fails ends all, for the others would wait for it.

    pytest                   on one rank: what needs no others, and what starts ranks of its own; -n 2: on both cores;
                             tests of `world` with the mark `four` are left to 4 ranks
    mpiexec -n 4 pytest      what ranks do together: the tests that ask for `world` or have the mark `mpi`
    --without-groups         leave out what 4 ranks show: the tests that ask for `each_group`, which they run on 3 and
                             4, and those with the mark `four`, for which the number of ranks does not matter
    --long                   also those, groups of 2, and the mark `long`: what takes long and shows what other tests
                             show for another program, number of ranks or device, or what only many starts show;
                             the fuzzers' full number of cases; and pages' commands on ranks of their own
    --turn K/N               also the K-th of N shares of the tests marked `long`: as CI, which takes them in turn
    --few-kernels            compile those that tests come to, not all before the first: for a few files
    --started                only those that start ranks of their own: what another MPI can change on one rank
    --all                    leave out nothing: whole grids, and on several ranks also what needs but one

A grid of parameters is thinned where they do not meet in the code. `in_turn("optimizer")`: the optimizers take turns
over the grid of the other parameters. `exhaustive`, of a test or of a set of its parameters: with --all only.
A test that is named, as FILE::TEST, always runs."""

import collections
import errno
import gc
import importlib.util
import inspect
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # The ranks that two tests start share the cores, where a rank of MPICH that waits must leave its own to the other
    # job's: to yield does nothing for another session where the kernel groups processes by them. Alone, it is slower.
    os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")

os.environ.setdefault("HPCDL_LOAD", "ignore")  # what a test finds does not depend on what else goes on
os.environ.pop("PYTHONUNBUFFERED", None)  # with it, a line and its end are two writes, which two ranks' output may mix

import numba
import numpy as np
import pytest
import ready_ranks
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import auto
from hpcdl.comm.progress import activity
from hpcdl.kernels import bind, device, shared
from hpcdl.machine.launcher import clean_environment, mpiexec

STANDIN = Path(__file__).parent / "standin"
TOGETHER = {"world", "mpi_tmpdir", "mpi_tmp_path", "mpi_file_name"}  # fixtures that all ranks ask for
BUDGET = 20  # seconds of all cores that a file may take, on a machine that takes YARDSTICK for the yardstick
YARDSTICK = 0.028  # seconds of a processor
MARGIN = 2  # a file beyond MARGIN budgets is an error, where HPCDL_TEST_BUDGET=error asks for it: CI does
GROUP, EACH = ("bare", "comm"), object()  # the communicator of a group as an argument, and what stands for it at first
auto.SECONDS = 0.001  # each run measures anew, and any table will do


def turn(text):
    """K and N of K/N."""
    turn, turns = map(int, text.split("/"))
    if not 1 <= turn <= turns:
        raise ValueError
    return turn, turns


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="whole grids; on several ranks, what needs one, too")
    parser.addoption("--long", action="store_true", help="also what takes long; --all implies it")
    parser.addoption("--turn", metavar="K/N", type=turn, help="also the K-th of N shares of what takes long")
    parser.addoption("--started", action="store_true", help="only what starts ranks of its own")
    parser.addoption("--few-kernels", action="store_true", help="compile kernels as tests come to them")
    parser.addoption("--without-groups", action="store_true", help="leave out what 4 ranks show for any number")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Rank 0 reports for all; what another rank has to say, it says when it fails."""
    if config.getoption("all") or config.getoption("long"):
        os.environ.setdefault("HPCDL_TESTS", "long")  # tests/fuzz.py looks at it
    config.cache_folder = tempfile.TemporaryDirectory()
    os.environ["HPCDL_CACHE"] = config.cache_folder.name  # what `auto` measures is not kept
    if MPI.COMM_WORLD.rank > 0:
        config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115 - open as long as pytest runs
    elif "PYTEST_XDIST_WORKER" not in os.environ and not config.getoption("few_kernels"):
        compile_kernels()
    meet(MPI.COMM_WORLD)
    config.pluginmanager.register(Budget())


def compile_kernels():
    """Compile every kernel, once for all ranks and workers; a mark in the cache says that it is done."""
    script = Path(__file__).parent / "kernels" / "compile.py"
    state = repr((bind.STAMP, script.read_bytes(), numba.__version__, platform.python_version(), platform.node()))
    mark = Path(shared.all_reduce._cache.cache_path) / f"compiled-for-tests-{zlib.crc32(state.encode()):08x}"
    if not mark.exists():
        print("compiling kernels, once", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, script], env=clean_environment(), check=True)
        mark.touch()


def pytest_collection_modifyitems(config, items):
    """Leave out what another run shows; all ranks take the same decisions, which depend on names and marks alone."""
    without = {"each_group", "four"} if config.getoption("without_groups") else set()
    thin = not config.getoption("all") and not any("::" in argument for argument in config.args)
    left = {"exhaustive"} if config.getoption("long") else {"exhaustive", "long"}
    turn, turns = config.getoption("turn") or (0, 1)
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.location[0], getattr(item, "originalname", item.name)].append(item)
    chosen = itertools.chain(*map(in_turn, tests.values())) if thin else items

    def wanted(item):
        fixtures, marks = set(item.fixturenames), {mark.name for mark in item.iter_markers()}
        together = fixtures & TOGETHER
        if MPI.COMM_WORLD.size == 1:  # what any number of ranks shows, 4 show, unless a group of 1 is asked for
            shown = "four" not in marks or not together or "each_group" in fixtures or "long" not in left
        else:
            shown = together or "mpi" in marks
        if config.getoption("started") and "alone" not in fixtures:
            return False
        if zlib.crc32(item.nodeid.encode()) % turns == turn - 1:
            marks.discard("long")
        return not (fixtures | marks) & without and (not thin or (shown and not marks & left))

    kept = set(filter(wanted, chosen))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def in_turn(grid):
    """Of the tests of one function, those in which it is the turn of what the mark `in_turn` names."""
    names = [name for mark in grid[0].iter_markers("in_turn") for name in mark.args]
    if not names:
        return grid
    columns = {}  # of each parameter: the number of its value in each test
    for name in grid[0].callspec.params:
        values = [repr(item.callspec.params[name]) for item in grid]
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        columns[name] = tuple(numbers[value] for value in values)
    others = {column for name, column in columns.items() if name not in names}  # a set: two may go hand in hand
    turn = list(map(sum, zip(*others, strict=True)))

    def has_come(column, row):
        return (column[row] - turn[row]) % min(1 + max(column), 1 + max(turn)) == 0

    return [item for row, item in enumerate(grid) if all(has_come(columns[name], row) for name in names)]


def pytest_collection_finish():
    """What is there by now stays: the collector need not look at thousands of tests again and again."""
    gc.collect()
    gc.freeze()


def yardstick():
    """Seconds of a processor that a fixed piece of work takes, the least of several times."""

    def once():
        began = time.process_time()
        sum(number * number for number in range(1_000_000))
        return time.process_time() - began

    return min(once() for _ in range(5))


class Budget:
    """How long each file takes: the slowest are printed, with those beyond the budget. None fails a user's tests.

    What counts is processor time, of this process on all ranks and of the programs that it has started, over all
    cores: no quiet machine of so many cores is faster, however long it takes here, where others may compute, too. A
    slower machine has a larger budget, by the yardstick, which is measured before the first test and after the last."""

    def __init__(self):
        self.seconds, self.busy, self.before = collections.Counter(), collections.Counter(), 0.0
        self.slower = max(1.0, yardstick() / YARDSTICK)

    def now(self):
        return MPI.COMM_WORLD.size * sum(os.times()[:4]) + ready_ranks.Ranks.busy

    def pytest_collection_finish(self):
        self.before = self.now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        """Where a test runs: send along what it took since the last report."""
        report = yield
        before, self.before = self.before, self.now()
        most = report.duration * len(os.sched_getaffinity(0))  # other ranks may have been less busy than this one
        report.user_properties.append(("busy", min(self.before - before, most)))
        return report

    def pytest_runtest_logreport(self, report):
        """Where reports come together."""
        self.seconds[report.location[0]] += report.duration
        self.busy[report.location[0]] += dict(report.user_properties).get("busy", 0.0)  # none of a worker that died

    def beyond(self, config, seconds):
        """The files that took more seconds of all cores than these, unless whole grids or a cluster were asked for."""
        limit = float("inf") if config.getoption("all") else self.slower * seconds * len(os.sched_getaffinity(0))
        return [file for file, busy in self.busy.items() if busy > limit and "cluster" not in Path(file).parts]

    def errors(self, config):
        """The files far beyond the budget, where that is asked for."""
        return self.beyond(config, MARGIN * BUDGET) if os.environ.get("HPCDL_TEST_BUDGET") == "error" else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and MPI.COMM_WORLD.size > 1:
            session.exitstatus = pytest.ExitCode.OK  # one rank has run what there is
        self.slower = max(self.slower, yardstick() / YARDSTICK)
        if self.errors(session.config) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter, config):
        terminalreporter.section(f"slowest files (budget: {BUDGET} s on all cores, times {self.slower:.1f})")
        for file, busy in self.busy.most_common(10):
            terminalreporter.write_line(f"{busy:5.1f} s of processors in {self.seconds[file]:5.1f} s: {file}")
        for file in self.beyond(config, BUDGET):
            terminalreporter.write_line(f"beyond its budget: {file}")
        for file in self.errors(config):
            terminalreporter.write_line(f"ERROR: {file} takes more than {MARGIN} times its budget")


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node, call, report):
    """Print the report of the rank that failed, then end the job."""
    if MPI.COMM_WORLD.size > 1:
        sys.stdout.flush()
        sys.stderr.write(f"\nrank {MPI.COMM_WORLD.rank} failed in {node.nodeid}\n{report.longreprtext}\n")
        sys.stderr.flush()
        time.sleep(0.2)  # MPICH's launcher drops what it has not read when the job ends
        MPI.COMM_WORLD.Abort(1)


def meet(comm):
    """A barrier that leaves the cores to those who are not there yet."""
    come = comm.Ibarrier()
    while not come.Test():
        time.sleep(1e-4)


@pytest.fixture
def world(monkeypatch):
    """All ranks; a barrier before and after keeps one test's messages out of the next.
    The communicators that a test leaves open are given back, as MPICH has 2048 for all tests of a process."""
    opened, make = [], Communicator.__init__

    def open_one(self, *arguments, **options):
        make(self, *arguments, **options)
        opened.append(self)

    monkeypatch.setattr(Communicator, "__init__", open_one)
    meet(MPI.COMM_WORLD)
    yield MPI.COMM_WORLD
    meet(MPI.COMM_WORLD)
    activity.in_flight.clear()
    for communicator in opened[::-1]:
        communicator.free()


def groups(world, least):
    """One communicator for each size from `least` to the world's, without --long the last two, or for each in $RANKS.
    A rank that is not in it gets None."""
    sizes = range(min(least, world.size), world.size + 1)
    sizes = sizes if os.environ.get("HPCDL_TESTS") == "long" else sizes[-2:]
    for size in map(int, os.environ["RANKS"].split(",")) if "RANKS" in os.environ else sizes:
        meet(world)
        part = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        yield size, None if part == MPI.COMM_NULL else part
        if part != MPI.COMM_NULL:
            part.Free()


@pytest.fixture
def each_group(world):
    """A function: run `body(comm)` on the first 2, 3, ... ranks, so that a world of 4 tests sizes 2 to 4 (`groups`).
    One rank runs the same tests on its own. least: begin with so many, where fewer show nothing new."""

    def run(body, least=2):
        for _, comm in groups(world, least):
            if comm is not None:
                body(comm)

    return run


def group_of(each_group):
    """A group's communicator: a test that takes it is a body of `each_group`; pytest.mark.least(N): least."""
    return EACH


bare, comm = (pytest.fixture(name=name)(group_of) for name in GROUP)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    name = next((name for name in GROUP if pyfuncitem.funcargs.get(name) is EACH), None)
    if name is None:
        return None
    given = {each: pyfuncitem.funcargs[each] for each in inspect.signature(pyfuncitem.obj).parameters}
    mark = pyfuncitem.get_closest_marker("least")
    pyfuncitem.funcargs["each_group"](lambda group: pyfuncitem.obj(**given | {name: group}), *mark.args if mark else ())
    return True


@pytest.fixture
def alone():
    """For tests that start ranks of their own, in a folder for temporary files of their own.
    Open MPI's launcher keeps its files in a folder that is named after its process. A launcher that is killed leaves
    the folder, and a later one with the same process number then does not start (213)."""
    if MPI.COMM_WORLD.size > 1:
        pytest.skip("starts ranks of its own")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture
def launch(alone, tmp_path):
    """A function: start a program on so many ranks, as a user would; for tests that run on one rank themselves.
    given: options of mpiexec."""

    def run(ranks, *command, timeout=60, check=None, cwd=tmp_path, given=(), **environment):
        done = subprocess.run(
            [mpiexec(), *given, "-n", str(ranks), sys.executable, *map(str, command)],
            env=clean_environment() | environment,
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            text=True,
        )
        if check is not None:
            assert done.returncode == check, done.stdout + done.stderr
        return done

    run.mpiexec = mpiexec()
    return run


@pytest.fixture
def environment(alone):
    """That of a user's shell, for commands that start ranks."""
    return clean_environment()


@pytest.fixture(scope="session", autouse=True)
def ranks_end():
    """Ranks that are up end with the tests."""
    yield
    ready_ranks.end()


@pytest.fixture
def run_on(alone, tmp_path):
    """A function as `launch`, for what a script prints and writes: on ranks that stay up, all of the same status."""

    def run(ranks, script, *arguments, timeout=60, check=None, cwd=tmp_path, **environment):
        done = ready_ranks.run(ranks, script, arguments, cwd, timeout, environment)
        if check is not None:
            assert done.returncode == check, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def fetch_first(world):
    """A function: run `body()` on all ranks; rank `late` first fetches from `busy`, whose MPI must answer meanwhile."""

    def run(body, busy, late):
        exposed, fetched = np.full(100, float(world.rank)), np.empty(100)
        window = MPI.Win.Create(exposed, 8, comm=world)
        if world.rank == late:
            time.sleep(0.1)  # the others wait by now
            window.Lock(busy)
            window.Get(fetched, busy)
            window.Unlock(busy)
            assert (fetched == busy).all()
        body()
        window.Free()

    return run


@pytest.fixture
def no_room(monkeypatch):
    """A function: let /dev/shm have no room for this rank of the world."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(rank):
        if MPI.COMM_WORLD.rank == rank:
            monkeypatch.setattr(os, "posix_fallocate", full)

    return fill


@pytest.fixture
def gpu(monkeypatch):
    """The stand-in for a GPU (tests/standin/cupy.py) as a device; its arrays meet no kernel here."""
    spec = importlib.util.spec_from_file_location("cupy", STANDIN / "cupy.py")
    standin = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cupy", standin)
    spec.loader.exec_module(standin)
    device.cuda.cache_clear()
    yield device.cuda(0)
    device.cuda.cache_clear()


@pytest.fixture
def simulate(run_on):
    """A function as `run_on`, with the stand-in for CuPy, its kernels in Numba's simulator."""

    def run(ranks, script, *arguments, timeout=120, **options):
        environment = {"PYTHONPATH": str(STANDIN), "NUMBA_ENABLE_CUDASIM": "1"}
        return run_on(ranks, script, *arguments, timeout=timeout, **environment, **options)

    return run
