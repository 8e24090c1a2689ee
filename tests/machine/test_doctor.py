"""Each check on made-up ranks: what it says, its verdict, and its advice."""

import dataclasses
import logging
import os

import pytest
from in_process import ends

from hpcdl.kernels.shared import BYTES
from hpcdl.machine import doctor, facts
from hpcdl.machine.doctor import HURTS, NOTE, OK
from hpcdl.machine.facts import Facts
from hpcdl.machine.network import VECTOR, LinkSpeed
from hpcdl.machine.threads import BLAS

GIB = 1 << 30


def rank(number=0, node=0, cores=range(8), machine=8, blas=1, variable="", room=64 * GIB, **more):
    return Facts(number, node, f"host{node}", list(cores), machine, blas, variable, room, **more)


def ranks(n, per_node=None, **same):
    """n ranks, so many on each host."""
    per_node = per_node or n
    return [rank(i, i - i % per_node, **same) for i in range(n)]


def one(rows):
    (row,) = rows
    return row


# -- software --------------------------------------------------------------------------------------------------------


def test_one_library_on_all_ranks():
    seen = ranks(4, 2, library="MPICH 5.0.2", versions={"mpi4py": "4.1.2", "numpy": "2.4"})
    assert [row.verdict for row in doctor.mpi(seen)] == [OK, OK]
    assert doctor.mpi(seen)[0].found == "MPICH 5.0.2, by mpi4py 4.1.2"
    seen[3].library = "MPICH 4.3.0"
    first, second = doctor.mpi(seen)
    assert first.verdict == HURTS and "MPICH 5.0.2" in first.found and "rank 3 on host2: MPICH 4.3.0" in first.found
    assert second.verdict == OK
    seen[3].library, seen[3].versions = "MPICH 5.0.2", {"mpi4py": "4.1.2", "numpy": "2.5"}
    first, second = doctor.mpi(seen)
    assert first.verdict == OK and second.verdict == HURTS and "numpy 2.5" in second.found


@pytest.mark.parametrize(
    "size, found, verdict, words",
    [
        (1, [("/p/mpiexec", "MPICH")], OK, ""),
        (4, [("/s/mpiexec", None), ("/p/mpiexec", "MPICH")], OK, ""),
        (1, [("/s/mpiexec", "Open MPI"), ("/p/mpiexec", "MPICH")], HURTS, "start with /p/mpiexec"),
        (4, [("/s/mpiexec", "Open MPI"), ("/p/mpiexec", "MPICH")], NOTE, "start with /p/mpiexec"),
        (1, [("/s/mpiexec", "Open MPI")], HURTS, "install MPICH's mpiexec"),
        (1, [], NOTE, "start with "),
    ],
)
def test_the_launcher_is_of_the_same_library(size, found, verdict, words):
    row = one(doctor.mpiexec(size, "MPICH", found))
    assert row.verdict == verdict and words in row.advice


@pytest.mark.parametrize(
    "size, environ, verdict, words",
    [
        (1, {}, OK, "1 rank, started alone"),
        (4, {"PMI_SIZE": "4"}, OK, "4 ranks, started by mpiexec"),
        (4, {"MPI_LOCALNRANKS": "2"}, OK, "4 ranks, started by mpiexec"),  # two on each host
        (1, {"PMI_SIZE": "1", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, OK, "started by mpiexec"),
        (1, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, NOTE, "alone in a Slurm allocation of 4 tasks"),
        (1, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, HURTS, "a world of its own"),
        (4, {"PMI_SIZE": "8"}, NOTE, "has 8 ranks (PMI_SIZE)"),
    ],
)
def test_the_world_is_one(size, environ, verdict, words):
    row = one(doctor.world(size, "MPICH", environ))
    assert row.verdict == verdict and words in row.found


# -- hosts -----------------------------------------------------------------------------------------------------------


def test_ranks_per_host():
    assert one(doctor.hosts(ranks(3))) == ("hosts", "host0, 3 ranks", OK, "")
    assert one(doctor.hosts(ranks(4, 2))).found == "host0, host2, 2 ranks each"
    assert one(doctor.hosts(ranks(64, 8))).found == "8 hosts (host0, host8, ...), 8 ranks each"
    row = one(doctor.hosts(ranks(5, 2)))
    assert row.verdict == NOTE and row.found == "ranks per host: host0 2, host2 2, host4 1"


@pytest.mark.parametrize(
    "seen, verdict, words",
    [
        (ranks(8), OK, ""),
        (ranks(4, blas=2), OK, ""),
        (ranks(8, 4, blas=2), OK, ""),
        ([rank(cores=[0, 1]), rank(1, cores=[2, 3], blas=2)], OK, ""),
        (ranks(2, blas=8, variable="OMP_NUM_THREADS"), HURTS, "export OMP_NUM_THREADS=4"),
        (ranks(1, blas=64, variable="MKL_NUM_THREADS"), HURTS, "export MKL_NUM_THREADS=8"),
        (ranks(16, blas=2, variable="OMP_NUM_THREADS"), HURTS, "THREADS=1, and start at most 8 ranks on these cores"),
        (ranks(4, cores=[0]), HURTS, "--bind-to none"),
        (ranks(4, cores=[0], variable="OMP_NUM_THREADS"), HURTS, "--bind-to none"),  # of 1 thread each
        ([rank(cores=[0]), rank(1, cores=[0]), rank(2, cores=[2]), rank(3, cores=[3])], HURTS, "--bind-to none"),
        (ranks(2, cores=[0, 1], blas=2, variable="OMP_NUM_THREADS"), HURTS, "export OMP_NUM_THREADS=1"),
        ([rank(cores=[0], blas=1), rank(1, cores=[0, 1])], OK, ""),  # the second has a core of its own
        (ranks(9), NOTE, "start at most 8 ranks on these cores"),
    ],
)
def test_threads_and_cores(seen, verdict, words):
    row = one(doctor.cores(seen))
    assert row.verdict == verdict and words in row.advice and bool(row.advice) == (verdict != OK)


def test_the_hosts_that_differ_are_named():
    seen = [*ranks(4, 2, blas=4), rank(4, 4, cores=[0], blas=4, variable="OMP_NUM_THREADS")]
    good, bad = doctor.cores(seen)
    assert good.found.startswith("host0, host2: 2 ranks on 8 of 8 cores, BLAS threads per rank: 4")
    assert bad.found == "host4: 1 rank on 1 of 8 cores, BLAS threads per rank: 4 (OMP_NUM_THREADS)"
    assert (good.verdict, bad.verdict) == (OK, HURTS)


@pytest.mark.parametrize(
    ("left", "verdict", "text"),
    [(1.0, OK, "processes use 0.0"), (0.95, OK, "0.1 of 2"), (0.8, NOTE, "0.4 of 2 cores"), (0.4, HURTS, "1.2 of 2")],
)
def test_others_on_the_cores(left, verdict, text):
    row = one(doctor.busy(ranks(2, cores=range(2), spare=left)))
    assert row.verdict == verdict and text in row.found


def test_thread_pools_and_a_load_that_nobody_knows():
    assert "openblas 8, Numba 8" in one(doctor.pools(ranks(2, pools="openblas 8, Numba 8"))).found
    assert one(doctor.busy(ranks(2))).found == "the load of other processes is unknown"


def test_room_in_shared_memory():
    need = 4 * (BYTES + (2 << 20))
    for room, verdict in ((None, HURTS), (0, HURTS), (need - 1, HURTS), (need, NOTE), (need + (1 << 20), NOTE)):
        assert one(doctor.room(ranks(4, room=room), "MPICH")).verdict == verdict
    enough = need + 4 * 8 * doctor.SMALL_MODEL
    assert one(doctor.room(ranks(4, room=enough), "MPICH")).verdict == OK
    assert "enough for 9,999,999 parameters" in one(doctor.room(ranks(4, room=enough - 1), "MPICH")).found
    assert one(doctor.room(ranks(4, room=need), "Open MPI")).verdict == HURTS  # it takes more
    alone = 8 * (BYTES + (2 << 20))  # a rank for each core is what counts
    assert one(doctor.room([rank(room=alone - 1)], "MPICH")).verdict == HURTS
    assert one(doctor.room([rank(room=alone)], "MPICH")).verdict == NOTE
    seen = [*ranks(4, 2), rank(4, 4, room=0)]
    assert [row.verdict for row in doctor.room(seen, "MPICH")] == [OK, HURTS]  # two hosts alike; one without room
    assert doctor.tight(ranks(4, room=4 * BYTES)) == []  # for scratch blocks
    assert one(doctor.tight(ranks(4, room=4 * BYTES - 1))).verdict == HURTS
    assert one(doctor.tight(ranks(4, room=None))).verdict == HURTS
    assert doctor.tight(ranks(1, room=0)) == []


def test_what_is_left_behind():
    assert doctor.leftovers(ranks(2)) == []
    row = one(doctor.leftovers(ranks(2, leftovers={"mpich_shm_*": 3 << 20, "sm_segment.*": 1 << 20})))
    assert row.verdict == NOTE and row.found.startswith("4 MiB")
    assert "rm /dev/shm/mpich_shm_* /dev/shm/sm_segment.*" in row.advice


# -- libraries and devices -------------------------------------------------------------------------------------------


def test_hdf5(monkeypatch):
    import h5py

    row = one(doctor.hdf5(ranks(1)))
    assert row.verdict == OK and h5py.version.hdf5_version in row.found and "not parallel" in row.found
    monkeypatch.setattr(h5py, "get_config", lambda: type("Config", (), {"mpi": True}))
    assert one(doctor.hdf5(ranks(1))).found.endswith(", parallel")


def test_gpus():
    assert one(doctor.gpus(ranks(2))).found.startswith("none")
    row = one(doctor.gpus(ranks(2, no_gpu="CuPy is missing; pip install cupy")))
    assert row.verdict == NOTE and row.advice == "CuPy is missing; pip install cupy"
    both = ranks(2, gpus=["0000:01", "0000:02"], cuda_aware=True)
    assert [row.verdict for row in doctor.gpus(both)] == [OK, OK]
    own = [rank(i, gpus=[f"0000:0{i}"], cuda_aware=True) for i in range(2)]  # each sees its own
    assert [row.verdict for row in doctor.gpus(own)] == [OK, OK] and doctor.gpus(own)[0].found == "2 GPUs for 2 ranks"
    shared = ranks(3, gpus=["0000:01"], cuda_aware=True)
    shared[1].cuda_aware = False
    assert [row.verdict for row in doctor.gpus(shared)] == [NOTE, NOTE]


@pytest.mark.parametrize(
    "cache, hosts, verdict",
    [
        (("/a", "ext4", ""), 2, OK),
        (("/a", "tmpfs", "Read-only file system"), 1, HURTS),
        (("/a", "lustre", ""), 1, NOTE),
        (("/a", "lustre", ""), 2, HURTS),
        (("/a", "nfs4", ""), 2, HURTS),
        (("/a", "fuse.sshfs", ""), 2, HURTS),
        (("/a", "beegfs_nodev", ""), 2, HURTS),
        (("/a", "", ""), 2, OK),
    ],
)
def test_the_compile_cache(cache, hosts, verdict):
    row = one(doctor.cache(ranks(2, 2 // hosts, cache=cache)))
    assert row.verdict == verdict and ("NUMBA_CACHE_DIR" in row.advice) == (verdict != OK) and cache[2] in row.found


def test_clocks():
    assert doctor.clocks(ranks(2)) == []
    seen = ranks(3, 1)
    seen[1].clock, seen[2].clock = -0.25, 0.5
    row = one(doctor.clocks(seen))
    assert row.verdict == OK and row.found == "0.750000 s apart at most (host1, host2)"
    seen[2].clock = 1.5
    assert one(doctor.clocks(seen)).verdict == NOTE


# -- the network -----------------------------------------------------------------------------------------------------


def test_the_network():
    assert doctor.network(ranks(1), [], {}) == []
    links = [LinkSpeed(0, 2, 2e-6, 10e9), LinkSpeed(0, 4, 3e-6, 8e9), LinkSpeed(2, 4, 2e-6, 10e9)]
    seconds = {"ring": 2 * 5 / 6 * VECTOR / 8e9 / 0.5}
    latency, bandwidth, reduce = doctor.network(ranks(6, 2), links, seconds)
    assert latency.found == "2 to 3 us between hosts" and bandwidth.found == "8 to 10 GB/s between hosts"
    assert "on 6 ranks" in reduce.found and "(50% of the bandwidth)" in reduce.found
    assert {latency.verdict, bandwidth.verdict, reduce.verdict} == {OK}
    slow = doctor.network(ranks(6, 2), [*links[:2], LinkSpeed(2, 4, 2e-6, 3e9)], seconds)[1]
    assert slow.verdict == NOTE and "host2 to host4" in slow.advice and "host0" not in slow.advice
    ethernet = [link._replace(bandwidth=1e8) for link in links]
    row = doctor.network(ranks(6, 2), ethernet, seconds)[1]
    assert row.verdict == NOTE and "MPI=site" in row.advice
    within = doctor.network(ranks(2), [LinkSpeed(0, 1, 1e-6, 1e8)], seconds)
    assert within[1].verdict == OK and within[1].found == "0.1 GB/s within the host"
    assert doctor.leaders(ranks(4)) == [0, 1] and doctor.leaders(ranks(1)) == [0]
    assert doctor.leaders(ranks(7, 3)) == [0, 3, 6]


# -- all together ----------------------------------------------------------------------------------------------------


def test_an_examination(world):
    rows = doctor.examine(world)
    assert (rows == []) == (world.rank > 0)
    if world.rank == 0:
        names = [row.what for row in rows if row.what != "left behind"]
        links = ["latency", "bandwidth", "all-reduce"] * (world.size > 1)
        software = ["MPI", "versions", "mpiexec", "world", "hosts"]
        assert names == [*software, "cores", "load", "threads", "/dev/shm", "HDF5", "GPUs", "compile cache", *links]
        assert {row.verdict for row in rows} <= {OK, NOTE, HURTS}
    quick = doctor.examine(world, quick=True)
    assert not {"latency", "bandwidth", "all-reduce"} & {row.what for row in quick}


def test_sizes_and_counts():
    sizes = {0: "0 bytes", 1: "1 byte", 1023: "1023 bytes", 1024: "1 KiB", 3 << 19: "1.5 MiB", 5 << 30: "5 GiB"}
    assert {n: doctor.format_bytes(n) for n in sizes} == sizes
    assert doctor.spread([3.0, 1.0, 2.0]) == "1 to 3" and doctor.spread([1.0001, 1.0]) == "1"
    assert doctor.spread([2084.0]) == "2080"


@pytest.fixture
def warnings(world, monkeypatch, caplog):
    """A function: what a training run warns of on a machine that `change` makes of this one, with this environment."""

    def warned(environ=(), several=True, quiet=False, **change):
        for name in [*BLAS, *(name for name in os.environ if name.startswith("SLURM_"))]:
            monkeypatch.delenv(name, raising=False)
        for name, value in dict(environ).items():
            monkeypatch.setenv(name, value)
        real = facts.quick_facts
        with monkeypatch.context() as patch:
            patch.setattr(doctor, "quick_facts", lambda comm: dataclasses.replace(real(comm), **change))
            caplog.clear()
            with caplog.at_level(logging.WARNING, "hpcdl"):
                doctor.warn(world, several, quiet)
        return [record.getMessage() for record in caplog.records]

    return warned


def test_a_training_run_warns_of_what_hurts(world, warnings):
    said = 1 if world.rank == 0 else 0
    cores = {"cores": [*range(8)], "machine": 8, "room": GIB}
    assert warnings(blas=1, **cores) == []
    assert warnings(blas=1, room=GIB, cores=[0], machine=1) == []  # more ranks than cores: nobody's mistake
    found = warnings(blas=99, variable="OMP_NUM_THREADS", **cores)
    assert len(found) == said and all("export OMP_NUM_THREADS=" in line for line in found)
    found = warnings(blas=1, **cores | {"cores": [0]})
    assert len(found) == said * (world.size > 1) and all("--bind-to none" in line for line in found)
    found = warnings(blas=1, **cores | {"room": BYTES})
    assert len(found) == said * (world.size > 1) and all(line.startswith("/dev/shm: ") for line in found)
    found = warnings(blas=1, **cores, spare=0.0)
    assert len(found) == said and all(line.startswith("load: other processes use 8.0 of 8 cores") for line in found)
    assert warnings(blas=1, **cores, spare=0.0, quiet=True) == []


def test_it_warns_once_and_not_before_usage_errors(monkeypatch):
    asked = []
    monkeypatch.setattr("hpcdl.launch.training.warn", lambda world, several, quiet: asked.append(quiet))
    told = ["--out", "none", "--model", "softmax", "--epochs", "1", "--progress", "none"]
    for bad in (["--data", "absent.h5"], ["--model", "conv"], ["--batch-size", "0"]):
        assert ends("train_allreduce", [*told, *bad])[0] == 2 and not asked
    assert ends("train_allreduce", told) == (0, "") and asked == [True]


def test_a_training_run_alone_in_an_allocation(world, warnings):
    machine = {"cores": [*range(8)], "machine": 8, "room": GIB, "blas": 1}
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}
    # Under mpiexec with a world of one rank per launcher, nobody is alone.
    alone = world.size == 1 and doctor.launched.launch(os.environ, "MPICH") is None
    found = warnings(job, **machine)
    assert len(found) == alone and all("allocation of 4 tasks" in line for line in found)
    assert warnings(job, several=False, **machine) == []
