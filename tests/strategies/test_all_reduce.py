"""All-reduce SGD on N ranks takes the very steps of sequential SGD at the same batch."""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm import node_memory
from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.data import from_arrays, open_data
from hpcdl.errors import TrainingError
from hpcdl.models.model import unwrapped
from hpcdl.strategies import all_reduce, sequential

pytestmark = pytest.mark.four

OPTIMIZERS = ["sgd", "momentum", "nesterov", "adam", "adamw"]


def agree(run, reference, tolerance):
    assert len(run.path) == len(reference.path) > 0
    for step, (mine, wanted) in enumerate(zip(run.path, reference.path, strict=True)):
        scale = max(1, np.abs(wanted).max())
        assert np.abs(mine - wanted).max() <= tolerance * scale, f"step {step}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.in_turn("optimizer")
def test_step_by_step_for_every_algorithm_and_optimizer(name, optimizer, follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, optimizer=optimizer)
    assert len(reference.path) == 4 * 3

    def body(comm):
        agree(follow(comm, all_reduce.train, optimizer=optimizer, allreduce=name), reference, 1e-10)

    each_group(body)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", ["shared", "hierarchical", "auto", "recursive"])
@pytest.mark.in_turn("nodes")
def test_step_by_step_where_vectors_are_not_short(name, nodes, follow, each_group, monkeypatch):
    if name == "shared" and nodes == 2:
        return  # refused, see its own test
    monkeypatch.setattr(node_memory, "ranks_of_node", lambda comm: comm.Split(comm.rank % nodes, comm.rank))
    reference = follow(MPI.COMM_SELF, sequential.train, model="mlp:900")  # 9,003 parameters, 72 kB

    def body(comm):
        agree(follow(comm, all_reduce.train, model="mlp:900", allreduce=name), reference, 1e-10)

    each_group(body)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_float32_to_rounding(optimizer, follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, optimizer=optimizer, dtype="float32")

    def body(comm):
        agree(follow(comm, all_reduce.train, optimizer=optimizer, dtype="float32"), reference, 2e-4)

    each_group(body, least=4)


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
def test_with_other_options(options, follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, **options)
    plain = follow(MPI.COMM_SELF, sequential.train, **({"model": options["model"]} if "model" in options else {}))
    assert options.keys() <= {"accumulate", "model"} or not np.allclose(reference.path[-1], plain.path[-1])

    def body(comm):
        agree(follow(comm, all_reduce.train, **options), reference, 1e-10)

    each_group(body, least=4)


def test_accumulation_changes_nothing_but_memory(follow):
    whole = follow(MPI.COMM_SELF, sequential.train)
    agree(follow(MPI.COMM_SELF, sequential.train, accumulate=4), whole, 1e-12)


@pytest.mark.parametrize("options", [{}, {"augment": "shift:1"}, {"placement": "streamed"}], ids=str)
def test_on_digits_with_every_way_to_hold_and_change_the_rows(options, follow, world):
    def data(comm):
        return open_data("digits", comm=comm, dtype="float64", seed=3, **options)

    settings = {"seed": 3, "batch_size": 100, "epochs": 1, "model": "mlp:16"}
    reference = follow(MPI.COMM_SELF, sequential.train, data(MPI.COMM_SELF), **settings)
    mine = data(world)
    run = follow(world, all_reduce.train, mine, **settings)
    agree(run, reference, 1e-10)
    mine.close()


def test_the_losses_of_all_ranks_are_the_loss_of_the_batch(follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train)

    def body(comm):
        run = follow(comm, all_reduce.train)
        total = np.array(run.own_losses)
        comm.Allreduce(MPI.IN_PLACE, total)
        assert np.allclose(total, reference.own_losses, rtol=1e-12)

    each_group(body)


def test_all_ranks_hold_the_same_bits(follow, each_group):
    def body(comm):
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

    each_group(body)


@pytest.mark.parametrize("kind, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_compressed_gradients_lead_close_by(kind, tolerance, follow, each_group):
    """Step by step within the rounding of the gradients; the same bits on all ranks; on one rank, no rounding."""
    reference = follow(MPI.COMM_SELF, sequential.train)

    def body(comm):
        run = follow(comm, all_reduce.train, own={"compress": kind})
        agree(run, reference, tolerance if comm.size > 1 else 1e-10)
        assert all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))
        assert (np.abs(run.path[0] - reference.path[0]).max() > 1e-12) == (comm.size > 1)  # it is rounded

    each_group(body)


def test_compressed_sends_what_theory_says(follow, each_group):
    def body(comm):
        run = follow(comm, all_reduce.train, own={"compress": "bfloat16"})
        size, steps, counted = run.model.layout.size, len(run.path), run.comm.traffic["all_reduce"]
        assert counted.calls == steps and counted.messages == steps * 2 * (comm.size - 1)
        assert comm.allreduce(counted.bytes) == steps * 2 * (comm.size - 1) * size * 2  # a quarter of float64's

    each_group(body)


def test_digits_are_learned_as_well_in_16_bits(follow, world):
    def final(own):
        data = open_data("digits", comm=world, dtype="float32", seed=1)
        run = follow(world, all_reduce.train, data, "mlp:32", own, dtype="float32", seed=1, batch_size=32, epochs=5)
        data.close()
        return run

    exact = final({})
    assert exact.progress.train_loss < 0.25
    for kind in ("float16", "bfloat16"):
        rounded = final({"compress": kind})
        assert abs(rounded.progress.train_loss - exact.progress.train_loss) < 0.005
        assert abs(rounded.scores["test_loss"] - exact.scores["test_loss"]) < 0.01


@pytest.mark.mpi(min_size=2)
def test_float16_ends_at_65504_and_says_so_where_bfloat16_goes_on(follow, world):
    data = from_arrays(np.full((8, 2), 1e4), np.full(8, 100.0), dtype="float32")
    settings = {"model": "linear", "dtype": "float32", "lr": 1e-12, "optimizer": "sgd", "batch_size": 8, "epochs": 3}
    assert np.isfinite(
        follow(world, all_reduce.train, data, own={"compress": "bfloat16"}, **settings).progress.train_loss
    )
    with pytest.raises(TrainingError, match="not finite"):
        follow(world, all_reduce.train, data, own={"compress": "float16"}, **settings)


def overlapped(size, **own):
    """The strategy's arguments for buckets of at least so many bytes."""
    return {"overlap": True, "bucket_mib": size / 2**20} | own


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("size, count", [(1, 3), (200, 2), (2**20, 1)])  # of 119 parameters, layers of 56, 40 and 18
@pytest.mark.in_turn("size", "count")
def test_overlapped_step_by_step_for_every_algorithm_and_size_of_bucket(name, size, count, follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, model="mlp:7,5", optimizer="adam")

    def body(comm):
        options = {"model": "mlp:7,5", "optimizer": "adam", "allreduce": name}
        run = follow(comm, all_reduce.train, own=overlapped(size), **options)
        agree(run, reference, 1e-10)
        assert all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))
        assert run.reported["overlap"]["buckets"] == count
        assert run.comm.traffic["all_reduce"].calls == count * len(run.path)
        hidden = run.reported["hidden_fraction"]
        assert hidden is None if comm.size == 1 else 0 <= hidden <= 1

    each_group(body)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.05}, {"accumulate": 3}, {"batch_size": 2}, {"steps": 5}, {"dtype": "float32"}],
    ids=str,
)
@pytest.mark.in_turn("optimizer")
def test_overlapped_with_other_options(options, optimizer, follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, optimizer=optimizer, **options)
    tolerance = 2e-4 if options.get("dtype") == "float32" else 1e-10

    def body(comm):
        own = overlapped(1)
        agree(follow(comm, all_reduce.train, own=own, optimizer=optimizer, **options), reference, tolerance)

    each_group(body, least=4)


@pytest.mark.parametrize("name", ["shared", "auto", "mpi"])
def test_overlapped_where_vectors_are_not_short(name, follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, model="mlp:900,20")  # 24,383 parameters, 191 kB

    def body(comm):
        agree(follow(comm, all_reduce.train, model="mlp:900,20", allreduce=name, own=overlapped(1)), reference, 1e-10)

    each_group(body, least=3)


@pytest.mark.parametrize("kind, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("size", [1, 200])
@pytest.mark.in_turn("size")
def test_overlapped_in_16_bits(kind, tolerance, size, follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, model="mlp:7,5")

    def body(comm):
        run = follow(comm, all_reduce.train, model="mlp:7,5", own=overlapped(size, compress=kind))
        agree(run, reference, tolerance if comm.size > 1 else 1e-10)
        assert all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))
        residual = run.state.tracked["residual"].array
        assert residual.size == run.model.layout.size
        assert comm.size == 1 or all(residual[part].any() for _, part in run.model.layout.layer_slices)
        sent = comm.allreduce(run.comm.traffic["all_reduce"].bytes)
        assert sent == len(run.path) * 2 * (comm.size - 1) * residual.size * 2

    each_group(body, least=3)


@pytest.mark.parametrize("compress", ["none", "bfloat16"])
def test_overlapped_resumed_is_never_stopped_to_the_bit(compress, follow, world, tmp_path):
    folder, own = Path(world.bcast(tmp_path)), overlapped(1, compress=compress)
    options = {"model": "mlp:7,5", "optimizer": "adam", "schedule": "constant", "dtype": "float32"}
    whole = follow(world, all_reduce.train, own=own, steps=11, **options)
    follow(world, all_reduce.train, own=own, steps=4, out=str(folder / "a"), **options)
    more = options | {"steps": 11, "resume": str(folder / "a")}
    again = follow(world, all_reduce.train, own=own, **more)
    assert np.array_equal(again.path, whole.path[4:])
    assert compress == "none" or np.array_equal(
        again.state.tracked["residual"].array, whole.state.tracked["residual"].array
    )
    for other in (overlapped(200, compress=compress), {"compress": compress}):  # goes on, to rounding
        agree(follow(world, all_reduce.train, own=other, **more), again, 1e-4 if compress == "none" else 2e-2)


def test_overlapped_buckets_start_while_the_last_part_is_computed(follow, each_group):
    def body(bare):
        started = []

        def train(comm, model, *arguments, **own):
            inner, counted = unwrapped(model), comm.traffic["all_reduce"]
            compute = inner.loss_and_gradient

            def watched(*arguments):
                before = counted.calls
                loss = compute(*arguments)
                started.append(counted.calls - before)
                return loss

            inner.loss_and_gradient = watched
            return all_reduce.train(comm, model, *arguments, **own)

        run = follow(bare, train, model="mlp:7,5", own=overlapped(1), accumulate=3, epochs=1, allreduce="ring")
        assert started[-9:] == [0, 0, 3] * 3 and len(run.path) == 3
        assert not any(started[:-9])  # those of the trial are not counted

    each_group(body)


def test_overlapped_with_a_model_that_reports_nothing_or_a_part(follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, model="mlp:7,5")

    def train(starts):
        def silenced(comm, model, *arguments, **own):
            compute = model.loss_and_gradient

            def quiet(parameters, batch, gradient, on_ready=None):
                def some(part):
                    if part.start in starts:
                        on_ready(part)

                return compute(parameters, batch, gradient, on_ready and some)

            model.loss_and_gradient = quiet
            return all_reduce.train(comm, model, *arguments, **own)

        return silenced

    def body(comm):
        for starts in ((), (56,), (0,), (0, 96)):  # layers begin at 0, 56 and 96
            agree(follow(comm, train(starts), model="mlp:7,5", own=overlapped(1)), reference, 1e-10)

    each_group(body, least=4)


def test_the_ring_sends_what_theory_says(follow, each_group):
    def body(comm):
        run = follow(comm, all_reduce.train, allreduce="ring")
        size, steps = run.model.layout.size, len(run.path)
        counted = run.comm.traffic["all_reduce"]
        assert counted.calls == steps and counted.messages == steps * 2 * (comm.size - 1)
        total = comm.allreduce(counted.bytes)
        assert total == steps * 2 * (comm.size - 1) * size * 8
        assert run.comm.traffic["broadcast"].calls == 1

    each_group(body)
