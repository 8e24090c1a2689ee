"""Every strategy takes the same steps on sparse rows as on the dense rows of the same, on 1 to 4 ranks."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm.gossip.topology import topology
from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.strategies import (
    all_reduce,
    federated,
    fully_sharded,
    gossip,
    grid,
    local_sgd,
    model_parallel,
    parameter_server,
    pipeline,
    sequential,
    tensor_parallel,
)

DEEP = "mlp:12,12,12,12"  # 5 layers
EPOCH = {"steps": 3}  # the last batch has 3 rows, and so none for a fourth rank
CUT = {"model": DEEP, **EPOCH}


def rows(sparse, classes=3, **options):
    """29 rows of 9 features, one in four not zero; the first one is empty, and so is the fifth feature."""
    random = np.random.default_rng(8)
    y = random.integers(0, classes, 29) if classes else random.standard_normal(29)
    x = random.standard_normal((29, 9)) * (random.random((29, 9)) < 0.25)
    x[0] = x[:, 5] = 0
    kind = CSR.of if sparse else np.asarray
    return from_arrays(kind(x), y, kind(x[:11]), y[:11], **{"dtype": "float64", "scale": 0.5} | options)


def agree(follow, comm, train, own=None, data=None, **options):
    """Train on both; the parameters after each step agree, as this rank has them. Returns the run on sparse rows."""
    both = [follow(comm, train, rows(sparse, **(data or {})), own=own, **options) for sparse in (False, True)]
    paths = [run.path for run in both]
    assert len(paths[0]) == len(paths[1])
    measured = (own or {}).get("balance") == "measured"  # a rank's layers are then others in each run
    for step, (dense, sparse) in enumerate(zip(*paths, strict=True) if not measured else ()):
        assert np.abs(dense - sparse).max(initial=0) <= 1e-10 * max(1, np.abs(dense).max(initial=0)), f"step {step}"
    for name in both[0].scores:
        assert both[1].scores[name] == pytest.approx(both[0].scores[name], rel=1e-9)
    assert both[1].agree in (None, True)
    return both[1]


@pytest.mark.parametrize(
    "model, classes",
    [("softmax", 3), ("logistic", 2), ("svm", 2), ("linear", 0), ("mlp:5", 3), ("mlp:5,activation=tanh", 0)],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.in_turn("optimizer")
def test_sequential(model, classes, optimizer, follow):
    options = {"model": model, "optimizer": optimizer, "weight_decay": 0.01}
    run = agree(follow, MPI.COMM_SELF, sequential.train, data={"classes": classes}, **options)
    assert len(run.path) == 12


WHOLE = {
    "all-reduce": (all_reduce.train, {}, EPOCH),
    "all-reduce, accumulate": (all_reduce.train, {}, {"accumulate": 3, **EPOCH}),
    "all-reduce, clipped": (all_reduce.train, {}, {"clip_norm": 0.05, "model": "softmax", **EPOCH}),
    "all-reduce, 2 rows": (all_reduce.train, {}, {"batch_size": 2, "steps": 9}),
    "all-reduce, overlap": (all_reduce.train, {"overlap": True, "bucket_mib": 1e-4}, {"model": "mlp:7,5", **EPOCH}),
    "local SGD": (local_sgd.train, {"sync_every": 2}, EPOCH),
    "federated": (federated.train, {"clients": 5, "fraction": 1.0, "local_epochs": 2, "local_batch": 3}, {"rounds": 3}),
    "fully sharded": (fully_sharded.train, {"stage": 3}, CUT),
    "fully sharded, stage 2": (fully_sharded.train, {"stage": 2}, {"accumulate": 2, **EPOCH}),
    "tensor parallel": (tensor_parallel.train, {}, CUT),
    "model parallel": (model_parallel.train, {}, CUT),
    "model parallel, measured": (model_parallel.train, {"balance": "measured"}, CUT),
    **{
        f"pipeline, {schedule}": (pipeline.train, {"schedule": schedule, "microbatches": 4}, CUT)
        for schedule in ("gpipe", "1f1b", "pipedream")
    },
    "pipeline, recompute": (pipeline.train, {"schedule": "gpipe", "recompute": True}, CUT),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.in_turn("ranks")
def test_on_several_ranks(name, ranks, follow, comm):
    train, own, options = WHOLE[name]
    if "federated" in name:
        options = options | {"optimizer": "sgd", "schedule": "constant"}
    if comm.size == ranks or MPI.COMM_WORLD.size == 1:
        agree(follow, comm, train, own, **options)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["adapt-then-combine", "dpsgd", "gradient-tracking", "defacto"])
def test_gossip(method, follow, world):
    own = {"topology": topology("ring", world.size), "method": method, "phase": 2 if method == "defacto" else 0}
    agree(follow, world, gossip.train, own, batch_size=8, steps=4)


@pytest.mark.parametrize("own", [{"servers": 1}, {"servers": 2}, {"on_workers": True}, {"delay": 1}], ids=str)
def test_parameter_server(own, follow, world):
    workers = world.size if own.get("on_workers") else world.size - own.get("servers", 1)
    if workers > 0:
        agree(follow, world, parameter_server.train, own | {"consistency": BSP}, workers=workers, **EPOCH)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("consistency", [Consistency("async"), Consistency("ssp", 2)], ids=str)
def test_parameter_server_with_one_worker(consistency, follow, world):
    own = {"servers": world.size - 1, "consistency": consistency}
    agree(follow, world, parameter_server.train, own, workers=1, **EPOCH)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 3), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.in_turn("stage")
def test_grid(shape, stage, follow, comm):
    own = {"grid": dict(zip(("data", "pipeline", "tensor"), shape, strict=True)), "stage": stage}
    if comm.size == math.prod(shape):
        agree(follow, comm, grid.train, own, **CUT)
