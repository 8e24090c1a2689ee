"""What a rank sees, of a made-up machine and of this one."""

import os
import re

import pytest

from hpcdl.machine import facts
from hpcdl.machine.threads import BLAS, Threads


def test_what_killed_jobs_left(tmp_path):
    for name, age in {"mpich_shm_1_0": 4000, "mpich_shm_2_0": 4000, "sm_segment.a.0.1.0": 4000, "other": 4000}.items():
        (tmp_path / name).write_bytes(bytes(8192))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "mpich_shm_3_0").write_bytes(bytes(8192))
    os.utime(tmp_path / "mpich_shm_3_0", (1e9 - 3000, 1e9 - 3000))  # perhaps of a job that runs
    size = 512 * (tmp_path / "other").stat().st_blocks
    assert facts.leftover_files(str(tmp_path), 1e9) == {"mpich_shm_*": 2 * size, "sm_segment.*": size}
    assert facts.leftover_files(str(tmp_path / "nowhere"), 1e9) == {}


def test_the_compile_cache(tmp_path, monkeypatch):
    (tmp_path / "mounts").write_text("server:/ / nfs rw 0 0\n")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    folder = str(tmp_path / "a" / "cache")
    assert facts.compile_cache(folder, tmp_path / "mounts") == (folder, "nfs", "")
    assert os.listdir(folder) == []
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "a"))
    assert facts.compile_cache(folder, tmp_path / "mounts")[2] == ""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "b"))
    assert facts.compile_cache(folder, tmp_path / "mounts")[2] == f"NUMBA_CACHE_DIR={tmp_path / 'b'} cannot be used"
    (tmp_path / "file").write_text("")
    assert "directory" in facts.compile_cache(str(tmp_path / "file" / "cache"))[2].lower()


def test_names_of_libraries():
    assert facts.library_name("MPICH Version:      5.0.2\nMPICH Release date: x") == "MPICH 5.0.2"
    assert facts.library_name("Open MPI v5.0.11, package: Open MPI user, ident\0") == "Open MPI v5.0.11"


def test_room():
    about = os.statvfs("/")
    assert facts.free("/") == pytest.approx(about.f_bavail * about.f_frsize, rel=0.1)
    assert facts.free("/nowhere") is None


@pytest.mark.parametrize("name", BLAS)
def test_the_variable_that_says_how_many_threads(world, monkeypatch, name):
    for each in BLAS:
        monkeypatch.delenv(each, raising=False)
    assert facts.quick_facts(world).variable == ""
    monkeypatch.setenv(name, "3")
    seen = facts.quick_facts(world)
    assert (seen.variable, seen.blas) == (name, 3) and Threads(world).now == 3


def test_looking_around(world):
    seen = facts.all_facts(world)
    assert seen.rank == world.rank and seen.cores == sorted(os.sched_getaffinity(0))
    assert 0 <= seen.node <= world.rank and seen.node == world.allreduce(seen.node) / world.size
    assert re.fullmatch(r"\S.* v?\d+(\.\d+)*\w*", seen.library)
    assert seen.versions["hpcdl"] and seen.versions["numpy"] and "Numba" in seen.pools
    assert seen.cache[0] and abs(seen.clock) < 0.1  # one machine


def test_clocks_that_are_apart(world, monkeypatch):
    """Every rank believes that the time of day is an hour later for each rank before it."""
    import time

    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + world.rank * 3600 * 10**9)
    assert facts.clock_lead(world) == pytest.approx(3600 * world.rank, abs=0.1)
