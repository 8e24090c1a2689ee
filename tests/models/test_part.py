"""Parts of models, by layers, within layers, and both: together they compute the whole model's loss and gradient.

Ranks that share layers are threads here, each with its own model; `ThreadGroup` is the group between them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod

import numpy as np
import pytest
from plain_models import make_batch

from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.balance import cut_layers
from hpcdl.models.layered import FlatWeights
from hpcdl.models.part import ModelPart
from hpcdl.random import Random

LENGTH = 8
MLPS = {  # spec: classes. By columns and rows in turn; after a layer by columns the classes are shared
    "softmax": 5,
    "mlp:8": 3,
    "mlp:8,5,activation=gelu": 5,
    "mlp:8,5,activation=tanh": 3,  # fewer classes than parts
    "mlp:4,6,8,activation=gelu": 5,
}
FOUR = list(MLPS)[-1]  # with four layers
GPTS = {
    "gpt:layers=1,width=8,heads=4,context=9": 10,  # a vocabulary that 4 parts cannot share evenly
    "gpt:layers=2,width=8,heads=4,context=8": 3,  # fewer tokens than parts
    "gpt:layers=2,width=8,heads=4,context=8,head=own": 7,
    "llama:layers=1,width=16,heads=8,kv-heads=4,context=8,units=12": 10,
    "gpt:layers=1,width=8,heads=4,context=8,positions=rotary,feed-forward=swiglu,units=4": 5,
    "llama:layers=1,width=6,heads=4,context=8,units=12,latent=3,query-latent=5,experts=2,shared=1": 7,
    "llama:layers=1,width=6,heads=4,context=8,units=12,latent=3,rope-width=4": 7,
}
CASES = MLPS | GPTS


class Meeting:
    """The meeting of a group's threads: each passes an array, and gets the arrays of all."""

    def __init__(self, size):
        self.size, self.given, self.barrier = size, [None] * size, threading.Barrier(size, timeout=30)

    def all(self, rank, array):
        self.given[rank] = array.copy()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()  # no thread passes its next array before all have these
        return found


class ThreadGroup:
    """Megatron's operators among threads; records their names, and fills an array with NaN that it replaces."""

    def __init__(self, meeting, rank, sequence):
        self.meeting, self.rank, self.size, self.sequence = meeting, rank, meeting.size, sequence
        self.asked = []

    def all_reduce(self, array, op="sum"):
        self.asked.append(op)
        together = self.meeting.all(self.rank, array)
        array[...] = np.max(together, axis=0) if op == "max" else np.sum(together, axis=0)

    def gather(self, array, pool, name):
        self.asked.append(name)
        if not self.sequence:
            return array
        together = self.meeting.all(self.rank, array)
        whole = pool.take(sum(map(len, together)), array.shape[1])
        whole[...] = np.concatenate(together)
        return whole

    def sum(self, array, pool, name):
        self.asked.append(name)
        total = np.sum(self.meeting.all(self.rank, array), axis=0)
        own = array
        if self.sequence:
            rows = len(array) // self.size
            total, own = total[self.rank * rows :][:rows], pool.take(rows, array.shape[1])
        own[...] = total
        if own is not array:
            array[...] = np.nan
            pool.give(array)
        return own

    f, g_backward = partialmethod(gather, name="f"), partialmethod(gather, name="g_backward")
    g, f_backward = partialmethod(sum, name="g"), partialmethod(sum, name="f_backward")


def together(size, sequence, body):
    """Return [body(rank, group), ...] of `size` threads; if one fails, the others do not wait for it."""
    meeting = Meeting(size)

    def run(rank):
        try:
            return body(rank, ThreadGroup(meeting, rank, sequence))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def build(spec, dtype="float64"):
    """Return the model, and parameters whose biases are not zero; the same in every thread."""
    model = make_model(spec, (LENGTH,), CASES[spec], dtype)
    noise = 0.2 * np.random.default_rng(0).standard_normal(model.size)
    return model, (model.initialize(Random(0)) + noise).astype(dtype)


def batch_for(spec, rows):
    return make_batch(rows, LENGTH, CASES[spec], "float64", tokens=spec in GPTS)


def places(piece):
    """Return the numbers of a piece's elements in the whole vector, (blocks, length), from the definition."""
    return piece.start + piece.stride * np.arange(piece.blocks)[:, None] + np.arange(piece.length)


def own(part, whole):
    """Return the vector of this part, from the whole vector."""
    vector = np.full(part.size, np.nan)
    for piece, _ in part.pieces():
        vector[piece.local : piece.local + piece.size] = whole[places(piece)].ravel()
    return vector


def stages_of(model, stages, chunks, share=(0, 1), group=None):
    """Return the model's stages, each with `chunks` chunks in turn, and all (stage, chunk) in the order of layers."""
    ranges = cut_layers(model, stages * chunks)
    parts = [ModelPart(model, ranges[stage::stages], share, group) for stage in range(stages)]
    return parts, [(parts[number % stages], number // stages) for number in range(len(ranges))]


def chain(model, parameters, batch, stages, chunks, share=(0, 1), group=None):
    """Run forward through all parts, then backward; return the loss, and (part, its gradient) of each part."""
    parts, order = stages_of(model, stages, chunks, share, group)
    gradients = [np.zeros(part.size) for part in parts]
    weights = {
        id(part): FlatWeights(part, own(part, parameters), gradient)
        for part, gradient in zip(parts, gradients, strict=True)
    }
    x, in_flight = batch.x, []
    for number, (part, chunk) in enumerate(order):
        if number > 0:
            assert x.shape == part.input_shape(chunk, len(batch.y))
        targets = part.targets(batch) if number == len(order) - 1 else None
        x, kept = part.forward(weights[id(part)], x, part.numbers[chunk], targets)
        in_flight.append(kept)
    (loss, _), dy = x, None
    for part, chunk in reversed(order):
        dy = part.backward(weights[id(part)], in_flight.pop(), dy, part.numbers[chunk])
    assert dy is None
    assert sum(map(len, model.pool.free.values())) == len(model.pool.bases)  # all buffers are given back
    return loss, list(zip(parts, gradients, strict=True))


def added_up(size, ranks, sequence):
    """Return the whole gradient from those of the parts. The gradient of a copy is added to that of its tensor.
    Replicated tensors have equal gradients on all ranks, but summands with sequence parallelism."""
    total = np.zeros(size)
    for found in ranks:
        for part, gradient in found:
            copies = {copy.name for copy in part.copies}
            for (piece, speaks), name in zip(part.pieces(), part.layout.tensors, strict=True):
                alike = part.axes[name] is None
                if alike and part.share[0] > 0 and not sequence:
                    continue
                assert speaks == (name not in copies and (not alike or part.share[0] == 0))
                values = gradient[piece.local : piece.local + piece.size]
                total[places(piece)] += values.reshape(piece.blocks, piece.length)
    return total


def whole(spec, batch):
    """Return loss and gradient of the whole model."""
    model, parameters = build(spec)
    gradient = np.zeros(model.size)
    return model.loss_and_gradient(parameters, batch, gradient), gradient


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12 * max(1, abs(wanted).max()))


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (3, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("spec", [FOUR, *GPTS])
def test_by_layers(spec, stages, chunks, rows):
    batch, (model, parameters) = batch_for(spec, rows), build(spec)
    loss, found = chain(model, parameters, batch, stages, chunks)
    expected, gradient = whole(spec, batch)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert_close(added_up(model.size, [found], False), gradient)


CUTS = [(spec, parts, False) for spec in CASES for parts in (2, 4)]
CUTS += [(spec, parts, True) for spec in GPTS for parts in (1, 2, 4)]


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(("spec", "parts", "sequence"), CUTS)
def test_within_layers(spec, parts, sequence, rows):
    batch = batch_for(spec, rows)

    def body(rank, group):
        model, parameters = build(spec)
        part = ModelPart(model, share=(rank, parts), group=group)
        vector, gradient = own(part, parameters), np.zeros(part.size)
        loss = part.loss_and_gradient(vector, batch, gradient)
        assert sum(map(len, model.pool.free.values())) == len(model.pool.bases)
        return loss, part.evaluate(vector, batch), [(part, gradient)], group.asked

    losses, scores, gradients, asked = zip(*together(parts, sequence, body), strict=True)
    expected, gradient = whole(spec, batch)
    model, parameters = build(spec)
    assert set(losses) == {losses[0]} and set(scores) == {scores[0]} and all(each == asked[0] for each in asked)
    assert losses[0] == pytest.approx(expected, rel=1e-12)
    assert scores[0] == pytest.approx(model.evaluate(parameters, batch), rel=1e-12)
    assert_close(added_up(model.size, gradients, sequence), gradient)
    for where in gradients[0][0][0].replicated() if not sequence else ():
        name = next(t.name for t in gradients[0][0][0].layout.tensors.values() if t.slice == where)
        alike = [part.layout.view(vector, name) for ((part, vector),) in gradients]
        assert all((each == alike[0]).all() for each in alike), name  # to the bit: no message keeps them equal


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize(("spec", "sequence"), [(FOUR, False), *((spec, s) for spec in GPTS for s in (0, 1))])
def test_by_layers_and_within(spec, sequence, stages, chunks):
    batch = batch_for(spec, 3)
    expected, gradient = whole(spec, batch)

    def body(rank, group):
        model, parameters = build(spec)
        return chain(model, parameters, batch, stages, chunks, (rank, 2), group)

    losses, gradients = zip(*together(2, bool(sequence), body), strict=True)
    assert losses[0] == losses[1] == pytest.approx(expected, rel=1e-12)
    assert_close(added_up(len(gradient), gradients, sequence), gradient)


def test_messages_of_a_block():
    """Four sums a block (g, f_backward), one each of the embedding and the head, two of the loss."""
    spec = "gpt:layers=2,width=8,heads=4,context=8"

    def body(rank, group):
        model, parameters = build(spec)
        part = ModelPart(model, share=(rank, 2), group=group)
        part.loss_and_gradient(own(part, parameters), batch_for(spec, 2), np.zeros(part.size))
        return group.asked

    for sequence in (False, True):
        for asked in together(2, sequence, body):
            forward = ["g", *["f", "g"] * 4, "f", "max", "sum"]
            backward = ["f", "f_backward", *["g_backward", "f", "f_backward"] * 4, "g_backward"]
            assert asked == forward + backward


def cuts_of(model, stages, chunks, parts):
    return [part for share in range(parts) for part in stages_of(model, stages, chunks, (share, parts))[0]]


EACH = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1), (3, 1, 2), (2, 2, 4)]
BOTH = [
    ("softmax", 1, 1, 2),
    ("mlp:8", 2, 1, 4),
    *(("mlp:8,5,activation=tanh", *cut) for cut in ((1, 1, 4), (3, 1, 2))),
]
BOTH += [(spec, *cut) for spec in (FOUR, *GPTS) for cut in EACH]


@pytest.mark.parametrize(("spec", "stages", "chunks", "parts"), BOTH)
def test_pieces_cover_the_vector_once_and_hold_its_initial_values(spec, stages, chunks, parts):
    model = make_model(spec, (LENGTH,), CASES[spec], "float32")
    spoken, initial = np.zeros(model.size, int), model.initialize(Random(3))
    for part in cuts_of(model, stages, chunks, parts):
        vector = part.initialize(Random(3))
        assert vector.dtype == "float32" and vector.shape == (part.size,)
        ends = 0
        for piece, speaks in part.pieces():
            assert piece.local == ends
            ends += piece.size
            np.testing.assert_array_equal(vector[piece.local : ends], initial[places(piece)].ravel())
            spoken[places(piece)] += speaks
        assert ends == part.size
        slices = [where for where, _ in part.initial(Random(3))]
        assert sum(where.stop - where.start for where in slices) == part.size
    assert (spoken == 1).all()


@pytest.mark.parametrize(("spec", "stages", "chunks", "parts"), BOTH)
def test_units(spec, stages, chunks, parts):
    """Units follow each other; a tensor of several parts lies at the same place in units of the same size."""
    model = make_model(spec, (LENGTH,), CASES[spec])
    places = {}
    for part in cuts_of(model, stages, chunks, parts):
        units, copies = part.units(), {copy.name for copy in part.copies}
        ends = [0, *(unit.stop for unit in units)]
        assert [unit.start for unit in units] == ends[:-1] and ends[-1] == part.size
        for name, tensor in part.layout.tensors.items():
            if tensor.slice.start == tensor.slice.stop:
                continue  # none of the vocabulary
            around = next(unit for unit in units if unit.start <= tensor.offset < unit.stop)
            assert tensor.slice.stop <= around.stop
            if name == "embedding.token" and any(layer.tied for layer in model.layers):
                assert around == tensor.slice  # the table, and each copy of it
            if part.axes[name] is None or name == "embedding.token":
                share = part.share[0] if part.axes[name] is not None else None
                where = around.stop - around.start, tensor.offset - around.start
                assert places.setdefault((name, share), where) == where
        tied = "embedding.token" if any(layer.tied for layer in model.layers) else ""
        lacks = part.layers[-1].name == "loss" and all(layer.name != "embedding" for layer in part.layers)
        assert copies == ({tied} if tied and lacks else set())


def test_units_of_layers():
    """There is one unit for each layer with tensors, if no tensor is tied or cut unevenly."""
    part = ModelPart(build("mlp:8,5,activation=tanh")[0])
    assert part.units() == [where for _, where in part.layout.layer_slices]
    part = ModelPart(build("mlp:8,5,activation=tanh")[0], share=(1, 2))  # 3 classes: weight and bias are cut unevenly
    sizes = [where.stop - where.start for where in part.units()]
    assert sizes == [8 * 4 + 4, 4 * 5 + 5, 5 * 1, 1]


def test_a_part_of_all_is_the_model():
    spec = "gpt:layers=1,width=8,heads=4,context=9"
    model, parameters = build(spec)
    part, batch = ModelPart(model), batch_for(spec, 3)
    assert part.layout.describe() == model.layout.describe()
    np.testing.assert_array_equal(own(part, parameters), parameters)
    assert part.evaluate(parameters, batch) == model.evaluate(parameters, batch)
    np.testing.assert_array_equal(part.predict(parameters, batch.x), model.predict(parameters, batch.x))
    assert part.rows_at_once == model.rows_at_once and part.sequences


def test_replicated():
    model, _ = build("gpt:layers=1,width=8,heads=4,context=9")
    part = ModelPart(model, share=(2, 4))
    names = [t.name for t in part.layout.tensors.values() if t.slice in part.replicated()]
    ends = ("position", "norm.gain", "norm.bias", "out.bias", "down.bias")
    assert names == [name for name in model.layout.tensors if name.endswith(ends)]
    cut = {"attention.qkv.weight": 2, "attention.qkv.bias": 1, "attention.out.weight": 0}
    cut |= {"mlp.up.weight": 1, "mlp.up.bias": 0, "mlp.down.weight": 0}
    wanted = {"embedding.token": 0} | {f"block1.{name}": axis for name, axis in cut.items()}
    assert {name: axis for name, axis in part.axes.items() if name not in names} == wanted
    assert part.layout.tensors["block1.attention.qkv.weight"].shape == (8, 3, 2)


GROUPED = make_model("gpt:layers=1,width=16,heads=8,kv-heads=2,context=9", (8,), 5)
THREE = make_model("gpt:layers=1,width=6,heads=3,context=9", (8,), 5)


class Sequence:
    """A group with sequence parallelism, with the members that a part reads before it computes."""

    rank, size, sequence = 0, 3, True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelPart(object()), "cuts the model by its layers, and this model lists none"),
        (lambda: ModelPart(build(next(iter(GPTS)))[0], share=(0, 3)), "heads 4 cannot .* 3 ranks"),
        (
            lambda: ModelPart(GROUPED, share=(0, 4)),
            "kv-heads 2 cannot be divided evenly among 4 ranks; take 1 or 2 ranks for each layer, or kv-heads=4 or 8",
        ),
        (lambda: ModelPart(GROUPED, share=(0, 3)), "or heads and kv-heads that are multiples of 3"),
        (lambda: ModelPart(build("mlp:8")[0], share=(0, 3)), "a hidden layer's width 8 cannot .* a multiple of 3"),
        (
            lambda: ModelPart(make_model("logistic", (4,), 2), share=(0, 2)),
            "outputs of the loss Logistic; add a hidden layer",
        ),
        (
            lambda: ModelPart(make_model("linear", (4,), 0), share=(1, 2)),
            "ranks cannot share the outputs of the loss Squared",
        ),
        (lambda: ModelPart(build("mlp:8")[0], share=(0, 2), group=Sequence()), "take --model gpt"),
        (lambda: ModelPart(THREE, share=(0, 3), group=Sequence()), "3 ranks cannot share sequences of 8 tokens evenly"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(UsageError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
