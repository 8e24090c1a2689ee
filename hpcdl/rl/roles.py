"""Roles of the ranks in reinforcement learning, and their shares of environments and replay memory.

    program     rank 0 ...
    dqn         learner, which also acts and remembers
    gorila      parameter servers | bundles: each acts, remembers and learns
                parameter servers | learners, which remember | actors           with --actors, --learners
    apex        learners | replay memories | actors                             --replays 0: the learners remember

Copies of an environment are numbered over all ranks that act, in rank order. Actor i sends its steps to memory i mod M,
where the copies of its actors are consecutive streams; the memories share --replay evenly."""

from typing import NamedTuple

from hpcdl.chunks import chunks
from hpcdl.errors import UsageError
from hpcdl.formatting import counted

NOBODY = range(0)


class RLRoles(NamedTuple):
    """The ranks of each role, as ranges; a rank may have several roles. envs: copies on each rank that acts."""

    servers: range
    learners: range
    memories: range
    actors: range
    envs: int = 1

    @property
    def acts_elsewhere(self) -> bool:
        """True if transitions travel to another rank's memory."""
        return self.actors != self.memories

    def first_copy(self, rank: int) -> int:
        """Return the number of the first environment copy of a rank; 0 if it does not act."""
        return self.actors.index(rank) * self.envs if rank in self.actors else 0

    def memory_of(self, actor: int) -> int:
        return self.memories[self.actors.index(actor) % len(self.memories)]

    def actors_of(self, memory: int) -> list[int]:
        return [actor for actor in self.actors if self.memory_of(actor) == memory]

    def streams(self, memory: int) -> int:
        """Return the number of environment copies whose steps go to this memory."""
        return self.envs * len(self.actors_of(memory)) if memory in self.memories else 0

    def room(self, memory: int, whole: int) -> int:
        """Return how many transitions this memory has room for, if all memories together have room for `whole`."""
        cut = chunks(whole, len(self.memories))[self.memories.index(memory)]
        return cut.stop - cut.start


def bundle_roles(size: int, servers: int, envs: int) -> RLRoles:
    """Return the roles of servers and bundles. Raises UsageError if no rank is left for a bundle."""
    check("bundle", size, {"parameter server": servers}, 1)
    rest = range(servers, size)
    return RLRoles(range(servers), rest, rest, rest, envs)


def separate_roles(size: int, servers: int, learners: int, actors: int, envs: int) -> RLRoles:
    """Return the roles of servers, learners with memories, and actors; a count of 0 means the remaining ranks."""
    if not learners:
        learners = max(1, size - servers - actors)
    check("actor", size, {"parameter server": servers, "learner": learners}, actors or 1)
    learning, acting = range(servers, servers + learners), range(servers + learners, size)
    if actors not in (0, len(acting)):
        raise UsageError(
            f"--actors {actors}, --learners {learners} and {counted(servers, 'parameter server')} are "
            f"{servers + learners + actors} ranks, but there are {size}"
        )
    if len(acting) < learners:
        raise UsageError(f"--learners {learners}: each needs an actor, and there are {len(acting)}")
    return RLRoles(range(servers), learning, learning, acting, envs)


def sharded_roles(size: int, learners: int, replays: int, actors: int, envs: int) -> RLRoles:
    """Return the roles of learners, memories (0: on the learners) and actors (0: the remaining ranks)."""
    check("actor", size, {"learner": learners, "replay rank": replays}, actors or 1)
    acting = range(learners + replays, size)
    if actors not in (0, len(acting)):
        raise UsageError(
            f"--actors {actors}, --learners {learners} and --replays {replays} are {learners + replays + actors} "
            f"ranks, but there are {size}"
        )
    memories = range(learners, learners + replays) if replays else range(learners)
    if len(acting) < len(memories):
        raise UsageError(
            f"{len(memories)} ranks with a replay memory need as many actors, and there are {len(acting)}: "
            f"give fewer --{'replays' if replays else 'learners'}"
        )
    return RLRoles(NOBODY, range(learners), memories, acting, envs)


def check(what: str, size: int, others: dict[str, int], least: int) -> None:
    """Raise UsageError if fewer than `least` of `size` ranks remain beside `others`, numbers of ranks by role."""
    needed = sum(others.values())
    if size < needed + least:
        named = ", ".join(counted(count, each) for each, count in others.items() if count)
        left = "no" if size <= needed else "too few"
        raise UsageError(
            f"{left} ranks are left for {what}s beside {named}: start {needed + least} ranks or more, not {size}"
        )
