"""Which ranks of a run of reinforcement learning do what, and what of the environments and of the replay is whose.

    program     rank 0 ...
    dqn         learner, which also acts and remembers
    gorila      parameter servers | bundles: each acts, remembers and learns
                parameter servers | learners, which remember | actors           with --actors, --learners
    apex        learners | replay memories | actors                             --replays 0: the learners remember

The copies of an environment are numbered over all ranks that act, in their order. Actor i sends what it sees to memory
i mod M, where the copies of its actors are streams, one after the other; the ranks that remember share --replay evenly.
"""

from typing import NamedTuple

from hpcdl.chunks import chunks
from hpcdl.errors import UsageError
from hpcdl.formatting import counted

NOBODY = range(0)


class RLRoles(NamedTuple):
    """The ranks of each role, as ranges; a rank may be in several. envs: copies on each rank that acts."""

    servers: range
    learners: range
    memories: range
    actors: range
    envs: int = 1

    @property
    def acts_elsewhere(self) -> bool:
        """Whether what is seen travels to another rank's memory."""
        return self.actors != self.memories

    def first_copy(self, rank: int) -> int:
        """The number of the first copy of the environment of a rank that acts; 0 where none does."""
        return self.actors.index(rank) * self.envs if rank in self.actors else 0

    def memory_of(self, actor: int) -> int:
        """The rank that remembers what this one sees."""
        return self.memories[self.actors.index(actor) % len(self.memories)]

    def actors_of(self, memory: int) -> list[int]:
        """The ranks whose steps this one remembers."""
        return [actor for actor in self.actors if self.memory_of(actor) == memory]

    def streams(self, memory: int) -> int:
        """How many copies of the environment this rank remembers."""
        return self.envs * len(self.actors_of(memory)) if memory in self.memories else 0

    def room(self, memory: int, whole: int) -> int:
        """The transitions that this rank holds of so many in all."""
        cut = chunks(whole, len(self.memories))[self.memories.index(memory)]
        return cut.stop - cut.start


def alone(envs: int) -> RLRoles:
    """One rank does it all."""
    return RLRoles(NOBODY, range(1), range(1), range(1), envs)


def bundles(size: int, servers: int, envs: int) -> RLRoles:
    """Parameter servers, and ranks that do all else. Raises UsageError where none is left."""
    check("bundle", size, {"parameter server": servers}, 1)
    rest = range(servers, size)
    return RLRoles(range(servers), rest, rest, rest, envs)


def apart(size: int, servers: int, learners: int, actors: int, envs: int) -> RLRoles:
    """Parameter servers, learners, which remember, and actors; a count of 0 is what is left over."""
    if not learners:
        learners = max(1, size - servers - actors)
    check("actor", size, {"parameter server": servers, "learner": learners}, actors or 1)
    learning, acting = range(servers, servers + learners), range(servers + learners, size)
    if actors not in (0, len(acting)):
        raise UsageError(
            f"--actors {actors}, --learners {learners} and {counted(servers, 'parameter server')} are "
            f"{servers + learners + actors} ranks, not {size}"
        )
    if len(acting) < learners:
        raise UsageError(f"--learners {learners}: each needs an actor, and there are {len(acting)}")
    return RLRoles(range(servers), learning, learning, acting, envs)


def sharded(size: int, learners: int, replays: int, actors: int, envs: int) -> RLRoles:
    """Learners, replay memories (0: the learners', one each) and actors (0: the ranks that are left over)."""
    check("actor", size, {"learner": learners, "replay": replays}, actors or 1)
    acting = range(learners + replays, size)
    if actors not in (0, len(acting)):
        raise UsageError(
            f"--actors {actors}, --learners {learners} and --replays {replays} are {learners + replays + actors} "
            f"ranks, not {size}"
        )
    memories = range(learners, learners + replays) if replays else range(learners)
    if len(acting) < len(memories):
        raise UsageError(
            f"{len(memories)} ranks that remember need as many actors, and there are {len(acting)}: "
            f"take fewer --{'replays' if replays else 'learners'}"
        )
    return RLRoles(NOBODY, range(learners), memories, acting, envs)


def check(what: str, size: int, others: dict[str, int], least: int) -> None:
    """Raise UsageError where fewer than `least` of so many ranks are left beside the others."""
    needed = sum(others.values())
    if size < needed + least:
        named = ", ".join(counted(count, each) for each, count in others.items() if count)
        left = "no" if size <= needed else "too few"
        raise UsageError(
            f"{left} {what}s are left over: {named} of {counted(size, 'rank')}; start at least {needed + least} ranks"
        )
