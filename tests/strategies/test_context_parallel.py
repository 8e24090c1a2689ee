"""Context parallelism: steps are those of sequential SGD; messages, bytes and memory are those of the formulas."""

import pytest
from local_ranks import all_to_all_rows

from hpcdl.strategies import context_parallel

LAYERS, WIDTH, LENGTH = 2, 12, 24
GPT = f"gpt:layers={LAYERS},width={WIDTH},heads=12,context=24"
OWN = "gpt:layers=1,width=24,heads=12,context=24,head=own"
EXPERTS = f"gpt:layers={LAYERS},width={WIDTH},heads=12,context=24,units=12,experts=6,balance=0.5,z=0.1"
ADAM = "adam:eps=0.001"  # what is 0 but for rounding makes no large steps
WAYS = ("ring", "ulysses")


@pytest.mark.parametrize("attention", WAYS)
@pytest.mark.parametrize(
    "model, stage, options",
    [
        (GPT, 0, {"optimizer": "sgd"}),
        (GPT, 1, {"optimizer": ADAM, "clip_norm": 0.1, "accumulate": 4}),  # of 3 rows in 4 parts, one is empty
        (OWN, 2, {"optimizer": ADAM, "weight_decay": 0.1}),
        (GPT, 3, {"clip_norm": 0.1, "batch_size": 1}),
        (EXPERTS, 2, {"optimizer": ADAM, "accumulate": 4}),
        (f"{EXPERTS},capacity=0.7", 0, {"clip_norm": 0.1}),
    ],
    ids=str,
)
def test_steps_are_those_of_sequential_sgd(model, stage, options, attention, cut, world):
    run = cut(world, context_parallel.train, {"attention": attention, "stage": stage}, model, **options)
    assert run.reported["attention"] == attention


def test_auto_takes_what_was_faster(cut, world):
    run = cut(world, context_parallel.train, {"attention": "auto"}, GPT)
    trial = run.reported["context"]
    if world.size > 1:
        assert run.reported["attention"] == min(WAYS, key=lambda way: trial[f"{way}_seconds"])


def test_messages_and_bytes(cut, ring, comm):
    """Of each attention and micro-batch: the ring sends keys and values size - 1 times, backward also their gradients;
    Ulysses exchanges qkv and the output, and backward the output and their gradients."""
    size, rows = comm.size, cut.micro_batches(2)
    values = [n * LENGTH // size * WIDTH for n in rows for _ in range(LAYERS)]
    found = {}
    for way in WAYS:
        run = cut(comm, context_parallel.train, {"attention": way}, GPT, epochs=1, accumulate=2)
        found[way], traffic = run.comm.traffic, run.comm.traffic
        summed = ring.all_reduce(run.model.layout.size, comm.rank, size)
        assert (traffic["all_reduce"].calls, traffic["all_reduce"].bytes) == (3, 3 * summed)  # the gradient
        assert traffic.bytes == sum(traffic[name].bytes for name in ("push", "all_to_all", "all_reduce"))
    push, exchange = found["ring"]["push"], found["ulysses"]["all_to_all"]
    assert push.messages == 3 * (size - 1) * len(values)
    assert push.bytes == 8 * (size - 1) * sum(6 * each for each in values)
    assert exchange.calls == (5 * len(values) if size > 1 else 0)
    # of each attention, rows of 3 / size of its values, of 1 / size for the output; backward both, and the output
    exchanged = [8 * n * each // size for each in values for n in (3, 1, 3, 1, 1)]
    assert exchange.bytes == sum(row * all_to_all_rows(size, row) for row in exchanged)


def test_messages_of_mixtures(cut, ring, comm):
    """Of each mixture and micro-batch forward: the choices of experts in 2 chunks of each sequence, of all ranks."""
    size, experts = comm.size, 6
    run = cut(comm, context_parallel.train, {"attention": "ring"}, EXPERTS, epochs=1, accumulate=2)
    values = [n * 2 * size * experts for n in cut.micro_batches(2) for _ in range(LAYERS)]
    gathered = run.comm.traffic["all_gather"]
    assert gathered.calls == (len(values) if size > 1 else 0)
    assert gathered.bytes == (sum(ring.all_gather(n, comm.rank, size) for n in values) if size > 1 else 0)


def test_a_rank_holds_its_part_of_the_activations(cut, world):
    """All layers but attention have 1 / size of the rows; buffers in flight are keys and values of other ranks."""
    whole = cut.alone(GPT, {"dtype": "float64", "allreduce": "ring", "steps": 4}).memory.peak["activations"]
    for way in WAYS:
        peak = cut(world, context_parallel.train, {"attention": way}, GPT).memory.peak["activations"]
        assert world.size == 1 or peak < 1.6 * whole / world.size  # buffers have powers of two elements


@pytest.mark.parametrize(
    "stop, own, optimizer",
    [(4, {"attention": "ring"}, "adam"), (5, {"attention": "ulysses", "stage": 2}, "momentum")],
    ids=str,
)
@pytest.mark.four
def test_resumed_is_never_stopped_to_the_bit(stop, own, optimizer, resumes):
    resumes(stop, context_parallel.train, GPT, own, optimizer=optimizer, clip_norm=0.1)
