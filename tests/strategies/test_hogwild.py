"""HOGWILD!: one thread is sequential SGD to the bit, joined rounds are local SGD, what is shared needs no messages."""

import numpy as np
import pytest
from mpi4py import MPI
from paths import agree

from hpcdl.comm.gossip.topology import topology
from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.errors import UsageError
from hpcdl.kernels import hogwild as kernels
from hpcdl.models import make_model
from hpcdl.random import Random
from hpcdl.runs import Replicas
from hpcdl.strategies import gossip, hogwild, local_sgd, sequential

ROUND, EXAMPLES = 7, 29  # so that the last round of an epoch has one example
ENDS = [*range(ROUND, EXAMPLES, ROUND), EXAMPLES]  # examples by the end of each round of an epoch
MODELS = {"linear": 0, "logistic": 2, "svm": 2, "softmax": 3}  # and the classes of its data
SGD = {"optimizer": "sgd", "schedule": "constant"}


def some(model, dtype="float64", sparse=True, rows=EXAMPLES, features=40, held="float64", scale=1.0):
    """Rows of which 6 of 40 elements are not zero, one of them empty."""
    random = np.random.default_rng(7)
    x = random.standard_normal((rows, features)) * (random.random((rows, features)) < 0.15)
    x[3] = 0
    x = (8 * x).astype(held)
    classes = MODELS[model]
    y = random.integers(0, classes, rows) if classes else random.standard_normal((rows, 2))
    return from_arrays(CSR.of(x) if sparse else x, y, classes=classes, dtype=dtype, scale=scale)


def at_ends(path):
    """Of a path with a step for each example, what is there at the ends of rounds."""
    epochs = len(path) // EXAMPLES
    return [path[epoch * EXAMPLES + end - 1] for epoch in range(epochs) for end in ENDS]


@pytest.fixture
def trained(follow):
    """A function: follow(hogwild.train) on one rank or `comm`, in rounds of 7 examples."""

    def run(data, model, own, comm=MPI.COMM_SELF, train=hogwild.train, **options):
        options = SGD | {"batch_size": ROUND, "epochs": 3, "dtype": data.dtype.name, "lr": 0.01} | options
        return follow(comm, train, data, model, own, **options)

    return run


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize("sparse", [True, False])
def test_one_thread_in_all_has_nobody_to_exchange_with(sparse, every, trained):
    data = some("softmax", "float32", sparse)
    wanted = trained(data, "softmax", {}, optimizer="adagrad", epochs=1)
    found = trained(data, "softmax", {"exchange_every": every}, optimizer="adagrad", epochs=1)
    agree(found, wanted, 0)
    assert np.array_equal(*(next(iter(each.optimizer.state.values())) for each in (found, wanted)))
    assert found.summary["exchange_every"] == every and wanted.summary["exchange_every"] == 0
    assert found.summary["repeatable"] and found.summary["collisions"] == 0
    held = [each.summary["memory_bytes_per_rank"] for each in (found, wanted)]
    assert [each["parameters"] for each in held] == [held[1]["parameters"]] * 2


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("locking", list(kernels.LOCKINGS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.in_turn("optimizer", "locking", "dtype")
def test_one_thread_on_sparse_rows_is_sequential_sgd_to_the_bit(model, dtype, locking, optimizer, trained):
    data = some(model, dtype)
    wanted = trained(data, model, {}, train=sequential.train, batch_size=1, optimizer=optimizer)
    found = trained(data, model, {"locking": locking}, optimizer=optimizer)
    agree(found.path, at_ends(wanted.path), 0)
    rounds = [sum(wanted.own_losses[i] for i in range(a, b)) for a, b in parts(wanted.own_losses)]
    assert found.own_losses == pytest.approx(rounds, rel=1e-6 if dtype == "float32" else 1e-12)
    assert found.summary["updates"] == 3 * EXAMPLES and found.summary["repeatable"]
    assert found.summary["collisions"] == found.summary["update_staleness"]["max"] == 0
    for name, vector in wanted.optimizer.state.items():
        agree([found.optimizer.state[name]], [vector], 0)


def parts(losses):
    """Where each round begins and ends among the single examples of several epochs."""
    ends = [epoch * EXAMPLES + end for epoch in range(len(losses) // EXAMPLES) for end in ENDS]
    return zip([0, *ends[:-1]], ends, strict=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.in_turn("optimizer", "sparse")
def test_one_thread_is_sequential_sgd_with_as_many_examples_to_an_update(model, batch, sparse, optimizer, trained):
    data, options = some(model, sparse=sparse), {"optimizer": optimizer, "weight_decay": 0.0 if sparse else 0.01}
    wanted = trained(data, model, {}, train=sequential.train, batch_size=batch, **options)
    found = trained(data, model, {"batch": batch}, batch_size=10, **options)
    each = 10 // batch  # updates of a round
    steps = len(wanted.path) // 3
    ends = [epoch * steps + min(end, steps) - 1 for epoch in range(3) for end in range(each, steps + each, each)]
    agree(found.path, [wanted.path[end] for end in ends], 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("held, scale, standard", [("uint8", 0.25, False), ("float64", 2.0, True)])
def test_dense_rows_of_any_type_are_scaled_and_standardized(held, scale, standard, trained):
    random = np.random.default_rng(1)
    x, y = random.integers(0, 9, (EXAMPLES, 6)).astype(held), random.standard_normal(EXAMPLES)
    data = from_arrays(x, y, dtype="float64", scale=scale, standardize=standard)
    wanted = trained(data, "linear", {}, train=sequential.train, batch_size=1)
    agree(trained(data, "linear", {}).path, at_ends(wanted.path), 1e-12)


def test_sparse_rows_of_another_type_are_converted(trained):
    data = some("logistic", held="int8", scale=0.5)
    wanted = trained(data, "logistic", {}, train=sequential.train, batch_size=1)
    agree(trained(data, "logistic", {}).path, at_ends(wanted.path), 0)


def by_hand(data, model, rate, decay, batch, epochs, adagrad):
    """HOGWILD! with one thread, written down: the coordinates that a batch touches, and only these."""
    rows, n = data.train.source, data.examples
    x, outputs = rows.x.dense(), {"softmax": 3, "linear": 2}[model]
    touches = np.append((x != 0).sum(axis=0), n)
    made = make_model(model, data.features, data.classes, "float64", outputs=data.outputs, sparse=True)
    w = made.initialize(Random(0)).reshape(-1, outputs)
    s, path = np.zeros_like(w), []
    for epoch in range(epochs):
        _, source, _ = data.in_place(epoch)
        for first in range(0, n, batch):
            g, times = np.zeros_like(w), np.zeros(len(w))
            chosen = source[first : first + batch]
            for i in chosen:
                row = np.append(x[i], 1.0)
                z = row @ w
                if model == "linear":
                    slope = z - rows.y[i]
                else:
                    slope = np.exp(z - z.max()) / np.exp(z - z.max()).sum() - np.eye(outputs)[rows.y[i]]
                g += np.outer(row, slope)
                times += row != 0
            d = g / len(chosen) + (decay * n / np.maximum(1, touches) * times / len(chosen))[:, None] * w
            if adagrad:
                s += d * d
                d = np.divide(d, np.sqrt(s) + 1e-10)
            w = w - rate * d
            path.append(w.reshape(-1).copy())
    return path


@pytest.mark.parametrize("adagrad", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("model", ["linear", "softmax"])
@pytest.mark.in_turn("adagrad")
def test_one_thread_is_the_loop_by_hand_with_a_penalty_on_what_is_touched(model, batch, adagrad, trained):
    data = some(model)
    rule = "adagrad" if adagrad else "sgd"
    found = trained(data, model, {"batch": batch}, weight_decay=0.05, batch_size=batch, epochs=2, optimizer=rule)
    agree(found.path, by_hand(data, model, 0.01, 0.05, batch, 2, adagrad), 1e-12)


def test_the_penalties_of_an_epoch_add_up_to_that_of_the_whole(trained):
    """With gradients of 0, a small rate and one epoch, w shrinks by rate * lambda * n, whatever touches it."""
    random = np.random.default_rng(0)
    x = (random.random((EXAMPLES, 5)) < 0.4) * 1e-9
    data = from_arrays(CSR.of(x), np.zeros(EXAMPLES), classes=0, dtype="float64")
    found = trained(data, "linear", {}, weight_decay=1.0, lr=1e-6, epochs=1)
    start = make_model("linear", (5,), 0, "float64", sparse=True).initialize(found.random)
    assert 1 - found.path[-1][:5] / start[:5] == pytest.approx(EXAMPLES * 1e-6, rel=1e-4)


@pytest.mark.parametrize("locking", list(kernels.LOCKINGS))
@pytest.mark.parametrize("sparse", [True, False])
def test_threads_do_each_example_once(sparse, locking, trained):
    data = some("softmax", sparse=sparse)
    found = trained(data, "softmax", {"threads": 3, "locking": locking}, epochs=4)
    assert found.summary["updates"] == 4 * EXAMPLES and not found.summary["repeatable"]
    assert found.examples == 4 * EXAMPLES and found.summary["threads"] == 3
    loss = trained(data, "softmax", {}, epochs=4).summary["train_loss"]
    assert 0 < found.summary["train_loss"] < 2 * loss + 1


@pytest.fixture
def many():
    """20,000 rows of 2 to 4 of 8 features: threads meet all the time."""
    random = np.random.default_rng(2)
    x = random.random((20_000, 8)) * (random.random((20_000, 8)) < 0.4)
    return from_arrays(CSR.of(x), random.integers(0, 2, 20_000), dtype="float64")


@pytest.mark.parametrize("locking", ["striped", "global"])
def test_under_locks_nobody_writes_between_reading_and_writing(locking, many, trained):
    found = trained(many, "logistic", {"threads": 2, "locking": locking}, batch_size=10_000, epochs=4)
    assert found.summary["updates"] == 80_000 and found.summary["updates_sampled"] >= 1_250
    assert found.summary["collisions"] == 0
    if locking == "global":
        assert found.summary["update_staleness"] == {"mean": 0, "max": 0, "histogram": [1250]}


@pytest.mark.parametrize("threads", [1, 2])
def test_the_updates_of_the_papers_proposition_suffice(threads, trained):
    """Recht et al., proposition 4.1: its rate and its number of updates bring f within eps of its least.
    Edges are the features of an example and the bias, so that Delta = rho = 1. tau = threads - 1."""
    random, rows, penalty, eps, share = np.random.default_rng(3), 20_000, 0.5, 0.01, 0.9
    at = random.random((rows, 8)).argsort(axis=1)[:, :3]
    x = np.zeros((rows, 8))
    np.put_along_axis(x, at, random.choice([-0.5, 0.5], (rows, 3)), axis=1)
    y = (x @ [3, -2, 2, -1, 1, -3, 2, 1] + 0.5 > random.logistic(size=rows)).astype(int)
    edges, n_by_d = np.column_stack([x, np.ones(rows)]), rows / np.append((x != 0).sum(axis=0), rows)

    def gradient(w):
        slope = 1 / (1 + np.exp(-edges @ w)) - y
        return edges.T @ slope / rows + penalty * w

    def value(w):
        return np.logaddexp(0, (1 - 2 * y) * (edges @ w)).mean() + penalty / 2 * w @ w

    lipschitz, best = 1.75 / 4 + penalty, np.zeros(9)
    for _ in range(200):
        best = best - gradient(best) / lipschitz
    start = make_model("logistic", (8,), 2, "float64", sparse=True).initialize(Random(0))
    far = np.linalg.norm(start - best)  # no update goes farther away
    m = np.sqrt(1.75) + penalty * n_by_d.max() * (far + np.linalg.norm(best))  # the largest gradient of an example
    omega, tau, delta, rho = 4, threads - 1, 1, 1
    cost = 2 * lipschitz * m**2 * omega * (1 + 6 * rho * tau + 6 * tau**2 * omega * delta**0.5)
    updates = cost * np.log(lipschitz * far**2 / eps) / (penalty**2 * share * eps)
    own = {"threads": threads, "locking": "none"}
    options = {"batch_size": rows, "epochs": int(np.ceil(updates / rows)), "weight_decay": penalty}
    data = from_arrays(CSR.of(x), y, classes=2, dtype="float64")
    found = trained(data, "logistic", own, lr=share * eps * penalty / cost, **options)
    assert max(np.linalg.norm(found.path - best, axis=1)) <= far
    assert value(found.path[-1]) - value(best) <= eps < (value(start) - value(best)) / 5


def test_in_turn_an_update_misses_those_of_all_other_threads_at_most(many, trained):
    found = trained(many, "logistic", {"threads": 2, "locking": "round-robin"}, batch_size=10_000, epochs=1)
    assert found.summary["update_staleness"]["max"] <= 1  # one other thread


def constant(rows):
    """Each example adds the rate to the one weight and to the bias: the slope of the hinge below its margin."""
    return from_arrays(CSR.of(np.ones((rows, 1))), np.ones(rows, int), classes=2, dtype="float64")


def sums(found, path=None):
    """How many examples have been added, of rate 2**-20, by the end of each round."""
    w = make_model("svm", (1,), 2, "float64", sparse=True).initialize(found.random)
    return [((at - w) * 2**20).tolist() for at in (found.path if path is None else path)]


@pytest.mark.parametrize("every", [0, 1, 7, 1000])
def test_no_update_is_lost_that_is_atomic_or_exchanged(every, trained):
    own = {"threads": 3, "exchange_every": every, "locking": "none" if every else "atomic"}
    found = trained(constant(20_000), "svm", own, batch_size=20_000, epochs=1, lr=2.0**-20)
    assert sums(found) == [[20_000] * 2] and found.summary["updates"] == 20_000


@pytest.mark.parametrize("every", [1, 2, 1000])
def test_threads_with_different_numbers_of_updates_end_a_round_with_an_exchange(every, trained):
    """Of 7 examples 3, 2 and 2; of the last one of an epoch 1, 0 and 0."""
    own = {"threads": 3, "exchange_every": every}
    found = trained(constant(EXAMPLES), "svm", own, epochs=2, lr=2.0**-20)
    wanted = [epoch * EXAMPLES + end for epoch in range(2) for end in ENDS]
    assert sums(found) == [[each] * 2 for each in wanted]
    assert found.summary["collisions"] is None and sum(found.summary["update_staleness"]["histogram"]) > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_threads_that_exchange_do_each_example_once_and_learn(optimizer, many, trained):
    own = {"threads": 2, "exchange_every": 16}
    options = {"batch_size": 10_000, "epochs": 4, "optimizer": optimizer}
    found, alone = trained(many, "logistic", own, **options), trained(many, "logistic", {}, **options)
    assert found.examples == found.summary["updates"] == 80_000 and not found.summary["repeatable"]
    assert found.summary["train_loss"] == pytest.approx(alone.summary["train_loss"], rel=0.1)
    extra = {kind: 2 * 2 * 9 * 8 for kind in ("parameters", *(["optimizer"] if optimizer == "adagrad" else []))}
    for kind, count in extra.items():
        more = [each.summary["memory_bytes_per_rank"][kind][0] for each in (found, alone)]
        assert more[0] - more[1] == count


def test_resumed_between_exchanges(trained, tmp_path):
    own = {"threads": 3, "exchange_every": 2}
    options = {"lr": 2.0**-20, "out": str(tmp_path / "a")}
    trained(constant(EXAMPLES), "svm", own, steps=3, **options)
    again = trained(constant(EXAMPLES), "svm", own, steps=7, lr=2.0**-20, resume=str(tmp_path / "a"))
    assert sums(again) == [[each] * 2 for each in (28, 29, 36, 43)] and again.summary["updates"] == 43


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("sparse", [True, False])
def test_resumed_to_the_bit_with_one_thread(optimizer, sparse, trained, tmp_path):
    data = some("softmax", "float32", sparse)
    whole = trained(data, "softmax", {}, steps=8, optimizer=optimizer)
    trained(data, "softmax", {}, steps=3, optimizer=optimizer, out=str(tmp_path / "a"))
    again = trained(data, "softmax", {}, steps=8, optimizer=optimizer, resume=str(tmp_path / "a"))
    agree(again.path, whole.path[3:], 0)
    assert again.summary["updates"] == whole.summary["updates"] == again.optimizer.step
    for name, vector in whole.optimizer.state.items():
        assert np.array_equal(again.optimizer.state[name], vector)


def test_rules_that_move_other_coordinates_are_refused(trained):
    for options in ({"optimizer": "momentum"}, {"clip_norm": 1.0}):
        with pytest.raises(UsageError, match="HOGWILD!"):
            trained(some("softmax"), "softmax", {}, **options)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.four
def test_one_batch_to_a_round_is_local_sgd(every, comm, trained):
    data = some("softmax", rows=48)
    options = {"comm": comm, "batch_size": 2 * comm.size, "steps": 48 // (2 * comm.size)}
    wanted = trained(data, "softmax", {"sync_every": every}, train=local_sgd.train, **options)
    found = trained(data, "softmax", {"batch": 2, "join_every": every}, **options)
    agree(found, wanted, 1e-12)
    assert found.summary is None or found.summary["vectors"] == comm.size
    sent = [comm.allgather(each.comm.traffic["all_reduce"].bytes) for each in (found, wanted)]
    assert sent[0] == sent[1] and (sum(sent[0]) > 0) == (comm.size > 1)


@pytest.mark.four
def test_joined_by_gossip_on_the_complete_graph_is_joined_by_averages(comm, trained):
    data = some("logistic", rows=48)
    options = {"comm": comm, "batch_size": comm.size, "epochs": 1}
    wanted = trained(data, "logistic", {"join_every": 2}, **options)
    own = {"join": "gossip", "join_every": 2, "topology": lambda size: topology("complete", size)}
    found = trained(data, "logistic", own, **options)
    agree(found, wanted, 1e-12)


@pytest.mark.mpi(min_size=3)
@pytest.mark.four
def test_joined_by_gossip_on_a_ring_is_gossip(world, trained):
    data = some("logistic", rows=48)
    ring = topology("ring", world.size)
    options = {"comm": world, "batch_size": world.size, "epochs": 1}
    wanted = trained(data, "logistic", {"topology": ring}, train=gossip.train, **options)
    found = trained(data, "logistic", {"join": "gossip", "topology": lambda size: ring}, **options)
    agree(found.own_path, wanted.own_path, 1e-12)


@pytest.mark.parametrize("locking", list(kernels.LOCKINGS))
@pytest.mark.four
def test_ranks_of_a_node_share_a_vector_without_messages(locking, comm, trained):
    data = some("softmax", rows=48)
    own = {"shared": True, "threads": 2, "locking": locking}
    found = trained(data, "softmax", own, comm=comm, batch_size=16, epochs=3)
    assert not isinstance(found.held, Replicas)
    assert found.comm.traffic.bytes == found.comm.traffic.messages == 0
    assert found.agree is True and found.optimizer.step == 3 * 48
    vectors = comm.allgather(found.parameters)
    assert all(np.array_equal(each, vectors[0]) for each in vectors)
    assert found.progress.train_loss < np.log(3)  # it has learned, in whatever order the threads met
    assert found.summary is None or locking != "global" or found.summary["collisions"] == 0


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.in_turn("threads")
@pytest.mark.four
def test_ranks_of_a_node_exchange_without_messages_and_lose_nothing(threads, every, comm, trained):
    own = {"shared": True, "threads": threads, "exchange_every": every}
    found = trained(constant(48), "svm", own, comm=comm, batch_size=16, epochs=2, lr=2.0**-20)
    assert sums(found, [found.parameters]) == [[96] * 2] and found.optimizer.step == 96
    assert found.comm.traffic.bytes == found.comm.traffic.messages == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.four
@pytest.mark.parametrize("shared", [True, False])
def test_resumed_on_several_ranks(shared, world, trained, mpi_tmp_path):
    data, own = some("softmax", "float32", rows=48), {"shared": shared, "locking": "global"}
    options = {"comm": world, "batch_size": 12, "optimizer": "adagrad"}
    first = trained(data, "softmax", own, steps=4, out=str(mpi_tmp_path / "a"), **options)
    again = trained(data, "softmax", own, steps=8, resume=str(mpi_tmp_path / "a"), **options)
    assert again.step == 8 and len(again.path) == 4 and again.optimizer.step == 96 == 2 * first.optimizer.step
    if not shared:
        whole = trained(data, "softmax", own, steps=8, **options)
        agree(again.path, whole.path[4:], 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.four
def test_one_worker_on_servers_is_one_thread_alone(world, trained):
    data, own = some("softmax"), {"servers": world.size - 1}
    found = trained(data, "softmax", own, comm=world, train=hogwild.train_on_servers, workers=1)
    if world.rank == 0:
        agree(found, trained(data, "softmax", {}), 1e-12)
        assert found.summary["updates"] == 3 * EXAMPLES and found.summary["join"] == "servers"


@pytest.mark.mpi(min_size=3)
@pytest.mark.four
@pytest.mark.parametrize("every", [0, 3])
def test_workers_on_servers_do_each_round_once(every, world, trained):
    data, own = some("softmax"), {"threads": 2, "exchange_every": every}
    found = trained(data, "softmax", own, comm=world, train=hogwild.train_on_servers, workers=world.size - 1)
    if world.rank == 0:
        assert found.examples == found.summary["updates"] == 3 * EXAMPLES
