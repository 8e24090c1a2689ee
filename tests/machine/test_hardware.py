"""What the machine's report holds: rows, sizes and tables; never how fast anything is."""

import os

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.kernels import probes
from hpcdl.kernels.device import CPU
from hpcdl.machine import hardware, hardware_memory, hardware_threads
from hpcdl.machine.hardware import bandwidths, peak, tables
from hpcdl.machine.hardware_threads import RoundTime, pairs, per_round, run_threads, thread_counts
from hpcdl.machine.topology import Cache, MachineTopology, Processor, from_sys

SHORT = 1e-4  # seconds for a number


def made(cores=2, siblings=1, nodes=1):
    """A machine with caches of 32 KiB, 1 MiB and 8 MiB, the last for all."""
    numbers = range(cores * siblings)
    processors = [Processor(n, n % cores, 0, n % cores * nodes // cores) for n in numbers]
    own = [frozenset(range(k, len(numbers), cores)) for k in range(cores)]
    caches = [Cache(level, size, shared) for level, size in ((1, 32 << 10), (2, 1 << 20)) for shared in own]
    caches.append(Cache(3, 8 << 20, frozenset(numbers)))
    return MachineTopology("made", "", processors, caches, {0: 1 << 30}, [*numbers])


def test_multiply_add_takes_its_steps():
    loop, x = probes.multiply_add(), np.array([1.0, -2.0, 0.0])
    loop(x, 0.5, 1.0, 2)
    wanted = np.array([1.0, -2.0, 0.0])
    for _ in range(2 * probes.DEPTH):
        wanted = wanted * 0.5 + 1.0
    assert np.allclose(x, wanted, rtol=1e-12)
    assert probes.multiply_add_source().count("v * factor + addend") == probes.DEPTH


def test_streams():
    a, b, c = (np.arange(k, k + 10, dtype=np.float32) for k in range(3))
    assert probes.read_stream(a, 3) == 45
    probes.triad_stream(a, b, c, np.float32(2), 2)
    assert np.array_equal(a, b + 2 * c)
    probes.copy_stream(a, c, 1)
    assert np.array_equal(a, c)


def test_threads_meet_and_pass_words():
    words, cpus = CPU.zeros(4 * probes.LINE, np.int64), [min(os.sched_getaffinity(0))] * 2
    assert run_threads(cpus, lambda i: probes.ping_pong(words, i, 20)) > 0 and words[0] == 40
    words[:] = 0
    run_threads(cpus, lambda i: probes.meet(words, i, 2, 30, 1))
    assert list(words[:: probes.LINE]) == [30, 30, 0, 0]


def test_a_lock_lets_in_one_at_a_time():
    words = CPU.zeros(2 * probes.LINE, np.int64)
    cpus = (sorted(os.sched_getaffinity(0)) * 2)[:2]
    assert hardware_threads.lock_seconds(words, cpus, 2_000_000) > 0
    assert words[probes.LINE] == 4_000_000 and words[0] == 0


def test_a_thread_that_fails_holds_no_other_up():
    def first(i):
        if i:
            raise KeyError("seen")

    with pytest.raises(Exception, match=r"seen|Barrier|^$"):
        run_threads([0, 0], lambda i: None, first)


def test_a_time_is_that_of_a_round():
    asked = []

    def run(rounds):
        asked.append(rounds)
        return 1e-3 * rounds

    taken = per_round(run, 0.1)
    assert taken.median == pytest.approx(1e-3) and taken.best == pytest.approx(1e-3)
    assert len(set(asked[-hardware_threads.REPEATS :])) == 1 and asked[-1] >= 4
    assert RoundTime(2.0, 1.0).rate("x", 6) == {"x": 3.0, "x_best": 6.0}
    assert RoundTime(2e-9, 1e-9).nanoseconds(2) == {"nanoseconds": 1.0, "nanoseconds_best": 0.5}


def test_numbers_of_threads_and_a_pair_for_each_relation():
    assert [thread_counts(n) for n in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert pairs(made(2, 2)) == [(0, 1), (0, 2)]  # one cache; siblings
    assert pairs(made(1)) == []


def test_working_sets_stay_where_they_are_meant_to():
    found = made(4)
    memory = hardware_memory.memory_size(found)
    assert memory == max(64 << 20, 4 * (8 << 20))
    own = [("L1", 16 << 10), ("L2", 512 << 10)]
    assert hardware_memory.places(found, [0]) == [*own, ("L3", 4 << 20), ("memory", memory)]
    assert hardware_memory.places(found, [0, 1, 2, 3]) == [*own, ("L3", 1 << 20), ("memory", memory // 4)]
    siblings = hardware_memory.places(made(2, 2), [0, 2])
    assert siblings[0] == ("L1", 8 << 10)


def test_a_machine_without_known_caches_has_a_memory():
    found = MachineTopology("made", "", [Processor(0, 0, 0, -1)], [], {}, [0])
    assert hardware_memory.places(found, [0]) == [("memory", 64 << 20)]


def test_no_room(monkeypatch):
    monkeypatch.setattr(hardware_memory, "available", lambda: 1000)
    with pytest.raises(UsageError, match="no room for 1 times 65536 bytes"):
        hardware_memory.bandwidth("read", "float32", 1 << 16, [0], [0], SHORT)


@pytest.fixture(scope="module")
def rows():
    """Of this machine, quickly, without the arithmetic, which has a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware_memory, "LEAST", 1 << 16)
        patch.setattr(hardware_memory, "MOST", 1 << 20)
        found = from_sys()
        return [row for part in ("machine", "memory", "cores") for row in hardware.PARTS[part](found, SHORT)], found


@pytest.mark.long
def test_rows_of_the_machine_and_between_its_cores(rows):
    made, found = rows
    kinds, cores = [row["what"] for row in made], len(found.one_per_core())
    assert kinds[:3] == ["processor", "processors", "cores"] and kinds.count("node") == len(found.nodes())
    assert [row["usable"] for row in hardware.rows_of_kind(made, "cores")] == [cores]
    assert kinds.count("cache") == len({cache.level for cache in found.caches})
    assert kinds.count("cache line") == len(pairs(found))
    assert [row["threads"] for row in hardware.rows_of_kind(made, "barrier")] == thread_counts(cores)[1:]
    assert [row["threads"] for row in hardware.rows_of_kind(made, "lock")] == thread_counts(cores)


def test_rows_of_the_memory(rows):
    made, found = rows
    bands = hardware.rows_of_kind(made, "bandwidth")
    threads = thread_counts(len(found.one_per_core()))
    places = len(found.caches_of(found.usable[0])) + 1
    assert len(bands) == (len(threads) + bool(found.siblings())) * places * len(hardware_memory.LOOPS)
    assert all(0 < row["gigabytes_per_second"] <= row["gigabytes_per_second_best"] for row in bands)
    types = hardware.rows_of_kind(made, "types")
    assert {row["dtype"] for row in types} == {"float64", "float32", "bfloat16", "float16"}
    assert len(hardware.rows_of_kind(made, "numa")) == (len(found.nodes()) if len(found.nodes()) > 1 else 0)


def arithmetic_rows():
    """As they would be of a processor with two threads and siblings."""
    about = {"what": "arithmetic", "level": "AVX2", "dtype": "float32", "bits": 256}
    speed = {"gflops": 8.0, "gflops_best": 9.0}
    rows = [about | speed | {"chains": chains, "threads": 1, "on": "cores"} for chains in (1, 2, 4, 8, 16)]
    rows.append(about | {"gflops": 16.0, "gflops_best": 20.0, "chains": 16, "threads": 2, "on": "cores"})
    return rows + [about | speed | {"chains": c, "threads": 2, "on": "siblings of one core"} for c in (1, 16)]


def test_tables(rows):
    made, _ = rows
    shown = tables(made + arithmetic_rows())
    heads = ["machine", "GFLOP/s", "GB/s", "read, GB/s", "10^9 elements/s", "nanoseconds"]
    heads = [head for head in heads if head != "read, GB/s" or hardware.rows_of_kind(made, "divided")]
    assert [table.cells[0][0] for table in shown] == heads
    assert all(len(line) == len(table.cells[0]) for table in shown for line in table.cells)
    assert shown[1].cells[1] == ["AVX2", "float32", *["8.0"] * 5, "16.0", "8.0", "8.0"]
    assert tables([]) == []


def test_medians_far_from_the_best():
    rows = [{"x": 7.0, "x_best": 10.0, "y": 1}, {"x": 9.0, "x_best": 10.0, "z": 30.0, "z_best": 20.0}]
    assert hardware.disturbed_count(rows) == (2, 3) and hardware.disturbed_count([]) == (0, 0)
    assert hardware.best_values(rows)[1] == {"x": 10.0, "x_best": 10.0, "z": 20.0, "z_best": 20.0}


def test_roofs(rows):
    made, found = rows
    assert peak(arithmetic_rows()) == 9.0 and peak([]) == 0.0  # of one thread
    assert list(bandwidths(made)) == [*(f"L{cache.level}" for cache in found.caches_of(found.usable[0])), "memory"]
    one = [row["gigabytes_per_second_best"] for row in made if row.get("place") == "memory" and row.get("threads") == 1]
    assert bandwidths(made)["memory"] == max(one)


def test_a_working_set_that_is_divided(monkeypatch):
    asked = []

    def bandwidth(loop, dtype, size, cpus, touched, seconds):
        asked.append((loop, size, cpus))
        return {"gigabytes_per_second": 10.0 * len(cpus) ** 2, "gigabytes_per_second_best": 20.0 * len(cpus)}

    monkeypatch.setattr(hardware_memory, "bandwidth", bandwidth)
    (row,) = hardware_memory.divided(made(4), SHORT)
    each = (1 << 20) * 3 // 4  # of the second cache, for the third is shared
    assert asked == [("read", 4 * each, [0]), ("read", each, [0, 1, 2, 3])]
    assert (row["cache"], row["speed_up"], row["speed_up_best"]) == ("L2", 16.0, 4.0)
    assert tables([row])[0].cells[1] == [
        "3 MiB, each of 4 threads has its part in its L2",
        "10.0",
        "160.0",
        "16.00",
        "4.00",
    ]
    assert hardware_memory.divided(made(1), SHORT) == []


def test_remote_memory_of_two_nodes(monkeypatch):
    asked = []
    speed = {"gigabytes_per_second": 1.0}
    monkeypatch.setattr(hardware_memory, "bandwidth", lambda *args: asked.append(args[3:5]) or speed)
    found = hardware_memory.remote(made(4, nodes=2), SHORT)
    assert [(row["from_node"], row["of_node"]) for row in found] == [(0, 0), (0, 1)]
    assert asked == [([0], [0]), ([0], [2])]
    assert "memory of node 1, from node 0" in [line[0] for line in tables(found)[0].cells]
