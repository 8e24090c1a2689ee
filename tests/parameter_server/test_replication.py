"""Replicas of slices: the same bits as the server's, counted to the byte; and no push is applied but the next one."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.errors import TrainingError, UsageError
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.replication import PendingPush, SliceReplica, backups, commit
from hpcdl.parameter_server.store_messages import COPY, Push
from hpcdl.parameter_server.store_settings import Replication, Serving, StoreLayout

pytestmark = pytest.mark.four
SIZE, STEPS = 23, 9


class Decaying:
    """An update whose order shows, with a state: v <- 0.5 v + pushed, values <- 0.9 values + v."""

    def __init__(self, size):
        self.state = {"velocity": np.zeros(size)}

    def of_size(self, size):
        return Decaying(size)

    def __call__(self, values, pushed, push):
        v = self.state["velocity"]
        v[push.part] = 0.5 * v[push.part] + pushed
        values[:] = 0.9 * values + v[push.part]


def used(bare, replicas, servers=2, consistency=BSP):
    """The final values; whether each replica has its server's bits; what each rank has sent, and applied."""
    comm = Communicator(bare, allreduce="ring")
    size = len(range(SIZE)[comm.rank * SIZE // servers : (comm.rank + 1) * SIZE // servers])
    initial, final = np.arange(float(SIZE)) if comm.rank == 0 else None, np.empty(SIZE)
    held = Decaying(-(-SIZE // servers) if comm.rank < SIZE % servers else SIZE // servers) if size else None
    layout, replication = StoreLayout(SIZE, comm.size, "float64", servers), Replication(replicas)
    store = ParameterStore(comm, layout, Serving(consistency), replication, initial=initial, update=held)
    before = store.comm.traffic["push"].bytes
    if replicas > 1:
        store.replicate()
    if store.serves:
        store.serve()
    else:
        w = np.empty(SIZE)
        for step in range(STEPS):
            store.pull(w)
            store.push(np.sin(w + step + comm.rank))
        store.close(final)
    sent = store.comm.traffic["push"].bytes - before
    mine = {comm.rank: [each.copy() for each in store.server.vectors]} if store.serves else {}
    followed = {which: each.vectors for which, each in store.server.replicas.of.items()} if store.serves else {}
    applied = sum(store.server.clocks.staleness.values()) if store.serves else 0
    told = comm.mpi.allgather((mine, followed, sent, applied))
    primaries = {which: held for each in told for which, held in each[0].items()}
    same = [
        all(np.array_equal(a, b) for a, b in zip(primaries[which], held, strict=True))
        for each in told
        for which, held in each[1].items()
    ]
    final = comm.mpi.bcast(final, comm.size - 1)
    store.free()
    comm.free()
    return final, same, [each[2] for each in told], [each[3] for each in told[:servers]]


def slices(servers):
    return [SIZE // servers + (which < SIZE % servers) for which in range(servers)]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("consistency", [BSP, Consistency("ssp", 2), Consistency("async")], ids=lambda each: each.name)
def test_replicas_are_the_bits_of_their_servers(consistency, world):
    """With one worker also the final values are those without replicas: the same updates in the same order."""
    servers = world.size - 1
    wanted, none, _, _ = used(world, 1, servers, consistency)
    assert none == []
    for replicas in range(2, servers + 1):
        final, same, _, applied = used(world, replicas, servers, consistency)
        assert same == [True] * (servers * (replicas - 1))
        assert np.array_equal(final, wanted) and applied == [STEPS] * servers
    if world.size == 4:
        final, same, _, applied = used(world, 2, 2, consistency)  # two workers
        assert same == [True] * 2 and applied == [2 * STEPS] * 2


@pytest.mark.mpi(min_size=4)
def test_what_replicas_cost_to_the_byte(world):
    """Each push: a copy of its values and two headers to the backup, 8 bytes back from there, and 8 to its client."""
    (final, _, alone, _), (same, _, sent, _) = used(world, 1), used(world, 2)
    assert np.array_equal(final, same)
    clients, head = world.size - 2, COPY.bytes
    for which, (own, other) in enumerate(zip(slices(2), slices(2)[::-1], strict=True)):
        pushes = clients * STEPS
        begun, copies, last = 2 * 8 * own, pushes * (2 * head + 8 * own), clients * head
        assert sent[which] - alone[which] == begun + copies + last + pushes * (8 + 8), other
    assert sent[2:] == alone[2:]


def test_who_holds_what():
    assert [backups(each, 4, 3) for each in range(4)] == [[1, 2], [2, 3], [3, 0], [0, 1]]
    assert backups(0, 2, 2) == [1] and backups(1, 2, 1) == []


def test_no_push_is_applied_but_the_next_one():
    state = SliceReplica(np.zeros(3), Clocks([5], BSP), Decaying(3), led=False)
    push = Push(5, slice(0, 3), 0, 0, 0, count=1, total=1, loss=0.5, norm=0)
    state.pending[5] = PendingPush(push, np.ones(3))
    assert not state.values.any()  # it waits until it is whole
    assert commit(state, state.pending, 5) and not commit(state, state.pending, 5)
    list(state.end_steps())
    assert state.values.tolist() == [1, 1, 1] and not state.losses
    for clock in (0, 2):  # it again, and one too many
        state.pending[5] = PendingPush(push._replace(clock=clock), np.ones(3))
        with pytest.raises(TrainingError, match=f"push {clock} of rank 5, whose next push is 1"):
            commit(state, state.pending, 5)
    assert state.values.tolist() == [1, 1, 1]


def test_losses_are_kept_until_rank_0_has_noted_them():
    state = SliceReplica(np.zeros(1), Clocks([5], BSP), Decaying(1), led=True)
    for clock in range(3):
        push = Push(5, slice(0, 1), clock, clock, 0, count=2, total=2, loss=clock, norm=0)
        state.pending[5] = PendingPush(push, np.ones(1))
        commit(state, state.pending, 5)
        list(state.end_steps())
    assert state.losses == {0: (0, 2), 1: (1, 2), 2: (2, 2)}
    state.note(b"a", 1, 0)
    state.note(b"b", 2, 0)
    assert state.losses == {2: (2, 2)} and [step for step, _ in state.notes] == [1, 2]
    state.note(b"c", 3, 2)
    assert not state.losses and [noted for _, noted in state.notes] == [b"c"]


@pytest.mark.parametrize(
    "layout, serving, said",
    [((3, True), (), "not work with --servers-on-workers"), ((3,), (1, 0), "not work with --broadcast-every")],
)
def test_refusals(layout, serving, said):
    comm = Communicator()
    with pytest.raises(UsageError, match=said):
        ParameterStore(comm, StoreLayout(SIZE, comm.size, "f8", *layout), Serving(BSP, *serving), Replication(3))
