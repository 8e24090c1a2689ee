"""Ape-X: many actors with different epsilons, prioritized replay, one learner or several by all-reduce.

    actor i, repeats                               replay memory, a shard               learner, repeats
        theta <- newest received        <---------------------------------------------    broadcast theta
        act, random with probability                                                      receive a requested sample
            eps^(1 + i/(N-1) alpha)                                         --------->    g <- its gradient
        priorities <- its own |TD errors|                                                 all-reduce g
        send the chunk          ---------->          add with the priorities              update theta
                                                     priorities <- |TD errors|  <-----    send |TD errors|

Unlike in Gorila, parameters travel seldom, gradients only between learners, and transitions once to a memory, then to a
learner each time they are sampled. With --replays 0 each learner holds a shard, and samples stay local.

The learner makes an update per --train-every environment steps. The faster side waits: actors for credits
(transition_stream.py), the learner for its sample (`learner_waited_seconds`). With --free, as in the paper, the learner
updates as often as it can, and the run ends after --env-steps. (Horgan et al., "Distributed prioritized experience
replay", ICLR 2018)"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same
from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.failure import refuse_together
from hpcdl.comm.trace import Traffic
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.faults import inject
from hpcdl.kernels.device import CPU, Array
from hpcdl.rl.agent import Learner
from hpcdl.rl.agent_rank import AgentRank
from hpcdl.rl.agent_state import ReturnScored, track_state
from hpcdl.rl.parameter_broadcast import Publisher, Receiver
from hpcdl.rl.remote_actor import act, chunk_receiver, chunk_sender
from hpcdl.rl.replay import Sample
from hpcdl.rl.replay_checkpoint import restore_replay, write_replay
from hpcdl.rl.shards import AHEAD, LocalShard, RemoteShard, SampleRequest, ShardServer, sample_kinds
from hpcdl.rl.tally import COUNTS
from hpcdl.runs.ownership import Whole
from hpcdl.runs.run import Run

FAILED, REFUSED = 1, 2
OTHERS = -10  # OTHERS - rank: key of another learner's totals in RankCounts.by_rank


def train(rank: AgentRank, run: Run) -> Array:
    """Train on the learners, which are `rank.comm`; return the parameters."""
    options, everyone, network, tally, roles = rank.options, rank.everyone, rank.network, rank.tally, rank.roles
    with tally.by_kind("parameters"):
        parameters = run.initial(network)
    target = parameters.copy() if options.target_every else None
    ownership = LearnerOwnership(rank, parameters)
    counts = track_state(run, "actor", tally)
    if target is not None:
        run.track("target", Same(target), counted=False)
    about = {"learners": rank.comm.size, "replays": len(roles.memories), "actors": len(roles.actors)}
    try:
        rank.begin(run, "apex", ownership, LearnerScored(ownership), **about)
        tally.load(counts)
        broadcast_start(everyone, 0, run.folder.path, run.step)
    except (TrainingError, AgreedError) as error:
        broadcast_start(everyone, REFUSED if isinstance(error, AgreedError) else FAILED)
        raise
    learner = ApexLearner(rank, run, parameters, target, restore_replays(rank))
    try:
        learner.learn()
    except (TrainingError, AgreedError):
        learner.close(FAILED)
        raise
    learner.close()
    ownership.gather_tallies()
    progress = ownership.progress() | {"learner_waited_seconds": rank.stopwatch.data_seconds}
    rank.report_end(run, progress, tally["restarts"])
    run.report_own(bytes_by_kind=dict(tally.by_kind.sent))
    return parameters


def broadcast_start(everyone: Communicator, status: int = 0, folder: Path | None = None, step: int = 0) -> tuple:
    """Return (status, folder, step of the run) as rank 0 gives them; collective. status: 0, FAILED or REFUSED."""
    with everyone.inside("begin"):
        start: tuple = everyone.mpi.bcast((status, folder, step))
    return start


class ApexLearner:
    """One learner: requests samples, computes its share of each gradient, sends parameters and priorities.
    target: the target network's parameters; None: no such network. restored: transitions restored in all memories."""

    def __init__(self, rank: AgentRank, run: Run, parameters: Array, target: Array | None, restored: int = 0):
        self.rank, self.run, self.parameters, self.target = rank, run, parameters, target
        self.comm, self.everyone, self.options, self.roles = rank.comm, rank.everyone, rank.options, rank.roles
        self.optimizer, self.tally, self.network, comm = rank.optimizer, rank.tally, rank.network, rank.comm
        self.learner = Learner(self.network, target, self.options.double == "yes")
        # The all-reduce also carries the number of steps, which rank 0 alone knows, and each learner's largest
        # importance weight. Each weight has an element of its own, so the sum over the learners holds all weights.
        size = self.network.size
        self.sums = comm.empty(size + 1 + comm.size, self.network.dtype)
        self.gradient, self.farthest, self.largest = self.sums[:size], self.sums[size : size + 1], self.sums[size + 1 :]
        cut = chunks(int(self.options.batch_size), comm.size)[comm.rank]
        self.rows, self.kept = cut.stop - cut.start, run.saved
        self.requested = self.received = 0  # samples of this leg
        self.starts = max(0, int(self.options.learning_starts) - restored)  # environment steps before the first update
        self.first = self.optimizer.step
        own_actors = [actor for i, actor in enumerate(self.roles.actors) if i % comm.size == comm.rank]
        self.publisher = Publisher(self.everyone, own_actors, self.tally.by_kind)
        self.everywhere = sum(map(self.roles.streams, self.roles.memories))
        self.shards: dict[int, Any] = self._shards()

    def _shards(self) -> dict[int, Any]:
        """Return the shards by the rank of the memory; only this rank's own if the learners hold the memories."""
        rank = self.rank
        if self.everyone.rank in self.roles.memories:
            save = partial(write_replay, rank.replay, self.run.folder.path, self.everyone.rank)
            shard = LocalShard(chunk_receiver(rank), self.options.prioritized, rank.random, save)
            return {self.everyone.rank: shard}
        kinds = partial(sample_kinds, shape=self.network.shape, dtype=rank.task.environment["dtype"])
        told = self.comm.rank == 0  # the first learner collects reports
        return {each: RemoteShard(self.everyone, each, kinds, self.tally, told) for each in self.roles.memories}

    def learn(self) -> None:
        run, options = self.run, self.options
        self.publisher.publish(self.parameters, self.network.device)
        losses, total = 0.0, 0
        for first in run.rounds():
            samples = self._samples(first)
            if samples:
                losses, total = losses + self._update(samples, first), total + int(options.batch_size)
            advance = 1  # steps of the run
            if options.free and samples:
                advance = max(0, min(int(self.farthest[0]), run.steps) - first)
            for _ in range(advance):
                run.record(losses, total)
                losses, total = 0.0, 0
                run.boundary(signalled=bool(self.tally["signal"]))
                self._keep()
                if run.over:
                    break
            self.publisher.catch_up(self.parameters, self.network.device)

    def _keep(self) -> None:
        """Save the replay memories after a new checkpoint; the first learner alone asks remote memories to save."""
        saved = self.run.saved
        if not self.options.save_replay or saved == self.kept:
            return
        self.kept = saved
        for rank, shard in self.shards.items():
            if self.comm.rank == 0 or rank == self.everyone.rank:
                shard.keep()

    def _samples(self, step: int) -> list[tuple[Any, Sample]]:
        """Return this learner's share of the batch after `step`, (shard, sample) pairs; [] if too early to learn."""
        while self.requested <= self.received + AHEAD:
            self._request(self.requested, step)
            self.requested += 1
        self.received += 1
        shards = self.shards.values()
        if not all(shard.ready for shard in shards):
            with self.rank.stopwatch.fetching():
                self.everyone.wait_until(lambda: all(shard.ready for shard in shards), patient=True)
        samples = [(shard, shard.take()) for shard in shards]
        return [(shard, sample) for shard, sample in samples if sample is not None]

    def _request(self, number: int, step: int) -> None:
        options, many = self.options, len(self.shards)
        steps, starts = (number + 1) * options.per_step, self.starts
        rows = self.rows if steps >= starts else 0
        beyond = min(steps, max(starts, options.per_step)) if options.free else steps
        beta = options.beta + (1 - options.beta) * min(1.0, (step + number - self.received) / self.run.steps)
        for i, (rank, shard) in enumerate(self.shards.items()):
            streams = self.roles.streams(rank)
            share = -(-beyond * streams // self.everywhere)
            part = chunks(rows, many)[(i + number) % many]
            key = ((self.first + number) * self.comm.size + self.comm.rank) * many + i
            allowed = math.inf if options.free else share + options.chunk * streams
            shard.ask(SampleRequest(part.stop - part.start, beta, key, share, allowed))

    def _update(self, samples: list[tuple[Any, Sample]], step: int) -> float:
        """Make an update from all learners' samples; return this learner's sum of losses. samples: this learner's."""
        options, optimizer = self.options, self.optimizer
        parts = [sample for _, sample in samples]
        sample = parts[0] if len(parts) == 1 else Sample(*map(np.concatenate, zip(*parts, strict=True)))
        self.sums[:] = 0
        about = self.parameters, sample, self.gradient, self.rank.model, optimizer.step
        loss, errors = self.learner.gradient(*about, whole=False)
        self.largest[self.comm.rank] = sample.weights.max(initial=0)
        if self.comm.rank == 0:
            self.farthest[:] = int(self.tally["steps"]) // int(options.per_step)  # steps of the run
        with self.tally.by_kind("gradients"):
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

    def close(self, status: int = 0) -> None:
        """Tell the memories and actors to end. status: 0, or FAILED if the run cannot continue."""
        for shard in self.shards.values():
            shard.close(status)
        self.publisher.close()


class LearnerOwnership(Whole):
    """Ownership of parameters that each learner holds whole. The first learner gathers all ranks' steps and bytes."""

    def __init__(self, rank: AgentRank, parameters: Array):
        super().__init__(rank.model, parameters, rank.optimizer)
        self.tally, self.batch = rank.tally, int(rank.options.batch_size)

    def sent(self, traffic: Traffic) -> tuple[float, float]:
        """Return (bytes, messages) sent by this learner; the first one adds other ranks' bytes, with NaN messages."""
        bytes, messages = super().sent(traffic)
        others = [totals[len(COUNTS) :].sum() for rank, totals in self.tally.by_rank.items() if rank >= 0]
        return bytes + float(sum(others)), math.nan if others else messages

    def gather_tallies(self) -> None:
        """Collect the counts of all learners on the first one; collective."""
        if self.peers.size == 1:
            return
        with self.peers.inside("score"):
            messages = self.peers.mpi.gather(self.tally.packed())
        for rank, message in enumerate(messages or ()):
            if rank > 0:
                self.tally.take(OTHERS - rank, message)

    def progress(self) -> dict:
        """Return environment steps, updates, replay ratio and bytes by kind."""
        steps = max(1.0, self.tally["steps"])
        return {
            "environment_steps": int(self.tally["steps"]),
            "updates": self.optimizer.step,
            "replay_ratio": self.optimizer.step * self.batch / steps,
        } | self.tally.bytes_by_kind()


class LearnerScored(ReturnScored):
    """Scores from the first learner, which has the counts of all ranks."""

    def __init__(self, held: LearnerOwnership):
        super().__init__(held, lambda: held.tally.scores() | held.progress())
        self.gather_tallies = held.gather_tallies

    def scores(self, data: Any) -> dict:
        self.gather_tallies()
        peers = self.held.peers
        own_scores = super().scores(data) if peers.rank == 0 else None
        with peers.inside("score"):
            scores: dict = peers.mpi.bcast(own_scores)
        return scores


def assist(rank: AgentRank, run: Run) -> None:
    """Run a memory or an actor. Raises the learners' error, without a message, because the learners report it."""
    status, folder, step = broadcast_start(rank.everyone)
    if not status:
        restore_replays(rank)
        remembers = rank.everyone.rank in rank.roles.memories
        status = run_memory(rank, run, folder) if remembers else run_actor(rank, run, step)
        run.report_own(bytes_by_kind=dict(rank.tally.by_kind.sent))
    if status:
        error = AgreedError("") if status == REFUSED else TrainingError("")
        error.speaker = None
        raise error


def restore_replays(rank: AgentRank) -> int:
    """Restore the saved memories; return the number of transitions in all of them; collective."""
    everyone = rank.everyone
    with refuse_together(everyone.mpi):
        restore_replay(rank.options, rank.replay, everyone.rank)
    with everyone.inside("begin"):
        total: int = everyone.mpi.allreduce(rank.replay.size if rank.replay is not None else 0)
    return total


def run_memory(rank: AgentRank, run: Run, folder: Path | None) -> int:
    """Run a replay memory, saved in the run's `folder` (None: not saved); return the status at the learners' end."""
    save = partial(write_replay, rank.replay, folder, rank.everyone.rank)
    memory = ShardServer(rank.everyone, chunk_receiver(rank), list(rank.roles.learners), rank.random, save)
    inject.arm(run)
    with rank.stopwatch.step("serve"):
        memory.serve()
    return memory.status


def run_actor(rank: AgentRank, run: Run, step: int) -> int:
    """Run an actor, from step `step` of the run on; return 0, or FAILED if the learners have failed."""
    comm, roles, network = rank.everyone, rank.roles, rank.network
    learner = roles.learners[roles.actors.index(comm.rank) % len(roles.learners)]
    receiver = Receiver(comm, learner, CPU.empty(network.size, network.dtype), rank.tally.by_kind)
    feeder = chunk_sender(rank)
    numbers = roles.first_copy(comm.rank) + np.arange(roles.envs)
    exponents = epsilon_exponents(numbers, len(roles.actors) * roles.envs, rank.options.epsilon_alpha)
    receiver.first()
    inject.arm(run)
    act(rank, feeder, receiver.newest, step * rank.options.per_step, exponents, rank.options.prioritized)
    receiver.close()
    return FAILED if feeder.failed else 0


def epsilon_exponents(number: np.ndarray, copies: int, alpha: float) -> np.ndarray:
    """Return the exponents of epsilon, 1 + i / (N - 1) alpha, for the copies i in `number` of N = `copies` copies."""
    return 1 + number / max(1, copies - 1) * alpha
