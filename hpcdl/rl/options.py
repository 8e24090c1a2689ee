"""Options of the reinforcement learning programs, in units of environment steps.

    --env-steps 100000 --train-every 4 --envs 2       25,000 steps of 4 environment steps, an update each
    --env-steps 100000 --train-every 1 --envs 8       12,500 steps of 8 environment steps, 8 updates each

A step of the run has `per_step` environment steps, and the updates that are due after them."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.errors import UsageError
from hpcdl.faults.inject import LONGEST
from hpcdl.formatting import dashed
from hpcdl.plugins import setting
from hpcdl.rl.roles import NOBODY, RLRoles, bundle_roles, separate_roles, sharded_roles
from hpcdl.runs.options import Options, not_negative, option, positive
from hpcdl.strategies.description import Strategy


@dataclass(frozen=True)
class RLOptions(Options):
    """Options shared by all reinforcement learning programs. Raises UsageError for invalid values."""

    unused = (
        *("data", "placement", "shuffle_window", "partition", "validation", "validation_by", "augment", "standardize"),
        *("data_servers", "epochs", "steps", "batch_per_rank", "accumulate", "patience", "class_weight", "scores"),
    )

    env: str = option(
        "CartPole-v1", "environment: a name that gymnasium knows, or your package.module:function, which makes one"
    )
    env_options: str = option("", "settings of the environment, separated by commas, as sutton_barto_reward=True")
    env_steps: int = option(60_000, "environment steps, of all copies together")
    envs: int = option(1, "copies of the environment that act side by side, on each rank that acts")
    pretend_env: float = option(0.0, "milliseconds of sleep that are added to each environment step")
    replay: int = option(100_000, "transitions that the replay memory holds")
    prioritized: bool = option(False, "draw transitions by priority: by their last temporal-difference errors")
    alpha: float = option(0.6, "with --prioritized: the exponent of priorities")
    beta: float = option(0.4, "with --prioritized: the exponent of importance weights, which rises to 1 by the end")
    n_step: int = option(3, "rewards that a return adds up, before it takes the value of the state reached")
    gamma: float = option(0.99, "discount of rewards per environment step")
    double: Literal["yes", "no"] = option(
        "yes", "double DQN: the target network values the action that the network itself likes best", bare="yes"
    )
    target_every: int = option(128, "updates between copies to the target network; 0: no target network")
    learning_starts: int = option(1000, "transitions in the replay memory before the first update")
    train_every: int = option(2, "environment steps for each update")
    epsilon: str = option(
        "linear:last=0.04,steps=8000",
        "probability of a random action: a number, or linear:first=1,last=0.04,steps=8000 by environment steps",
    )
    episodes: int = option(20, "episodes of an evaluation, of the greedy policy, with the same seeds each time")
    save_replay: bool = option(False, "save the replay memory in checkpoints, so that a resumed run continues with it")

    model: str = option("mlp:64,64,dueling", "mlp:128,128 (widths), mlp:128,128,dueling, or torch:nets:cnn")
    loss: str = option("huber", "loss of a temporal-difference error: huber:delta=1, or squared")
    batch_size: int | str = option(64, "transitions of an update")
    lr: float = option(2e-3, "learning rate (step size)")
    clip_norm: float = option(10.0, "largest allowed 2-norm of the mean gradient; 0: any")
    optimizer: str = option("adam", "sgd, momentum, nesterov, adam, adamw, adagrad, muon; as in adam:beta1=0.9")
    evaluate_every: int = option(10_000, "environment steps between evaluations")
    checkpoint_every: int = option(0, "environment steps between checkpoints; 0: only when the run ends")

    def __post_init__(self) -> None:
        from hpcdl.rl.agent import Epsilon
        from hpcdl.rl.q_network import delta_of

        self._refuse_unused(": this program learns in an environment (--env), not from data")
        super().__post_init__()
        if isinstance(self.batch_size, str):
            raise UsageError(f"--batch-size {self.batch_size}: give a number of transitions")
        positive(self, "env_steps", "envs", "replay", "n_step", "train_every", "episodes")
        not_negative(self, "pretend_env", "alpha", "target_every", "learning_starts")
        if self.pretend_env > LONGEST:
            raise UsageError(f"--pretend-env is {LONGEST:,.0f} at most, not {self.pretend_env}")
        for name in ("gamma", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"--{name} is at least 0 and at most 1, not {getattr(self, name)}")
        if not math.isfinite(self.alpha):
            raise UsageError(f"--alpha is a finite number, not {self.alpha}")
        self._refuse_small_memory("memory never holds", self.replay - self.envs * (self.n_step + 2))
        Epsilon.read(self.epsilon)
        delta_of(self.loss)
        _ = self.settings
        long, short = max(self.train_every, self.envs), min(self.train_every, self.envs)
        if long % short:
            raise UsageError(
                f"--train-every {self.train_every} and --envs {self.envs}: one must be a multiple of the other, "
                "because all copies step together"
            )

    def roles(self, size: int) -> RLRoles:
        """Return the roles of `size` ranks. Raises UsageError if the options do not fit this number or each other."""
        for name in ("evaluate_every", "checkpoint_every"):
            if getattr(self, name) % self.per_step:
                raise UsageError(
                    f"--{dashed(name)} {getattr(self, name)}: give a multiple of {self.per_step} environment "
                    "steps, the larger one of --train-every and --envs"
                )
        return RLRoles(NOBODY, range(1), range(1), range(1), self.envs)

    def check_apart(self, roles: RLRoles) -> None:
        """Raise UsageError if memories are too small to learn, or an evaluation or checkpoint is due within a step."""
        room = sum(roles.room(each, self.replay) - roles.streams(each) * (self.n_step + 2) for each in roles.memories)
        self._refuse_small_memory(f"memories of {len(roles.memories)} ranks never hold", max(0, room))
        shortest = self.environment_steps(len(roles.learners))
        for name in ("evaluate_every", "checkpoint_every"):
            if 0 < getattr(self, name) < shortest:
                raise UsageError(f"--{dashed(name)} must be at least {shortest} environment steps, those of one step")

    def _refuse_small_memory(self, holds: str, room: int) -> None:
        """Raise UsageError if `room`, the transitions that can be drawn from full memories, is too small."""
        for name in ("batch_size", "learning_starts"):
            if room < getattr(self, name):
                raise UsageError(
                    f"--{dashed(name)} {getattr(self, name):,}: the replay {holds} more than {room:,} transitions "
                    f"with --replay {self.replay:,}; give a larger --replay"
                )

    @property
    def per_step(self) -> int:
        """Environment steps of one learner in a step of the run."""
        return max(self.train_every, self.envs)

    def sharing(self, learners: int) -> int:
        """Return how many of the `learners` take part in a step of the run, each with `per_step` environment steps."""
        return 1

    def environment_steps(self, workers: int) -> int:
        return self.per_step * self.sharing(workers)

    @property
    def updates_per_step(self) -> int:
        """Updates of a learner per step of the run."""
        return max(1, self.envs // self.train_every)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the environment, by name."""
        option = f"--env-options {self.env_options}"
        return dict(setting(item, option) for item in filter(None, self.env_options.split(",")))

    @property
    def advice(self) -> str:
        return "a smaller --lr, a --clip-norm or scaled rewards may help"

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Return (transitions of an update, steps between evaluations, steps in all)."""
        batch, per_step = int(self.batch_size), self.environment_steps(ranks)
        updates = self.updates_per_step * self.sharing(ranks)
        steps = self.allowance.steps(math.ceil(self.env_steps / per_step), batch * updates)
        return batch, max(1, self.evaluate_every // per_step), steps


@dataclass(frozen=True)
class ApartOptions(RLOptions):
    """Options of Gorila and Ape-X, which plan one update of a learner per step."""

    updates_per_step = 1

    @property
    def per_step(self) -> int:
        return self.train_every


@dataclass(frozen=True)
class GorilaOptions(ApartOptions):
    servers: int = option(1, "ranks that hold the parameters, a slice each")
    actors: int = option(0, "with --learners: ranks that only act; 0: all remaining ranks")
    learners: int = option(0, "ranks that learn from the steps of separate actors; 0: each rank acts and learns")
    consistency: Literal["bsp", "async"] = option(
        "async", "bsp: learners push in rounds; async: no learner waits for another"
    )
    sync_every: int = option(16, "environment steps of an actor before it takes newer parameters")
    chunk: int = option(16, "with --learners: steps of each copy of the environment that an actor sends at once")
    max_staleness: int = option(0, "discard gradients of parameters more than this number of updates old; 0: keep all")
    outliers: float = option(5.0, "discard gradients with a loss this many deviations over the mean; 0: keep all")

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "actors", "learners", "max_staleness", "outliers")
        positive(self, "servers", "sync_every", "chunk")
        from hpcdl.optim import refuse_slices  # here: who only reads help needs no kernels

        refuse_slices(self.optimizer, "a parameter server holds a slice of the vector")
        if (self.actors or self.learners) and self.consistency == "bsp":
            raise UsageError("--consistency bsp is for ranks that act and learn: leave out --actors and --learners")

    def roles(self, size: int) -> RLRoles:
        if self.actors or self.learners:
            found = separate_roles(size, self.servers, self.learners, self.actors, self.envs)
        else:
            found = bundle_roles(size, self.servers, self.envs)
        self.check_apart(found)
        return found

    def sharing(self, learners: int) -> int:
        return learners if self.consistency == "bsp" else 1


@dataclass(frozen=True)
class ApexOptions(ApartOptions):
    learners: int = option(1, "ranks that learn, together by all-reduce")
    replays: int = option(1, "ranks that hold a part of the replay memory; 0: each learner holds one")
    actors: int = option(0, "ranks that act; 0: all remaining ranks")
    uniform: bool = option(False, "draw uniformly from the replay memory, not by priorities")
    epsilon: str = option("0.4", "probability of a random action of the boldest actor: a number, or linear:last=0.1")
    epsilon_alpha: float = option(7.0, "actor i of N acts randomly with probability epsilon^(1 + i / (N - 1) * this)")
    broadcast_every: int = option(8, "updates between broadcasts of the parameters to actors")
    chunk: int = option(16, "steps of each copy of the environment that an actor sends at once")
    free: bool = option(False, "learn as often as the learner can, whatever --train-every says")

    def __post_init__(self) -> None:
        object.__setattr__(self, "prioritized", not self.uniform)
        super().__post_init__()
        not_negative(self, "replays", "actors", "epsilon_alpha")
        if not math.isfinite(self.epsilon_alpha):
            raise UsageError(f"--epsilon-alpha is a finite number, not {self.epsilon_alpha}")
        positive(self, "learners", "broadcast_every", "chunk")

    def roles(self, size: int) -> RLRoles:
        found = sharded_roles(size, self.learners, self.replays, self.actors, self.envs)
        if int(self.batch_size) < self.learners:
            raise UsageError(f"--batch-size {self.batch_size}: {self.learners} learners share it; give a larger one")
        self.check_apart(found)
        return found


@dataclass(frozen=True)
class ActingStrategy(Strategy):
    """A reinforcement learning strategy, whose train(rank, run) gets an `AgentRank`. assist: name of the function
    assist(rank, run) of ranks that do not learn, which get a communicator of their own; "": all ranks call train."""

    assist: str = ""

    def __post_init__(self) -> None:
        """Require no forecast, unlike other strategies: the length of episodes is unknown."""


DQN = ActingStrategy("train-dqn", RLOptions, "hpcdl.rl.dqn:train", ranks=1)
GORILA = ActingStrategy("train-gorila", GorilaOptions, "hpcdl.rl.gorila:train")
APEX = ActingStrategy("train-apex", ApexOptions, "hpcdl.rl.apex:train", assist="hpcdl.rl.apex:assist")
