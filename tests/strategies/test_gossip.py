"""Gossip is what its matrix form says, in every method; on the complete graph it is all-reduce SGD."""

import numpy as np
import pytest
from mpi4py import MPI
from paths import agree
from written_runs import summary

from hpcdl.comm.gossip.mixing import exact_factors, mixing
from hpcdl.comm.gossip.topology import topology
from hpcdl.data import from_arrays
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.random import Random
from hpcdl.strategies import gossip, sequential

pytestmark = pytest.mark.four

LINEAR = ["sgd", "momentum", "nesterov"]
METHODS = sorted(gossip.METHODS)


def graph_of(spec, size):
    try:
        return topology(spec, size, seed=2)
    except UsageError:
        return None


def train(method, spec, follow, comm, **options):
    own = {"topology": graph_of(spec, comm.size), "method": method, "phase": options.pop("phase", 0)}
    return follow(comm, gossip.train, own=own | {"rule": options.pop("rule", "metropolis-hastings")}, **options)


@pytest.mark.parametrize("optimizer", LINEAR)
@pytest.mark.parametrize("rule", ["metropolis-hastings", "uniform"])
@pytest.mark.in_turn("rule")
def test_adapt_then_combine_on_the_complete_graph_is_all_reduce_sgd(rule, optimizer, follow, alone, comm):
    """The shares are uneven, and some are empty."""
    reference = alone(optimizer=optimizer, weight_decay=0.01)
    options = {"optimizer": optimizer, "weight_decay": 0.01, "rule": rule}
    run = train("adapt-then-combine", "complete", follow, comm, **options)
    agree(run, reference)
    agree(run.own_path, reference.path)
    assert run.scores["consensus_distance"] < 1e-25


@pytest.mark.parametrize("optimizer", LINEAR)
@pytest.mark.parametrize("spec", ["ring", "star", "hypercube", "torus", "one-peer", "exponential"])
@pytest.mark.in_turn("optimizer")
def test_defacto_in_phases_of_one_batch_is_all_reduce_sgd_on_any_graph(spec, optimizer, follow, alone, comm):
    reference = alone(optimizer=optimizer)
    exact = spec != "one-peer" or comm.size & (comm.size - 1) == 0
    if graph_of(spec, comm.size) is not None and exact:
        run = train("defacto", spec, follow, comm, optimizer=optimizer, phase=1)
        agree(run.own_path, reference.path)


def test_a_phase_of_defacto_is_a_step_with_all_of_its_batches(follow, comm):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((24, 6)), random.integers(0, 3, 24)
    data = from_arrays(x, y, x, y, dtype="float64")
    whole = follow(MPI.COMM_SELF, sequential.train, data, batch_size=8, schedule="constant")
    run = train("defacto", "ring", follow, comm, data=data, batch_size=4, phase=2, schedule="constant")
    agree(run.own_path[1::2], whole.path)
    for before, after in zip([None, *run.own_path[1::2]], run.own_path[::2], strict=False):
        assert before is None or np.array_equal(before, after)  # nothing moves within a phase


def plain(method, graph, size, data, model, phase, *, lr, steps, batch):
    """The matrix form of each method, with the replicas of all ranks as rows of X; returns X after each step."""
    one = model.initialize(Random(0))
    x, per_epoch = np.tile(one, (size, 1)), data.steps_per_epoch(batch)
    y, last, mean = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    mixed, before, path = x.copy(), x.copy(), []
    y_before = y.copy()
    for step in range(steps):
        g = np.zeros_like(x)
        for rank in range(size):
            share = next(data.batches(step // per_epoch, batch, (rank, size), step % per_epoch))
            model.loss_and_gradient(x[rank], share, g[rank])
            g[rank] *= size / share.total
        w, ends = mixing(graph, step), (step + 1) % phase == 0
        if method == "adapt-then-combine":
            x = w @ (x - lr * g)
        elif method == "dpsgd":
            x = w @ x - lr * g
        elif method == "gradient-tracking":
            y, last = w @ y + g - last, g
            x = w @ x - lr * y
        elif method == "detag":
            root = np.sqrt(1 - sorted([0, *np.abs(np.linalg.eigvalsh(w))])[-2] ** 2)  # Liu and Morse 2011
            eta = (1 - root) / (1 + root)
            if step % phase == 0:
                before, y_before, mean = mixed, y, 0 * mean
            mean = mean + g / phase
            mixed, before = (1 + eta) * w @ mixed - eta * before, mixed
            y, y_before = (1 + eta) * w @ y - eta * y_before, y
            if ends:
                mixed = x = mixed - lr * y  # Lu and De Sa 2021, (15): before (16), which changes y
                y, last = y + mean - last, mean
        elif method == "defacto":
            mean = (mean if step % phase else 0 * mean) + g / phase
            if ends:
                x = x - lr * mean
                for factor in exact_factors(graph):
                    x = factor @ x
        path.append(x.copy())
    return path


@pytest.mark.parametrize("partition", ["iid", "by-label"])
@pytest.mark.parametrize("spec", ["ring", "star", "one-peer", "random-matching"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.in_turn("partition")
@pytest.mark.least(3)
def test_every_method_takes_the_steps_of_its_matrix_form(method, spec, partition, follow, comm):
    options = {"optimizer": "sgd", "schedule": "constant", "lr": 0.3, "batch_size": 13, "steps": 10}
    graph = graph_of(spec, comm.size)
    try:
        phase = gossip.batches_of(method, graph, "metropolis-hastings", 3 if method in ("detag", "defacto") else 0)
        run = train(method, spec, follow, comm, data=data_of(partition), phase=phase, **options)
    except UsageError:
        assert (method, spec) in REFUSED
        return
    model = make_model("mlp:5", run.data.features, run.data.classes, "float64")
    paths = plain(method, graph, comm.size, data_of(partition), model, phase, lr=0.3, steps=10, batch=13)
    agree(run.own_path, [rows[comm.rank] for rows in paths])
    agree(run.path, [rows.mean(axis=0) for rows in paths])


REFUSED = {("detag", "one-peer"), ("detag", "random-matching"), ("defacto", "one-peer"), ("defacto", "random-matching")}


def data_of(partition):
    random = np.random.default_rng(4)
    y = random.integers(0, 3, 29)
    x = random.standard_normal((29, 6)) + y[:, None]
    return from_arrays(x, y, x[:11], y[:11], dtype="float64", partition=partition)


@pytest.mark.parametrize(  # in the middle of a phase of 3, and at its end
    "method, stop", [*((method, 4) for method in METHODS), ("detag", 6), ("defacto", 6)]
)
def test_resumed_is_never_stopped_to_the_bit(method, stop, follow, world, mpi_tmp_path):
    options = {"steps": 10, "partition": "by-label", "data": data_of("by-label")}
    options |= {"phase": 3} if method in ("detag", "defacto") else {}
    whole = train(method, "ring", follow, world, **options)
    out = str(mpi_tmp_path / "parts")
    train(method, "ring", follow, world, **options, out=out, checkpoint_every=stop, keep=9)
    world.Barrier()
    if world.rank == 0:
        (mpi_tmp_path / "parts" / f"checkpoint-{stop:09d}.h5").replace(mpi_tmp_path / "parts" / "checkpoint.h5")
    world.Barrier()
    again = train(method, "ring", follow, world, **options, out=out, resume=out)
    assert len(again.own_path) == 10 - stop
    assert np.array_equal(again.own_path[-1], whole.own_path[-1])
    world.Barrier()
    if world.rank == 0:
        found = summary(mpi_tmp_path / "parts")
        assert found["strategy"] == "gossip" and found["method"] == method
        assert len(found["replica_test_accuracy"]) == world.size and found["replicas_agree"] is None
    world.Barrier()


def test_a_run_that_is_gone_on_with_keeps_its_settings(follow, world, mpi_tmp_path):
    out, graph = str(mpi_tmp_path / "a"), topology("ring", world.size)
    own = {"topology": graph, "method": "detag", "phase": 3}
    follow(world, gossip.train, own=own, steps=4, out=out)
    world.Barrier()
    with pytest.raises(UsageError, match="that run's phase is 3, not 4"):
        follow(world, gossip.train, own=own | {"phase": 4}, steps=8, out=out, resume=out)
    with pytest.raises(UsageError, match="that run's topology is ring, not complete"):
        follow(world, gossip.train, own=own | {"topology": topology("complete", world.size)}, steps=8, resume=out)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_edges(method, follow, comm):
    """K values over each edge in each step; tracking sends two vectors; DeFacto one for each place in its factors."""
    run = train(method, "ring", follow, comm, steps=6, phase=3 if method in ("detag", "defacto") else 0)
    graph, k = topology("ring", comm.size), run.parameters.size
    if method == "defacto":
        messages = 2 * sum(np.count_nonzero(np.delete(f[:, comm.rank], comm.rank)) for f in exact_factors(graph))
    else:
        messages = 6 * len(graph.graph(0)[comm.rank])
    values = 2 * k if method in ("gradient-tracking", "detag") else k
    assert run.comm.traffic["push"].messages == messages
    assert run.comm.traffic["push"].bytes == messages * values * 8
    if method != "defacto":  # on each edge in each step; all else is the broadcast of the initial values
        left = {to: (size, count) for to, size, count in run.comm.sent_to}
        for to in graph.graph(0)[comm.rank]:
            left[to] = left[to][0] - 6 * values * 8, left[to][1] - 6
        begun, sums = run.comm.traffic["broadcast"], np.sum([(0, 0), *left.values()], axis=0)
        assert (begun.bytes, begun.messages) == tuple(sums) and np.min([*left.values(), (0, 0)]) == 0
