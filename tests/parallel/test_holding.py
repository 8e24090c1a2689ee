"""What a rank holds: units and who owns them, initial values, what is gathered when, and who agrees with whom."""

import itertools

import numpy as np
import pytest

from hpcdl.chunks import chunk
from hpcdl.comm import Communicator
from hpcdl.data import Batch, from_arrays
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.part import Part
from hpcdl.random import Random
from hpcdl.runs import Options, Run
from hpcdl.parallel.holding import Holding, Units, balanced_owners, check_rows

GPT = "gpt:layers=1,width=12,heads=12,context=5"
OWN = f"{GPT},head=own"
LENGTH, VOCABULARY = 5, 7
STAGES = 0, 1, 2, 3


def model_of(spec=GPT):
    return make_model(spec, (LENGTH,), VOCABULARY, "float64")


def places(piece):
    """The numbers of the elements of a piece in the whole vector."""
    return np.add.outer(piece.start + piece.stride * np.arange(piece.blocks), np.arange(piece.length)).reshape(-1)


# -- units ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owners", [False, True])
@pytest.mark.parametrize("lengths", [[7], [5, 1, 3], [1, 1], [4, 0, 9, 2, 2], [40, 1, 1, 1]], ids=str)
def test_each_element_of_each_unit_belongs_to_one_rank(lengths, owners):
    ends = [0, *itertools.accumulate(lengths)]
    units = [slice(*each) for each in itertools.pairwise(ends)]
    vector = np.arange(ends[-1])
    for size in range(1, 6):
        cut = [Units(units, rank, size, owners) for rank in range(size)]
        assert sorted(np.concatenate([vector[own] for each in cut for own in each.own])) == vector.tolist()
        for rank, each in enumerate(cut):
            assert each.size == sum(own.stop - own.start for own in each.own) == each.at[-1].stop
            for unit, within, own, at in zip(units, each.within, each.own, each.at, strict=True):
                assert np.array_equal(vector[unit][within], vector[own]) and at.stop - at.start == own.stop - own.start
                if not owners:
                    assert within == chunk(unit.stop - unit.start, size, rank)
            shard = np.concatenate([vector[own] for own in each.own])
            for start, stop in itertools.combinations(range(ends[-1] + 1), 2):
                met = [shard[each.at[u]][inside] for u, inside in each.meet(slice(start, stop))]
                inside = [value for value in shard if start <= value < stop]
                assert np.concatenate([[], *met]).tolist() == inside


@pytest.mark.parametrize("spec", [GPT, OWN])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_pieces_of_shards_lie_where_the_tensors_do(spec, parts):
    """The whole vector comes back from the shards of all parts, whatever is cut twice."""
    model, size = model_of(spec), 3
    whole, times = np.arange(model.size) ** 2, np.zeros(model.size, int)
    for t, rank in itertools.product(range(parts), range(size)):
        part = Part(model, share=(t, parts))
        units, vector = Units(part.units(), rank, size), np.zeros(part.size, int)
        for piece, _ in part.pieces():
            vector[piece.local : piece.local + piece.size] = whole[places(piece)]
        shard = np.concatenate([vector[own] for own in units.own])
        held = units.pieces(part.pieces())
        assert sum(piece.size for piece, _ in held) == units.size
        for piece, speaks in held:
            assert np.array_equal(shard[piece.local : piece.local + piece.size], whole[places(piece)])
            times[places(piece)] += speaks
    assert (times == 1).all()


def test_the_rank_that_has_least_gets_the_longest_that_is_left():
    assert balanced_owners([3, 9, 5, 5], 2) == [0, 0, 1, 1]
    assert balanced_owners([4, 4, 4], 5) == [0, 1, 2]
    assert balanced_owners([], 3) == []
    random = np.random.default_rng(1)
    for _ in range(50):
        lengths, ranks = random.integers(1, 100, random.integers(1, 20)).tolist(), int(random.integers(1, 6))
        owners = balanced_owners(lengths, ranks)
        loads = [sum(n for n, owner in zip(lengths, owners, strict=True) if owner == rank) for rank in range(ranks)]
        assert max(loads) <= sum(lengths) / ranks + (1 - 1 / ranks) * max(lengths)  # Graham, 1966


@pytest.mark.parametrize(
    "options, words",
    [
        ({"placement": "partitioned"}, "--placement partitioned: .* read the same rows"),
        ({"data_servers": 1}, "--data-"),
    ],
)
def test_ranks_that_share_a_model_read_the_same_rows(options, words):
    check_rows(Options(**options), 1)
    with pytest.raises(UsageError, match=words):
        check_rows(Options(**options), 2)


# -- holding -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hold(world):
    """A function: what this rank holds at a stage, with a run of its own."""
    opened = []

    def make(stage=0, owners=False, spec=GPT, chunks=None, bare=world, **options):
        comm = Communicator(bare, "ring")
        run = Run(comm, Options(optimizer="adam", dtype="float64", progress="none", **options))
        model, x = model_of(spec), np.zeros((4, LENGTH), int)
        data = from_arrays(x, x[:, 0], classes=VOCABULARY, dtype="float64")
        run.model = model
        opened.extend([run.own, comm])
        return Holding(run, Part(model, chunks), run.make_optimizer(model, data, 0), comm, stage=stage, owners=owners)

    yield make
    for comm in opened:
        comm.free()


def rows(count, seed=0):
    random = np.random.default_rng(seed)
    x, y = random.integers(0, VOCABULARY, (count, LENGTH)), random.integers(0, VOCABULARY, count)
    return Batch(x.astype(float), y, count, epoch=0, step=0, index=np.arange(count))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("owners", [False, True])
def test_initial_values_are_those_of_the_whole_model(stage, owners, hold):
    for chunks in (None, [range(1, 3)], [range(3, 6)]):  # the last has a copy of the table that is tied
        held = hold(stage, owners, chunks=chunks)
        whole = model_of().initialize(Random(0))
        for piece, _ in held.parameter_pieces:
            assert np.array_equal(held.parameters[piece.local : piece.local + piece.size], whole[places(piece)])
        assert held.parameters.size == sum(piece.size for piece, _ in held.parameter_pieces)
        owned = np.concatenate([np.empty(0), *held.owned])
        for piece, _ in held.pieces:
            assert np.array_equal(owned[piece.local : piece.local + piece.size], whole[places(piece)])
        assert held.optimizer.state["first_moment"].size == held.optimizer.size == owned.size
        for view in held.owned:  # what is updated is what is held
            assert view.size == 0 or np.shares_memory(view, held.parameters)


@pytest.mark.parametrize("spec", [GPT, OWN])
def test_two_layers_are_gathered_at_once_the_right_ones(spec, hold):
    """While a layer is computed, its own parameters are there and those of the next one come; none else are held."""
    held, seen = hold(3, spec=spec), []
    for i, layer in enumerate(held.part.layers):

        def forward(*arguments, i=i, original=layer.forward):
            seen.append(("F", i, set(held.sharded.gathered)))
            return original(*arguments)

        def backward(*arguments, i=i, original=layer.backward):
            seen.append(("B", i, set(held.sharded.gathered)))
            return original(*arguments)

        layer.forward, layer.backward = forward, backward
    last = len(held.part.layers) - 1
    held.backward(rows(2))
    assert seen == [("F", i, {i, i + 1} - {last + 1}) for i in range(last + 1)] + [
        ("B", i, {i, i - 1} - {-1}) for i in reversed(range(last + 1))
    ]
    assert held.sharded.gathered == {}
    held.update(2)
    now = held.memory.now
    assert now["parameters"] == now["gradients"] == 8 * held.units.size and now["activations"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_scores_leave_nothing_behind_and_need_no_gradient(stage, hold):
    held, batch, model = hold(stage), rows(3), model_of()
    wanted = model.evaluate(model.initialize(Random(0)), batch)
    held.zero()
    before = dict(held.memory.now)
    assert held.evaluate(None, batch) == pytest.approx(wanted)
    assert {kind: count for kind, count in held.memory.now.items() if count} == before
    assert not held.gradient.any()
    held.counts = False
    assert held.evaluate(None, batch) == (0.0, 0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_summed_over_the_ranks_once(stage, hold, world):
    """Each rank a batch of its own; what a rank owns of the gradient is then that of all batches."""
    held, model, gradient = hold(stage, clip_norm=1.0), model_of(), np.zeros(model_of().size)
    w = model.initialize(Random(0))
    losses = [model.loss_and_gradient(w, rows(2, seed), gradient) for seed in range(world.size)]
    assert held.backward(rows(2, world.rank)) == pytest.approx(losses[world.rank])
    held._reduce()
    for piece, _ in held.pieces:
        mine = np.concatenate([np.empty(0), *held.gradients])[piece.local : piece.local + piece.size]
        assert np.abs(mine - gradient[places(piece)]).max(initial=0) < 1e-12
    assert held._norm() == pytest.approx(np.linalg.norm(gradient), rel=1e-12)


def test_a_version_that_is_stashed_has_memory_of_its_own(hold):
    held = hold()
    stash, before = held.stash(), held.parameters.copy()
    stash.parameters[:] = 7
    assert np.array_equal(held.parameters, before) and held.memory.now["parameters"] == 2 * held.parameters.nbytes
    assert np.shares_memory(stash.g[0][0], held.gradient)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_hold_other_bits_are_found(stage, hold, world):
    held = hold(stage)
    assert held.agree(held.run.own) is (True if stage < 3 else None)
    if world.rank == world.size - 1:
        held.parameters[-1] += 1e-15
    assert held.agree(held.run.own) is (False if stage < 3 else None)


@pytest.mark.mpi(min_size=2)
def test_copies_of_a_tied_table_are_compared(hold, world):
    """Ranks with other layers, of which the first and the last share a table."""
    chunks = {0: [range(0, 2)], world.size - 1: [range(3, 6)]}.get(world.rank, [range(2, 3)])
    held = hold(0, chunks=chunks)
    assert held.agree(held.run.own) is True
    if world.rank == 0:
        held.part.layout.view(held.parameters, "embedding.token")[3, 4] += 1
    assert held.agree(held.run.own) is False
