"""Ape-X: many actors with different epsilons, prioritized replay, one learner or several by all-reduce.

    actor i, repeats                               replay memory, a shard               learner, repeats
        theta <- newest received        <---------------------------------------------    broadcast theta
        act, random with probability                                                      receive a requested sample
            eps^(1 + i/(N-1) alpha)                                         --------->    g <- its gradient
        priorities <- its own |TD errors|                                                 all-reduce g
        send the chunk          ---------->          add with the priorities              update theta
                                                     priorities <- |TD errors|  <-----    send |TD errors|

Compared with Gorila, parameters travel only now and then and gradients not at all; transitions travel instead, once to
a memory and to a learner each time they are sampled. With --replays 0 each learner holds a shard, and samples stay
local.

The learner makes an update per --train-every environment steps, and the faster side waits: actors for credits to send
(transition_stream.py), the learner for its sample (`learner_waited_seconds`). With `free` there is no such ratio, as in
the paper: the learner makes as many updates as it can, and the run ends after so many environment steps.

(Horgan et al., "Distributed prioritized experience replay", ICLR 2018)
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.failure import refuse_together
from hpcdl.comm.progress import activity
from hpcdl.comm.trace import Traffic
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.faults import inject
from hpcdl.kernels.device import CPU, Array
from hpcdl.models.model import unwrapped
from hpcdl.optim import Optimizer
from hpcdl.random import Random
from hpcdl.rl.agent import Epsilon, Learner
from hpcdl.rl.agent_state import ReturnScored, state_of, tracked_state
from hpcdl.rl.dqn import FIXED, fixed_summary, rate_summary
from hpcdl.rl.parameter_broadcast import Publisher, Receiver
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.remote_actor import act, make_actor, make_recorder
from hpcdl.rl.replay import Sample
from hpcdl.rl.replay_checkpoint import replay_path, restore_replay, write_replay
from hpcdl.rl.roles import RLRoles
from hpcdl.rl.shards import AHEAD, LocalShard, RemoteShard, SampleFormat, SampleRequest, ShardServer
from hpcdl.rl.tally import COUNTS, BytesByKind, RankCounts
from hpcdl.rl.task import EnvironmentTask
from hpcdl.rl.transition_stream import ChunkReceiver, ChunkSender
from hpcdl.runs.ownership import Whole
from hpcdl.runs.run import Run
from hpcdl.runs.stopwatch import Stopwatch

FAILED, REFUSED = 1, 2
OTHERS = -10  # OTHERS - rank: key of another learner's totals among those of single ranks


def train(
    comm: Communicator,
    model: Any,
    task: EnvironmentTask,
    optimizer: Optimizer,
    run: Run,
    environments: Any,
    replay: Any,
    roles: RLRoles,
) -> Array:
    """Train on the learners, which are `comm`; run.everyone are all ranks. Returns the parameters."""
    options, everyone, network = run.options, run.everyone, unwrapped(model)  # type: Any, Communicator, QNetwork
    by_kind = BytesByKind(everyone.traffic)
    tally = RankCounts(by_kind)
    with by_kind("parameters"):
        parameters = run.initial(network)
    target = parameters.copy() if options.target_every else None
    ownership = LearnerOwnership(model, parameters, optimizer, target, tally, int(options.batch_size))
    run.report(
        **fixed_summary(task, options), learners=comm.size, replays=len(roles.memories), actors=len(roles.actors)
    )
    try:
        run.begin("apex", ownership, task, FIXED)
        folder = run.folder.path
        broadcast_start(everyone, 0, folder, run.step)
    except (TrainingError, AgreedError) as error:
        broadcast_start(everyone, REFUSED if isinstance(error, AgreedError) else FAILED)
        raise
    restored, stopwatch = restore_replays(everyone, options, replay), run.stopwatch
    about = options, stopwatch, run.random, run.steps, partial(save_replay, folder, replay)
    learner = ApexLearner(
        comm, everyone, model, task, run, *about, optimizer, parameters, target, replay, roles, tally, restored
    )
    try:
        learner.learn()
    except (TrainingError, AgreedError):
        learner.close(FAILED)
        raise
    learner.close()
    ownership.gather_tallies()
    rates = rate_summary(run.progress, options.per_step, tally["restarts"])
    run.report(**ownership.progress(), **rates, learner_waited_seconds=stopwatch.data_seconds)
    run.report_own(bytes_by_kind=dict(by_kind.sent))
    return parameters


def broadcast_start(everyone: Communicator, status: int = 0, folder: Path | None = None, step: int = 0) -> tuple:
    """Broadcast rank 0's status, folder and step, with which all ranks begin; collective."""
    with activity.inside("begin", everyone):
        start: tuple = everyone.mpi.bcast((status, folder, step))
    return start


def ignored(rank: int, message: np.ndarray) -> None:
    """Ignore a report: only the first learner collects them."""


class ApexLearner:
    """One learner: requests samples, computes its share of each gradient, and sends parameters and priorities.

    steps: of the whole run. save(rank): writes this learner's own replay memory. restored: transitions from earlier
    legs, in all memories.
    """

    def __init__(
        self,
        comm: Communicator,
        everyone: Communicator,
        model: Any,
        task: EnvironmentTask,
        run: Run,
        options: Any,
        stopwatch: Stopwatch,
        random: Random,
        steps: int,
        save: Callable[[int], None],
        optimizer: Optimizer,
        parameters: Array,
        target: Array | None,
        replay: Any,
        roles: RLRoles,
        tally: RankCounts,
        restored: int = 0,
    ):
        self.comm, self.everyone, self.model, self.run = comm, everyone, model, run
        self.options, self.stopwatch, self.random, self.steps, self.save = options, stopwatch, random, steps, save
        self.optimizer, self.parameters, self.target, self.tally = optimizer, parameters, target, tally
        assert tally.by_kind is not None
        self.by_kind, self.network = tally.by_kind, unwrapped(model)
        self.learner = Learner(self.network, target, options.double == "yes")
        # The all-reduce also carries the steps that rank 0 knows of, on which all have to agree, and each learner's
        # largest importance weight, in a place of its own: the sum of all vectors holds each of them.
        size = self.network.size
        self.sums = comm.empty(size + 1 + comm.size, self.network.dtype)
        self.gradient, self.farthest, self.largest = self.sums[:size], self.sums[size : size + 1], self.sums[size + 1 :]
        cut = chunks(int(options.batch_size), comm.size)[comm.rank]
        self.rows, self.kept = cut.stop - cut.start, run.saved
        self.requested = self.received = 0  # samples of this leg
        self.starts = max(0, int(options.learning_starts) - restored)  # environment steps before the first update
        self.first = optimizer.step
        own_actors = [actor for i, actor in enumerate(roles.actors) if i % comm.size == comm.rank]
        self.publisher = Publisher(self.everyone, own_actors, self.by_kind)
        self.roles, self.everywhere = roles, sum(map(roles.streams, roles.memories))
        self.shards: dict[int, Any] = self._shards(replay, task)

    def _shards(self, replay: Any, task: EnvironmentTask) -> dict[int, Any]:
        """Return the shards by the rank of the memory; if the learners hold memories, only the own one."""
        rank, options = self.everyone.rank, self.options
        if rank in self.roles.memories:
            intake = ChunkReceiver(
                self.everyone, self.roles.actors_of(rank), self.roles.envs, replay, self.tally, self.by_kind
            )
            return {rank: LocalShard(intake, options.prioritized, self.random, partial(self.save, rank))}
        form = SampleFormat(self.network.shape, task.environment["dtype"])
        on_report = self.tally.take if self.comm.rank == 0 else ignored
        return {
            memory: RemoteShard(self.everyone, memory, form, self.by_kind, on_report) for memory in self.roles.memories
        }

    def learn(self) -> None:
        """Learn until the run is over."""
        run = self.run
        self.publisher.publish(self.parameters, self.network.device)
        losses, total = 0.0, 0
        for first in run.rounds():
            samples = self._samples(first)
            if samples:
                losses, total = losses + self._update(samples, first), total + int(self.options.batch_size)
            for _ in range(self._steps(bool(samples), first)):
                run.record(losses, total)
                losses, total = 0.0, 0
                run.boundary(signalled=bool(self.tally["signal"]))
                self._keep()
                if run.over:
                    break
            self.publisher.catch_up(self.parameters, self.network.device)

    def _keep(self) -> None:
        """Write the memories with a new checkpoint: a learner its own, the first learner asks remote ones."""
        saved = self.run.saved
        if not self.options.save_replay or saved == self.kept:
            return
        self.kept = saved
        for rank, shard in self.shards.items():
            if self.comm.rank == 0 or rank == self.everyone.rank:
                shard.keep()

    # -- samples -----------------------------------------------------------------------------------------------------

    def _samples(self, step: int) -> list[tuple[Any, Sample]]:
        """Return this learner's share of the batch after `step`, one part per shard; [] if it is too early to learn."""
        while self.requested <= self.received + AHEAD:
            self._request(self.requested, step)
            self.requested += 1
        self.received += 1
        shards = self.shards.values()
        if not all(shard.ready for shard in shards):
            with self.stopwatch.fetching():
                self.everyone.wait_until(lambda: all(shard.ready for shard in shards), patient=True)
        samples = [(shard, shard.take()) for shard in shards]
        return [(shard, sample) for shard, sample in samples if sample is not None]

    def _request(self, number: int, step: int) -> None:
        """After `step` of the run, request sample `number` of this leg from the shards."""
        options, many = self.options, len(self.shards)
        steps, starts = (number + 1) * options.per_step, self.starts
        rows = self.rows if steps >= starts else 0
        beyond = min(steps, max(starts, options.per_step)) if options.free else steps
        beta = options.beta + (1 - options.beta) * min(1.0, (step + number - self.received) / self.steps)
        for i, (rank, shard) in enumerate(self.shards.items()):
            streams = self.roles.streams(rank)
            share = -(-beyond * streams // self.everywhere)
            part = chunks(rows, many)[(i + number) % many]
            key = ((self.first + number) * self.comm.size + self.comm.rank) * many + i
            allowed = math.inf if options.free else share + options.chunk * streams
            shard.ask(SampleRequest(part.stop - part.start, beta, key, share, allowed))

    def _update(self, samples: list[tuple[Any, Sample]], step: int) -> float:
        """Make an update from all learners' samples; return this learner's sum of losses."""
        options, optimizer = self.options, self.optimizer
        parts = [sample for _, sample in samples]
        sample = parts[0] if len(parts) == 1 else Sample(*map(np.concatenate, zip(*parts, strict=True)))
        self.sums[:] = 0
        loss, errors = self.learner.gradient(
            self.parameters, sample, self.gradient, self.model, optimizer.step, whole=False
        )
        self.largest[self.comm.rank] = sample.weights.max(initial=0)
        if self.comm.rank == 0:
            self.farthest[:] = self.reached
        with self.by_kind("gradients"):
            self.comm.all_reduce(self.sums)
        rate = optimizer.schedule(step)
        largest = float(self.largest.max())  # over the whole batch
        optimizer.update(self.parameters, self.gradient, 1 / (int(options.batch_size) * largest), rate=rate)
        if options.prioritized:
            ends = np.cumsum([len(part.actions) for part in parts])[:-1]
            for (shard, part), part_errors in zip(samples, np.split(errors, ends), strict=True):
                shard.update(part, part_errors)
        if self.target is not None and optimizer.step % options.target_every == 0:
            self.target[:] = self.parameters
        if optimizer.step % options.broadcast_every == 0:
            self.publisher.publish(self.parameters, self.network.device)
        return loss / largest

    @property
    def reached(self) -> int:
        """Steps of the run that correspond to the environment steps this rank knows of."""
        return int(self.tally["steps"]) // int(self.options.per_step)

    def _steps(self, updated: bool, step: int) -> int:
        """Return the number of steps by which the run, which is at `step`, advances now."""
        if not (self.options.free and updated):
            return 1
        return max(0, min(int(self.farthest[0]), self.steps) - step)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, status: int = 0) -> None:
        """End the memories and actors, too; status: 0, or why the run cannot go on."""
        for shard in self.shards.values():
            shard.close(status)
        self.publisher.close()


class LearnerOwnership(ReturnScored, Whole):
    """Ownership of parameters and target network that all learners hold; the first one has the counts of all ranks."""

    def __init__(
        self, model: Any, parameters: Array, optimizer: Optimizer, target: Array | None, tally: RankCounts, batch: int
    ):
        super().__init__(model, parameters, optimizer)
        self.target, self.tally, self.of_actors, self.batch = target, tally, dict[str, np.ndarray](), batch

    def tracked(self) -> dict[str, Tracked]:
        state = super().tracked() | tracked_state("actor", self.tally, self.of_actors)
        return state | ({"target": Same(self.target)} if self.target is not None else {})

    def resumed(self, everyone: Communicator) -> None:
        super().resumed(everyone)
        if self.of_actors:
            self.tally.load(state_of("actor", self.of_actors))

    def sent(self, traffic: Traffic) -> tuple[float, float]:
        """Return bytes and messages sent by this learner; on the first one, also those of memories and actors."""
        bytes, messages = super().sent(traffic)
        others = [totals[len(COUNTS) :].sum() for rank, totals in self.tally.by_rank.items() if rank >= 0]
        return bytes + float(sum(others)), math.nan if others else messages

    def gather_tallies(self) -> None:
        """Collect the counts of all learners on the first one; collective."""
        if self.peers.size == 1:
            return
        with activity.inside("score", self.peers):
            messages = self.peers.mpi.gather(self.tally.packed())
        for rank, message in enumerate(messages or ()):
            if rank > 0:
                self.tally.take(OTHERS - rank, message)

    def scores(self, data: Any) -> dict:
        self.gather_tallies()
        own_scores = None
        if self.peers.rank == 0:
            own_scores = data.scores(self.network, self.parameters) | self.tally.scores() | self.progress()
        with activity.inside("score", self.peers):
            scores: dict = self.peers.mpi.bcast(own_scores)
        return scores

    def progress(self) -> dict:
        """Return environment steps, updates, replay ratio and bytes by kind."""
        steps = max(1.0, self.tally["steps"])
        return {
            "environment_steps": int(self.tally["steps"]),
            "updates": self.optimizer.step,
            "replay_ratio": self.optimizer.step * self.batch / steps,
        } | self.tally.bytes_by_kind()


# -- memories and actors ----------------------------------------------------------------------------------------------


def assist(comm: Communicator, network: QNetwork, run: Run, environments: Any, replay: Any, roles: RLRoles) -> None:
    """Run a memory or an actor; `comm` are all ranks. Raises the error of the learners, who report it."""
    status, folder, step = broadcast_start(comm)
    if not status:
        options, random, stopwatch = run.options, run.random, run.stopwatch
        tally = RankCounts(BytesByKind(comm.traffic))
        restore_replays(comm, options, replay)
        arm = partial(inject.arm, run)
        if comm.rank in roles.memories:
            status = run_memory(comm, random, stopwatch, replay, roles, tally, folder, arm)
        else:
            status = run_actor(comm, network, options, random, stopwatch, environments, roles, tally, step, arm)
        run.report_own(bytes_by_kind=dict(tally.by_kind.sent) if tally.by_kind else None)
    if status:
        error = AgreedError("") if status == REFUSED else TrainingError("")
        error.speaker = None
        raise error


def restore_replays(everyone: Communicator, options: Any, replay: Any) -> int:
    """Restore the saved memories; return the number of transitions in all of them; collective."""
    with refuse_together(everyone.mpi):
        restore_replay(options, replay, everyone.rank)
    with activity.inside("begin", everyone):
        total: int = everyone.mpi.allreduce(replay.size if replay is not None else 0)
    return total


def save_replay(folder: Path | None, replay: Any, rank: int) -> None:
    """Write a memory beside the checkpoint."""
    if folder is not None:
        write_replay(replay, replay_path(folder, rank))


def run_memory(
    comm: Communicator,
    random: Random,
    stopwatch: Stopwatch,
    replay: Any,
    roles: RLRoles,
    tally: RankCounts,
    folder: Path | None,
    arm: Callable[[], None],
) -> int:
    """Run a replay memory; return the status with which the learners ended. arm(): lets faults strike from now on."""
    assert tally.by_kind is not None
    intake = ChunkReceiver(comm, roles.actors_of(comm.rank), roles.envs, replay, tally, tally.by_kind)
    memory = ShardServer(comm, intake, list(roles.learners), random, partial(save_replay, folder, replay, comm.rank))
    arm()
    with stopwatch.step("serve"):
        memory.serve()
    return memory.status


def run_actor(
    comm: Communicator,
    network: QNetwork,
    options: Any,
    random: Random,
    stopwatch: Stopwatch,
    environments: Any,
    roles: RLRoles,
    tally: RankCounts,
    step: int,
    arm: Callable[[], None],
) -> int:
    """Run an actor; return the status with which the learners ended. arm(): lets faults strike from now on."""
    assert tally.by_kind is not None
    number, copies = roles.actors.index(comm.rank), len(roles.actors) * roles.envs
    learner = roles.learners[number % len(roles.learners)]
    receiver = Receiver(comm, learner, CPU.empty(network.size, network.dtype), tally.by_kind)
    recorder = make_recorder(options, environments)
    earlier_steps = step * options.per_step
    actor = make_actor(network, environments, random, recorder.add, roles.first_copy(comm.rank), earlier_steps)
    feeder = ChunkSender(comm, roles.memory_of(comm.rank), tally, tally.by_kind)
    base = Epsilon.read(options.epsilon)
    exponents = epsilon_exponents(roles.first_copy(comm.rank) + np.arange(roles.envs), copies, options.epsilon_alpha)
    receiver.first()
    arm()
    act(
        stopwatch,
        actor,
        recorder,
        feeder,
        tally,
        receiver.newest,
        lambda: base(earlier_steps + actor.steps * copies) ** exponents,
        options.prioritized,
    )
    receiver.close()
    return FAILED if feeder.failed else 0


def epsilon_exponents(number: np.ndarray, copies: int, alpha: float) -> np.ndarray:
    """Return 1 + i / (N - 1) alpha for copies i: the exponents of epsilon."""
    return 1 + number / max(1, copies - 1) * alpha
