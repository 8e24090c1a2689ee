"""Four hosts with a network between them: who is on which host, what passes each link, and training across them.

The bytes are those that the kernel counts on a host's link, all headers included; theory counts the payload."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hosts import Hosts
from mpi4py import MPI
from scaling import MODELS
from written_runs import lines, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.chunks import chunks
from hpcdl.machine.world import OPEN_MPI, library

HERE = Path(__file__).parent
HEADERS = 1.08  # times the payload, at most
K = 1_000_000  # float32
JUMBO = 9000  # bytes of a frame: few headers, so that little but the payload passes


pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts ranks of its own")


@pytest.fixture(scope="module")
def possible():
    """Skips where no hosts can be."""
    try:
        with Hosts(1):
            pass
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def four(possible):
    """Four hosts, with links as fast as the machine is."""
    with Hosts(4, mtu=JUMBO) as up:
        yield up


@pytest.fixture(scope="module", autouse=True)
def kernels(compiled):
    """Have all ranks take the kernels from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(compiled))
        yield


# -- the hosts themselves ----------------------------------------------------------------------------------------------


def running(word):
    """The processes of this machine that have this word in their command."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [process] if word in (process / "cmdline").read_text().split("\0") else []
    return found


def until(condition):
    """Whether the condition comes to hold, within seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def background(word):
    """A command of a host that leaves a process with this word behind."""
    return "sh", "-c", f"setsid sh -c 'sleep 1000; true' {word} > /dev/null 2>&1 &"


def test_hosts_differ_in_name_address_and_memory_and_share_files(four, tmp_path):
    (tmp_path / "file").write_text("the same")
    for host in range(4):
        assert four.on(host, "hostname").stdout == f"host{host}\n"
        four.on(host, "touch", f"/dev/shm/of{host}")
        assert four.on(host, "ls", "/dev/shm").stdout == f"of{host}\n"
        address = json.loads(four.on(host, "ip", "-json", "address", "show", "dev", "eth0").stdout)[0]["addr_info"][0]
        assert address["local"] == f"10.77.0.{host + 1}"
        assert four.on(host, "getent", "hosts", "host2").stdout.split() == ["10.77.0.3", "host2"]
        assert four.on(host, "cat", "file", cwd=tmp_path).stdout == "the same"
    assert four.on(1, "sh", "-c", "exit 7", check=None).returncode == 7


def test_nothing_is_left(possible):
    word = f"left-{os.getpid()}"
    with Hosts(2) as pair:
        pair.on(1, *background(word))
        assert until(lambda: running(word))
        folder = pair.folder
        assert str(folder) in running(str(folder))[0].joinpath("cmdline").read_text()
    assert not running(word) and not running(str(folder)) and not folder.exists()


def test_nothing_is_left_when_their_owner_is_killed(possible):
    word = f"killed-{os.getpid()}"
    program = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from hosts import Hosts
with Hosts(2) as pair:
    pair.on(1, *{background(word)!r})
    print(pair.folder, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        folder = owner.stdout.readline().strip()
        assert until(lambda: running(word)) and running(folder)
        owner.send_signal(signal.SIGKILL)
    assert until(lambda: not running(word) and not running(folder) and not Path(folder).exists())


def test_what_takes_too_long_is_ended_and_the_hosts_are_there_again(possible):
    word = f"long-{os.getpid()}"
    with Hosts(2) as pair:
        pair.on(1, *background(word))
        with pytest.raises(subprocess.TimeoutExpired):
            pair.on(0, "sleep", "1000", timeout=0.3)
        assert not running(word)
        assert pair.on(1, "hostname").stdout == "host1\n"


@pytest.mark.parametrize(("mbits", "ms"), [(100, None), (100, 0), (100, 5)])
def test_a_link_is_no_faster_than_it_is_said_to_be(mbits, ms, possible):
    program = """
import sys, time
import numpy as np
from mpi4py import MPI
comm, other, nothing, much = MPI.COMM_WORLD, 1 - MPI.COMM_WORLD.rank, np.empty(0), np.ones(2_000_000, "u1")
def exchange(values, back):
    start = time.perf_counter()
    if comm.rank == 0:
        comm.Send(values, other)
    comm.Recv(values if comm.rank else back, other)
    if comm.rank:
        comm.Send(back, other)
    return time.perf_counter() - start
taken = [[exchange(values, nothing) for _ in range(3)] for values in (nothing, much)]
if comm.rank == 0:
    print([min(each) for each in taken])
"""
    with Hosts(2, mbits, ms, mtu=JUMBO) as pair:
        short, long = json.loads(pair.mpiexec(2, 1, "-c", program).stdout)
    burst = 3 * (64 << 10) if ms is None else 0  # bytes that full buckets let pass
    ms = ms or 0
    assert short >= 2e-3 * ms
    assert long >= 2e-3 * ms + 8e-6 * (2_000_000 - burst) / mbits


# -- bytes on the links ------------------------------------------------------------------------------------------------

EXCHANGE = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import numpy as np
from mpi4py import MPI
from hosts import link_counters
from hpcdl.comm import Communicator
from hpcdl.comm.node_memory import ranks_of_node

world, found = MPI.COMM_WORLD, {{}}
node = ranks_of_node(world)
found["hosts"] = world.allgather(MPI.Get_processor_name())
found["nodes"] = world.allgather(node.allgather(world.rank))
for name in sys.argv[1:]:
    comm = Communicator(world, allreduce=name)
    vector = comm.empty({K})
    for turn in range(2):  # the first one makes connections
        vector[:] = np.arange({K}) % 97 + world.rank
        counted = comm.traffic["all_reduce"]
        messages, before = counted.messages, link_counters()
        world.Barrier()  # nothing comes before all have looked
        comm.all_reduce(vector)
        world.Barrier()
        after, messages = link_counters(), counted.messages - messages
    right = bool((vector == np.arange({K}) % 97 * world.size + sum(range(world.size))).all())
    passed = [now - then for now, then in zip(after, before)]
    found[name] = world.allgather([right, passed, messages])
    comm.free()
if world.rank == 0:
    print(json.dumps(found))
"""


def messages_of(name, size, per_host):
    """(from, to, values) of the messages of an all-reduce of K values, those between the same two ranks in one."""
    cut = [part.stop - part.start for part in chunks(K, size)]
    if name == "hierarchical":  # the first rank of each host, exchanging
        return [(a * per_host, b * per_host, n) for a, b, n in messages_of("recursive", size // per_host, 1)]
    if name == "naive":
        return [each for rank in range(1, size) for each in ((rank, 0, K), (0, rank, K))]
    if name == "tree":  # to the rank without the lowest bit, and back
        return [each for r in range(1, size) for each in ((r, r & (r - 1), K), (r & (r - 1), r, K))]
    if name == "ring":
        return [(r, (r + 1) % size, 2 * K - cut[(r + 1) % size] - cut[(r + 2) % size]) for r in range(size)]
    if size == 3:  # recursive, on a circulant graph: chunk r+2 to rank r+2, then r+1 to r+1, and the sums backwards
        added = [(r, (r + d) % 3, cut[(r + d) % 3]) for r in range(3) for d in (2, 1)]
        return added + [(to, r, n) for r, to, n in added]
    # halves with the rank at half the distance, quarters with the one at a quarter, ..., and backwards
    return [(r, r ^ d, 2 * K * d // size) for r in range(size) for d in (1, 2, 4) if d < size]


def passes(name, count, per_host):
    """Bytes that theory has each host send and receive."""
    sent, received = [0] * count, [0] * count
    for source, to, values in messages_of(name, count * per_host, per_host):
        if source // per_host != to // per_host:
            sent[source // per_host] += 4 * values
            received[to // per_host] += 4 * values
    return list(zip(sent, received, strict=True))


@pytest.mark.parametrize(("count", "per_host"), [(4, 1), (3, 1), (4, 2)])
def test_hosts_are_found_and_links_carry_what_theory_says(count, per_host, four):
    names = "naive", "ring", "tree", "recursive", "hierarchical"
    found = json.loads(four.mpiexec(count, per_host, "-c", EXCHANGE, *names, timeout=120).stdout)
    ranks = range(count * per_host)
    assert found["hosts"] == [f"host{rank // per_host}" for rank in ranks]
    assert found["nodes"] == [[r for r in ranks if r // per_host == rank // per_host] for rank in ranks]
    for name in names:
        right, passed, messages = zip(*found[name], strict=True)
        assert all(right)
        for host, payloads in enumerate(passes(name, count, per_host)):
            for what, payload, counted in zip(("sent", "received"), payloads, passed[host * per_host], strict=True):
                assert payload <= counted <= HEADERS * payload, f"{name}: host{host} {what} {counted}, not {payload}"
        if name == "hierarchical":
            assert [number > 0 for number in messages] == [rank % per_host == 0 for rank in ranks]


def test_theory_of_what_passes():
    """The list of messages against the formulas of the algorithms' own pages."""
    for count in (3, 4):
        driver, *others = passes("naive", count, 1)
        assert driver == (4 * (count - 1) * K,) * 2 and set(others) == {(4 * K,) * 2}
        assert sum(sent for sent, _ in passes("tree", count, 1)) == 4 * 2 * (count - 1) * K
        for sent, received in passes("ring", count, 1):
            assert abs(sent - 8 * (count - 1) * K / count) <= 8 and abs(received - 8 * (count - 1) * K / count) <= 8
        sent, received = zip(*passes("recursive", count, 1), strict=True)
        assert sum(sent) == sum(received) == 8 * (count - 1) * K
    assert set(passes("recursive", 4, 1)) == {(6 * K,) * 2}
    assert set(passes("hierarchical", 4, 2)) == {(6 * K,) * 2}
    assert set(passes("ring", 4, 2)) == {(7 * K,) * 2}


# -- training ----------------------------------------------------------------------------------------------------------

COMMON = ["--data", "digits", "--batch-size", "60", "--steps", "15", "--seed", "5"]


def train(four, count, per_host, folder, *command):
    """Run a training program on so many hosts and ranks; returns its folder."""
    arguments = ["-m", "hpcdl.cli", *command, *COMMON, "--out", folder]
    four.mpiexec(count, per_host, *arguments, timeout=120, cwd=folder.parent)
    return folder


def parameters(folder):
    return Checkpoint.read(folder).vectors["parameters"]


def losses(folder):
    return np.array([line["train_loss"] for line in lines(folder) if "test_loss" not in line])


@pytest.mark.parametrize(
    "command",
    [
        ["train-allreduce", "--data-servers", "1", "--model", "mlp:40", "--allreduce", "ring"],
        ["train-parameter-server", "--servers", "2", "--consistency", "bsp", "--model", "mlp:40"],
    ],
    ids=lambda command: command[1],
)
def test_servers_across_hosts_change_no_bit(command, four, tmp_path):
    apart = train(four, 4, 1, tmp_path / "apart", *command)
    together = train(four, 1, 4, tmp_path / "together", *command)
    assert np.array_equal(parameters(apart), parameters(together))
    assert np.array_equal(losses(apart), losses(together)) and len(losses(apart)) == 15
    assert summary(apart)["replicas_agree"] and summary(apart)["ranks"] == 4


def test_a_pipeline_over_hosts_is_sequential(four, tmp_path):
    model = ["--model", "mlp:32,24,16", "--dtype", "float64"]
    stages = train(four, 4, 1, tmp_path / "stages", "train-pipeline", "--microbatches", "4", *model)
    one = train(four, 1, 1, tmp_path / "one", "train-sequential", *model)
    assert len(losses(one)) == 15 and np.allclose(losses(stages), losses(one), rtol=1e-10, atol=0)
    assert np.allclose(parameters(stages), parameters(one), rtol=0, atol=1e-10)


# -- links that are cut ------------------------------------------------------------------------------------------------


def test_a_link_that_is_cut_for_a_while_changes_nothing(four, tmp_path):
    command = ["train-allreduce", "--model", "mlp:40", "--allreduce", "ring"]
    cut = train(four, 2, 2, tmp_path / "cut", *command, "--inject", "drop:rank=2,step=6,seconds=0.5")
    whole = train(four, 2, 2, tmp_path / "whole", *command)
    assert np.array_equal(parameters(cut), parameters(whole)) and len(losses(cut)) == 15


@pytest.mark.parametrize("lost", [pytest.param(0, id="the supervisor's"), pytest.param(2, id="another")])
def test_a_host_whose_link_is_cut_is_left_out(lost, possible, tmp_path):
    """On both sides all ranks end, and the supervisor goes on on the host that it is on."""
    with Hosts(2, mtu=JUMBO) as two:
        launch, environment = two.launch(2, 2)
        job = [*launch, sys.executable, "-m", "hpcdl", "train-allreduce", "--model", "mlp:40", "--allreduce", "ring"]
        job += [*COMMON, "--out", tmp_path / "run", "--timeout", "3", "--inject", f"drop:rank={lost},step=6"]
        job += ["--checkpoint-every", "2"]
        supervise = [sys.executable, "-m", "hpcdl", "supervise", "--min-ranks", "2", "--", *job]
        done = two.on(0, *supervise, cwd=tmp_path, timeout=150, **environment)
        assert done.stderr.count("the links of this host are cut for good: eth0") == 1
        assert "rank 0: waits in all_reduce" in done.stderr and "rank 2: no answer" in done.stderr
        assert "supervise: hosts that do not answer: host1" in done.stderr
        assert "on 2 ranks instead of 4" in done.stderr and len(losses(tmp_path / "run")) == 15
        assert until(lambda: not running(str(tmp_path / "run")))


DETECTOR = {"": "true", "_thread": "true", "_period": "0.5", "_timeout": "3.0"}  # of Open MPI, seconds


@pytest.mark.skipif(library() != OPEN_MPI, reason="Open MPI hands failures to the program; MPICH does not")
def test_a_host_that_vanishes_is_outlived_in_the_job(possible, tmp_path):
    """All ranks of a host are gone at once; of the two sides the larger one goes on, from memory."""
    with Hosts(3, mtu=JUMBO) as three:
        command = ["train-allreduce", "--model", "mlp:40", "--allreduce", "ring", "--dtype", "float64"]
        whole = train(three, 2, 1, tmp_path / "whole", *command)
        launch, environment = three.launch(3, 2)
        launch[1:1] = ["--with-ft", "ulfm", "--rank-by", "node"]  # whoever watches a rank is on another host
        launch[1:1] = [word for name, value in DETECTOR.items() for word in ("--mca", f"mpi_ft_detector{name}", value)]
        job = [*launch, sys.executable, "-m", "hpcdl", *command, *COMMON, "--out", tmp_path / "run", "--survive", "4"]
        supervise = [sys.executable, "-m", "hpcdl", "supervise", "--restarts", "0", "--", *job]
        done = three.on(0, *supervise, "--inject", "drop:rank=2,step=6", cwd=tmp_path, timeout=100, **environment)
        assert "ranks 2 and 5 are gone after step 5; 4 ranks go on" in done.stdout
        assert "the launcher, which still runs, is ended" in done.stderr  # it waits for the host
        (loss,) = summary(tmp_path / "run")["losses"]
        assert (loss["ranks"], loss["left"], summary(tmp_path / "run")["steps"]) == ([2, 5], 4, 15)
        assert np.allclose(parameters(tmp_path / "run"), parameters(whole), rtol=0, atol=1e-12)
        assert until(lambda: not running(str(tmp_path / "run")))


# -- the measurement ---------------------------------------------------------------------------------------------------


def test_scaling_measures_and_tabulates(possible, tmp_path):
    kept = tmp_path / "result.json"
    options = ["--hosts", "3", "--per-host", "1", "--mbits", "1000", "--ms", "1", "--repeats", "3", "--json", kept]
    done = subprocess.run(
        [sys.executable, HERE / "scaling.py", *options, "--algorithms", "naive,mpi"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(kept.read_text())
    found = result["launches"]["1"]
    assert found["alpha"] >= 1e-3  # that of the link
    rows = [(int(size), *row) for size, each in found["seconds"].items() for row in each.items()]
    measured = {(size, int(count)): times["naive"] for size, count, times in rows}
    assert set(measured) == {(4_000, 2), (4_000, 3), (256_000, 2), (256_000, 3), (4_000_000, 2)}
    for (size, count), times in measured.items():
        assert all(seconds >= 2e-3 + 2 * (count - 1) * size * 8e-9 for seconds in times)  # as the driver's link allows
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| 2 |", "| 3 |"))]
    assert len(rows) == len(measured)
    assert [rows[-1][1].split(" / ")[1], len(rows[-1])] == [f"{2e3 * (found['alpha'] + 4e6 * 8e-9):.1f}", 3]


def test_pytorch_over_hpcdl_and_gloo_is_measured(possible):
    pytest.importorskip("torch")
    done = subprocess.run(
        [
            *(sys.executable, HERE / "on_links.py", "--mbits", "1000", "bench-torch", "--models", "none"),
            *("--sizes", "1KiB,256KiB", "--seconds", "0.1"),
        ],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1,000 Mbit/s" in done.stdout and "on 2 ranks" in done.stdout
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| 1KiB", "| 256KiB"))]
    assert len(rows) == 2 and all(len(row) == 4 for row in rows)
    assert float(rows[1][1].replace(",", "")) >= 0.5 * 1e6 * (256 << 10) * 8 / 1e9  # microseconds, as the link allows


@pytest.mark.parametrize("count", range(2, 20))
def test_no_model_is_faster_than_what_is_possible(count):
    """2 (N-1)/N of the vector has to pass the link of one rank (Patarasuk and Yuan, 2009), and one latency."""
    for name, model in MODELS.items():
        for n, alpha, beta in ((4e6, 0, 1e-6), (4e6, 3, 1e-6), (4, 5, 1e-6)):
            assert model(count, n, alpha, beta) >= max(alpha, 2 * (count - 1) / count * n * beta) * (1 - 1e-12), name
