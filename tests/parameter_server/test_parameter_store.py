"""The parameter store: what is pushed is applied, once, when its consistency says; and it is counted to the byte."""

import itertools
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
from hpcdl.parameter_server.store_messages import ANSWER_HEADER, REQUEST_HEADER
from hpcdl.parameter_server.store_settings import Serving, StoreLayout, check_store
from hpcdl.random import Random

pytestmark = pytest.mark.four

ASYNC = Consistency("async")
CONSISTENCIES = [BSP, Consistency("ssp", 0), Consistency("ssp", 1), Consistency("ssp", 4), ASYNC]
NAMES = ["bsp", "ssp0", "ssp1", "ssp4", "async"]


def places(size: int) -> list[dict]:
    """All ways to place the slices on so many ranks: on 1, 2 or 3 servers, and on the workers."""
    return [{"servers": servers} for servers in range(1, min(4, size))] + [{"on_workers": True}]


def store_of(comm, size, dtype, consistency=BSP, broadcast_every=0, delay=0, servers=1, on_workers=False, **options):
    """A store with these settings."""
    layout = StoreLayout(size, comm.size, dtype, servers, on_workers, options.pop("block", 1))
    return ParameterStore(comm, layout, Serving(consistency, broadcast_every, delay), **options)


def use(bare, size, client, dtype="float64", **options):
    """What a store holds in the end and its servers' (staleness, version), when each client has run `client(store)`.

    Whatever the client does: no message is left, and clients get to see the final values.
    """
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


# -- nothing is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=NAMES)
def test_the_end_is_the_sum_of_all_pushes_although_clients_close_when_they_like(each_group, consistency, every):
    """Client i makes (2 i) mod 5 pushes: the first none at all, others in the middle of the others' rounds."""
    initial, dtype = np.arange(11) - 5, {"bsp": "int64", "ssp": "float32", "async": "float64"}[consistency.name]

    def client(store):
        values = np.empty(11, dtype)
        for t in range(2 * number(store) % 5):
            dawdle(store, t)
            store.pull(values)
            store.push((np.arange(11) * (1 + number(store)) + t).astype(dtype))

    def body(bare):
        for place in places(bare.size):
            clients = bare.size - place.get("servers", 0)
            rounds = [2 * i % 5 for i in range(clients)]
            wanted = initial + sum(np.arange(11) * (1 + i) + t for i in range(clients) for t in range(rounds[i]))
            options = {"consistency": consistency, "broadcast_every": every, "initial": initial.astype(dtype)}
            held, servers = use(bare, 11, client, dtype, **options, **place)
            assert held.dtype == dtype and np.array_equal(held, wanted)
            for staleness, version in servers:
                assert staleness.total() == sum(rounds)
                assert version == (max(rounds) if consistency.in_rounds else sum(rounds))

    each_group(body)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=NAMES)
def test_the_last_round_is_applied_when_who_is_not_in_it_closes_last(each_group, consistency, every):
    """The first client pushes nothing, and closes when all others have pushed and, most likely, closed."""

    def client(store, comm):
        values, (first, *others) = np.empty(9), store.clients
        store.pull(values)
        if store.comm.rank == first:
            for rank in others:
                until(store, comm.iwait(source=rank, tag=9))
            for t in range(10):
                dawdle(store, t)
        else:
            store.push(np.ones(9))
            comm.notify(first, tag=9)

    def body(bare):
        comm = Communicator(bare, allreduce="ring")
        for place in places(bare.size):
            options = {"consistency": consistency, "broadcast_every": every}
            held, servers = use(bare, 9, partial(client, comm=comm), **options, **place)
            pushes = bare.size - place.get("servers", 0) - 1
            assert (held == pushes).all() and all(staleness.total() == pushes for staleness, _ in servers)
        comm.free()

    each_group(body)


@pytest.mark.parametrize("consistency", [BSP, Consistency("ssp", 2), ASYNC], ids=["bsp", "ssp2", "async"])
def test_parts(each_group, consistency):
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

    def body(bare):
        for place in places(bare.size):
            clients = bare.size - place.get("servers", 0)
            held, _ = use(bare, size, client, consistency=consistency, block=3, initial=np.ones(size), **place)
            assert np.array_equal(held, wanted(clients, rounds))

    each_group(body)


def test_slices_end_at_blocks(each_group):
    def body(bare):
        store = store_of(Communicator(bare, allreduce="ring"), 32, "f4", on_workers=True, block=3)
        cuts = store.slices
        assert [cut.stop - cut.start for cut in cuts[:-1]] == [
            3 * (c.stop - c.start) for c in chunks(10, bare.size)[:-1]
        ]
        assert cuts[0].start == 0 and cuts[-1].stop == 32
        assert all(one.stop == two.start for one, two in itertools.pairwise(cuts))
        store.close()
        store.free()

    each_group(body)


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
def test_bsp_is_the_theory_to_the_bit_in_whatever_order_the_clients_come(each_group, every):
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

    def body(bare):
        for place in places(bare.size):
            for seed in range(2):
                run = partial(client, seed=seed)
                held, servers = use(bare, size, run, "float32", initial=initial, broadcast_every=every, **place)
                clients = bare.size - place.get("servers", 0)
                assert np.array_equal(held, path(clients)[-1])
                assert all(told == (Counter({0: clients * rounds}), rounds) for told in servers)

    each_group(body)


@pytest.mark.parametrize("bound, every", [(1, 0), (1, 2), (3, 0), (3, 1), (3, 2), (3, 4)])
def test_ssp_shows_every_push_but_those_of_the_last_clocks(each_group, bound, every):
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

    def body(bare):
        for place in places(bare.size):
            clients = bare.size - place.get("servers", 0)
            if place.get("servers", 0) > clients:
                continue
            options = {"consistency": Consistency("ssp", bound), "broadcast_every": every}
            held, servers = use(bare, clients, client, **options, **place)
            assert (held == 8).all()
            for staleness, _ in servers:
                assert staleness.total() == 8 * clients and max(staleness) <= bound

    each_group(body)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("every", [0, 3])
def test_with_ssp_the_fast_get_as_far_ahead_as_they_may_and_no_farther(each_group, every):
    """The first client pushes only when all others have told it, by messages of their own, that they are K ahead."""
    bound = 2

    def client(store, comm):
        mine, values = number(store), np.empty(9)
        others = [rank for rank in store.clients if rank != store.clients[0]]
        for t in range(5):
            store.pull(values)
            if mine == 0 and t == 0:
                for rank in others:
                    until(store, comm.iwait(source=rank, tag=9))
            if mine > 0 and t == bound + 1:
                assert (values >= 100).all()  # the first client's push is in it
            store.push(np.full(9, 100.0 if mine == 0 else 1.0))
            if mine > 0 and t == bound:
                comm.notify(store.clients[0], tag=9)

    def body(bare):
        comm = Communicator(bare, allreduce="ring")
        for place in places(bare.size):
            clients = bare.size - place.get("servers", 0)
            options = {"consistency": Consistency("ssp", bound), "broadcast_every": every}
            _, servers = use(bare, 9, partial(client, comm=comm), **options, **place)
            for staleness, _ in servers:
                assert max(staleness) == (bound if clients > 1 or every else 0)
                assert staleness[bound] >= (clients - 1 if not every else 0)
        comm.free()

    each_group(body)


@pytest.mark.mpi(min_size=3)
def test_async_staleness_is_the_updates_missed(world):
    """A client that pulled, and waited for three pushes of another, is 3 versions stale; nobody waits for anybody."""
    seen = []

    def update(values, pushed, push):
        seen.append((push.client, push.staleness, push.step))
        values += pushed

    def client(store, comm):
        values, (first, second) = np.empty(4), store.clients[:2]
        if store.comm.rank == first:
            store.pull(values)
            comm.notify(second, tag=9)
            comm.wait(source=second, tag=9)
            store.push(np.ones(4))
        if store.comm.rank == second:
            comm.wait(source=first, tag=9)
            for _ in range(3):
                store.pull(values)
                store.push(np.ones(4))
            store.pull(values)  # all three have been applied
            assert (values == 3).all()
            comm.notify(first, tag=9)

    comm = Communicator(world, allreduce="ring")
    _, servers = use(world, 4, partial(client, comm=comm), consistency=ASYNC, update=update)
    assert servers == [(Counter({0: 3, 3: 1}), 4)]
    if world.rank == 0:
        assert seen == [(2, 0, 0), (2, 0, 1), (2, 0, 2), (1, 3, 3)]
    comm.free()


@pytest.mark.parametrize("every", [0, 1, 3])
def test_async_clients_draw_their_steps_from_one_counter(each_group, every):
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

    def body(bare):
        for place in places(bare.size):
            drawn.clear(), steps.clear()
            options = {"consistency": ASYNC, "broadcast_every": every, "update": update}
            _, servers = use(bare, 9, client, **options, **place)
            clients = bare.size - place.get("servers", 0)
            pushes = sum(3 + i for i in range(clients))
            given = sorted(step for part in bare.allgather(drawn) for step in part)
            assert len(set(given)) == pushes and max(given) < pushes + (clients if every else 0)
            assert steps in ([], list(range(pushes)))
            assert all(staleness.total() == version == pushes for staleness, version in servers)

    each_group(body)


@pytest.mark.parametrize("delay", [1, 3, 9])
def test_a_fixed_delay(each_group, delay):
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

    def body(bare):
        for place in places(bare.size):
            clients = bare.size - place.get("servers", 0)
            held, servers = use(bare, 9, client, delay=delay, **place)
            assert np.array_equal(held, sum(u(clients, t) for t in range(rounds)))
            late = Counter()
            for t in range(rounds):  # the version when u(t) is applied, less the version from which it was computed
                late[t - max(0, t - delay)] += clients
            assert all(told == (late, rounds) for told in servers)

    each_group(body)


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
def test_a_users_update_with_a_state_and_steps_that_rank_0_counts(each_group, every):
    """Values and state are gathered after each step, the state is set by scatter, and rank 0 says when to end."""
    size, steps, start = 11, 6, 2

    def theory(clients):
        w, v = np.arange(size) * 1.0, np.ones(size)
        for t in range(start, steps):
            v = v / 2 + t * sum(range(1, clients + 1))
            w = w + v
            yield np.array([w, v])

    def body(bare):
        for place in places(bare.size):
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

    each_group(body)


@pytest.mark.parametrize("every", [0, 1])
def test_steps_begin_without_end_where_no_horizon_is_set(each_group, every):
    def client(store):
        values = np.empty(9)
        for t in range(3):
            assert store.pull(values) == 2 + t and (values == t * len(store.clients)).all()
            store.push(np.ones(9))

    def body(bare):
        for place in places(bare.size):
            horizon = Horizon if bare.rank == 0 else None
            held, _ = use(bare, 9, client, horizon=horizon, start=2, broadcast_every=every, **place)
            assert (held == 3 * (bare.size - place.get("servers", 0))).all()

    each_group(body)


def test_what_update_is_told(each_group):
    """In rounds the sum of all examples; else each push as it was made."""
    told = []

    def update(values, pushed, push):
        told.append((push.client, push.count, push.total, push.loss, push.norm, push.step))
        values += pushed

    def client(store):
        for t in range(2):
            store.pull(np.empty(9))
            store.push(np.ones(9), count=number(store) + 1, total=50, loss=0.5, norm=2 + t)

    def body(bare):
        for consistency in (BSP, Consistency("ssp", 1)):
            told.clear()
            use(bare, 9, client, consistency=consistency, update=update, on_workers=True)
            n = bare.size
            if consistency is BSP:
                assert [(count, step) for _, count, _, _, _, step in told] == [(n * (n + 1) / 2, t) for t in range(2)]
            else:
                assert sorted(told) == [(i, i + 1, 50, 0.5, 2 + t, t) for i in range(n) for t in range(2)]

    each_group(body)


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=NAMES)
def test_messages_and_bytes(each_group, consistency):
    """A pull: a header each way and the slice back; a push: a header and the slice; nothing for a slice held here."""
    size, rounds = 23, 3

    def client(store):
        values = np.empty(size)
        for _ in range(rounds):
            store.pull(values)
            store.push(values)

    def body(bare):
        for place in places(bare.size):
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
                sent += (2 * rounds + 1) * REQUEST_HEADER.itemsize + rounds * 8 * (part.stop - part.start)
            if store.serves:
                answers = (rounds + 1) * (len(store.clients) - store.works)
                messages += 2 * answers
                sent += answers * (ANSWER_HEADER.itemsize + 8 * store.server.values.size)
            assert comm.traffic["push"].messages == messages and comm.traffic["push"].bytes == sent
            bare.Barrier()
            store.free()
            comm.free()

    each_group(body)


def test_beside_other_messages_and_one_after_the_other(each_group):
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

    def body(bare):
        comm = Communicator(bare, allreduce="ring")
        for place in places(bare.size):
            for consistency in CONSISTENCIES:
                held, _ = use(bare, 9, partial(client, comm=comm), consistency=consistency, **place)
                assert (held == 3 * (bare.size - place.get("servers", 0))).all()
        comm.free()

    each_group(body)


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


@pytest.mark.mpi(min_size=2)
def test_who_waits_naps(world, monkeypatch):
    """A server and the clients that wait for a slow one leave the core to others, until they have napped 30 times."""
    naps, looks, nap, look = Counter(), Counter(), time.sleep, os.sched_yield
    comm = Communicator(world, allreduce="ring")
    slow = world.size - 1

    def counting(seconds):
        naps["all"] += 1
        if naps["all"] == 30:
            comm.inotify(slow, tag=7)
        nap(seconds)

    def looking():
        looks["all"] += 1
        assert looks["all"] < 1_000_000
        look()

    def client(store):
        values = np.empty(3)
        store.pull(values)
        if world.rank == slow:
            for rank in range(slow):
                until(store, comm.iwait(source=rank, tag=7))
        else:
            monkeypatch.setattr(time, "sleep", counting)
            monkeypatch.setattr(os, "sched_yield", looking)
        store.push(values)
        store.pull(values)

    if world.rank == 0:
        monkeypatch.setattr(time, "sleep", counting)
        monkeypatch.setattr(os, "sched_yield", looking)
    use(world, 3, client)
    assert world.rank == slow or naps["all"] >= 30
    comm.free()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("consistency", [BSP, Consistency("ssp", 1)], ids=["bsp", "ssp1"])
def test_push_without_pull(world, consistency):
    """What was computed from parameters older than the bound allows is refused by the server."""
    comm = Communicator(world, allreduce="ring")
    store = store_of(comm, 3, "f4", consistency)
    if world.rank == 0:
        with pytest.raises(UsageError, match=f"rank 1 pushed at clock {consistency.staleness + 1} .* of clock 0: more"):
            store.serve()
    elif world.rank == 1:
        store.pull(np.empty(3, "f4"))
        for _ in range(consistency.staleness + 2):
            store.push(np.ones(3, "f4"))
    activity.in_flight.clear()  # what the server waits for after its refusal never comes


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


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((4, 10, 0, False, BSP), "at least one server, not 0"),
        ((4, 10, 4, False, BSP), "no worker is left over: 4 parameter servers of 4 ranks; start at least 5"),
        ((5, 3, 4, False, BSP), "4 servers cannot share 3 parameters; take 3 or fewer"),
        ((5, 4, 0, True, BSP), "5 servers cannot share 4 parameters"),
        ((4, 10, 1, False, BSP, -1), "send after every"),
        ((4, 10, 1, False, BSP, 2), "after every 2 clocks need workers that may be 1 clocks ahead"),
        ((4, 10, 1, False, Consistency("ssp", 2), 4), "take a staleness of 3 or more"),
        ((4, 10, 1, False, BSP, 0, -1), "a fixed delay is a number of versions"),
        ((4, 10, 1, False, Consistency("ssp", 2), 0, 1), "ssp has clocks of its own"),
        ((4, 10, 1, False, Consistency("bsp", 2)), "a staleness of 2 is for ssp"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(UsageError, match=words):
        layout, serving = arguments[:4], arguments[4:]
        ranks, size, servers, on_workers = layout
        check_store(StoreLayout(size, ranks, servers=servers, on_workers=on_workers), Serving(*serving))


def test_what_is_not_refused():
    check_store(StoreLayout(10, 4, servers=3), Serving(Consistency("ssp", 2), 3))
    check_store(StoreLayout(1, 1, servers=0, on_workers=True), Serving(ASYNC, 100, 5))
