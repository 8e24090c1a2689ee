"""Memory that ranks share: everybody reaches every part, nothing is left behind, and too little room is no crash."""

import gc
import logging
import os

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl import shared_memory


def test_every_rank_reaches_every_part(each_group, mpi_tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", str(mpi_tmp_path))

    def body(comm):
        parts = shared_memory.share(comm, 1000 * comm.rank, "a test", "nothing")
        assert len(parts) == comm.size
        assert all(len(part) >= 1000 * rank for rank, part in enumerate(parts))
        assert not any(part.any() for part in parts)
        comm.Barrier()
        parts[comm.rank][:] = comm.rank + 1
        comm.Barrier()
        for rank, part in enumerate(parts):
            assert (part == rank + 1).all()
        starts = [part.ctypes.data for part in parts if len(part)]
        assert all(start % 4096 == 0 for start in starts) and len(set(starts)) == len(starts)
        assert os.listdir(mpi_tmp_path) == []  # it has no name any more: a killed job leaves nothing behind
        comm.Barrier()

    each_group(body)


def test_a_job_killed_while_it_reserves_leaves_nothing_behind(world, mpi_tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", str(mpi_tmp_path))
    reserve, seen = os.posix_fallocate, []

    def look(*arguments):
        seen.append(os.listdir(mpi_tmp_path))
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", look)
    assert shared_memory.share(world, 100, "a test", "nothing") is not None
    assert seen == [[]]


def test_a_view_keeps_the_memory_alive(world):
    view = shared_memory.share(world, 8, "a test", "nothing")[world.rank][:8].view("int64")
    view[0] = 7 + world.rank
    gc.collect()
    assert view[0] == 7 + world.rank


def test_more_than_there_is_gives_none_and_one_warning(world, caplog):
    stat = os.statvfs(shared_memory.FOLDER)
    too_much = stat.f_blocks * stat.f_frsize + 1
    with caplog.at_level(logging.WARNING):
        parts = shared_memory.share(world, too_much if world.rank == world.size - 1 else 10, "a test", "it goes on")
    assert parts is None
    messages = [record.getMessage() for record in caplog.records]
    if world.rank == 0:
        assert len(messages) == 1
        assert "No space left" in messages[0] and "a test needs" in messages[0] and "it goes on" in messages[0]
    else:
        assert messages == []


@pytest.mark.parametrize("missing", ["the folder", "the mapping"])
def test_any_other_failure_is_the_same_on_all_ranks(world, monkeypatch, missing):
    if missing == "the folder":
        monkeypatch.setattr(shared_memory, "FOLDER", "/nowhere")
    elif world.rank == world.size - 1:
        monkeypatch.setattr(shared_memory, "Mapping", lambda *_: (_ for _ in ()).throw(OSError(12, "no memory")))
    assert shared_memory.share(world, 100, "a test", "nothing") is None
    monkeypatch.undo()
    assert np.all([part.size for part in shared_memory.share(world, 100, "a test", "nothing")])


KILLED = """
import os, re, signal
from mpi4py import MPI
from hpcdl.comm import Communicator

def names():
    return sorted(set(re.findall(r"/dev/shm/(mpich_shm_\\w+)", open("/proc/self/maps").read())))

if MPI.COMM_WORLD.rank == 0:
    print("before", *names(), flush=True)
comm = Communicator(MPI.COMM_WORLD)
comm.barrier()
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


def test_a_job_that_is_killed_leaves_no_file_of_the_library(launch):
    done = launch(2, "-c", KILLED)
    assert done.returncode != 0
    _, *names = done.stdout.split()
    assert bool(names) == MPI.Get_library_version().startswith("MPICH")
    assert not [name for name in names if os.path.exists(f"/dev/shm/{name}")]
