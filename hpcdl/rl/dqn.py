"""DQN on one rank: act, remember, learn from a sample of the replay memory.

    each step     per_step environment steps, with epsilon-greedy actions     -> replay
                  updates of the network by the gradient of a sample from the replay memory,
                  every target_every of them: target <- network

With double DQN, n-step returns, a dueling network and prioritized replay these are most of what "Rainbow" combines
(Hessel et al., AAAI 2018). (Mnih et al., "Human-level control through deep reinforcement learning", Nature 2015.)

Random numbers are keyed by (seed, purpose, number), so that a run is the same to the bit each time.
"""

from typing import Any

from hpcdl.comm import Communicator
from hpcdl.kernels.device import Array
from hpcdl.models.model import unwrapped
from hpcdl.optim import Optimizer
from hpcdl.rl.agent import Actor, Epsilon, Learner
from hpcdl.rl.agent_state import AgentOwnership
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.task import EnvironmentTask
from hpcdl.runs.progress import Progress
from hpcdl.runs.run import Run

FIXED = ("env", "env_options", "envs", "environment_steps_per_step", "gamma", "n_step", "replay")


def train(
    comm: Communicator,
    model: Any,
    task: EnvironmentTask,
    optimizer: Optimizer,
    run: Run,
    environments: Any,
    replay: Any,
) -> Array:
    """Learn in `environments`, whose transitions go into `replay`; returns the parameters.

    model: a `QNetwork`, or a straggler's wrapper. run.options: `RLOptions`.
    """
    options: Any = run.options
    random = run.random
    network: QNetwork = unwrapped(model)
    epsilon = Epsilon.read(options.epsilon)
    parameters = run.initial(network)
    gradient = comm.empty(network.size, network.dtype)
    target = parameters.copy() if options.target_every else None
    actor = Actor(network, environments, random, replay.add)
    learner = Learner(network, target, options.double == "yes")

    def progress() -> dict:
        return progress_summary(run.progress, options.per_step, replay)

    ownership = AgentOwnership(
        model, parameters, optimizer, target, actor, replay if options.save_replay else None, progress
    )
    run.report(**fixed_summary(task, options))
    run.begin("dqn", ownership, task, FIXED)
    ownership.go_on()
    enough = max(options.learning_starts, options.batch_size)
    planned = run.plan(task)[2]

    def ready() -> bool:
        """True if the memory holds enough transitions to learn from, or is full."""
        return replay.size >= enough or replay.written >= options.replay

    for step in run.rounds():
        with run.stopwatch.fetching():
            for _ in range(options.per_step // options.envs):
                actor.act(parameters, epsilon(actor.steps * options.envs))
        losses, total = 0.0, 0
        for _ in range(options.updates_per_step if ready() else 0):
            beta = options.beta + (1 - options.beta) * step / planned
            sample = replay.sample(options.batch_size, beta, random("sample", optimizer.step))
            gradient[:] = 0
            loss, errors = learner.gradient(parameters, sample, gradient, model, optimizer.step)
            optimizer.update(parameters, gradient, 1 / options.batch_size, rate=optimizer.schedule(step))
            if options.prioritized:
                replay.update(sample.index, sample.serial, errors)
            if target is not None and optimizer.step % options.target_every == 0:
                target[:] = parameters
            losses, total = losses + loss, total + options.batch_size
        run.record(losses, total)
        run.boundary()
    run.report(**progress(), **rate_summary(run.progress, options.per_step, environments.restarts))
    return parameters


def fixed_summary(task: EnvironmentTask, options: Any) -> dict:
    """Return the entries of a run's summary that are known at its start."""
    return {
        "env": task.name,
        "env_options": task.environment["options"],
        "envs": options.envs,
        "environment_steps_per_step": options.per_step,
        "gamma": options.gamma,
        "n_step": options.n_step,
        "replay": options.replay,
    }


def progress_summary(progress: Progress, per_step: int, replay: Any) -> dict:
    """Return environment steps, updates, transitions in memory, and updates per transition."""
    steps = progress.step * per_step
    return {
        "environment_steps": steps,
        "updates": progress.updates,
        "replay_size": int(replay.size),
        "replay_ratio": progress.examples / max(1, steps),
    }


def rate_summary(progress: Progress, per_step: int, restarts: float) -> dict:
    """Return rates over all legs, and the environment restarts of this one."""
    seconds = max(1e-9, progress.seconds)
    return {
        "environment_steps_per_second": progress.step * per_step / seconds,
        "updates_per_second": progress.updates / seconds,
        "environment_restarts": int(restarts),
    }
