"""Roles: every rank has one, whatever the numbers; all is shared out whole; what is refused."""

import itertools

import pytest

from hpcdl.errors import UsageError
from hpcdl.rl.options import RLOptions
from hpcdl.rl.roles import RLRoles, bundle_roles, separate_roles, sharded_roles

SIZES = range(1, 12)


def found(make, *arguments):
    """The roles, or None where they are refused, in a line that says what to do."""
    try:
        return make(*arguments)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
        return None


def assert_whole(roles: RLRoles, size: int):
    """Each rank has a role; the ranges follow each other; actors, copies and room are shared out without a rest."""
    parts = [roles.servers, roles.learners, roles.memories, roles.actors]
    assert set(itertools.chain(*parts)) == set(range(size))
    ends = [0]
    for part in dict.fromkeys(filter(len, parts)):
        assert part.start in (ends[-1], ends[-2] if len(ends) > 1 else 0) and part.step == 1
        ends.append(part.stop)
    assert min(map(len, parts[1:])) >= 1
    of = [roles.actors_of(memory) for memory in roles.memories]
    assert sorted(itertools.chain(*of)) == list(roles.actors) and all(of)
    assert max(map(len, of)) - min(map(len, of)) <= 1
    assert all(roles.memory_of(actor) == memory for memory in roles.memories for actor in roles.actors_of(memory))
    copies = [roles.first_copy(actor) + i for actor in roles.actors for i in range(roles.envs)]
    assert copies == list(range(roles.envs * len(roles.actors)))
    assert sum(map(roles.streams, range(size))) == len(copies)
    room = [roles.room(memory, 1003) for memory in roles.memories]
    assert sum(room) == 1003 and max(room) - min(room) <= 1
    assert all(roles.first_copy(rank) == 0 for rank in roles.servers)


def test_one_rank_does_all():
    roles = RLOptions(envs=4).roles(1)
    assert_whole(roles, 1)
    assert not roles.acts_elsewhere


@pytest.mark.parametrize("size", SIZES)
def test_bundles(size):
    for servers, envs in itertools.product(range(1, 12), (1, 3)):
        roles = found(bundle_roles, size, servers, envs)
        assert (roles is None) == (servers >= size)
        if roles:
            assert_whole(roles, size)
            assert roles.learners == roles.memories == roles.actors and not roles.acts_elsewhere
            assert len(roles.servers) == servers and roles.envs == envs


@pytest.mark.parametrize("size", SIZES)
def test_actors_and_learners_apart(size):
    for servers, learners, actors in itertools.product(range(1, 5), range(6), range(8)):
        if not (learners or actors):
            continue
        roles = found(separate_roles, size, servers, learners, actors, 2)
        if learners and actors:
            fits = servers + learners + actors == size and actors >= learners
        elif learners:
            fits = size - servers - learners >= learners
        else:
            fits = 1 <= size - servers - actors <= actors
        assert (roles is not None) == fits, (servers, learners, actors)
        if roles:
            assert_whole(roles, size)
            assert roles.acts_elsewhere and roles.learners == roles.memories
            assert len(roles.servers) == servers
            assert learners in (0, len(roles.learners)) and actors in (0, len(roles.actors))


@pytest.mark.parametrize("size", SIZES)
def test_memories_of_their_own(size):
    for learners, replays, actors in itertools.product(range(1, 4), range(4), range(8)):
        roles = found(sharded_roles, size, learners, replays, actors, 2)
        rest = size - learners - replays
        fits = rest >= (replays or learners) and actors in (0, rest)
        assert (roles is not None) == fits, (learners, replays, actors)
        if roles:
            assert_whole(roles, size)
            assert not roles.servers and len(roles.learners) == learners
            assert (roles.memories == roles.learners) == (replays == 0)


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (bundle_roles, (1, 1, 1), "no ranks are left for bundles beside 1 parameter server: start 2 ranks"),
        (bundle_roles, (3, 4, 1), "4 parameter servers: start 5 ranks or more, not 3"),
        (separate_roles, (2, 1, 1, 0, 1), "no ranks are left for actors beside 1 parameter server, 1 learner: start"),
        (separate_roles, (4, 1, 1, 3, 1), "too few ranks are left for actors beside 1 parameter server, 1 learner:"),
        (separate_roles, (6, 1, 1, 3, 1), "--actors 3, --learners 1 and 1 parameter server are 5 ranks, but there"),
        (separate_roles, (4, 1, 2, 0, 1), "--learners 2: each needs an actor, and there are 1"),
        (separate_roles, (4, 1, 0, 1, 1), "--learners 2: each needs an actor"),
        (sharded_roles, (3, 1, 2, 0, 1), "no ranks are left for actors beside 1 learner, 2 replay ranks: start 4"),
        (sharded_roles, (4, 1, 2, 0, 1), "replay memory need as many actors, and there are 1: give fewer --replays"),
        (sharded_roles, (3, 2, 0, 0, 1), "give fewer --learners"),
        (sharded_roles, (6, 1, 1, 3, 1), "--actors 3, --learners 1 and --replays 1 are 5 ranks, but there are 6"),
    ],
)
def test_what_does_not_go_together(make, arguments, words):
    with pytest.raises(UsageError) as refused:
        make(*arguments)
    assert words in str(refused.value) and "\n" not in str(refused.value)
