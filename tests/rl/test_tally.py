"""What ranks have done and sent: sums over all, by kind; each return is told once; a resumed run counts on."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.rl.agent import LAST
from hpcdl.rl.tally import KINDS, SLOTS, BytesByKind, RankCounts
from hpcdl.runs import signals


def acted(steps, returns, episodes=None, restarts=0, copies=2):
    episodes = len(returns) if episodes is None else episodes
    environments = SimpleNamespace(count=copies, restarts=restarts)
    returns = [float(each) for each in returns]
    return SimpleNamespace(steps=steps, returns=returns, episodes=episodes, environments=environments)


def test_bytes_are_of_the_innermost_kind():
    traffic = SimpleNamespace(bytes=5)
    by_kind = BytesByKind(traffic)
    with by_kind("parameters"):
        traffic.bytes += 100
        with by_kind("control"):  # as where leave is given in waiting for an answer
            traffic.bytes += 7
        traffic.bytes += 30
    with pytest.raises(KeyError, match="wrong"), by_kind("transitions"):
        traffic.bytes += 1000
        raise KeyError("wrong")
    wanted = {"parameters": 130, "control": 7, "transitions": 1000}
    assert by_kind.sent == dict.fromkeys(KINDS, 0) | wanted
    by_kind.rest("samples")
    by_kind.rest("samples")
    assert by_kind.sent["samples"] == 5 and sum(by_kind.sent.values()) == traffic.bytes


def test_sums_over_actors_memories_and_servers():
    """Two actors tell a memory, which tells a server, on which another memory has told as well."""
    actors, memories, server = [RankCounts(), RankCounts()], [RankCounts(), RankCounts()], RankCounts()
    actors[0].note(acted(10, [1, 2], restarts=1))
    actors[1].note(acted(20, [3], copies=3))
    for rank, actor in enumerate(actors, 3):
        for _ in range(2):  # totals: what is told twice counts once
            memories[0].take(rank, actor.packed())
    memories[1].note(acted(5, [9]))
    memories[1].discard()
    memories[1].discard()
    for rank, memory in enumerate(memories, 1):
        server.take(rank, memory.packed())
    assert (server["steps"], server["episodes"], server["restarts"], server["discarded"]) == (90, 4, 1, 2)
    assert sorted(server.returns) == [1, 2, 3, 9] and list(memories[0].returns) == [1, 2, 3]
    assert server.scores() == {"episodes": 4, "return_mean": 3.75, "return_min": 1.0, "return_max": 9.0}
    assert RankCounts().scores() == {"episodes": 0}


def test_bytes_of_all_by_kind():
    own = BytesByKind(SimpleNamespace(bytes=0))
    own.sent["gradients"] = 8
    one, two = RankCounts(own), RankCounts(BytesByKind(SimpleNamespace(bytes=0)))
    two.by_kind.sent["parameters"] = 100
    two.take(2, one.packed())
    two.note_sent(1, "parameters", 40.0)
    two.note_sent(1, "parameters", 50.0)
    wanted = {"parameters_bytes": 150, "gradients_bytes": 8}
    assert two.bytes_by_kind() == {f"{kind}_bytes": 0 for kind in KINDS} | wanted


def test_each_return_is_told_once_and_in_order():
    actor, server = RankCounts(), RankCounts()
    told = []
    for turn in range(12):
        actor.note(acted(turn, range(0, 3 * turn), episodes=3 * turn))
        message = actor.packed()
        assert message.shape == (RankCounts.length,) and message.dtype == np.float64
        told.append(int((~np.isnan(message[-SLOTS:])).sum()))
        server.take(1, message)
    assert told == [0] + 11 * [3]
    assert list(server.returns) == list(range(33)) and server["episodes"] == 33


def test_many_at_once_travel_some_in_each_message():
    actor, server = RankCounts(), RankCounts()
    actor.note(acted(50, range(50)))
    for _ in range(7):
        server.take(1, actor.packed())
    assert list(server.returns) == list(range(50)) and not actor.unsent_returns
    # An actor keeps the last hundred alone: of more, those are what is told.
    actor.note(acted(900, range(100), episodes=50 + 400))
    while actor.unsent_returns:
        server.take(1, actor.packed())
    assert list(server.returns)[-3:] == [97, 98, 99] and len(server.returns) == LAST and server["episodes"] == 450


def test_a_resumed_run_goes_on_counting(monkeypatch):
    before, after = RankCounts(), RankCounts()
    before.note(acted(30, range(150)[-LAST:], episodes=150, restarts=2))
    with monkeypatch.context() as patch:
        patch.setattr(signals, "received", [15])
        state = before.state()
    after.load(state)
    assert after["signal"] == 0, "a signal is of one leg"
    after.note(acted(4, [1000]))
    assert (after["steps"], after["episodes"], after["restarts"]) == (68, 151, 2)
    assert len(after.returns) == LAST and after.scores()["return_max"] == 1000 and after.scores()["return_min"] == 51
    assert np.isnan(RankCounts().packed()[-SLOTS:]).all()


def test_a_signal_is_told(monkeypatch):
    actor, server = RankCounts(), RankCounts()
    assert not server["signal"]
    monkeypatch.setattr(signals, "received", [15])
    message = actor.packed()
    monkeypatch.undo()
    server.take(1, message)
    assert server["signal"] == 1
