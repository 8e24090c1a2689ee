"""The parameter store: what is pushed is applied, once, when its consistency says; and it is counted to the byte."""

import functools
import inspect
import os
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError
from hpcdl.parameter_server.clocks import Horizon
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.parameter_store import ParameterStore, add
from hpcdl.parameter_server.store_messages import ANSWER, REQUEST
from hpcdl.parameter_server.store_settings import Serving, StoreLayout
from hpcdl.random import Random

pytestmark = pytest.mark.four

ASYNC = Consistency("async")
CONSISTENCIES = [BSP, Consistency("ssp", 1), ASYNC]
NAMES = ["bsp", "ssp1", "async"]


def places(size: int) -> list[dict]:
    """All ways to place the slices on so many ranks: on 1, 2 or 3 servers, and on the workers."""
    return [{"servers": servers} for servers in range(1, min(4, size))] + [{"on_workers": True}]


def store_of(comm, size, dtype, consistency=BSP, broadcast_every=0, delay=0, servers=1, on_workers=False, **options):
    """A store with these settings."""
    layout = StoreLayout(size, comm.size, dtype, servers, on_workers, options.pop("block", 1))
    return ParameterStore(comm, layout, Serving(consistency, broadcast_every, delay), **options)


def use(bare, size, client, dtype="float64", **options):
    """What a store holds in the end and its servers' (staleness, version), when each client has run `client(store)`.
    Whatever the client does: no message is left, and clients get to see the final values."""
    comm = Communicator(bare, allreduce="ring")
    store, final = store_of(comm, size, dtype, **options), np.empty(size, dtype)
    if store.works:
        client(store)
        store.close(final)
    else:
        store.serve()
    server = store.server
    held = np.concatenate([each for each in bare.allgather(server.values if server else None) if each is not None])
    told = (server.clocks.staleness, server.clocks.version) if server else None
    told = [each for each in bare.allgather(told) if each]
    if store.works:
        assert np.array_equal(final, held)
    for request in list(activity.in_flight):
        request.test()
    bare.Barrier()
    assert not activity.in_flight and not store.comm.mpi.Iprobe()
    store.free()
    comm.free()
    return held, told


def number(store) -> int:
    """Of this client among the clients."""
    return store.clients.index(store.comm.rank)


def dawdle(store, clock: int, seed=0) -> None:
    """Up to two milliseconds of something else, another time for each client and clock."""
    end = time.perf_counter() + 2e-3 * Random(seed)("dawdle", store.comm.rank, clock).random() ** 3
    while time.perf_counter() < end:
        store.attend()
        time.sleep(1e-4)


def until(store, request):
    """Wait for a message of another kind, and serve meanwhile where this rank does."""
    while not request.test():
        store.attend()
        os.sched_yield()


def on_places(test):
    """Let the test run for each way to place the slices on the first 2, 3, ... ranks, with bare, place and clients."""

    @functools.wraps(test)
    def run(each_group, **fixtures):
        def all_places(bare):
            for place in places(bare.size):
                test(bare, place, bare.size - place.get("servers", 0), **fixtures)

        each_group(all_places)

    others = list(inspect.signature(test).parameters.values())[3:]
    group = inspect.Parameter("each_group", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*others, group])
    return run


# -- nothing is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=NAMES)
@on_places
def test_the_end_is_the_sum_of_all_pushes_although_clients_close_when_they_like(
    bare, place, clients, consistency, every
):
    """Client i makes (2 i) mod 5 pushes: the first none at all, others in the middle of the others' rounds."""
    initial, dtype = np.arange(11) - 5, {"bsp": "int64", "ssp": "float32", "async": "float64"}[consistency.name]

    def client(store):
        values = np.empty(11, dtype)
        for t in range(2 * number(store) % 5):
            dawdle(store, t)
            store.pull(values)
            store.push((np.arange(11) * (1 + number(store)) + t).astype(dtype))

    rounds = [2 * i % 5 for i in range(clients)]
    wanted = initial + sum(np.arange(11) * (1 + i) + t for i in range(clients) for t in range(rounds[i]))
    options = {"consistency": consistency, "broadcast_every": every, "initial": initial.astype(dtype)}
    held, servers = use(bare, 11, client, dtype, **options, **place)
    assert held.dtype == dtype and np.array_equal(held, wanted)
    for staleness, version in servers:
        assert staleness.total() == sum(rounds)
        assert version == (max(rounds) if consistency.in_rounds else sum(rounds))


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=NAMES)
@on_places
def test_parts(bare, place, clients, consistency):
    """Each round a client pulls a part and pushes to another, of any length; slices are cut at multiples of 3."""
    size, rounds = 32, 5  # 10 blocks, and a rest of 2

    def parts(client, t):
        ends = Random(1)("parts", client, t).integers(0, size + 1, 4)
        return slice(*sorted(ends[:2])), slice(*sorted(ends[2:]))

    def pushed(client, t):
        whole, part = np.zeros(size), parts(client, t)[1]
        whole[part] = np.arange(size)[part] + 10 * client + t
        return whole

    def wanted(clients, t):
        return sum((pushed(i, s) for i in range(clients) for s in range(t)), np.ones(size))

    def client(store):
        mine = number(store)
        for t in range(rounds):
            asked, told = parts(mine, t)
            values = np.empty(asked.stop - asked.start)
            store.pull(values, asked)
            if consistency is BSP:
                assert np.array_equal(values, wanted(len(store.clients), t)[asked])
            store.push(pushed(mine, t)[told], told)

    held, _ = use(bare, size, client, consistency=consistency, block=3, initial=np.ones(size), **place)
    assert np.array_equal(held, wanted(clients, rounds))


def test_slices_end_at_blocks():
    cuts = StoreLayout(32, 4, on_workers=True, block=3).slices
    assert cuts == [slice(0, 9), slice(9, 18), slice(18, 24), slice(24, 32)]


def test_slices_that_are_too_long_to_be_sent_before_they_are_asked_for(world):
    """3 MB a server, and on the workers everyone pushes to everyone at once."""
    size = 400_000 * min(3, world.size)

    def client(store):
        values = np.empty(size)
        for t in range(2):
            store.pull(values)
            assert (values == t * len(store.clients)).all()
            store.push(np.ones(size))

    for place in places(world.size):
        clients = world.size - place.get("servers", 0)
        assert (use(world, size, client, **place)[0] == 2 * clients).all()


# -- who sees what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1])
@on_places
def test_bsp_is_the_theory_to_the_bit_in_whatever_order_the_clients_come(bare, place, clients, every):
    """w(t+1) = w(t) + (u_1(t) + u_2(t) + ...), in float32 and in the order of the clients."""
    size, rounds, draw = 13, 4, Random(7)
    initial = draw("initial").standard_normal(size).astype("f4")

    def u(client, t):
        return draw("u", client, t).standard_normal(size).astype("f4")

    def path(clients):
        w = [initial]
        for t in range(rounds):
            total = u(0, t)
            for i in range(1, clients):
                total = total + u(i, t)
            w.append(w[-1] + total)
        return w

    def client(store, seed):
        values, wanted = np.empty(size, "f4"), path(len(store.clients))
        for t in range(rounds):
            dawdle(store, t, seed)
            assert store.pull(values) == t
            assert np.array_equal(values, wanted[t])
            store.push(u(number(store), t))

    for seed in range(2):
        run = partial(client, seed=seed)
        held, servers = use(bare, size, run, "float32", initial=initial, broadcast_every=every, **place)
        assert np.array_equal(held, path(clients)[-1])
        assert all(told == (Counter({0: clients * rounds}), rounds) for told in servers)


@pytest.mark.parametrize("bound, every", [(1, 0), (1, 2), (3, 1), (3, 4)])
@on_places
def test_ssp_shows_every_push_but_those_of_the_last_clocks(bare, place, clients, bound, every):
    """Element i counts the pushes of client i: at clock c at least c - K of each are seen, and c of one's own."""

    def client(store):
        mine, n = number(store), len(store.clients)
        values, one = np.empty(n), np.zeros(n)
        one[mine] = 1
        for t in range(8):
            dawdle(store, t)
            store.pull(values)
            assert (values >= t - bound).all() and (values <= t + bound + 1).all()
            assert values[mine] == t
            store.push(one)

    if place.get("servers", 0) > clients:
        return
    options = {"consistency": Consistency("ssp", bound), "broadcast_every": every}
    held, servers = use(bare, clients, client, **options, **place)
    assert (held == 8).all()
    for staleness, _ in servers:
        assert staleness.total() == 8 * clients and max(staleness) <= bound


@pytest.mark.parametrize("every", [0, 1, 3])
@on_places
def test_async_clients_draw_their_steps_from_one_counter(bare, place, clients, every):
    """No step is given out twice or left out (but the one that each has drawn ahead), and versions count up."""
    drawn, steps = [], []

    def update(values, pushed, push):
        steps.append(push.step)
        assert 0 <= push.staleness <= push.step

    def client(store):
        values = np.empty(9)
        for t in range(3 + number(store)):
            dawdle(store, t)
            drawn.append(store.pull(values))
            store.push(values)

    options = {"consistency": ASYNC, "broadcast_every": every, "update": update}
    _, servers = use(bare, 9, client, **options, **place)
    pushes = sum(3 + i for i in range(clients))
    given = sorted(step for part in bare.allgather(drawn) for step in part)
    assert len(set(given)) == pushes and max(given) < pushes + (clients if every else 0)
    assert steps in ([], list(range(pushes)))
    assert all(staleness.total() == version == pushes for staleness, version in servers)


@pytest.mark.parametrize("delay", [1, 3, 9])
@on_places
def test_a_fixed_delay(bare, place, clients, delay):
    """w(t+1) = w(t) + u(t - D): what is pulled at clock t has the updates before t - D; at the end all are applied."""
    rounds = 6

    def u(clients, t):
        return sum((np.arange(9) + 7.0**t * (1 + i) for i in range(clients)), np.zeros(9))

    def client(store):
        values = np.empty(9)
        for t in range(rounds):
            store.pull(values)
            assert np.array_equal(values, sum((u(len(store.clients), s) for s in range(t - delay)), np.zeros(9)))
            store.push(np.arange(9) + 7.0**t * (1 + number(store)))

    held, servers = use(bare, 9, client, delay=delay, **place)
    assert np.array_equal(held, sum(u(clients, t) for t in range(rounds)))
    late = Counter()
    for t in range(rounds):  # the version when u(t) is applied, less the version from which it was computed
        late[t - max(0, t - delay)] += clients
    assert all(told == (late, rounds) for told in servers)


# -- updates, states, and who leads ----------------------------------------------------------------------------------


class Momentum:
    """A user's update with a state: v <- v / 2 + u, w <- w + v."""

    def __init__(self, size):
        self.state = {"velocity": np.zeros(size)}

    def __call__(self, values, pushed, push):
        velocity = self.state["velocity"]
        velocity *= 0.5
        velocity += pushed
        values += velocity


class Counting:
    """Rank 0: `steps` steps, none beyond each fourth one before that is done; gathers values and state after each."""

    def __init__(self, size, steps, start):
        self.steps, self.at, self.size, self.path = steps, start, size, []

    def horizon(self):
        return Horizon(self.steps, min(self.steps, (self.at // 4 + 1) * 4))

    def count(self, loss, total):
        self.at += 1
        both = np.empty((2, self.size))
        for which, vector in enumerate(both):
            self.store.gather(vector, which, needs=self.at, finish=self.at == self.steps)
        self.path.append((both, loss, total))


@pytest.mark.parametrize("every", [0, 1])
@on_places
def test_a_users_update_with_a_state_and_steps_that_rank_0_counts(bare, place, clients, every):
    """Values and state are gathered after each step, the state is set by scatter, and rank 0 says when to end."""
    size, steps, start = 11, 6, 2

    def theory(clients):
        w, v = np.arange(size) * 1.0, np.ones(size)
        for t in range(start, steps):
            v = v / 2 + t * sum(range(1, clients + 1))
            w = w + v
            yield np.array([w, v])

    comm = Communicator(bare, allreduce="ring")
    holders = bare.size if place.get("on_workers") else place["servers"]
    update = Momentum(len(range(size)[chunks(size, holders)[bare.rank]])) if bare.rank < holders else add
    lead = Counting(size, steps, start) if bare.rank == 0 else None
    initial = np.arange(size) * 1.0 if bare.rank == 0 else None
    options = {"update": update, "initial": initial, "start": start, "broadcast_every": every}
    store = store_of(comm, size, "float64", horizon=lead and lead.horizon, **options, **place)
    if lead is not None:
        lead.store, store.server.each_step = store, lead.count
    store.scatter(np.ones(size) if bare.rank == 0 else None, which=1)
    if store.works:
        values, taken = np.empty(size), []
        while (step := store.pull(values)) is not None:
            taken.append(step)
            store.push(np.full(size, step * (number(store) + 1.0)), loss=1.0, total=5.0)
        assert taken == list(range(start, steps))
        store.close()
    elif lead is not None:
        for loss, total in store.completed_steps():
            lead.count(loss, total)
    else:
        store.serve()
    if lead is not None:
        wanted = list(theory(len(store.clients)))
        assert [(loss, total) for _, loss, total in lead.path] == [(len(store.clients), 5.0)] * len(wanted)
        assert np.array_equal([both for both, _, _ in lead.path], wanted)
    store.free()
    comm.free()


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=NAMES)
@on_places
def test_messages_and_bytes(bare, place, clients, consistency):
    """A pull: a header each way and the slice back; a push: a header and the slice; nothing for a slice held here."""
    size, rounds = 23, 3

    def client(store):
        values = np.empty(size)
        for _ in range(rounds):
            store.pull(values)
            store.push(values)

    comm = Communicator(bare, allreduce="ring")
    store = store_of(comm, size, "float64", consistency, **place)
    if store.works:
        client(store)
        store.close(np.empty(size))
    else:
        store.serve()
    sent, messages = 0, 0
    others = [part for rank, part in enumerate(store.slices) if rank != bare.rank] if store.works else []
    for part in others:
        messages += rounds * 3 + 1
        sent += (2 * rounds + 1) * REQUEST.bytes + rounds * 8 * (part.stop - part.start)
    if store.serves:
        answers = (rounds + 1) * (len(store.clients) - store.works)
        messages += 2 * answers
        sent += answers * (ANSWER.bytes + 8 * store.server.values.size)
    assert comm.traffic["push"].messages == messages and comm.traffic["push"].bytes == sent
    bare.Barrier()
    store.free()
    comm.free()


@on_places
def test_beside_other_messages_and_one_after_the_other(bare, place, clients):
    """A user's own messages on the same communicator, with the tags the store has, too, stay the user's."""

    def client(store, comm):
        workers, values = store.clients, np.empty(9)
        right = workers[(number(store) + 1) % len(workers)]
        left = workers[number(store) - 1]
        for t in range(3):
            store.pull(values)
            got = np.empty(9)
            for tag in range(1, 9):
                request = comm.iwait(got, left, tag)
                comm.ipush(np.full(9, 10.0 * tag + t), right, tag)
                until(store, request)
                assert (got == 10 * tag + t).all()
            store.push(np.ones(9))

    comm = Communicator(bare, allreduce="ring")
    for consistency in CONSISTENCIES:
        held, _ = use(bare, 9, partial(client, comm=comm), consistency=consistency, **place)
        assert (held == 3 * clients).all()
    comm.free()


@pytest.mark.mpi(min_size=3)
def test_two_at_once_on_servers_of_their_own(world):
    """Clients may use several stores at once, where each is served by another rank."""
    comm = Communicator(world, allreduce="ring")
    first, second = comm.split(None if world.rank == 1 else 0), comm.split(None if world.rank == 0 else 0)
    stores = [store_of(part, 4, "f4", c) for part, c in ((first, BSP), (second, ASYNC)) if part is not None]
    if world.rank > 1:
        values, n = np.empty(4, "f4"), world.size - 2
        for t in range(4):
            stores[0].pull(values)
            assert (values == t * n).all()
            stores[1].pull(values)
            stores[0].push(np.ones(4, "f4"))
            stores[1].push(np.full(4, 2, "f4"))
        stores[1].close(values)
        assert (values == 8 * n).all()
        stores[0].close(values)
        assert (values == 4 * n).all()
    else:
        stores[0].serve()
    world.Barrier()
    for each in (*stores, first, second, comm):
        if each is not None:
            each.free()


# -- refusals --------------------------------------------------------------------------------------------------------


def test_arrays_that_do_not_fit(world):
    """Another length or type is refused where it is given, before anything is sent."""
    store = store_of(Communicator(world, allreduce="ring"), 7, "f4", on_workers=True)
    for wrong, part in [
        (np.ones(6, "f4"), None),
        (np.ones(7), None),
        (np.ones(7, "f4"), slice(0, 6)),
        (np.ones(3, "f4"), slice(5, None)),
    ]:
        for call in (store.pull, store.push):
            with pytest.raises(UsageError, match=r"the store has \d values of float32 for elements . to .; the array"):
                call(wrong, part)
    with pytest.raises(UsageError, match="consecutive"):
        store.pull(np.ones(4, "f4"), slice(0, 7, 2))
    store.close()
    store.free()
