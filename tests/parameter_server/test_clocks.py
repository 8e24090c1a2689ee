"""Who may start what, without ranks: clients of a store pull, push and close in any order that the clocks allow."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.errors import UsageError
from hpcdl.parameter_server.clocks import Clocks, Horizon
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.store_messages import ENDED, NO_STEP, Push

ASYNC = Consistency("async")
ORDERS = st.lists(st.integers(0, 3), max_size=60)  # which of the clients that can do something does it
CLIENTS = st.integers(1, 4)
ANY = st.sampled_from([BSP, ASYNC, *(Consistency("ssp", bound) for bound in (0, 1, 3))])


class Until:
    """So many steps; none from `limit` on begins yet."""

    def __init__(self, steps=math.inf, limit=math.inf):
        self.steps, self.limit = steps, min(steps, limit)

    def __call__(self):
        return Horizon(self.steps, self.limit)


def push_of(client, clock=0, seen=0, version=0):
    return Push(client, slice(0, 1), clock, seen, version, count=1, total=1, loss=0, norm=0)


class Play:
    """A store without values: clients that pull, compute, and push; what each of them has pulled is kept.
    `pulled` has, for each pull that was answered: client, clock, step, the store's clock; `applied` the pushes."""

    def __init__(self, clients, consistency, start=0, lead=None):
        self.clocks = Clocks(range(clients), consistency, start, lead)
        self.at = dict.fromkeys(range(clients))  # what each has pulled: the store's clock and version
        self.pulled, self.pushes, self.applied, self.counted, self.round = [], [], [], [], []

    def pull(self, client):
        """Whether the pull is answered with a step."""
        clocks = self.clocks
        step = clocks.grant(clocks.of_client[client])
        if step is None or step == ENDED:
            return False
        self.at[client] = clocks.of_store, clocks.version
        self.pulled.append((client, clocks.of_client[client], step, clocks.of_store))
        return True

    def push(self, client):
        clocks, (seen, version) = self.clocks, self.at[client]
        push, self.at[client] = push_of(client, clocks.of_client[client], seen, version), None
        self.pushes.append(clocks.step_of(push))
        clocks.pushed(push)
        if clocks.consistency.in_rounds:
            self.round.append(push)
        else:
            self.apply([push])
        self.end_steps()

    def apply(self, pushes):
        self.applied += [self.clocks.described(push) for push in pushes]
        self.clocks.applied(pushes)

    def end_steps(self):
        for step in self.clocks.complete():
            if self.round:
                self.apply(self.round)
                self.round = []
            self.counted.append(step)

    def close(self, client):
        self.clocks.open.discard(client)
        self.end_steps()

    def able(self):
        """The clients that can do something: push, or pull and be answered."""
        granted = self.clocks.granted
        able = []
        for client in sorted(self.clocks.open):
            step = self.clocks.grant(self.clocks.of_client[client]) if self.at[client] is None else 0
            if step not in (None, ENDED):
                able.append(client)
        self.clocks.granted = granted
        return able

    def go(self, order):
        """Let those that can do something do it, in this order; whether somebody still can."""
        for number in order:
            able = self.able()
            if not able:
                return False
            client = able[number % len(able)]
            (self.pull if self.at[client] is None else self.push)(client)
        return True


@settings(deadline=None)
@given(CLIENTS, st.integers(0, 4), st.integers(0, 5), ORDERS)
def test_nobody_is_more_than_the_bound_ahead(clients, bound, start, order):
    """A pull at clock c sees all but the last `bound` clocks; clients' clocks are at most bound + 1 apart."""
    play = Play(clients, Consistency("ssp", bound), start)
    for number in order:
        assert play.go([number])  # the slowest always can
        clocks = play.clocks.of_client.values()
        assert max(clocks) - min(clocks) <= bound + 1
    assert all(step == clock and clock - store <= bound for _, clock, step, store in play.pulled)
    assert all(push.staleness == push.clock - push.seen <= bound for push in play.applied if bound)


@settings(deadline=None)
@given(CLIENTS, st.sampled_from([BSP, Consistency("ssp", 0)]), ORDERS)
def test_a_bound_of_0_is_rounds(clients, consistency, order):
    """Round t has one push of each client, is applied when all have come, and all pull what it made; none is stale."""
    play = Play(clients, consistency)
    play.go(order)
    rounds = [list(group) for _, group in itertools.groupby(play.applied, lambda push: push.step)]
    assert len(rounds) == play.clocks.version == len(play.counted)
    assert all(sorted(push.client for push in each) == list(range(clients)) for each in rounds)
    assert all(store == clock == step for _, clock, step, store in play.pulled)
    assert play.clocks.staleness == (Counter({0: clients * len(rounds)}) if rounds else Counter())


@settings(deadline=None)
@given(CLIENTS, st.integers(0, 5), ORDERS)
def test_async_steps_are_drawn_in_turn_and_nobody_waits(clients, start, order):
    play = Play(clients, ASYNC, start)
    for number in order:
        assert play.able() == list(range(clients))
        play.go([number])
    assert [step for _, _, step, _ in play.pulled] == list(range(start, start + len(play.pulled)))
    assert play.pushes == [push.step for push in play.applied] == list(range(start, start + len(play.applied)))


@settings(deadline=None)
@given(CLIENTS, ANY, ORDERS)
def test_staleness_is_what_a_push_has_missed(clients, consistency, order):
    """Under ssp the clocks by which the store was behind at the pull; else the updates between the pull and its own."""
    play, wanted, since = Play(clients, consistency), [], {}
    for number in order:
        able = play.able()
        if not able:
            break
        client = able[number % len(able)]
        updates = len(wanted)
        if play.at[client] is None:
            since[client] = play.clocks.of_client[client] - play.clocks.of_store, updates
            play.pull(client)
        else:
            play.push(client)
            behind, before = since[client]
            if not consistency.in_rounds:
                wanted.append(behind if consistency.clocked else updates - before)
    if consistency.in_rounds:
        wanted = [0] * len(play.applied)
    assert [push.staleness for push in play.applied] == wanted
    assert play.clocks.staleness == Counter(wanted)


@settings(deadline=None)
@given(CLIENTS, ANY, st.integers(0, 5), st.integers(0, 9), ORDERS)
def test_all_steps_are_counted_once_and_then_all_is_over(clients, consistency, start, steps, order):
    """With a last step: every client makes all of its pushes (async: together), and is then told that none is left."""
    steps += start
    play = Play(clients, consistency, start, Until(steps))
    if play.go(order):
        play.go([0] * 500)
    assert play.counted == list(range(start, steps)) and play.clocks.granted == steps
    assert all(play.clocks.grant(play.clocks.of_client[client]) == ENDED for client in range(clients))
    each = clients if consistency.clocked else 1
    assert Counter(play.pushes) == dict.fromkeys(range(start, steps), each)


@settings(deadline=None)
@given(CLIENTS, ANY, st.integers(1, 9), st.integers(0, 9), ORDERS)
def test_nobody_begins_a_step_that_is_to_wait(clients, consistency, more, limit, order):
    """Up to the limit everything is done, and nothing beyond it, until it is raised."""
    lead = Until(limit + more, limit)
    play = Play(clients, consistency, lead=lead)
    if play.go(order):
        play.go([0] * 500)
    assert play.counted == list(range(limit)) and play.clocks.granted == limit
    assert not play.able() and set(play.at.values()) == {None}
    assert all(play.clocks.grant(play.clocks.of_client[client]) is None for client in range(clients))
    lead.limit = lead.steps
    play.go([0] * 500)
    assert play.counted == list(range(limit + more))


@settings(deadline=None)
@given(CLIENTS, ANY, ORDERS, st.data())
def test_who_closes_is_waited_for_no_longer(clients, consistency, order, data):
    """Clients close one after the other, at any time; the others go on, and in the end every push is counted."""
    play = Play(clients, consistency)
    for client in data.draw(st.permutations(range(clients))):
        part = data.draw(st.integers(0, len(order)))
        assert play.go(order[:part]) and play.able()
        if play.at[client] is not None and data.draw(st.booleans()):
            play.push(client)
        play.close(client)
    assert not play.clocks.open and not play.round and len(play.applied) == len(play.pushes)
    assert play.counted == sorted(set(play.pushes)) == list(range(len(play.counted)))


@settings(deadline=None)
@given(CLIENTS, st.integers(0, 4), st.integers(0, 5), st.integers(1, 5), st.booleans(), ORDERS, st.data())
def test_subscribers_are_sent_what_they_need(clients, bound, start, every, limited, order, data):
    """Clients that know only what they were sent: none goes beyond bound or limit, and somebody always can go on."""
    every, lead = min(every, bound + 1), Until(data.draw(st.integers(0, 9)) + start) if limited else Until()
    lead.limit = data.draw(st.integers(start, int(lead.steps))) if limited else math.inf
    clocks = Clocks(range(clients), Consistency("ssp", bound), start, lead)
    step, limit = clocks.grant_unasked()
    seen = start  # as they subscribe
    for number in [*order, *[0] * 100]:
        able = [c for c, clock in clocks.of_client.items() if clock < limit and seen >= clock - bound]
        if not able and step != ENDED and lead.limit < lead.steps and min(clocks.of_client.values()) == lead.limit:
            lead.limit = lead.steps  # a checkpoint has been written
            step, limit = clocks.grant_unasked()
            continue
        if not able or step == ENDED:
            break
        client = able[number % len(able)]
        clocks.pushed(push_of(client, clocks.of_client[client], seen))
        assert clocks.of_client[client] <= lead.limit
        list(clocks.complete())
        if clocks.broadcast_due(every):
            clocks.broadcast_at = seen = clocks.of_store
            step, limit = clocks.grant_unasked()
            assert clocks.granted >= limit or not limited
    if limited:
        assert step == ENDED and set(clocks.of_client.values()) == {lead.steps}
    else:
        assert able


def test_the_stores_clock():
    """Of the slowest open client; when all have closed, of the fastest; under async the pushes."""
    clocks, loose = Clocks([3, 5], Consistency("ssp", 2), 7), Clocks([3, 5], ASYNC, 7)
    for each in (clocks, loose):
        each.pushed(push_of(5, 7, 7))
        each.pushed(push_of(5, 8, 7))
    assert (clocks.of_store, loose.of_store) == (7, 9)
    for client in (3, 5):
        clocks.open.discard(client)
        assert clocks.of_store == 9
    assert list(clocks.complete()) == [7, 8] and not list(clocks.complete())


@pytest.mark.parametrize("bound", [0, 2])
def test_a_push_from_parameters_that_are_too_old_is_refused(bound):
    clocks = Clocks([4], Consistency("ssp", bound))
    for clock in range(bound + 1):
        clocks.pushed(push_of(4, clock, 0))
    words = f"rank 4 pushed at clock {bound + 1} values computed from parameters of clock 0: more than {bound} behind"
    with pytest.raises(UsageError, match=words):
        clocks.pushed(push_of(4, bound + 1, 0))
    assert clocks.of_client[4] == clocks.pushes == bound + 1


def test_what_subscribers_are_told():
    """Nothing where no step ever waits, or where steps are drawn; else how far they may go, and when it is over."""
    assert Clocks([0], Consistency("ssp", 2)).grant_unasked() == (NO_STEP, math.inf)
    assert Clocks([0], ASYNC, 0, Until(9)).grant_unasked() == (NO_STEP, math.inf)
    clocks = Clocks([0], Consistency("ssp", 2), 4, Until(9, 6))
    assert clocks.grant_unasked() == (NO_STEP, 6) and clocks.granted == 6
    clocks.horizon.limit = 9
    assert clocks.grant_unasked() == (NO_STEP, 7) and clocks.granted == 7
    assert Clocks([0], BSP, 9, Until(9)).grant_unasked() == (ENDED, 9)
    clocks.horizon.limit = math.inf
    clocks.of_client[0] = 8
    assert clocks.grant_unasked() == (NO_STEP, 9)


def test_when_subscribers_are_sent_to():
    """After every 3 clocks; and before, where no step is given out that they could do."""
    free, held = Clocks([0], Consistency("ssp", 5), 2), Clocks([0], Consistency("ssp", 5), 2, Until(99, 6))
    held.grant_unasked()
    found = []
    for clocks in (free, held):
        for clock in range(2, 9):
            clocks.pushed(push_of(0, clock, clock))
            if clocks.broadcast_due(3):
                clocks.broadcast_at = clocks.of_store
                found.append(clocks.of_store)
    assert found == [5, 8, 5, 6, 7, 8, 9]
