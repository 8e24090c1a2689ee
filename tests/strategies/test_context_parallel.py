"""Context parallelism: steps are those of sequential SGD; messages, bytes and memory are those of the formulas."""

import numpy as np
import pytest
from local_ranks import all_to_all_rows
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.parallel import ring_attention
from hpcdl.parallel.ring_attention import RingAttention
from hpcdl.strategies import context_parallel

LAYERS, WIDTH, LENGTH = 2, 12, 24
GPT = f"gpt:layers={LAYERS},width={WIDTH},heads=12,context=24"
OWN = "gpt:layers=1,width=24,heads=12,context=24,head=own"
EXPERTS = f"gpt:layers={LAYERS},width={WIDTH},heads=12,context=24,units=12,experts=6,balance=0.5,z=0.1"
ADAM = "adam:eps=0.001"  # what is 0 but for rounding makes no large steps
LLAMA = "llama:layers=1,width=24,heads=12,kv-heads=4,context=24"
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


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_blocks_may_be_cut_by_queries(model, cut, world, monkeypatch):
    monkeypatch.setattr(ring_attention, "LEAST", 2)
    found, plain = [], RingAttention.pieces

    def noted(self, *given):
        for piece in plain(self, *given):
            found.append(piece)
            yield piece

    monkeypatch.setattr(RingAttention, "pieces", noted)
    cut(world, context_parallel.train, {"attention": "ring"}, model, optimizer=ADAM, accumulate=2)
    assert any(piece.before for piece in found) == (world.size > 1)


@pytest.mark.parametrize("first", [0, 96])
@pytest.mark.parametrize("sequences", [0, 1, 3, 8, 20])
def test_pieces_have_each_query_once(sequences, first):
    """While messages travel, 8 sequences or more are cut between sequences, and fewer within them."""
    length, ring = 192, RingAttention(Communicator(MPI.COMM_SELF))
    done = ring.comm.iall_reduce(np.zeros(1))
    for ring.requests, least in ([], 1), ([done], 8):
        queries = []
        pieces = [*ring.pieces(sequences * length, length, first)]
        for each in pieces:
            assert each.keys.start % length == 0 and each.keys.stop % length == 0
            for row in range(each.queries.start, each.queries.stop, each.length):
                queries += range(row + each.first, row + each.length)
        assert queries == [row * length + i for row in range(sequences) for i in range(first, length)]
        assert len(pieces) >= min(least, sequences * ((length - first) // 64))


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
