"""Tensor parallelism: steps are those of sequential SGD; sums, bytes and memory are those of the formulas."""

import pytest

from hpcdl.chunks import chunk
from hpcdl.strategies import tensor_parallel

LAYERS, WIDTH, LENGTH, VOCABULARY = 2, 12, 12, 7
GPT = f"gpt:layers={LAYERS},width={WIDTH},heads=12,context=12"
OWN = "gpt:layers=1,width=24,heads=12,context=15,head=own"
LLAMA = "llama:layers=1,width=48,heads=24,kv-heads=12,context=12,units=12"  # two queries a key
ADAM = "adam:eps=0.001"  # what is 0 but for rounding makes no large steps
SEQUENCE = {"sequence": True}
ALONE = 3  # sums of the gradient over copies of the model, of which there is one, in 3 steps


@pytest.mark.parametrize(
    "model, own, options",
    [
        ("mlp:12", {}, {"optimizer": "sgd"}),
        ("mlp:12,12", {}, {"clip_norm": 0.05}),  # the loss works on outputs that are cut: 3 classes, 4 ranks
        ("mlp:24,12,12", {}, {"optimizer": ADAM, "accumulate": 3}),
        ("mlp:12,activation=gelu", {}, {"batch_size": 1}),
        ("softmax", {}, {"weight_decay": 0.1}),  # the only layer is the first, and the last
        (GPT, {}, {}),
        (GPT, {}, {"optimizer": ADAM, "clip_norm": 0.1, "accumulate": 4}),  # of 3 rows in 4 parts, one is empty
        (OWN, {}, {"optimizer": "sgd", "allreduce": "naive"}),
        (GPT, SEQUENCE, {"clip_norm": 0.1, "accumulate": 4}),
        (OWN, SEQUENCE, {"optimizer": ADAM}),
        (LLAMA, {}, {"optimizer": ADAM, "accumulate": 2}),
        (LLAMA, SEQUENCE, {"clip_norm": 0.1}),
        ("mlp:24,12", {}, {"optimizer": "muon:eps=0.001", "clip_norm": 0.1, "lr": 0.02}),
    ],
    ids=str,
)
def test_steps_are_those_of_sequential_sgd(model, own, options, cut, world):
    cut(world, tensor_parallel.train, own, model, **options)


def test_sums_and_bytes_of_a_transformer(cut, ring, comm):
    """All-reduces: 4 a block and micro-batch, 1 each for embedding and head, 2 of the loss."""
    run = cut(comm, tensor_parallel.train, None, GPT, epochs=1, accumulate=2)
    rows = cut.micro_batches(2)
    each = [n * LENGTH * WIDTH for n in rows for _ in range(4 * LAYERS + 2)]
    if comm.size > 1:
        each += [values for n in rows for values in (n * LENGTH, 2 * n * LENGTH)]
    counted = run.comm.traffic["all_reduce"]
    assert counted.calls == len(each) + ALONE
    assert counted.messages == 2 * (comm.size - 1) * len(each)
    assert counted.bytes == sum(ring.all_reduce(values, comm.rank, comm.size) for values in each)
    assert run.comm.traffic.bytes == counted.bytes


def test_halves_of_sums_and_bytes_with_sequence_parallelism(cut, ring, comm):
    """An all-reduce is a reduce-scatter and an all-gather; backward gathers the input of a product anew, which is one
    all-gather more for each. At the end of a step the gradient of what all have alike is summed."""
    run = cut(comm, tensor_parallel.train, SEQUENCE, GPT, epochs=1, accumulate=2)
    rows, where, traffic = cut.micro_batches(2), (comm.rank, comm.size), run.comm.traffic
    values = [n * LENGTH * WIDTH for n in rows]
    alike = LAYERS * 6 * WIDTH + (12 + 2) * WIDTH  # norms and two biases of a block; positions, the last norm
    loss = [n * LENGTH * numbers for n in rows for numbers in (1, 2)] if comm.size > 1 else []
    wanted = {
        "all_gather": ((6 * LAYERS + 3) * values, ring.all_gather, lambda *each: ring.messages(*each)[1]),
        "reduce_scatter": ((4 * LAYERS + 2) * values, ring.reduce_scatter, lambda *each: ring.messages(*each)[0]),
        "all_reduce": ([*loss, *3 * [alike]], ring.all_reduce, lambda *each: 2 * (comm.size - 1)),
    }
    for name, (each, sent, messages) in wanted.items():
        assert traffic[name].calls == len(each) + ALONE * (name == "all_reduce"), name
        assert traffic[name].messages == sum(messages(values, *where) for values in each), name
        assert traffic[name].bytes == sum(sent(values, *where) for values in each), name
    assert traffic.bytes == sum(traffic[name].bytes for name in wanted)


def test_sums_of_a_perceptron(cut, ring, comm):
    """Three layers by columns, rows, columns: forward sums after the second, backward before the third; the loss twice.
    The norm of the gradient, for clipping, is one more of one number a step."""
    run = cut(comm, tensor_parallel.train, None, "mlp:24,12", epochs=1, clip_norm=1.0)
    loss = (1, 2) if comm.size > 1 else ()
    each = [1, 1, 1] + [n * width for n in cut.micro_batches(1) for width in (12, 12, *loss)]
    counted = run.comm.traffic["all_reduce"]
    assert counted.calls == len(each) + ALONE
    assert counted.bytes == sum(ring.all_reduce(values, comm.rank, comm.size) for values in each)
    assert run.comm.traffic.bytes == counted.bytes


def test_a_rank_holds_its_part_of_the_weights_and_all_of_norms_and_biases(cut, comm):
    part = chunk(VOCABULARY, comm.size, comm.rank)
    block = 12 * WIDTH**2 // comm.size + 7 * WIDTH // comm.size + 6 * WIDTH
    held = LAYERS * block + (part.stop - part.start) * WIDTH + 12 * WIDTH + 2 * WIDTH
    for own in ({}, SEQUENCE):
        peak = cut(comm, tensor_parallel.train, own, GPT, optimizer=ADAM).memory.peak
        assert (peak["parameters"], peak["gradients"], peak["optimizer"]) == (8 * held, 8 * held, 16 * held)


@pytest.mark.four
def test_sequence_parallelism_keeps_less_between_the_parts(cut, world):
    kept = [cut(world, tensor_parallel.train, own, GPT).memory.peak["activations"] for own in ({}, SEQUENCE)]
    assert (kept[1] < kept[0]) == (world.size > 1)


@pytest.mark.parametrize("stop, own, optimizer", [(4, {}, "adam"), (5, SEQUENCE, "momentum")], ids=str)
@pytest.mark.four
def test_resumed_is_never_stopped_to_the_bit(stop, own, optimizer, resumes):
    resumes(stop, tensor_parallel.train, GPT, own, optimizer=optimizer, clip_norm=0.1)
