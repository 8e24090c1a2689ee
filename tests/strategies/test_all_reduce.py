"""All-reduce SGD on N ranks takes the very steps of sequential SGD at the same batch."""

import numpy as np
import pytest
from paths import agree

from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.data import from_arrays
from hpcdl.errors import TrainingError
from hpcdl.strategies import all_reduce

pytestmark = pytest.mark.four

OPTIMIZERS = ["sgd", "momentum", "nesterov", "adam", "adamw", "muon"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.in_turn("optimizer")
def test_step_by_step_for_every_algorithm_and_optimizer(name, optimizer, follow, alone, comm):
    reference = alone(optimizer=optimizer)
    assert len(reference.path) == 4 * 3
    run = follow(comm, all_reduce.train, optimizer=optimizer, allreduce=name)
    agree(run, reference)
    assert np.allclose(np.sum(comm.allgather(run.own_losses), axis=0), reference.own_losses, rtol=1e-12)
    assert run.comm.traffic["all_reduce"].calls == 12 and run.comm.traffic["broadcast"].calls == 1


@pytest.mark.least(4)
def test_float32_to_rounding(follow, alone, comm):
    options = {"optimizer": "adamw", "dtype": "float32"}
    agree(follow(comm, all_reduce.train, **options), alone(**options), 2e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.05},
        {"weight_decay": 0.1},
        {"accumulate": 3},
        {"schedule": "cosine:warmup=1"},
        {"batch_size": "full", "epochs": 6},
        {"batch_size": 2},  # fewer examples than ranks in every batch
        {"steps": 5},
        {"model": "softmax"},
    ],
    ids=str,
)
@pytest.mark.least(4)
def test_with_other_options(options, follow, alone, comm):
    reference = alone(**options)
    plain = alone(**({"model": options["model"]} if "model" in options else {}))
    assert options.keys() <= {"accumulate", "model"} or not np.allclose(reference.path[-1], plain.path[-1])
    agree(follow(comm, all_reduce.train, **options), reference, 1e-10)


def test_all_ranks_hold_the_same_bits(follow, comm):
    run = follow(comm, all_reduce.train, dtype="float32")
    assert all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))
    assert run.agree is True

    def diverging(*arguments):
        parameters = all_reduce.train(*arguments)
        parameters[0] += comm.rank == comm.size - 1
        return parameters

    if comm.size > 1:  # and it is seen when they do not
        with pytest.raises(TrainingError, match="do not agree"):
            follow(comm, diverging)


@pytest.mark.parametrize("kind, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_compressed_gradients_lead_close_by(kind, tolerance, follow, alone, comm):
    """Step by step within the rounding of the gradients; the same bits on all ranks; on one rank, no rounding. Of
    float64's bytes a quarter is sent."""
    reference = alone()
    run = follow(comm, all_reduce.train, own={"compress": kind})
    agree(run, reference, tolerance if comm.size > 1 else 1e-10)
    assert all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))
    assert (np.abs(run.path[0] - reference.path[0]).max() > 1e-12) == (comm.size > 1)  # it is rounded
    counted, steps = run.comm.traffic["all_reduce"], len(run.path)
    assert (counted.calls, counted.messages) == (steps, steps * 2 * (comm.size - 1))
    assert comm.allreduce(counted.bytes) == steps * 2 * (comm.size - 1) * run.model.layout.size * 2


@pytest.mark.parametrize("own", [{"compress": "topk:1"}, {"compress": "randomk:1"}], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.in_turn("overlap")
def test_everything_selected_is_no_compression(own, overlap, follow, alone, comm):
    own = own | (overlapped(200) if overlap else {})
    agree(follow(comm, all_reduce.train, model="mlp:7,5", own=own), alone(model="mlp:7,5"), 1e-10)


@pytest.mark.parametrize("compress", ["int8", "qsgd", "terngrad", "sign", "sign:vote", "topk:0.1", "randomk:0.1"])
@pytest.mark.parametrize("more", [{}, {"overlap": True, "bucket_mib": 0}, {"compress_from": 300}], ids=str)
@pytest.mark.in_turn("more")
def test_every_method_trains_and_the_replicas_agree(compress, more, follow, comm):
    run = follow(comm, all_reduce.train, model="mlp:7,5", own={"compress": compress} | more)
    assert all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))
    assert run.agree is True and np.isfinite(run.parameters).all()


@pytest.mark.mpi(min_size=2)
def test_float16_ends_at_65504_and_says_so_where_bfloat16_goes_on(follow, world):
    data = from_arrays(np.full((8, 2), 1e4), np.full(8, 100.0), dtype="float32")
    settings = {"model": "linear", "dtype": "float32", "lr": 1e-12, "optimizer": "sgd", "batch_size": 8, "epochs": 3}
    run = follow(world, all_reduce.train, data, own={"compress": "bfloat16"}, **settings)
    assert np.isfinite(run.progress.train_loss)
    with pytest.raises(TrainingError, match="not finite"):
        follow(world, all_reduce.train, data, own={"compress": "float16"}, **settings)


def overlapped(size, **own):
    """The strategy's arguments for buckets of at least so many bytes."""
    return {"overlap": True, "bucket_mib": size / 2**20} | own


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("size, count", [(1, 3), (200, 2), (2**20, 1)])  # of 119 parameters, layers of 56, 40 and 18
@pytest.mark.in_turn("size", "count")
def test_overlapped_step_by_step_for_every_algorithm_and_size_of_bucket(name, size, count, follow, alone, comm):
    reference = alone(model="mlp:7,5", optimizer="adam")
    options = {"model": "mlp:7,5", "optimizer": "adam", "allreduce": name}
    run = follow(comm, all_reduce.train, own=overlapped(size), **options)
    agree(run, reference, 1e-10)
    assert all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))
    assert run.reported["overlap"]["buckets"] == count
    assert run.comm.traffic["all_reduce"].calls == count * len(run.path)
    hidden = run.reported["hidden_fraction"]
    assert hidden is None if comm.size == 1 else 0 <= hidden <= 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.05}, {"accumulate": 3}, {"batch_size": 2}, {"steps": 5}, {"dtype": "float32"}], ids=str
)
@pytest.mark.in_turn("optimizer")
@pytest.mark.least(4)
def test_overlapped_with_other_options(options, optimizer, follow, alone, comm):
    reference = alone(optimizer=optimizer, **options)
    tolerance = 2e-4 if options.get("dtype") == "float32" else 1e-10
    own = overlapped(1)
    agree(follow(comm, all_reduce.train, own=own, optimizer=optimizer, **options), reference, tolerance)


@pytest.mark.parametrize("kind, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("size", [1, 200])
@pytest.mark.in_turn("size")
@pytest.mark.least(3)
def test_overlapped_in_16_bits(kind, tolerance, size, follow, alone, comm):
    reference = alone(model="mlp:7,5")
    run = follow(comm, all_reduce.train, model="mlp:7,5", own=overlapped(size, compress=kind))
    agree(run, reference, tolerance if comm.size > 1 else 1e-10)
    assert all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))
    residual = run.state.tracked["residual"].array
    assert residual.size == run.model.layout.size
    assert comm.size == 1 or all(residual[part].any() for _, part in run.model.layout.layer_slices)
    sent = comm.allreduce(run.comm.traffic["all_reduce"].bytes)
    assert sent == len(run.path) * 2 * (comm.size - 1) * residual.size * 2


@pytest.mark.parametrize("compress", ["none", "bfloat16", "qsgd", "topk:0.1"])
def test_overlapped_resumed_is_never_stopped_to_the_bit(compress, resumes):
    resumes(4, all_reduce.train, "mlp:7,5", overlapped(1, compress=compress), optimizer="adam")
