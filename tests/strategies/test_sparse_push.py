"""--sparse-push: the same steps as without, and bytes that are just those of what the batches touch."""

import numpy as np
import pytest
from mpi4py import MPI
from paths import agree

from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.store_messages import ANSWER, REQUEST
from hpcdl.parameter_server.store_settings import StoreLayout
from hpcdl.strategies import parameter_server, sequential

pytestmark = pytest.mark.four

ASYNC, SSP = Consistency("async"), Consistency("ssp", 2)
FEATURES, ROWS = 60, 29


def documents(sparse=True, classes=3):
    """29 rows of 60 features, of which each has 4 or so, the first of them often; the first row is empty."""
    random = np.random.default_rng(3)
    x = random.standard_normal((ROWS, FEATURES)) * (random.random((ROWS, FEATURES)) < 4 / (1 + np.arange(FEATURES)) / 5)
    x[0] = 0
    y = random.integers(0, classes, ROWS) if classes else random.standard_normal(ROWS)
    kind = CSR.of if sparse else np.asarray
    return from_arrays(kind(x), y, kind(x[:7]), y[:7], dtype="float64")


@pytest.fixture
def push(serve):
    """A function: train with parameter servers on sparse rows; own: arguments of the strategy."""

    def run(comm, own, data=None, **options):
        options = {"model": "softmax", "optimizer": "sgd", "lr": 0.5, "epochs": 2} | options
        return serve(comm, own, data or documents(), **options)

    return run


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "model, classes, options",
    [
        ("softmax", 3, {}),
        ("logistic", 2, {"optimizer": "adagrad"}),
        ("svm", 2, {"batch_size": 2}),  # fewer rows than workers
        ("linear", 0, {"clip_norm": 0.1}),
        ("mlp:5", 3, {"optimizer": "adagrad", "accumulate": 2}),
        ("mlp:5,4", 3, {"schedule": "step:every=1,factor=0.5"}),
    ],
)
@pytest.mark.parametrize("place", [{"servers": 1}, {"servers": 2}, {"on_workers": True}, {"servers": 1, "delay": 1}])
@pytest.mark.in_turn("place")
@pytest.mark.least(3)
def test_bsp_takes_the_same_steps(model, classes, options, place, push, comm):
    if place.get("servers", 1) < comm.size:
        data = documents(classes=classes)
        plain, keyed = (push(comm, place | more, data, model=model, **options) for more in ({}, {"sparse_push": True}))
        if comm.rank == 0:
            agree(keyed, plain)
            assert keyed.reported["staleness_histogram"] == plain.reported["staleness_histogram"]
        everywhere = comm.allgather(keyed.parameters if keyed.held.works or comm.rank == 0 else None)
        assert all(np.array_equal(each, everywhere[0]) for each in everywhere if each is not None)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("consistency", [ASYNC, SSP, Consistency("ssp", 0)], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.in_turn("optimizer")
def test_one_worker_is_sequential(consistency, optimizer, push, follow, world):
    """The steps are applied one by one, each at its elements alone; under bsp two ranks show no more."""
    settings = {"optimizer": optimizer, "lr": 0.5, "epochs": 2}
    reference = follow(MPI.COMM_SELF, sequential.train, documents(), "softmax", **settings)
    own = {"servers": world.size - 1, "consistency": consistency, "sparse_push": True}
    run = push(world, own, **settings)
    if world.rank == 0:
        agree(run, reference)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    "own", [{"consistency": ASYNC}, {"consistency": SSP}, {"consistency": ASYNC, "on_workers": True}]
)
def test_several_workers_that_do_not_wait(own, push, world):
    """Every push is applied once; steps small enough for any order of them bring the table's loss down."""
    data = documents()
    run = push(world, own | {"sparse_push": True}, data, epochs=6, lr=0.2)
    if world.rank == 0:
        pushes = sum(run.reported["staleness_histogram"])
        assert pushes == len(run.path) * (1 if own["consistency"] == ASYNC else run.workers)
        model, (batch,) = make_model("softmax", (FEATURES,), 3, "float64"), data.batches(0, ROWS, (0, 1))
        first, last = (model.evaluate(each, batch)[0] for each in (model.initialize(run.random), run.parameters))
        assert last < 0.95 * first


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("consistency", [Consistency("bsp"), ASYNC], ids=str)
@pytest.mark.parametrize("model", ["softmax", "mlp:5"])
@pytest.mark.in_turn("model")
def test_bytes_are_those_of_what_the_batches_touch(model, consistency, servers, push, world):
    """Counted from the rows themselves: keys and values of a worker; under async of all of them, which draw batches."""
    if servers >= world.size:
        return
    own = {"servers": servers, "consistency": consistency, "sparse_push": True}
    run, dense = push(world, own, model=model), push(world, own | {"sparse_push": False}, model=model)
    if world.rank > 0:
        return
    made, data = make_model(model, (FEATURES,), 3, "float64"), documents()
    width = made.layers[0].full_shapes["weight"][1]
    layout, workers = StoreLayout(made.size, world.size, servers=servers, block=width), run.workers
    slices = layout.slices
    edges = [(cut.start // width, min(cut.stop, FEATURES * width) // width) for cut in slices]
    tails = [cut.stop - max(cut.start, FEATURES * width) for cut in slices]
    steps, clocked = len(run.path), consistency.clocked

    def sent(rank_of_share, shares):
        """Bytes of the keys and values of all steps of one share."""
        bytes = 0
        for epoch in range(2):
            for batch in data.batches(epoch, 13, (rank_of_share, shares)):
                touched = batch.x.dense().any(axis=0)
                for (first, last), tail in zip(edges, tails, strict=True):
                    rows = np.count_nonzero(touched[first : max(first, last)])
                    bytes += 2 * REQUEST.bytes + 8 * rows + 8 * (rows * width + max(0, tail))
        return bytes

    header = REQUEST.bytes
    found = run.summary["bytes_sent_per_rank"][servers:]
    if clocked:
        assert found == [sent(k, workers) + header * servers for k in range(workers)]
    else:  # each draws its steps, and once more, when none is left
        assert sum(found) == sent(0, 1) + header * (steps + workers) + workers * header * servers
    if clocked and servers == 1:  # answers: values as many as were pushed, and at last all
        values = sum(sent(k, workers) for k in range(workers)) - 8 * sum(
            np.count_nonzero(batch.x.dense().any(axis=0))
            for k in range(workers)
            for epoch in range(2)
            for batch in data.batches(epoch, 13, (k, workers))
        )
        answers = values - 2 * header * steps * workers + ANSWER.bytes * steps * workers
        whole = workers * (ANSWER.bytes + 8 * made.size)
        assert run.summary["bytes_sent_per_rank"][0] == answers + whole
    before = dense.summary["bytes_sent_per_rank"][servers:]
    assert sum(found) < sum(before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_resumed_to_the_bit(optimizer, push, world, mpi_tmp_path):
    own = {"servers": min(2, world.size - 1), "sparse_push": True}
    options = {"optimizer": optimizer, "schedule": "constant", "dtype": "float64"}
    whole = push(world, own, steps=6, **options)
    push(world, own, steps=4, out=str(mpi_tmp_path / "a"), **options)
    again = push(world, own, steps=6, resume=str(mpi_tmp_path / "a"), **options)
    if world.rank == 0:
        assert np.array_equal(again.path, whole.path[4:])


@pytest.mark.parametrize("model", [object(), make_model("gpt:layers=1,width=4,heads=1", (8,), 5)], ids=["own", "gpt"])
def test_a_model_without_a_row_for_each_feature_is_refused(model):
    with pytest.raises(UsageError, match="take a linear model or an mlp"):
        parameter_server.touched_rows(model)
