"""Learn to act, actors, replay and learners on ranks of their own: mpiexec -n 5 python scripts/train_apex.py

The first --learners ranks learn, the next --replays remember, and the others act. --replays 0 has the learners
remember. Whoever is too fast waits, so that there are --train-every environment steps to an update; --free has the
learner make as many updates as it can.
"""

from hpcdl.rl.training import Learning  # first: it takes over the signals before MPI starts

# isort: split
import math
from dataclasses import dataclass

from hpcdl.errors import UsageError
from hpcdl.rl.apex import assist, train
from hpcdl.rl.options import RLOptions
from hpcdl.rl.roles import RLRoles, sharded_roles
from hpcdl.runs.help import dashed
from hpcdl.runs.options import option


@dataclass
class ApexOptions(RLOptions):
    updates_per_step = 1

    learners: int = option(1, "ranks that learn, together by all-reduce")
    replays: int = option(1, "ranks that hold a part of the replay memory; 0: each learner holds one")
    actors: int = option(0, "ranks that act; 0: those that are left over")
    uniform: bool = option(False, "draw uniformly from the replay memory, not by priorities")
    epsilon: str = option("0.4", "probability of a random action of the boldest actor: a number, or linear:first=...")
    epsilon_alpha: float = option(7.0, "of actor i of N the probability is epsilon^(1 + i / (N - 1) * this)")
    broadcast_every: int = option(8, "updates between broadcasts of the parameters to actors")
    chunk: int = option(16, "steps of each copy of the environment that an actor sends at once")
    free: bool = option(False, "learn as often as the learner can, whatever --train-every says")

    def __post_init__(self) -> None:
        self.prioritized = not self.uniform
        super().__post_init__()
        for name in ("replays", "actors", "epsilon_alpha"):
            self._refuse_negative(name)
        if not math.isfinite(self.epsilon_alpha):
            raise UsageError(f"--epsilon-alpha is a number, not {self.epsilon_alpha}")
        for name in ("learners", "broadcast_every", "chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{dashed(name)} must be greater than 0, not {getattr(self, name)}")

    def roles(self, size: int) -> RLRoles:
        found = sharded_roles(size, self.learners, self.replays, self.actors, self.envs)
        if self.batch_size < self.learners:
            raise UsageError(f"--batch-size {self.batch_size}: {self.learners} learners share it; give a larger one")
        self.check_apart(found)
        return found

    @property
    def per_step(self) -> int:  # type: ignore[override]
        """Environment steps of a step of the run, which is an update."""
        return self.train_every


TRAINING = Learning("train-apex", ApexOptions, __doc__, train, assist=assist)
main = TRAINING.main


if __name__ == "__main__":
    main()
