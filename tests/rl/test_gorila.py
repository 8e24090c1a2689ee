"""Gorila: one bundle in rounds is DQN to the bit; what is repeated; chains are learned by all roles; what is discarded.

Runs share one process for each rank: 4 ranks show what 2, 3 and 4 do."""

import numpy as np
import pytest
from agent_ranks import CHAIN, assert_learned
from agent_ranks import learned_by_dqn as dqn
from conftest import groups
from written_runs import lines

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.optim import make_optimizer
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.store_messages import Push
from hpcdl.rl.gorila import Bundle, StalenessFilter
from hpcdl.rl.options import GORILA, GorilaOptions
from hpcdl.rl.training import Learning

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.four]

AS_DQN = {"consistency": "bsp", "sync_every": 1, "outliers": 0.0}
SCORES = ("test_return", "test_return_min", "test_episode_length", "updates")
SCORES += ("episodes", "return_mean", "return_min", "return_max")


def learned(comm, **more):
    return Learning(GORILA).run(comm, GorilaOptions(**(CHAIN | more)))


def evaluations(folder):
    return [{name: line.get(name) for name in ("step", *SCORES)} for line in lines(folder) if "test_return" in line]


@pytest.fixture
def on(world):
    """A function: run `body(comm)` on the first ranks of the world, so many, where there are as many."""

    def run(sizes, body):
        for size, comm in groups(world, min(sizes)):
            if comm is not None and size in sizes:
                body(comm)

    return run


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ([2, 3], {"env_steps": 400}),
        ([4], {"target_every": 0, "train_every": 4, "envs": 2, "env_steps": 800}),
        ([2], {"double": "no", "envs": 4, "env_steps": 400, "optimizer": "momentum", "schedule": "constant"}),
        ([3], {"prioritized": True, "env_steps": 400, "envs": 2, "train_every": 2, "model": "mlp:8"}),
    ],
    ids=["n steps", "without a target network", "not double", "prioritized n steps"],
)
def test_one_bundle_in_rounds_is_dqn_to_the_bit(sizes, how, on, mpi_tmp_path):
    how = how | {"clip_norm": 0.0}

    def body(comm):
        """All ranks but one serve."""
        own = mpi_tmp_path / str(comm.size)
        run = learned(comm, servers=comm.size - 1, out=str(own / "gorila"), **AS_DQN, **how)
        if comm.rank == 0:
            alone = dqn(out=str(own / "dqn"), **how)
            assert run.step * run.per_step == alone.step * alone.per_step
            for name in ("parameters", *(f"optimizer/{each}" for each in alone.optimizer.state)):
                mine, wanted = (Checkpoint.read(own / each).vectors[name] for each in ("gorila", "dqn"))
                np.testing.assert_array_equal(mine, wanted, name)
            got, wanted = evaluations(own / "gorila"), evaluations(own / "dqn")
            assert len(got) >= 2 and {each["episodes"] for each in got} != {0}
            for each in got + wanted:
                each.pop("step")  # with more copies than steps between updates, a step of DQN has several updates
            assert got == wanted

    on(sizes, body)


@pytest.mark.parametrize("consistency", ["bsp", "async"])
@pytest.mark.parametrize("clip", [0.02, 10.0])
def test_clipped_by_the_norm_of_the_whole_gradient(clip, consistency, on):
    """Of a round the servers find it, to rounding; else the learner tells it. Async with one bundle is DQN as well."""
    how = {"env_steps": 200, "evaluate_every": 200, "clip_norm": clip}

    def body(comm):
        run = learned(comm, servers=comm.size - 1, **AS_DQN | {"consistency": consistency}, **how)
        if comm.rank == 0:
            np.testing.assert_allclose(run.parameters, dqn(**how).parameters, rtol=0, atol=1e-12)
            assert run.summary["staleness_histogram"] == [run.summary["updates"]]

    on([3] if consistency == "bsp" else [2, 3], body)


@pytest.mark.least(3)
def test_rounds_repeat_to_the_bit(comm):
    """bsp, with outliers discarded and actors that sync now and then."""
    how = {"consistency": "bsp", "env_steps": 160 * (comm.size - 1), "evaluate_every": 80 * (comm.size - 1)}
    one, two = (learned(comm, outliers=3.0, sync_every=4, **how) for _ in range(2))
    if comm.rank == 0:
        np.testing.assert_array_equal(one.parameters, two.parameters)
        assert one.step == 160 and one.summary["environment_steps"] == how["env_steps"]
        assert one.summary["episodes"] > 5 * (comm.size - 1)
        names = (*SCORES, "replay_ratio", "discarded_outliers", "discarded_per_rank")
        assert [one.summary[name] for name in names] == [two.summary[name] for name in names]
        # Losses of a round are added as they come.
        assert one.summary["train_loss"] == pytest.approx(two.summary["train_loss"], rel=1e-12)


def assert_counted(summary, roles):
    """Every byte is of one kind, and each rank sends what its role sends."""
    kinds = summary["bytes_by_kind_per_rank"]
    assert [sum(each.values()) for each in kinds] == summary["bytes_sent_per_rank"]
    assert all(min(each.values()) >= 0 for each in kinds)
    sends = {"servers": {"parameters"}, "learners": {"parameters", "gradients"}}
    sends["actors"] = {"parameters", "transitions", "control"}
    if roles.acts_elsewhere:
        sends["learners"] = sends["learners"] | {"control"}
    else:
        sends["actors"] = sends["learners"]
    for name, wanted in sends.items():
        for rank in getattr(roles, name):
            assert {kind for kind, count in kinds[rank].items() if count} == wanted, (name, rank)
    for kind in ("parameters", "gradients", "transitions"):
        whole = sum(each[kind] for each in kinds)
        assert 0 <= summary[f"{kind}_bytes"] <= whole, kind
    gradients = summary["updates"] * summary["parameters"] * 8
    assert sum(each["gradients"] for each in kinds) >= gradients


def test_bundles_of_which_none_waits_learn_the_chain(on):
    def body(comm):
        how = {"prioritized": comm.size == 4, "envs": comm.size - 1, "train_every": comm.size - 1}
        run = learned(comm, env_steps=1600 * (comm.size - 1), n_step=1, evaluate_every=1200, sync_every=4, **how)
        if comm.rank == 0:
            assert_learned(run)
            assert_counted(run.summary, run.options.roles(comm.size))
            assert run.summary["bundles"] and run.summary["learners"] == comm.size - 1
            assert sum(run.summary["staleness_histogram"]) == run.summary["updates"]

    on([2, 4], body)


@pytest.mark.parametrize(
    ("size", "how"), [(3, {"learners": 1}), (4, {"learners": 1, "servers": 2, "envs": 2, "train_every": 2})], ids=str
)
def test_actors_and_learners_apart_learn_the_chain(size, how, on):
    def body(comm):
        steps = 1600 * how.get("train_every", 1)
        run = learned(comm, env_steps=steps, n_step=1, chunk=4, sync_every=4, **how)
        if comm.rank == 0:
            roles = run.options.roles(comm.size)
            assert_learned(run)
            assert_counted(run.summary, roles)
            assert not run.summary["bundles"] and run.summary["actors"] == len(roles.actors)
            assert run.summary["environment_steps"] == steps and run.step == 1600

    on([size], body)


def test_outliers_are_not_pushed(on):
    """The updates of one bundle in rounds are those of DQN, but for the outliers."""

    def body(comm):
        run = learned(comm, env_steps=300, evaluate_every=300, **AS_DQN | {"outliers": 0.1})
        if comm.rank == 0:
            discarded, updates = run.summary["discarded_per_rank"], run.summary["updates"]
            assert discarded == [0, run.summary["discarded_outliers"]] and discarded[1] > 3
            assert updates + discarded[1] == dqn(env_steps=300, evaluate_every=300).summary["updates"]
            assert sum(run.summary["staleness_histogram"]) == updates

    on([2], body)


def test_what_is_too_stale_is_not_applied(world):
    """A server that is given pushes, one after the other, of parameters 0 to 4 versions old."""
    optimizer = make_optimizer("sgd", 3, "float64", lambda step: 0.5)
    update = StalenessFilter(optimizer, None, Consistency("async"), most=2)
    values, made = np.zeros(3), []
    for staleness, count in [(0, 1), (2, 1), (3, 1), (4, 0), (9, 1), (1, 0), (1, 2)]:
        push = Push(1, slice(0, 3), 0, 0, 0, count, count, 0.0, 0.0, staleness=staleness)
        made.append(update(values, np.ones(3), push))
    assert made == [True, True, False, False, False, False, True]
    assert update.discarded == 2 and optimizer.step == 3
    np.testing.assert_allclose(values, -0.5 * (1 + 1 + 0.5))
    never = StalenessFilter(optimizer, None, Consistency("async"), most=0)
    assert never(values, np.ones(3), push._replace(staleness=10**6)) and not never.discarded


def test_what_is_too_stale_is_counted(on, monkeypatch):
    """Each push of the last rank comes late, for it says that its parameters are the first ones."""
    push = Bundle._push

    def late(bundle, step):
        if bundle.rank.comm.rank == bundle.rank.comm.size - 1:
            for connection in bundle.store.client.connections:
                connection.version = 0.0
        push(bundle, step)

    monkeypatch.setattr(Bundle, "_push", late)
    monkeypatch.setattr(Bundle, "_follow", lambda bundle: None)

    def body(comm):
        run = learned(comm, env_steps=400, evaluate_every=400, max_staleness=5, servers=comm.size - 2)
        if comm.rank == 0:
            discarded = run.summary["discarded_per_rank"]
            servers = discarded[: comm.size - 2]
            assert min(servers) > 0 and max(servers) - min(servers) <= 6  # how many came before its sixth update
            assert len(run.summary["staleness_histogram"]) <= 6
            assert run.summary["discarded_outliers"] == 0

    on([4], body)
