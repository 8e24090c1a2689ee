"""How process groups are made of MPI's world: by programs as users write them; what they leave, and how they fail."""

import json
import textwrap
from datetime import timedelta

import numpy as np
import pytest
import torch

from hpcdl.errors import UsageError

BEGIN = """
import os, sys
import torch
from torch import distributed as dist
import hpcdl.torch
"""


@pytest.fixture
def program(launch, tmp_path):
    """A function: run this text on so many ranks."""

    def run(ranks, text, check=0, start=launch, **environment):
        path = tmp_path / "program.py"
        path.write_text(BEGIN + textwrap.dedent(text))
        return start(ranks, path, check=check, **environment)

    return run


@pytest.mark.long
def test_nothing_is_told_and_a_trace_is_left(program, tmp_path):
    """Neither address, port nor rank; MPI starts with the first process group; the default group is made again."""
    done = program(
        3,
        """
        assert "mpi4py.MPI" not in sys.modules
        for turn in range(2):
            dist.init_process_group("hpcdl")
            assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (dist.get_rank(), 3, "hpcdl")
            store = dist.distributed_c10d._get_default_store()
            if dist.get_rank() == 0:
                store.set("word", "here")
            assert store.get("word") == b"here"
            tensor = torch.ones(1000)
            dist.all_reduce(tensor)
            assert (tensor == 3).all()
            gloo = dist.new_group(backend="gloo")
            dist.all_reduce(tensor, group=gloo)
            assert (tensor == 9).all()
            dist.destroy_process_group()
        counts = hpcdl.torch.traffic()["all_reduce"]
        assert counts["calls"] == 2 and counts["bytes"] > 0, counts
        try:
            hpcdl.torch.write_trace("x.json")
        except hpcdl.errors.UsageError as error:
            print(error)
        """,
        HPCDL_ALLREDUCE="ring",
        HPCDL_TRACE=str(tmp_path / "traced"),
    )
    assert done.stdout.count("there is no process group of the backend hpcdl") == 3
    events = json.loads((tmp_path / "traced/trace.json").read_text())["traceEvents"]
    assert sum(each["name"] == "all_reduce" for each in events) == 6


def test_a_program_that_says_where_and_who(program, run_on):
    """As programs for gloo do; and ranks in another order than MPI's."""
    program(
        2,
        """
        from mpi4py import MPI
        rank = 1 - MPI.COMM_WORLD.rank
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1] if sys.argv[1:] else "29611"
        dist.init_process_group("hpcdl", rank=rank, world_size=2)
        found = [None, None]
        dist.all_gather_object(found, MPI.COMM_WORLD.rank)
        assert found == [1, 0] and dist.get_rank() == rank
        group = dist.new_group([1])
        if rank == 1:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert dist.get_process_group_ranks(group) == [1] and tensor == 1
        dist.destroy_process_group()
        """,
        start=run_on,
    )


def test_an_exception_on_one_rank_ends_all_and_is_seen(program):
    done = program(
        2,
        """
        dist.init_process_group("hpcdl")
        if dist.get_rank() == 1:
            raise ValueError("deliberately")
        dist.barrier()
        """,
        check=1,
    )
    assert "rank 1 of 2 failed" in done.stderr and "ValueError: deliberately" in done.stderr
    assert 'raise ValueError("deliberately")' in done.stderr


@pytest.mark.mpi(min_size=2)
def test_ranks_that_are_not_mpis(world):
    from hpcdl.torch.groups import world_communicator

    limit = timedelta(seconds=30)
    with pytest.raises(UsageError, match=f"start the program with mpiexec -n {world.size + 1}"):
        world_communicator(world.rank, world.size + 1, None, limit)
    with pytest.raises(UsageError, match="init_process_group: rank=0, and a rank is there twice"):
        world_communicator(0, world.size, None, limit)


@pytest.mark.mpi(min_size=2)
def test_a_host_whose_name_another_does_not_know(world, monkeypatch):
    """It is reached at its address; the client of PyTorch's, which would ask for the name for long, is not asked."""
    from hpcdl.torch import registration

    asked, places, client = [], ["nowhere.invalid", "127.0.0.1"], torch.distributed.TCPStore

    def reach(place, *about, **options):
        asked.append(place)
        return client(place, *about, **options)

    monkeypatch.setattr(torch.distributed, "TCPStore", reach)
    monkeypatch.setattr(registration, "addresses", lambda: places)
    if world.rank:
        monkeypatch.setattr(registration.socket, "gethostname", lambda: f"host{world.rank}")
    store = registration.shared_store(world, timedelta(seconds=30))
    if world.rank == 0:
        store.set("word", "here")
    assert store.get("word") == b"here" and set(asked) == {"127.0.0.1"}
    world.Barrier()
    places.pop()
    with pytest.raises(UsageError, match=r"reached at nowhere\.invalid: nowhere\.invalid is not known to host1"):
        registration.shared_store(world, timedelta(seconds=30))


@pytest.mark.mpi(min_size=3)
def test_some_ranks_of_the_world(world, mpi_tmp_path):
    """They find each other by the store that they share, in an order of their own."""
    from hpcdl.torch.groups import world_communicator

    if world.rank:
        store = torch.distributed.FileStore(str(mpi_tmp_path / "store"), world.size - 1)
        rank = world.size - 1 - world.rank
        comm = world_communicator(rank, world.size - 1, store, timedelta(seconds=30))
        found = np.full(2, float(rank))
        comm.all_reduce(found)
        assert (comm.rank, comm.size, found[0]) == (rank, world.size - 1, sum(range(world.size - 1)))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_call_different_things_are_told(group):
    group.group.WORLD.comm.use("shared")
    with pytest.raises(UsageError, match=r"all_reduce of 4 float32 \(sum\).*all_reduce of 5 float32 \(sum\)"):
        group.all_reduce(torch.ones(4 + min(1, group.get_rank())))
    group.group.WORLD.comm.use("auto")


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_job_after_the_timeout(program):
    done = program(
        2,
        """
        import datetime, time
        dist.init_process_group("hpcdl", timeout=datetime.timedelta(seconds=1))
        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(30)
        """,
        check=1,
    )
    assert "rank 0" in done.stderr and "barrier" in done.stderr
