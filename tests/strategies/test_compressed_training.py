"""Methods of compression that know more than a vector: in training they give the steps that their papers have."""

import numpy as np
import pytest
from paths import agree

from hpcdl.data import from_arrays
from hpcdl.strategies import all_reduce, local_sgd

pytestmark = pytest.mark.four

WAYS = {"whole": {}, "in buckets": {"overlap": True, "bucket_mib": 1e-6}}


@pytest.fixture(params=WAYS)
def way(request):
    """Arguments of the strategy: the gradient reduced at once, and in buckets."""
    return WAYS[request.param]


def same_bits(run, comm):
    return all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))


def test_powersgd_of_full_rank_is_no_compression(way, follow, alone, comm):
    reference = alone(optimizer="adam")
    run = follow(comm, all_reduce.train, optimizer="adam", own=way | {"compress": "powersgd:rank=99,ratio=0"})
    agree(run, reference, 1e-10)
    assert same_bits(run, comm)
    run = follow(comm, all_reduce.train, optimizer="adam", own=way | {"compress": "powersgd:rank=1"})
    assert comm.size == 1 or np.abs(run.path[-1] - reference.path[-1]).max() > 1e-3
    assert same_bits(run, comm)


@pytest.mark.parametrize("allreduce", ["shared", "mpi", "hierarchical", "tree"])
@pytest.mark.parametrize("own", [{"compress": "powersgd:rank=1"}, {"compress": "sign", "compress_from": 60}], ids=str)
@pytest.mark.mpi(min_size=2)
def test_buckets_in_flight_begin_their_second_all_reduce_in_any_order(own, allreduce, follow, comm):
    """Many small buckets: each rank has another of them complete first."""
    own |= {"overlap": True, "bucket_mib": 0}
    many = follow(comm, all_reduce.train, model="mlp:7,5,7,5,7", own=own, allreduce=allreduce)
    few = follow(comm, all_reduce.train, model="mlp:7,5,7,5,7", own=own, allreduce="ring")
    assert np.allclose(many.path, few.path, rtol=0, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_dgc_that_sends_everything_is_the_optimizer(way, optimizer, follow, alone, comm):
    options = {"optimizer": optimizer, "weight_decay": 0.01, "average": "from=1"}
    reference = alone(**options)
    run = follow(comm, all_reduce.train, own=way | {"compress": "dgc:1"}, **options)
    agree(run, reference, 1e-10)
    assert np.abs(run.parameters - reference.parameters).max() < 1e-10  # the means of the paths
    assert np.abs(run.parameters - run.path[-1]).max() > 1e-3
    assert same_bits(run, comm)
    run = follow(comm, all_reduce.train, own=way | {"compress": "dgc:0.1,warmup=1"}, **options)
    assert comm.size == 1 or np.abs(run.path[-1] - reference.path[-1]).max() > 1e-3
    assert same_bits(run, comm)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_onebit_adam_is_adam_in_its_warmup(way, optimizer, follow, alone, comm):
    options = {"optimizer": optimizer, "weight_decay": 0.01}
    reference = alone(**options)
    run = follow(comm, all_reduce.train, own=way | {"compress": "onebit-adam:99"}, **options)
    agree(run, reference, 1e-10)
    run = follow(comm, all_reduce.train, own=way | {"compress": "onebit-adam:3"}, **options)
    agree_until = np.abs(run.path[2] - reference.path[2]).max()
    assert agree_until < 1e-10 < 1e-5 < np.abs(run.path[-1] - reference.path[-1]).max()
    assert same_bits(run, comm)


@pytest.mark.mpi(min_size=2)
def test_onebit_adam_moves_no_value_further_than_adam(way, follow, comm):
    """Nor one without a gradient, by the sign that it has in its block."""
    x = np.random.default_rng(0).standard_normal((60, 4)) * [1, 1, 1e-6, 0]
    data = from_arrays(x, np.arange(60) % 3, dtype="float64")
    options = {"optimizer": "adam", "schedule": "constant", "model": "softmax", "lr": 0.01}
    path = follow(comm, all_reduce.train, data, own=way | {"compress": "onebit-adam:3"}, **options).path
    moves = np.abs(np.diff(np.reshape(path, (len(path), -1, 3)), axis=0))[3:]
    assert 0 < moves[:, 2].max() <= 0.01 * 0.1 / 0.001**0.5 * (1 + 1e-9)
    assert not moves[:, 3].any() and moves[:, 0].min() > 0


@pytest.mark.mpi(max_size=1)
def test_the_steps_of_adam_with_a_frozen_second_moment(follow, comm):
    """On one rank nothing is left out: Adam's formula, in numpy, from the gradients that its path tells."""
    run = follow(comm, all_reduce.train, own={"compress": "onebit-adam:3"}, optimizer="adam", schedule="constant")
    sequential = follow(comm, all_reduce.train, optimizer="adam", schedule="constant", steps=3)
    m, s = (sequential.state.tracked[f"optimizer/{name}_moment"].array for name in ("first", "second"))
    found = {name: run.state.tracked[f"optimizer/{name}_moment"].array for name in ("first", "second")}
    assert np.array_equal(found["second"], s) and not np.array_equal(found["first"], m)
    t, root = len(run.path), np.sqrt(s / (1 - 0.999**3))
    step = run.options.lr / (1 - 0.9**t) * found["first"] / (root + 1e-8)
    assert np.abs(run.path[-2] - run.path[-1] - step).max() < 1e-14


@pytest.mark.parametrize(
    "spec, optimizer, names",
    [
        ("powersgd:rank=1", "momentum", ["residual", "factors"]),
        ("dgc:0.1,warmup=1", "momentum", ["residual", "local_momentum"]),
        ("onebit-adam:2", "adam", ["residual"]),
    ],
)
def test_resumed_is_never_stopped(way, spec, optimizer, names, resumes, world):
    _, run = resumes(4, all_reduce.train, own=way | {"compress": spec}, optimizer=optimizer)
    for name in names:
        assert run.state.tracked[name].array.any() or world.size == 1


def test_local_sgd_keeps_the_factors_of_powersgd(resumes, world):
    _, run = resumes(4, local_sgd.train, own={"sync_every": 2, "compress": "powersgd:rank=1"}, optimizer="momentum")
    assert run.state.tracked["factors"].array.any() == (world.size > 1)
