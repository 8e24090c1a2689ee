"""Grids of all axes of parallelism: steps are those of sequential SGD on every grid; sums and memory."""

import itertools
import math

import numpy as np
import pytest
from local_ranks import all_to_all_rows
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.grid import AXES
from hpcdl.parallel.cut_model import CutModel
from hpcdl.strategies import all_reduce, fully_sharded, grid, model_parallel, pipeline, sequential, tensor_parallel
from hpcdl.strategies.pipeline_schedules import INTERLEAVED, V_SHAPED

pytestmark = pytest.mark.four

ADAM = "adam:eps=0.001"  # what is 0 but for rounding makes no large steps
MUON = "muon:eps=0.001"
MLP = "mlp:12,12,12,12,12"  # 6 layers
LAYERS, WIDTH, LENGTH = 2, 12, 12
GPT = f"gpt:layers={LAYERS},width={WIDTH},heads=12,context=12"  # 7 layers
OWN = f"{GPT},head=own"
LONG = f"gpt:layers={LAYERS},width={WIDTH},heads=12,context=24"  # sequences of 24 tokens, cut along the axis context
MIXTURE = "layers=1,width=24,heads=12,kv-heads=12,context=12,units=12,experts=3"  # 4 layers
SHARED = MIXTURE.replace("experts=3", "experts=12")  # along the axis expert
DEEPSEEK = "layers=2,width=24,heads=12,context=12,units=12,shared=2,dense=1,dense-units=24,latent=8,query-latent=10"
LATENT = "layers=2,width=24,heads=12,context=24,units=12,latent=8,head-width=3,rope-width=4"
LLAMA = "llama:layers=2,width=48,heads=24,kv-heads=12,context=12,units=12"


def grids(size, model=""):
    """All grids of so many ranks; those whose ranks share sequences, for a model of long ones; those whose ranks share
    experts, for a model with enough of them."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    shapes = (shape for shape in itertools.product(divisors, repeat=len(AXES)) if math.prod(shape) == size)
    found = [dict(zip(AXES, shape, strict=True)) for shape in shapes]
    long, shared = "context=24" in model and size > 1, "experts=12" in model and size > 1
    return [shape for shape in found if (shape["context"] > 1) == long and (shape["expert"] > 1) == shared]


def fit(own, shape):
    """The strategy's arguments on a grid; stages interleave where there are several, with layers for 2 chunks each."""
    stages, schedule = shape["pipeline"], own.get("schedule")
    if schedule in INTERLEAVED:
        own = own | ({"chunks": 2, "microbatches": stages} if 1 < stages < 4 else {"schedule": "1f1b"})
    elif schedule in V_SHAPED and stages > 3:
        own = own | {"schedule": "zb-h1"}
    return own | {"grid": shape}


CASES = [
    (MLP, {"stage": 0}, {"optimizer": "sgd"}),
    (MLP, {"stage": 1, "schedule": "gpipe", "microbatches": 3}, {"optimizer": ADAM}),
    (MLP, {"stage": 2, "schedule": "interleaved"}, {"clip_norm": 0.05}),
    ("mlp:12,12,12,12", {"stage": 3}, {"clip_norm": 0.05}),  # of 3 classes, the last of 4 ranks has none
    (MLP, {"stage": 3, "schedule": "naive", "recompute": True}, {"batch_size": 2}),
    (GPT, {"stage": 0, "schedule": "interleaved", "recompute": True}, {"clip_norm": 0.1}),
    (GPT, {"stage": 1, "sequence": True}, {"optimizer": ADAM, "clip_norm": 0.1}),
    (GPT, {"stage": 2, "microbatches": 3}, {"optimizer": ADAM, "clip_norm": 0.1}),
    (GPT, {"stage": 3, "sequence": True, "schedule": "interleaved", "recompute": True}, {"clip_norm": 0.1}),
    (OWN, {"stage": 3, "schedule": "gpipe"}, {"allreduce": "naive"}),
    (OWN, {"stage": 2, "sequence": True, "balance": "measured"}, {"weight_decay": 0.1}),
    (LONG, {"stage": 0, "attention": "ulysses"}, {"optimizer": ADAM, "clip_norm": 0.1}),
    (LONG, {"stage": 2, "sequence": True}, {"optimizer": ADAM}),
    (LONG, {"stage": 3, "schedule": "zb-h1", "attention": "ulysses"}, {"optimizer": MUON, "lr": 0.02}),
    (
        "llama:layers=2,width=16,heads=8,kv-heads=4,context=24",
        {"stage": 1, "recompute": True},
        {"optimizer": MUON, "lr": 0.02},
    ),
    (LLAMA, {"stage": 1, "microbatches": 3}, {"optimizer": ADAM}),
    (f"llama:{LATENT}", {"stage": 1, "attention": "ulysses"}, {"optimizer": ADAM}),
    (f"llama:{LATENT}", {"stage": 3, "schedule": "zb-h2", "recompute": False}, {"clip_norm": 0.1}),
    (LLAMA, {"stage": 3, "sequence": True, "schedule": "1f1b", "recompute": True}, {"clip_norm": 0.1}),
    (GPT, {"stage": 0}, {"optimizer": MUON, "weight_decay": 0.1, "lr": 0.02}),
    (OWN, {"stage": 1, "sequence": True}, {"optimizer": MUON, "clip_norm": 0.1, "lr": 0.02}),
    (MLP, {"stage": 2, "schedule": "gpipe"}, {"optimizer": f"{MUON},scale=rms", "average": "from=0", "lr": 0.02}),
    (GPT, {"stage": 3, "sequence": True}, {"optimizer": MUON, "clip_norm": 0.1, "lr": 0.02}),
    (GPT, {"stage": 2, "schedule": "zb-h2", "microbatches": 5, "sequence": True}, {"clip_norm": 0.1}),
    (MLP, {"stage": 3, "schedule": "zb-h1"}, {"optimizer": ADAM}),
    (GPT, {"stage": 3, "schedule": "zb-interleaved"}, {}),
    (OWN, {"stage": 1, "schedule": "zb-v", "microbatches": 3}, {"optimizer": ADAM, "clip_norm": 0.1}),
    (f"gpt:{MIXTURE}", {"stage": 1, "microbatches": 3}, {"optimizer": ADAM}),
    (f"llama:{MIXTURE},capacity=1.25", {"stage": 2, "sequence": True, "recompute": True}, {"clip_norm": 0.1}),
    (
        f"llama:{DEEPSEEK},experts=3,top=1",
        {"stage": 0, "schedule": "zb-h1", "sequence": True},
        {"optimizer": MUON, "lr": 0.02},
    ),
    (GPT, {"stage": 0, "schedule": "dualpipe-v", "microbatches": 6, "recompute": True}, {}),
    (f"gpt:{SHARED}", {"stage": 0, "microbatches": 3}, {"optimizer": ADAM, "clip_norm": 0.1}),
    (f"llama:{SHARED},capacity=1.25", {"stage": 1, "sequence": True, "recompute": True}, {"clip_norm": 0.1}),
    (f"gpt:{SHARED},top=1,capacity=1.25", {"stage": 2, "schedule": "zb-h1"}, {"optimizer": ADAM, "batch_size": 3}),
    (f"llama:{DEEPSEEK},experts=12", {"stage": 3, "sequence": True}, {"optimizer": MUON, "lr": 0.02, "clip_norm": 0.1}),
    (f"gpt:{SHARED},top=1", {"stage": 0}, {"optimizer": MUON, "lr": 0.02, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("other", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, 6))])
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_steps_are_those_of_sequential_sgd(number, other, cut, world):
    """Of the grids of these ranks each case takes one, the next case the next one; --all: every grid."""
    model, own, options = CASES[number]
    shapes = grids(world.size, model)
    for shape in [shapes[(number + other) % len(shapes)]] if other < len(shapes) else []:
        run = cut(world, grid.train, fit(own, shape), model, **options)
        assert run.reported["grid"] == shape and run.reported["stage"] == own["stage"]
        part, shard = run.held.part.size, run.held.shards.units.size
        held = {0: (part, part), 1: (part, part), 2: (part, shard), 3: (shard, shard)}[own["stage"]]
        assert (run.memory.now["parameters"] // 8, run.memory.now["gradients"] // 8) == held
        copies = shape["data"] * shape["context"]
        assert own["stage"] == 0 or abs(shard - part / copies) < len(run.held.shards.units.units)


def test_float32_to_rounding(cut, world):
    for shape in grids(world.size)[1:4:2] or grids(world.size):
        cut(world, grid.train, {"grid": shape, "stage": 2, "recompute": True}, GPT, 2e-5, dtype="float32")


@pytest.mark.parametrize("recompute", [False, True])
def test_sums_within_layers_with_recomputation(recompute, cut, ring, comm):
    """4 all-reduces a block and micro-batch, 6 where forward is done twice; so are that of the embedding and 2 of the
    loss, and the one of the head, of backward, is not."""
    own = {"grid": {"tensor": comm.size}, "microbatches": 2, "recompute": recompute}
    run = cut(comm, grid.train, own, GPT, epochs=1)
    rows, forwards = cut.micro_batches(2), 1 + recompute
    each = [n * LENGTH * WIDTH for n in rows for _ in range(LAYERS * (2 * forwards + 2) + forwards + 1)]
    if comm.size > 1:
        each += [n * LENGTH * numbers for n in rows for numbers in (1, 2) for _ in range(forwards)]
    counted = run.comm.traffic["all_reduce"]
    assert counted.calls == len(each) + 3  # and of the gradient of 3 steps, over 1 copy
    assert counted.bytes == run.comm.traffic.bytes == sum(ring.all_reduce(n, comm.rank, comm.size) for n in each)


def test_gathers_along_the_data_axis_for_each_micro_batch(cut, ring, comm):
    """At stage 3 every micro-batch gathers all layers twice, thrice with recomputation, and scatters them once."""
    for recompute in (False, True):
        own = {"grid": {"data": comm.size}, "stage": 3, "microbatches": 3, "recompute": recompute}
        run = cut(comm, grid.train, own, MLP, epochs=1)
        lengths = [each.stop - each.start for each in run.held.shards.units.units]
        traffic, where = run.comm.traffic, (comm.rank, comm.size)
        gathered, scattered = (sum(each(n, *where) for n in lengths) for each in (ring.all_gather, ring.reduce_scatter))
        assert len(lengths) == 6 and sum(lengths) == run.model.layout.size
        assert traffic["all_gather"].bytes == 3 * 3 * (2 + recompute) * gathered
        assert traffic["reduce_scatter"].bytes == 3 * 3 * scattered
        assert traffic.bytes == traffic["all_gather"].bytes + traffic["reduce_scatter"].bytes


def test_matrices_of_muon_go_to_their_owners_and_back(cut, comm):
    """A tensor-parallel weight of n elements sends n (1 - 1/t) values to its owner, and as many back; with copies of
    the parts each copy gets its part. Whole ones, on replicas or as layers that one rank owns, send nothing."""
    size, n = comm.size, LAYERS * 12 * WIDTH**2
    copies = 2 if size == 4 else 1
    parts = size // copies
    cases = [
        (grid.train, {"grid": {"data": copies, "tensor": parts}}, n * (copies + 1 - 2 / parts) if parts > 1 else 0),
        (grid.train, {"grid": {"data": size}}, 0),
        (grid.train, {"grid": {"pipeline": size}, "microbatches": 1}, None),
        (fully_sharded.train, {"stage": 2, "gather": "broadcast"}, 0),
    ]
    for train, own, values in cases:
        run = cut(comm, train, own, GPT, optimizer=MUON, lr=0.02, epochs=1)
        matrices = run.held.matrices
        assert run.held.optimizer.workspace is None and matrices is not None
        if values is None:
            assert matrices.messages == ([], [])
        else:
            assert sum(comm.allgather(run.comm.traffic["push"].bytes)) == 3 * 8 * round(values)
    run = cut(comm, grid.train, {"grid": {"expert": size}}, f"llama:{SHARED}", optimizer=MUON, lr=0.02, epochs=1)
    assert run.held.matrices.messages == ([], [])  # each rank has its experts whole


def test_messages_between_stages_whose_layers_are_shared(cut, world):
    """Each rank of a stage sends the activations of its data copy, 1/tensor of the tokens with sequence parallelism."""
    for number, shape in enumerate(each for each in grids(world.size) if each["pipeline"] > 1):
        for sequence in (False, True) if world.size < 4 else (number % 2 == 0,):
            own = {"grid": shape, "microbatches": 2, "sequence": sequence}
            run = cut(world, grid.train, own, GPT, epochs=1)
            d, p = world.rank // (world.size // shape["data"]), world.rank // shape["tensor"] % shape["pipeline"]
            neighbours = (p > 0) + (p < shape["pipeline"] - 1)
            rows = sum(cut_.stop - cut_.start for batch in (13, 13, 3) for cut_ in [chunks(batch, shape["data"])[d]])
            values = rows * LENGTH * WIDTH // (shape["tensor"] if sequence else 1)
            assert run.comm.traffic["push"].bytes == 8 * values * neighbours
            assert run.comm.traffic["push"].messages == 3 * 2 * neighbours


def test_messages_of_experts(cut, ring, comm):
    """Of each micro-batch: 2 exchanges of rows forward, and backward 2 of rows and 2 of a number for each. With all
    experts chosen, each rank needs the experts of the others for all of its tokens."""
    size, width, experts = comm.size, 24, 12
    model = f"gpt:{SHARED},top={experts}"
    run = cut(comm, grid.train, {"grid": {"expert": size}, "microbatches": 2}, model, epochs=1)
    traffic = run.comm.traffic
    batches = 3 * 2
    assert traffic["push"].messages == batches * 6 * (size - 1)
    rows = 29 * LENGTH * experts * (size - 1) // size  # of all ranks, to others
    pushed = sum(comm.allgather(traffic["push"].bytes))
    assert pushed == 8 * rows * (4 * width + 2)
    if size > 1:
        assert run.reported["expert"] == {"messages": batches * 6 * (size - 1) * size, "bytes": pushed}
        assert traffic["all_to_all"].calls == batches
        assert traffic["all_to_all"].bytes == batches * 8 * experts // size * all_to_all_rows(size, 8 * experts // size)
    (slices,) = run.held.part.common()
    common = sum(part.stop - part.start for part in slices)
    assert common == run.model.layout.size - (experts * 2 * 12 * width if size > 1 else 0)
    assert traffic["all_reduce"].bytes == 3 * ring.all_reduce(common, comm.rank, size)


@pytest.mark.parametrize(
    "optimizer, some, model",
    [(ADAM, slice(None), GPT), (MUON, slice(1, 7), GPT), (MUON, slice(1, None, 2), f"llama:{SHARED}")],
)
def test_each_strategy_goes_on_from_the_checkpoint_of_another(optimizer, some, model, follow, cut, world, mpi_tmp_path):
    """The state loads to the bit, and the steps are those of a sequential run that was never stopped, to rounding."""
    folder, options = str(mpi_tmp_path / "a"), {"optimizer": optimizer, "clip_norm": 0.1, "schedule": "constant"}
    options |= {"dtype": "float64", "allreduce": "ring"}
    shapes = grids(world.size, model)
    most = shapes[len(shapes) // 2]  # of all axes something, where the ranks are many enough
    strategies = [
        (pipeline.train, {"microbatches": 3}),
        (sequential.train, None),
        (fully_sharded.train, {"stage": 3}),
        (grid.train, {"grid": most, "stage": 2, "sequence": True}),
        (tensor_parallel.train, {"sequence": True}),
        (fully_sharded.train, {"stage": 1, "gather": "broadcast"}),
        (all_reduce.train, None),
        (model_parallel.train, None),
        (grid.train, {"grid": shapes[-1], "stage": 3, "recompute": True}),
    ][some]
    wanted = cut.alone(model, options | {"steps": len(strategies)}).path
    for done, (train, own) in enumerate(strategies):
        comm = MPI.COMM_SELF if train is sequential.train else world
        if comm is world or world.rank == 0:

            def start(steps, train=train, own=own, comm=comm, **more):
                return follow(comm, train, cut.data(model, "float64"), model, own, steps=steps, **options, **more)

            if done:
                loaded, found = start(done, resume=folder), Checkpoint.read(mpi_tmp_path / "a").vectors
                assert loaded.path == []
                if isinstance(loaded.held, CutModel):
                    state = cut.state(loaded, comm)
                else:
                    state = {name: loaded.state.tracked[name].array for name in found}
                assert set(state) == set(found) and len(found) == 3
                assert all(np.array_equal(state[name], vector) for name, vector in found.items())
            run = start(done + 1, out=folder, resume=folder if done else "")
            reached = cut.state(run, comm)["parameters"] if isinstance(run.held, CutModel) else run.parameters
            assert np.abs(reached - wanted[done]).max() < 1e-10
        world.Barrier()


@pytest.mark.parametrize(
    "train, own",
    [
        (grid.train, {"grid": "most", "sequence": True}),
        (pipeline.train, {"schedule": "1f1b"}),
        (model_parallel.train, {}),
        (tensor_parallel.train, {}),
        (fully_sharded.train, {}),
    ],
)
def test_communicators_are_given_back(train, own, follow, cut, world, monkeypatch):
    """MPI has some thousands at once, and a search makes many runs."""
    opened, original = [], Communicator._open

    def note(comm, *arguments):
        original(comm, *arguments)
        opened.append(comm)

    monkeypatch.setattr(Communicator, "_open", note)
    own = {"grid": grids(world.size)[len(grids(world.size)) // 2], "sequence": True} if "grid" in own else own
    follow(world, train, cut.data(GPT, "float64"), GPT, own, steps=1, allreduce="ring")
    assert len(opened) >= 2 and all(comm.mpi == MPI.COMM_NULL for comm in opened)
