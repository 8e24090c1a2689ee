"""One server of a store by itself: requests are handed to it, and what it sends is kept instead of sent."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.comm.trace import Traffic
from hpcdl.parameter_server.clocks import Clocks, Horizon
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.parameter_store import add
from hpcdl.parameter_server.slice_server import SliceServer, StoreRequest
from hpcdl.parameter_server.store_messages import ANSWER, ENDED, REQUEST, StoreOperation, StoreTag

SSP = Consistency("ssp", 9)


class Post:
    """In the place of a communicator: `sent` are receiver, tag and array of what is under way, and has arrived."""

    rank, size = 3, 4

    def __init__(self):
        self.sent, self.traffic = [], Traffic()

    def iwait(self, *_):
        return SimpleNamespace(done=False)

    def ipush(self, array, to, tag):
        self.sent.append(SimpleNamespace(to=to, tag=tag, array=array, done=False))
        return self.sent[-1]

    def take(self):
        """What has been sent since: receiver, step and values of each answer."""
        sent, self.sent = self.sent, []
        for head, values in zip(sent[::2], sent[1::2], strict=True):
            assert head.to == values.to and head.tag + 1 == values.tag
            yield head.to, int(ANSWER.read(head.array)["step"]), values.array.tolist()


@pytest.fixture
def serve():
    """A function: a server of two values for ranks 1 and 2; `ask(rank, operation, clock)` hands it a request."""

    def make(consistency, steps=None, **options):
        post, horizon = Post(), None if steps is None else lambda: Horizon(steps, steps)
        server = SliceServer(post, np.zeros(2), Clocks([1, 2], consistency, 0, horizon), add, **options)

        def ask(client, operation, clock=0, **numbers):
            buffer = np.full(2, float(client)) if operation == StoreOperation.PUSH else None
            numbers = {"reply": StoreTag.ANSWER, "clock": clock, "seen": clock, "stop": 2, "total": 8} | numbers
            server.handle_own(StoreRequest(REQUEST.header(operation=operation, **numbers), client), buffer)

        return server, post, ask

    return make


def test_a_pull_waits_for_its_round_which_is_told_first(serve):
    told = []
    server, post, ask = serve(BSP, steps=3)
    server.each_step = lambda loss, total: told.append((loss, total, server.values.tolist(), list(post.take())))
    ask(1, StoreOperation.PULL)
    ask(2, StoreOperation.PULL)
    assert list(post.take()) == [(1, 0, [0, 0]), (2, 0, [0, 0])]
    ask(2, StoreOperation.PUSH, loss=0.5)
    ask(2, StoreOperation.PULL, clock=1)
    assert not post.sent and not told
    ask(1, StoreOperation.PUSH, loss=0.25)
    assert told == [(0.75, 8, [3, 3], [])]
    assert list(post.take()) == [(2, 1, [3, 3])]


def test_after_a_loss_that_is_not_finite_no_step_begins_and_none_is_counted(serve):
    """The steps that are given out are done: client 1's step 1."""
    told = []
    server, post, ask = serve(SSP, steps=3)
    server.each_step = lambda *step: told.append(step)
    for clock, loss in ((0, 1.0), (1, np.inf)):
        for client in (1, 2):
            ask(client, StoreOperation.PULL, clock)
        for client in (1, 2):
            ask(client, StoreOperation.PUSH, clock, loss=loss)
    list(post.take())
    ask(1, StoreOperation.PULL, 2)
    assert [step for _, step, _ in post.take()] == [ENDED]
    assert told == [(2, 8)] and (server.not_finite.client, server.not_finite.step) == (1, 1)


def test_a_signal_is_known_from_then_on(serve):
    server, _, ask = serve(SSP)
    ask(2, StoreOperation.PULL)
    assert not server.signalled
    ask(1, StoreOperation.PULL, signal=True)
    ask(1, StoreOperation.PUSH)
    assert server.signalled


def test_what_is_under_way_stays_and_one_copy_serves_all_of_a_version(serve):
    server, post, ask = serve(SSP)
    for client in (1, 2):
        ask(client, StoreOperation.PULL)
    before = [post.sent[1].array, post.sent[3].array]
    ask(1, StoreOperation.PUSH)
    ask(1, StoreOperation.PULL, clock=1)
    assert np.shares_memory(*before) and not np.shares_memory(before[0], post.sent[5].array)
    assert list(post.take()) == [(1, 0, [0, 0]), (2, 0, [0, 0]), (1, 1, [1, 1])]
    assert not np.shares_memory(server.values, before[0])


def test_a_subscriber_gets_the_newest_when_the_one_before_has_arrived(serve):
    """Versions that come while a message is under way are left out, but for the last; nothing is sent twice."""
    server, post, ask = serve(SSP, broadcast_every=1)
    ask(1, StoreOperation.SUBSCRIBE)
    message = post.sent[-1]
    assert message.tag == StoreTag.UNASKED + 1
    post.sent.clear()
    for clock in range(3):
        for client in (1, 2):
            ask(client, StoreOperation.PUSH, clock)
    assert not server.attend() and not post.sent
    message.done = True
    assert server.attend() and not server.attend()
    message = post.sent[-1]
    assert [values for _, _, values in post.take()] == [[9, 9]]
    message.done = True
    assert not server.attend() and not post.sent  # it has all there is
    ask(1, StoreOperation.PUSH, 3)
    ask(2, StoreOperation.PUSH, 3)
    post.sent[-1].done = True
    assert [values for _, _, values in post.take()] == [[12, 12]]
    ask(1, StoreOperation.LAST)
    ask(2, StoreOperation.PUSH, 4)
    assert not post.sent  # to who has closed


def test_the_last_pulls_are_answered_together_with_what_was_delayed(serve):
    server, post, ask = serve(BSP, delay=2)
    ask(1, StoreOperation.PUSH)
    ask(2, StoreOperation.PUSH)
    ask(1, StoreOperation.LAST)
    assert not post.sent and server.values.tolist() == [0, 0] and server.clocks.open == {2}
    ask(2, StoreOperation.LAST)
    assert [(to, values) for to, _, values in post.take()] == [(1, [3, 3]), (2, [3, 3])]
    assert server.clocks.staleness == {0: 2} and not server.clocks.open


def test_rank_0_gathers_until_it_is_over(serve):
    """At the clock that it needs; and when all clients have closed, this server does not end before it is told."""
    assert serve(SSP)[0].inbox.pending.keys() == {1, 2}
    server, post, ask = serve(SSP, gathered=True)
    assert server.inbox.pending.keys() == {0, 1, 2}
    ask(0, StoreOperation.PULL, reply=StoreTag.GATHERED, needs=1)
    ask(1, StoreOperation.PUSH)
    assert not post.sent
    ask(2, StoreOperation.PUSH)
    assert [message.tag for message in post.sent] == [StoreTag.GATHERED, StoreTag.GATHERED + 1]
    for client in (1, 2):
        ask(client, StoreOperation.LAST)
    assert not server.clocks.open and server.gathered
    ask(0, StoreOperation.OVER)
    assert not server.gathered
