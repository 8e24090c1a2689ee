"""Several nodes: the sums, and who sends how much. The nodes are made up: ranks of one machine in groups."""

import numpy as np
import pytest
from local_ranks import circulant_traffic
from sums import check_sum, check_sums

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator, node_memory
from hpcdl.comm.allreduce import hierarchical, shared
from hpcdl.errors import UsageError
from hpcdl.kernels import shared as kernels

BLOCK = kernels.BLOCK // 4
LAYOUTS = {
    "pairs": lambda rank: rank // 2,
    "round robin": lambda rank: rank % 2,
    "one and the rest": lambda rank: min(rank, 1),
    "two, then each alone": lambda rank: max(rank, 1),
    "each alone": lambda rank: rank,
    "together": lambda rank: 0,
}


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch):
    """A function: the node of a rank."""
    place = LAYOUTS[request.param]
    monkeypatch.setattr(node_memory, "ranks_of_node", lambda comm: comm.Split(place(comm.rank), comm.rank))
    return place


@pytest.mark.parametrize("where", ["windows", "elsewhere", "mixed"])
def test_sums_of_all_lengths(where, layout, bare):
    comm = Communicator(bare, allreduce="hierarchical")
    check_sums(comm, where, (0, 1, 7, 1009, BLOCK // 2 + 1, BLOCK + 1, 2 * BLOCK + 17), times=2)


@pytest.mark.parametrize("op", ["mean", "max", "min"])
@pytest.mark.in_turn("op")
def test_operations(op, layout, bare):
    comm = Communicator(bare, allreduce="hierarchical")
    rows = np.random.default_rng(1).integers(-9, 9, (comm.size, 3001)).astype("float64")
    vector = comm.empty(3001, "float64")
    vector[:] = rows[comm.rank]
    comm.all_reduce(vector, op)
    assert np.allclose(vector, getattr(rows, op)(0), rtol=1e-15, atol=0)


def test_only_leaders_send_and_what_theory_says(layout, bare, monkeypatch):
    monkeypatch.setattr(hierarchical, "PIECE", 4096)
    comm = Communicator(bare, allreduce="hierarchical")
    memory, length = comm.node_memory, 5000
    vector = comm.empty(length)
    memory.take_written()
    comm.all_reduce(vector)
    nodes, counted = memory.nodes, comm.traffic["all_reduce"]
    whole = memory.ranks_per_node == 1 or nodes == 1
    pieces = [length] if whole else [min(1024, length - start) for start in range(0, length, 1024)]
    if nodes == 1 or memory.rank > 0:
        assert counted.messages == 0
    elif nodes & (nodes - 1) == 0:  # recursive, so much for each piece
        assert counted.messages == len(pieces) * 2 * (nodes.bit_length() - 1)
        sent = sum(4 * recursive_values(piece, nodes, memory.firsts.index(comm.rank)) for piece in pieces)
        assert counted.bytes == sent  # a leader writes nothing to shared memory
    else:
        each = [sum(circulant_traffic(piece, nodes, memory.firsts.index(comm.rank))) for piece in pieces]
        assert (counted.bytes, counted.messages) == (4 * sum(sent for sent, _ in each), sum(many for _, many in each))


@pytest.mark.mpi(min_size=3)
def test_pieces_are_in_flight_on_both_levels(monkeypatch, world):
    """While the leaders exchange piece i, the other ranks copy piece i - 1 and add piece i + 1."""
    monkeypatch.setattr(node_memory, "ranks_of_node", lambda comm: comm.Split(comm.rank // 2, comm.rank))
    monkeypatch.setattr(hierarchical, "PIECE", 4096)
    comm, done = Communicator(world, allreduce="hierarchical"), []
    add, copy = kernels.add_to_leader, kernels.copy_from_leader

    def noted(name, kernel, first):
        def call(*arguments):
            done.append((name, arguments[first] // 1024))
            kernel(*arguments)

        return call

    monkeypatch.setattr(kernels, "add_to_leader", noted("add", add, 1))
    monkeypatch.setattr(kernels, "copy_from_leader", noted("copy", copy, 1))
    check_sum(comm, comm.empty(4 * 1024))
    order = ["add 0", "add 1", "copy 0", "add 2", "copy 1", "add 3", "copy 2", "copy 3"]
    assert [f"{name} {piece}" for name, piece in done] == (order if comm.node_memory.rank else [])
    comm.free()


def recursive_values(length, size, rank):
    cut, sent, first, distance = chunks(length, size), 0, 0, size // 2
    while distance:  # halving: this rank keeps the half that it lies in
        other = first if rank & distance else first + distance
        sent += cut[other + distance - 1].stop - cut[other].start
        first, distance = (first + distance if rank & distance else first), distance // 2
    distance = 1
    while distance < size:
        start = rank // distance * distance
        sent, distance = sent + cut[start + distance - 1].stop - cut[start].start, 2 * distance
    return sent


@pytest.mark.mpi(min_size=2)
def test_shared_is_refused_on_several_nodes(layout, world):
    nodes = len({layout(rank) for rank in range(world.size)})
    if nodes > 1:
        bare, vector = world.Dup(), np.ones(5)
        calls = [lambda: Communicator(world, allreduce="shared"), lambda: shared.shared_all_reduce(bare, vector)]
        for call in (*calls, lambda: next(shared.steps(bare, vector))):
            with pytest.raises(UsageError, match=f"on {nodes} nodes; take hierarchical or auto"):
                call()
        node_memory.node_memory(bare).free()
        bare.Free()


@pytest.mark.mpi(min_size=3)
def test_mpi_has_its_turns_while_a_rank_waits_for_its_leader(monkeypatch, world, fetch_first):
    monkeypatch.setattr(node_memory, "ranks_of_node", lambda comm: comm.Split(comm.rank // 2, comm.rank))
    comm = Communicator(world, allreduce="hierarchical")
    vector = comm.empty(10)
    vector[:] = 1
    fetch_first(lambda: comm.all_reduce(vector), busy=1, late=2)
    assert (vector == comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_no_room_on_one_node_is_messages_for_all(layout, world, no_room):
    no_room(rank=0)
    comm = Communicator(world, allreduce="hierarchical")
    vector = comm.empty(1009)
    check_sum(comm, vector)


@pytest.mark.mpi(min_size=4)
def test_bytes_of_a_node(monkeypatch, world):
    """In windows a leader writes nothing to shared memory; elsewhere a rank's values go to its scratch block, too."""
    monkeypatch.setattr(node_memory, "ranks_of_node", lambda comm: comm.Split(min(comm.rank // 2, 1), comm.rank))
    comm = Communicator(world, allreduce="hierarchical")
    length, memory = BLOCK // 2, comm.node_memory
    others = memory.size - 1  # they share the adding into the leader's vector, and copy all of it
    whole = 4 * length
    for vector, copies in ((comm.empty(length), 0), (np.empty(length, "float32"), 1)):
        vector[:] = 1
        before = comm.traffic["all_reduce"].bytes
        comm.all_reduce(vector)
        written = comm.traffic["all_reduce"].bytes - before
        if memory.rank == 0:  # half of the vector to the other leader, twice; to its scratch block and back
            assert written == whole + 2 * copies * whole
        else:
            assert abs(written - (whole / others + whole + copies * whole)) <= 64
