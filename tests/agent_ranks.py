"""The parts of a rank that acts or learns on the chain, without a run."""

import contextlib
from types import SimpleNamespace

import chains
import numpy as np
from mpi4py import MPI

from hpcdl.random import Random
from hpcdl.rl.agent_rank import AgentRank
from hpcdl.rl.options import DQN, RLOptions
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.roles import NOBODY, RLRoles
from hpcdl.rl.tally import BytesByKind, RankCounts
from hpcdl.rl.training import Learning

ACTS = {"chunk": 8, "n_step": 3, "gamma": chains.GAMMA, "epsilon": "0.7"}
STOPWATCH = SimpleNamespace(step=lambda name: contextlib.nullcontext(), fetching=contextlib.nullcontext)


def learned_by_dqn(**more):
    """A run of DQN on the chain, on this rank alone."""
    return Learning(DQN).run(MPI.COMM_SELF, RLOptions(**CHAIN | more))


def assert_values(network, parameters, tolerance):
    """It knows the values of the chain."""
    values = network.values(parameters, np.eye(chains.STATES, dtype=np.float32))
    np.testing.assert_allclose(values, chains.best_values(), atol=tolerance)


def assert_learned(run, tolerance=0.1):
    assert_values(run.scored.network, run.parameters, tolerance)
    assert run.summary["test_return"] == 1.0 and run.stopped == "finished"


def network():
    return QNetwork((chains.STATES,), 2, "mlp:8,dueling", "float64")


def agent_rank(network, environments=None, optimizer=None, comm=None, everyone=None, roles=None, **options):
    """A rank; without `comm` the one that acts in the environments, of which others have those before and after."""
    task = SimpleNamespace(environment={"dtype": "float32"})
    tally = RankCounts(everyone and BytesByKind(everyone.traffic))
    if comm is None:
        envs = environments.count
        everyone = SimpleNamespace(rank=environments.first // envs)
        roles = RLRoles(NOBODY, range(1), range(1), range(everyone.rank + 1), envs)
    how = SimpleNamespace(**ACTS | options), Random(3), STOPWATCH, roles
    return AgentRank(comm, everyone, *how, network, task, optimizer, environments, None, tally)


class Takes:
    """In the place of a sender: takes so many chunks, then all is over."""

    def __init__(self, most):
        self.most, self.chunks, self.closed = most, [], 0

    @property
    def over(self):
        return len(self.chunks) >= self.most

    def send(self, chunk):
        assert not self.over
        self.chunks.append(chunk)

    def close(self):
        self.closed += 1


CHAIN = {  # options of a run on the chain
    **{"env": "chains:chain", "gamma": chains.GAMMA, "model": "mlp:16,dueling", "dtype": "float64", "lr": 0.01},
    **{"target_every": 20, "learning_starts": 50, "batch_size": 16, "replay": 500, "train_every": 1, "epsilon": "0.5"},
    **{"episodes": 3, "evaluate_every": 200, "progress": "none", "out": "none", "trace": 0},
}
