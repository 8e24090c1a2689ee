"""Ape-X: it finds the values of a chain, whoever learns, remembers and acts; its parts make what one rank makes.

What of a run comes first, a chunk, a sample or new parameters, depends on the machine: no run is promised to repeat, on
no number of ranks. Exact are the identities here: what a copy of the environment does by the same parameters, the
priorities of it, the gradient of learners together, and the counts."""

import json
from pathlib import Path
from types import SimpleNamespace

import chains
import numpy as np
import pytest
from agent_ranks import Takes, agent_rank, assert_values, network
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.optim import make_optimizer
from hpcdl.random import Random
from hpcdl.rl.agent import Learner
from hpcdl.rl.apex import ApexLearner, epsilon_exponents
from hpcdl.rl.environments import Environments
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.remote_actor import act
from hpcdl.rl.replay import Replay
from hpcdl.rl.roles import NOBODY, RLRoles
from hpcdl.rl.shards import AHEAD
from hpcdl.rl.transition_stream import CREDITS

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_apex.py"
CHAIN = "--env knownchains:chain --model mlp:16,dueling --dtype float64 --gamma 0.8 --lr 0.01 --target-every 20"
CHAIN += " --learning-starts 50 --batch-size 16 --replay 500 --epsilon 0.5 --epsilon-alpha 1 --n-step 1 --chunk 4"
CHAIN += " --episodes 3 --evaluate-every 400 --seed 1 --progress none --out r"
RANKS = 5

# learners, memories (0: the learners remember), and how else; the others of 5 ranks act
CASES = {
    "a memory": (1, 1, "--train-every 1 --env-steps 600"),
    "two memories, uniform": (1, 2, "--train-every 2 --env-steps 1200 --uniform --envs 2"),
    "the learner remembers": (1, 0, "--train-every 1 --env-steps 600 --double no"),
    "two learners": (2, 1, "--train-every 1 --env-steps 600"),
    "two learners remember": (2, 0, "--train-every 1 --env-steps 600 --uniform --allreduce ring"),
    "two learners, free": (2, 1, "--train-every 1 --env-steps 2500 --free --pretend-env 2"),
    "the learner remembers, free": (1, 0, "--train-every 1 --env-steps 3000 --free --uniform --pretend-env 2"),
}


@pytest.mark.parametrize("case", ["a memory", *(pytest.param(case, marks=pytest.mark.long) for case in [*CASES][1:])])
def test_it_finds_the_values_of_a_chain(run_on, tmp_path, case):
    learners, replays, more = CASES[case]
    (tmp_path / "knownchains.py").write_text(Path(chains.__file__).read_text())
    given = [*CHAIN.split(), "--learners", learners, "--replays", replays, *more.split()]
    run_on(RANKS, SCRIPT, *given, check=0)
    found, summary = Checkpoint.read(tmp_path / "r"), json.loads((tmp_path / "r/summary.json").read_text())
    network = QNetwork((chains.STATES,), 2, found.attributes["model"], "float64")
    assert_values(network, found.vectors["parameters"], 0.1 if "--free" in given else 0.03)
    assert summary["test_return"] == 1.0 and summary["replicas_agree"] and summary["stopped"] == "finished"
    actors = RANKS - learners - replays
    assert [summary[name] for name in ("learners", "replays", "actors")] == [learners, replays or learners, actors]
    assert summary["learner_waited_seconds"] > 0 and summary["environment_restarts"] == 0
    check_counts(summary)
    check_bytes(summary, learners, replays)


def check_counts(summary):
    """As many updates as --train-every says, and never more of what is seen than was allowed and is under way."""
    options, steps = summary["options"], summary["environment_steps"]
    per_step, streams = options["train_every"], options["envs"] * summary["actors"]
    assert summary["steps"] * per_step == options["env_steps"] <= steps
    assert summary["replay_ratio"] == pytest.approx(summary["updates"] * options["batch_size"] / steps)
    if not options["free"]:
        first = -(-options["learning_starts"] // per_step)
        assert summary["updates"] == summary["steps"] - first + 1
        unlearned = AHEAD * per_step + (CREDITS + 2) * options["chunk"] * streams + summary["replays"]
        assert steps <= options["env_steps"] + unlearned


def check_bytes(summary, learners, replays):
    """Each byte has a kind, and each kind comes from those who send such."""
    sent, kinds = summary["bytes_sent_per_rank"], summary["bytes_by_kind_per_rank"]
    assert [sum(each.values()) for each in kinds] == sent
    roles = ["learner"] * learners + ["memory"] * replays
    roles += ["actor"] * (len(sent) - len(roles))
    senders = {kind: {role for role, each in zip(roles, kinds, strict=True) if each[kind]} for kind in kinds[0]}
    prioritized = not summary["options"]["uniform"]
    assert senders == {
        "parameters": {"learner"},
        "gradients": {"learner"} if learners > 1 else set(),
        "transitions": {"actor"},
        "samples": {"memory"} if replays else set(),
        "priorities": {"learner"} if replays and prioritized else set(),
        "control": {*roles},
    }
    # What rank 0 has been told by the end lacks what was sent last.
    for kind in kinds[0]:
        assert 0 <= summary[f"{kind}_bytes"] <= sum(each[kind] for each in kinds)


def test_an_actor_is_as_bold_as_its_number_says():
    """Over all copies of three actors with two each: eps, ..., eps^(1 + alpha), by equal powers."""
    roles = RLRoles(NOBODY, range(1), range(1, 2), range(2, 5), 2)
    powers = [epsilon_exponents(roles.first_copy(rank) + np.arange(2), 6, 7.0) for rank in roles.actors]
    np.testing.assert_allclose(np.concatenate(powers), [1 + i / 5 * 7 for i in range(6)], rtol=1e-15)
    assert epsilon_exponents(np.arange(1), 1, 7.0).tolist() == [1.0]


def acted(net, parameters, first, envs, chunks=6, priorities=True):
    """What an actor of these copies, of four, sends while it has the same parameters."""
    taken, rank = Takes(chunks), agent_rank(net, Environments("chains:chain", {}, envs, 3, first))
    act(rank, taken, lambda steps: parameters, 0, epsilon_exponents(first + np.arange(envs), 4, 3.0), priorities)
    return taken.chunks


def network_and_parameters():
    net = network()
    return net, net.initialize(Random(5))


def test_copies_do_the_same_however_they_are_divided():
    """Four copies of one actor, of two, of four: the same steps to the bit, with the same priorities."""
    network, parameters = network_and_parameters()
    memories = []
    for envs in (4, 2, 1):
        sent = {first: acted(network, parameters, first, envs) for first in range(0, 4, envs)}
        of_copies = []
        for copy in range(4):
            first, column = copy // envs * envs, copy % envs
            rows = [getattr(chunk, name) for name in ("frames", "actions", "rewards", "flags") for chunk in sent[first]]
            of_copies.append(b"".join(np.ascontiguousarray(each[column::envs]).tobytes() for each in rows))
        memories.append(of_copies)
        actions = np.concatenate([chunk.actions for chunk in sent[0]])
        assert 0 < actions.mean() < 1
    assert memories[0] == memories[1] == memories[2]
    assert len(set(memories[0])) == 4


def test_first_priorities_are_td_errors_by_the_actors_parameters():
    """|Q(s, a) - R - gamma^n max_b Q(s', b)|, without a target network; in the memory (error + epsilon)^alpha."""
    (network, parameters), terminated = network_and_parameters(), False
    replay = Replay(200, (chains.STATES,), "f4", streams=2, n_step=3, gamma=chains.GAMMA, prioritized=True)
    for chunk in acted(network, parameters, 0, 2):
        serials = chunk.add_to(replay)
        assert len(serials) == len(chunk.priorities)
        of = replay.gather(serials % replay.capacity)
        q, ahead = (network.values(parameters, each) for each in (of.observations, of.next_observations))
        wanted = np.abs(q[np.arange(len(serials)), of.actions] - of.returns - of.discounts * ahead.max(axis=1))
        np.testing.assert_allclose(chunk.priorities, wanted, rtol=1e-6, atol=1e-9)
        kept = replay.tree.leaves[serials % replay.capacity]
        np.testing.assert_array_equal(kept, (chunk.priorities.astype("f8") + 1e-6) ** 0.6)
        terminated |= (of.discounts == 0).any()
    assert terminated and replay.size > 80 and np.unique(replay.tree.leaves).size > 5
    assert all(len(chunk.priorities) == 0 for chunk in acted(network, parameters, 0, 2, priorities=False))


class Told:
    """In the place of a shard: what a learner tells it."""

    def update(self, sample, errors):
        self.errors = errors


def learner(comm, everyone, network, batch):
    """One of the learners of `comm`, whose target network differs from the network."""
    options = {"batch_size": batch, "double": "yes", "prioritized": True, "per_step": 1, "learning_starts": 0}
    options |= {"target_every": 1000, "broadcast_every": 1000}
    parameters, target = network.initialize(Random(5)), network.initialize(Random(6))
    roles = RLRoles(NOBODY, range(comm.size), range(everyone.size, everyone.size + 1), NOBODY)
    optimizer = make_optimizer("momentum", network.size, "float64", lambda step: 0.1)
    rank = agent_rank(network, None, optimizer, comm, everyone, roles, **options)
    return ApexLearner(rank, SimpleNamespace(saved=None), parameters, target)


@pytest.mark.mpi(min_size=2)
def test_learners_together_are_one(bare):
    """Their samples, unlike in length: the parameters and losses of one learner of all; each knows its errors. Weights
    are divided by the largest of the whole batch, wherever that lies."""
    everyone, network = Communicator(bare, allreduce="ring"), network_and_parameters()[0]
    replay = Replay(300, (chains.STATES,), "f4", n_step=3, gamma=chains.GAMMA, prioritized=True)
    for chunk in acted(*network_and_parameters(), 0, 1):
        chunk.add_to(replay)
    whole = replay.sample(13, 0.5, np.random.default_rng(1))
    ends = np.array([13 * (rank + 1) ** 2 // bare.size**2 for rank in range(bare.size)])
    some = slice(([0, *ends])[bare.rank], ends[bare.rank])
    mine, lone = learner(everyone, everyone, network, 13), Communicator(bare.Split(bare.rank))
    alone, divided = learner(lone, everyone, network, 13), learner(lone, everyone, network, 13)
    by_the_largest = whole._replace(weights=whole.weights / whole.weights.max())  # Schaul et al. 2016, algorithm 1
    for _ in range(3):
        told, all_told = Told(), Told()
        part = type(whole)(*(each[some] for each in whole))
        losses = bare.allreduce(mine._update([(told, part)], 0))
        loss = alone._update([(all_told, whole)], 0)
        np.testing.assert_allclose([losses, divided._update([(Told(), by_the_largest)], 0)], loss, rtol=1e-6)
        np.testing.assert_allclose(told.errors, all_told.errors[some], rtol=1e-12)
    np.testing.assert_allclose(mine.parameters, alone.parameters, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(divided.parameters, alone.parameters, rtol=1e-6, atol=1e-8)
    everywhere = bare.allgather(mine.parameters.tobytes())
    assert len(set(everywhere)) == 1 and (mine.parameters != network.initialize(Random(5))).any()
    everyone.free()


@pytest.mark.parametrize("parts", [4, 64])
def test_a_sample_of_several_shards_is_learned_from_as_one(parts, alone):
    """The update of all rows, by one largest weight, and to each shard its own errors."""
    net, began = network_and_parameters()
    replay = Replay(300, (chains.STATES,), "f4", n_step=3, gamma=chains.GAMMA, prioritized=True)
    for chunk in acted(net, began, 0, 1):
        chunk.add_to(replay)
    whole = replay.sample(64, 0.7, np.random.default_rng(2))
    assert whole.weights.max() > 2 * whole.weights.min()
    cuts, told, all_told, parameters = chunks(64, parts), [Told() for _ in range(parts)], Told(), []
    pieces = [type(whole)(*(array[cut] for array in whole)) for cut in cuts]
    for samples in ([(all_told, whole)], [*zip(told, pieces, strict=True)]):
        comm = Communicator(MPI.COMM_SELF)
        found = learner(comm, comm, net, 64)
        found._update(samples, 0)
        parameters.append(found.parameters.copy())
        comm.free()
    np.testing.assert_array_equal(*parameters)
    q = net.values(began, whole.observations)[np.arange(64), whole.actions]
    targets = Learner(net, net.initialize(Random(6))).targets(began, whole)
    np.testing.assert_allclose(all_told.errors, np.abs(targets - q), rtol=1e-12)
    np.testing.assert_array_equal(np.concatenate([each.errors for each in told]), all_told.errors)
