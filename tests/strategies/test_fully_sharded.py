"""Fully sharded training: steps are those of sequential SGD at every stage; what is sent and what is held, exactly."""

import pytest

from hpcdl.chunks import chunk
from hpcdl.strategies import all_reduce, fully_sharded

ADAM = "adam:eps=0.001"  # what is 0 but for rounding makes no large steps
MUON = "muon:eps=0.001"
MLP, LENGTHS = "mlp:12,7", (84, 91, 24)  # parameters of each layer
GPT = "gpt:layers=1,width=8,heads=2,context=12"
LLAMA = "llama:layers=1,width=8,heads=4,kv-heads=2,context=12,units=12"
TABLE = 7 * 8  # the tied tensor
STAGES = 1, 2, 3


def own_of(lengths, rank, size):
    """How many of the values of each unit a rank owns."""
    return [chunk(n, size, rank).stop - chunk(n, size, rank).start for n in lengths]


@pytest.mark.parametrize(
    "model, own, options",
    [
        (MLP, {"stage": 1}, {"optimizer": ADAM}),
        (MLP, {"stage": 2}, {"optimizer": "sgd", "accumulate": 3}),
        (MLP, {"stage": 3}, {"clip_norm": 0.05, "accumulate": 4}),
        (MLP, {"stage": 1, "gather": "broadcast"}, {"clip_norm": 0.05}),
        (MLP, {"stage": 2, "gather": "broadcast"}, {"weight_decay": 0.1}),
        (MLP, {"stage": 3, "gather": "broadcast"}, {"optimizer": ADAM}),
        ("softmax", {"stage": 3, "gather": "broadcast"}, {"accumulate": 2}),  # one layer: the others own nothing
        ("mlp:1", {"stage": 3}, {"batch_size": 2}),  # fewer examples than ranks, tensors of one value
        (GPT, {"stage": 1}, {"clip_norm": 0.1}),
        (GPT, {"stage": 2}, {"optimizer": ADAM, "allreduce": "naive"}),
        (GPT, {"stage": 3}, {"optimizer": ADAM, "clip_norm": 0.1, "accumulate": 2}),
        (f"{GPT},head=own", {"stage": 3}, {"batch_size": "full"}),
        (GPT, {"stage": 3, "gather": "broadcast"}, {}),
        *((LLAMA, {"stage": stage}, {"optimizer": ADAM}) for stage in STAGES),
        (GPT, {"stage": 1}, {"optimizer": MUON, "weight_decay": 0.1, "lr": 0.02}),
        (MLP, {"stage": 3, "gather": "broadcast"}, {"optimizer": MUON, "clip_norm": 0.05, "lr": 0.02}),
    ],
    ids=str,
)
def test_steps_are_those_of_sequential_sgd(model, own, options, cut, world):
    cut(world, fully_sharded.train, own, model, **options)


def sent(run):
    """Calls and bytes of the operations of a run."""
    return {name: (each.calls, each.bytes) for name, each in run.comm.traffic.items() if each.calls}


@pytest.mark.parametrize("parts", [1, 3])
def test_bytes_by_layer_and_micro_batch(parts, cut, ring, comm):
    where = comm.rank, comm.size
    scattered, gathered = (sum(count(n, *where) for n in LENGTHS) for count in (ring.reduce_scatter, ring.all_gather))
    times = {1: (1, 1), 2: (parts, 1), 3: (parts, 2 * parts)}  # a step: scatters and gathers of each layer
    for stage, (scatters, gathers) in times.items():
        run = cut(comm, fully_sharded.train, {"stage": stage}, MLP, epochs=1, accumulate=parts)
        assert sent(run) == {
            "reduce_scatter": (3 * 3 * scatters, 3 * scatters * scattered),
            "all_gather": (3 * 3 * gathers, 3 * gathers * gathered),
        }
        messages = [ring.messages(n, *where) for n in LENGTHS]
        assert run.comm.traffic.messages == 3 * sum(scatters * one + gathers * other for one, other in messages)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_go_to_the_owners_of_their_matrices_and_back(stage, cut, comm):
    """The first weight, 6 x 12, costs less than the second, 12 x 7, so that the second has rank 0, and it rank 1."""
    run = cut(comm, fully_sharded.train, {"stage": stage}, MLP, optimizer=MUON, lr=0.02, epochs=1)
    left = 0
    for weight, unit, owner in ((72, 84, 1), (84, 91, 0)):
        own = chunk(unit, comm.size, owner % comm.size)
        left += weight - max(0, min(weight, own.stop) - own.start)
    assert sum(comm.allgather(run.comm.traffic["push"].bytes)) == (3 * 2 * 8 * left if comm.size > 1 else 0)


@pytest.mark.parametrize("gather", ["all-gather", "broadcast"])
def test_bytes_are_1_or_1_and_a_half_times_those_of_all_reduce(gather, follow, cut, comm):
    """Of all ranks together: a rank owns of each layer what it owns, and of the whole vector something else."""
    run = follow(comm, all_reduce.train, cut.data(MLP, "float64"), MLP, epochs=1, allreduce="ring")
    reduced = sum(comm.allgather(run.comm.traffic["all_reduce"].bytes))
    assert reduced == 3 * 2 * (comm.size - 1) * 8 * sum(LENGTHS)
    for stage, factor in {1: 1, 2: 1, 3: 1.5}.items():
        run = cut(comm, fully_sharded.train, {"stage": stage, "gather": gather}, MLP, epochs=1)
        assert sum(comm.allgather(run.comm.traffic.bytes)) == factor * reduced


def test_a_tied_table_is_sent_for_each_layer_that_uses_it(cut, comm):
    """Embedding and head both gather it, and both sum their gradient by it: as much once more as for the rest."""
    for stage, (scattered, gathered) in {1: (0, 0), 2: (1, 0), 3: (1, 2)}.items():
        run = cut(comm, fully_sharded.train, {"stage": stage}, GPT, epochs=1)
        traffic, size = run.comm.traffic, run.model.layout.size
        scatters, gathers = (sum(comm.allgather(traffic[each].bytes)) for each in ("reduce_scatter", "all_gather"))
        assert scatters == 3 * 8 * (comm.size - 1) * (size + scattered * TABLE)
        assert gathers == 3 * 8 * (comm.size - 1) * (size * (2 if stage == 3 else 1) + gathered * TABLE)


def test_what_is_held_between_steps_and_at_most(cut, comm):
    """A share of each layer; at stage 3 two layers are gathered at once, from stage 2 on one has a gradient."""
    mine, size, largest = sum(own_of(LENGTHS, comm.rank, comm.size)), sum(LENGTHS), max(LENGTHS)
    assert abs(mine - size / comm.size) < len(LENGTHS)
    held = {1: (size, size), 2: (size, mine), 3: (mine, mine)}
    for stage, (parameters, gradients) in held.items():
        options = {"optimizer": ADAM, "accumulate": 2}
        run = cut(comm, fully_sharded.train, {"stage": stage}, MLP, **options)
        now = [run.memory.now[kind] // 8 for kind in ("parameters", "gradients", "optimizer")]
        peak = [run.memory.peak[kind] // 8 for kind in ("parameters", "gradients", "optimizer")]
        assert now == [parameters, gradients, 2 * mine]
        gathered, summed = sum(sorted(LENGTHS)[-2:]) if stage == 3 else 0, largest if stage > 1 else 0
        assert peak == [parameters + gathered, gradients + summed, 2 * mine]


def test_whole_layers_belong_to_the_rank_that_has_least(cut, world):
    run = cut(world, fully_sharded.train, {"gather": "broadcast"}, MLP)
    wanted = {1: [199], 2: [91, 108]}.get(world.size, [91, 84, 24, *[0] * (world.size - 3)])
    assert world.allgather(run.memory.now["parameters"] // 8) == wanted


@pytest.mark.parametrize("stage, gather", [(1, "all-gather"), (2, "all-gather"), (3, "all-gather"), (3, "broadcast")])
@pytest.mark.four
def test_resumed_is_never_stopped_to_the_bit(stage, gather, resumes):
    resumes(5, fully_sharded.train, GPT, {"stage": stage, "gather": gather}, optimizer="adam", clip_norm=0.1)
