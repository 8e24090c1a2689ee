"""DQN on one rank: act, remember, learn from a sample of the replay memory.

    each step     per_step environment steps, with epsilon-greedy actions     -> replay
                  updates of the network by the gradient of a sample from the replay memory,
                  after each target_every updates: target <- network

With double DQN, n-step returns, a dueling network and prioritized replay, it has most parts of "Rainbow" (Hessel et
al., AAAI 2018). A run can be repeated to the bit. (Mnih et al., "Human-level control through deep reinforcement
learning", Nature 2015)"""

from hpcdl.checkpoint.state import Same
from hpcdl.kernels.device import Array
from hpcdl.rl.agent import Epsilon, Learner
from hpcdl.rl.agent_rank import AgentRank
from hpcdl.rl.agent_state import ReturnScored, begin_acting, track_state
from hpcdl.runs.ownership import Whole
from hpcdl.runs.run import Run


def train(rank: AgentRank, run: Run) -> Array:
    """Act, remember and learn on this rank; return the parameters."""
    options, network, optimizer, replay = rank.options, rank.network, rank.optimizer, rank.replay
    epsilon = Epsilon.read(options.epsilon)
    parameters = run.initial(network)
    gradient = rank.comm.empty(network.size, network.dtype)
    target = parameters.copy() if options.target_every else None
    actor = rank.actor(replay.add)
    learner = Learner(network, target, options.double == "yes")

    def progress() -> dict:
        place = run.progress
        steps = place.step * options.per_step
        held = {"replay_size": int(replay.size), "replay_ratio": place.examples / max(1, steps)}
        return {"environment_steps": steps, "updates": place.updates} | held

    saved = track_state(run, "actor", actor), track_state(run, "replay", replay) if options.save_replay else {}
    if target is not None:
        run.track("target", Same(target))
    held = Whole(rank.model, parameters, optimizer)
    rank.begin(run, "dqn", held, ReturnScored(held, lambda: actor.scores() | progress()))
    begin_acting(actor, replay, *saved)
    enough = max(options.learning_starts, options.batch_size)
    planned = run.plan(rank.task)[2]
    for step in run.rounds():
        with rank.stopwatch.fetching():
            for _ in range(options.per_step // options.envs):
                actor.act(parameters, epsilon(actor.steps * options.envs))
        losses, total = 0.0, 0
        for _ in range(options.updates_per_step if replay.holds(enough) else 0):
            beta = options.beta + (1 - options.beta) * step / planned
            sample = replay.sample(options.batch_size, beta, rank.random("sample", optimizer.step))
            gradient[:] = 0
            loss, errors = learner.gradient(parameters, sample, gradient, rank.model, optimizer.step)
            optimizer.update(parameters, gradient, 1 / options.batch_size, rate=optimizer.schedule(step))
            if options.prioritized:
                replay.update(sample.index, sample.serial, errors)
            if target is not None and optimizer.step % options.target_every == 0:
                target[:] = parameters
            losses, total = losses + loss, total + options.batch_size
        run.record(losses, total)
        run.boundary()
    rank.report_end(run, progress(), rank.environments.restarts)
    return parameters
