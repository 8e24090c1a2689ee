"""Pipelines: steps are those of sequential SGD, PipeDream's those of its simulation; messages, in flight, stopping."""

from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm.progress import activity
from hpcdl.data import from_arrays
from hpcdl.models import make_model
from hpcdl.models.balance import cut_layers
from hpcdl.optim import make_optimizer
from hpcdl.random import Random
from hpcdl.runs import Run, signals
from hpcdl.strategies import pipeline
from hpcdl.strategies.pipeline_schedules import INTERLEAVED, V_SHAPED

pytestmark = pytest.mark.four

DEEP = "mlp:5,4,6,5,4,6,5"  # 8 layers: 2 chunks on each of 4 ranks
WIDTHS = 5, 4, 6, 5, 4, 6, 5
GPT = "gpt:layers=3,width=8,heads=2,context=12"  # 9 layers
OWN = f"{GPT},head=own"
LLAMA = "llama:layers=3,width=8,heads=2,kv-heads=1,context=12,units=6"
ADAM = "adam:eps=0.001"  # what is 0 but for rounding makes no large steps
LENGTH, WIDTH, VOCABULARY = 12, 8, 7


def fit(text, size):
    """The strategy's arguments as "SCHEDULE MICRO-BATCHES [recompute] [measured]".
    interleaved and those in a V: so many for each stage; 2 chunks; on one rank, which does not interleave, 1f1b."""
    schedule, count, *more = text.split()
    own = {"schedule": schedule, "microbatches": int(count), "recompute": "recompute" in more}
    own["balance"] = "measured" if "measured" in more else "parameters"
    if schedule in INTERLEAVED:
        own |= {"schedule": "1f1b"} if size == 1 else {"chunks": 2, "microbatches": int(count) * size}
    elif schedule in V_SHAPED:
        own["microbatches"] = int(count) * size
    return own


@pytest.mark.parametrize(
    "model, own, options",
    [
        (DEEP, "naive 4", {"optimizer": "sgd"}),
        (DEEP, "gpipe 3", {"clip_norm": 0.05}),
        (DEEP, "1f1b 5", {"optimizer": ADAM, "batch_size": 2}),  # most micro-batches are empty
        (DEEP, "1f1b 1", {"optimizer": "nesterov"}),
        (DEEP, "interleaved 2", {"weight_decay": 0.1}),
        (DEEP, "interleaved 1 recompute", {"optimizer": ADAM}),
        (DEEP, "gpipe 4 recompute measured", {}),
        (GPT, "1f1b 4", {"optimizer": ADAM, "clip_norm": 0.1}),
        (GPT, "interleaved 2 recompute", {"allreduce": "naive"}),
        (OWN, "gpipe 2 recompute", {}),
        (OWN, "interleaved 1", {"clip_norm": 0.1}),
        (LLAMA, "1f1b 4 recompute", {"optimizer": ADAM}),
        (DEEP, "zb-h1 5", {"optimizer": ADAM}),
        (DEEP, "zb-h2 8 recompute", {"clip_norm": 0.05}),
        (DEEP, "zb-v 2", {"optimizer": "nesterov"}),
        (GPT, "zb-h1 4", {"optimizer": ADAM, "clip_norm": 0.1}),
        (GPT, "zb-interleaved 2", {}),
        (GPT, "zb-v 1 recompute", {"clip_norm": 0.1}),
        (GPT, "dualpipe-v 2 measured", {"optimizer": ADAM}),
        (OWN, "zb-v 2", {}),
    ],
    ids=str,
)
def test_steps_are_those_of_sequential_sgd(model, own, options, cut, world):
    cut(world, pipeline.train, fit(own, world.size), model, **options)


@pytest.mark.parametrize("own", ["naive 3", "gpipe 3", "1f1b 5", "interleaved 2"])
def test_two_messages_a_boundary_and_micro_batch(own, cut, comm):
    mine = fit(own, comm.size)
    run = cut(comm, pipeline.train, mine, DEEP, epochs=1)
    pushed, rows, parts = run.comm.traffic["push"], cut.micro_batches(mine["microbatches"]), run.held.part.chunks
    widths = [WIDTHS[each.start - 1] for each in parts if each.start > 0]  # backward, to the stage before
    widths += [WIDTHS[each.stop - 1] for each in parts if each.stop < len(run.model.layers)]
    assert len(widths) == 2 * len(parts) - (comm.rank == 0) - (comm.rank == comm.size - 1)
    assert pushed.calls == pushed.messages == len(rows) * len(widths)
    assert pushed.bytes == 8 * sum(rows) * sum(widths)
    assert run.comm.traffic.bytes == pushed.bytes


def test_messages_of_a_transformer_and_the_sum_of_what_is_tied(cut, ring, comm):
    """Rows for each token travel; the first and the last stage sum the gradient of the table that they share."""
    run = cut(comm, pipeline.train, {"microbatches": 3}, GPT, epochs=1)
    traffic, neighbours = run.comm.traffic, (comm.rank > 0) + (comm.rank < comm.size - 1)
    assert traffic["push"].messages == 9 * neighbours
    assert traffic["push"].bytes == 8 * 29 * LENGTH * WIDTH * neighbours
    tied = 0
    if comm.size > 1 and comm.rank in (0, comm.size - 1):
        tied = 3 * ring.all_reduce(VOCABULARY * WIDTH, int(comm.rank > 0), 2)
    assert traffic["all_reduce"].bytes == tied
    assert traffic.bytes == traffic["push"].bytes + tied


@pytest.mark.parametrize("m", [1, 3])
def test_micro_batches_in_flight(m, cut, comm):
    p = comm.size
    wanted = {"naive": [1] * p, "gpipe": [m] * p, "1f1b": [min(m, p - s) for s in range(p)]}
    for schedule, most in wanted.items():
        run = cut(comm, pipeline.train, {"schedule": schedule, "microbatches": m}, DEEP, epochs=1)
        assert run.reported["in_flight_per_rank"] == most
    if p > 1:
        own = {"schedule": "interleaved", "microbatches": m * p, "chunks": 2}
        run = cut(comm, pipeline.train, own, DEEP, epochs=1)
        assert run.reported["in_flight_per_rank"] == [min(2 * m * p, 2 * (p - 1 - s) + p + 1) for s in range(p)]


def test_activations_of_micro_batches_in_flight(cut, world):
    """GPipe keeps 6 micro-batches, 1F1B fewer, recomputation of each its input alone; weights are held once."""
    peaks = {}
    for schedule, recompute in (("gpipe", False), ("gpipe", True), ("1f1b", False), ("naive", False)):
        own = {"schedule": schedule, "microbatches": 6, "recompute": recompute}
        run = cut(world, pipeline.train, own, OWN, optimizer=ADAM)
        peaks[schedule, recompute] = run.memory.peak["activations"]
        held = 8 * run.held.part.size
        assert [run.memory.peak[kind] for kind in ("parameters", "gradients", "optimizer")] == [held, held, 2 * held]
    assert peaks["gpipe", True] < peaks["gpipe", False]
    assert peaks["naive", False] < peaks["gpipe", False]
    in_flight = min(6, world.size - world.rank)
    assert (peaks["1f1b", False] < peaks["gpipe", False]) == (in_flight < 6)
    assert (peaks["1f1b", False] == peaks["naive", False]) == (in_flight == 1)
    assert sum(world.allgather(run.held.part.size)) == run.model.layout.size


RATE = 0.05
CONSTANT = {"schedule": "constant", "lr": RATE}
DREAM = {"schedule": "pipedream"}
PLAIN = "mlp:5,4,6"


def simulate(data, spec, layers, steps, optimizer="momentum", start=None, first=0):
    """PipeDream on one rank: stage s takes micro-batch k with weights that lack the last p - 1 - s updates before it.
    layers: the names of the layers of each stage. start, first: parameters and step from which a run goes on, with an
    empty pipeline. Returns the parameters after each step, losses and scores."""
    model = make_model(spec, data.features, data.classes, "float64")
    rule = make_optimizer(optimizer, model.size, "float64", lambda step: RATE)
    slices = [[at for name, at in model.layout.layer_slices if name in names] for names in layers]
    w, losses = [model.initialize(Random(0)) if start is None else start], []
    for k in range(steps - first):
        mixed, gradient = np.empty(model.size), np.zeros(model.size)
        for s, own in enumerate(slices):
            for at in own:
                mixed[at] = w[max(0, k - (len(layers) - 1 - s))][at]
        epoch, step = divmod(first + k, 3)
        batch = next(data.batches(epoch, 13, (0, 1), step))
        losses.append(model.loss_and_gradient(mixed, batch, gradient))
        w.append(w[-1].copy())
        rule.update(w[-1], gradient, scale=1 / batch.total)
    x, y = data.test.rows(0, data.test.examples)
    loss, right = model.evaluate(w[-1], SimpleNamespace(x=x, y=y))
    return SimpleNamespace(
        path=w[1:], own_losses=losses, scores={"test_loss": loss / len(x), "test_accuracy": right / len(x)}
    )


def stages_of(model, data, stages):
    """The names of the layers of each stage."""
    made = make_model(model, data.features, data.classes, "float64")
    return [[layer.name for layer in made.layers[each.start : each.stop]] for each in cut_layers(made, stages)]


@pytest.mark.parametrize(
    "model, optimizer, recompute",
    [(PLAIN, "sgd", False), (PLAIN, ADAM, True), (OWN, "momentum", False), (OWN, "sgd", True)],
)
def test_pipedream_uses_weights_as_old_as_the_stages_behind_are_many(model, optimizer, recompute, cut, comm):
    """Forward and backward of a micro-batch by the same weights; the first of an epoch lies in flight with the last."""
    data, p = cut.data(model, "float64"), comm.size
    wanted = simulate(data, model, stages_of(model, data, p), 9, optimizer)
    own = DREAM | {"recompute": recompute}
    options = CONSTANT | {"optimizer": optimizer, "epochs": 3}
    run = cut(comm, pipeline.train, own, model, 1e-13, wanted, **options)
    assert run.reported["weights_updates_old"] == list(reversed(range(p)))
    assert run.reported["in_flight_per_rank"] == [p - s for s in range(p)]
    versions = p - comm.rank  # those that are stashed, and the current one
    assert run.memory.peak["parameters"] == 8 * versions * run.held.part.size
    pushed, neighbours = run.comm.traffic["push"], (comm.rank > 0) + (comm.rank < p - 1)
    assert pushed.messages == 9 * neighbours and run.comm.traffic.bytes == pushed.bytes
    if model == OWN:
        assert pushed.bytes == 3 * 8 * 29 * LENGTH * WIDTH * neighbours
    reference = cut.alone(model, options | {"dtype": "float64", "allreduce": "ring"})
    same = np.abs(wanted.path[-1] - reference.path[-1]).max() < 1e-10
    assert same == (p == 1)  # on one rank it is sequential SGD, on several it is not


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_run_that_is_shorter_than_the_pipeline_is_deep(steps, cut, world):
    data, p = cut.data(PLAIN, "float64"), world.size
    wanted = simulate(data, PLAIN, stages_of(PLAIN, data, p), steps)
    run = cut(world, pipeline.train, DREAM, PLAIN, 1e-13, wanted, steps=steps, **CONSTANT)
    assert run.reported["weights_updates_old"] == [min(steps - 1, p - 1 - s) for s in range(p)]


def leftovers(comm):
    """Whether a message has come that nobody has received; collective."""
    comm.barrier()
    return comm.mpi.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


def told(monkeypatch, rank, step):
    """Let a signal come to `rank` in this step, and all ranks look for it after each."""
    original = Run.boundary

    def boundary(run):
        run.agreement.interval = 1
        if run.step == step and run.comm.rank == rank:
            signals.received.append("SIGTERM")
        original(run)

    monkeypatch.setattr(signals, "received", [])
    monkeypatch.setattr(Run, "boundary", boundary)


def dream_that_ends(comm, follow, cut, **options):
    """A run of PipeDream that something ends early, whose steps are those of the simulation."""
    clean = []

    def train(comm, *arguments, **own):
        pipeline.train(comm, *arguments, **own)
        clean.append(not leftovers(comm))

    x, y = np.random.default_rng(6).standard_normal((40, 6)), np.arange(40) % 3
    validation = {"validation": options.get("validation", 0)}
    data = from_arrays(x[:29], y[:29], x[29:], y[29:], dtype="float64", **validation)
    run = follow(comm, train, data, PLAIN, DREAM, allreduce="ring", **CONSTANT | options)
    assert clean == [True] and not activity.in_flight and run.memory.now["activations"] == 0
    assert len(set(comm.allgather((run.stopped, run.step, len(run.path))))) == 1
    assert run.step == len(run.path)
    if not validation["validation"]:
        wanted = simulate(data, PLAIN, run.reported["layers_of_stages"], run.step)
        for mine, whole in zip(run.path, wanted.path, strict=True):
            for piece, _ in run.held.shards.parameter_pieces:
                there = whole[piece.start : piece.start + piece.size]
                assert np.abs(mine[piece.local : piece.local + piece.size] - there).max() < 1e-12
    return run


@pytest.mark.parametrize("step", [1, 3, 4, 7])
@pytest.mark.parametrize("target", [0, -1])
@pytest.mark.in_turn("target")
def test_a_signal_to_any_rank_ends_pipedream_when_what_has_begun_is_done(
    step, target, follow, cut, world, monkeypatch, mpi_tmp_path
):
    told(monkeypatch, target % world.size, step)
    run = dream_that_ends(world, follow, cut, steps=400, out=str(mpi_tmp_path))
    assert run.stopped == "signal" and run.step == step + world.size - 1
    if world.rank == 0:
        assert Checkpoint.read(mpi_tmp_path).attributes["step"] == run.step


def test_patience_and_a_time_limit_end_pipedream(follow, cut, world):
    """What ends it may be seen again while what has begun is being done: the run must not grow longer by that."""
    run = dream_that_ends(world, follow, cut, steps=400, time_limit=1e-9)
    assert run.stopped == "time limit" and run.step >= world.size
    options = {"validation": 0.2, "patience": 1, "lr": 1e-30, "batch_size": 8, "epochs": 100}
    run = dream_that_ends(world, follow, cut, **options)
    assert run.stopped == "patience" and run.step == 2 * run.per_epoch + world.size - 1


@pytest.mark.parametrize(
    "stop, model, own, options",
    [
        (4, GPT, "1f1b 3", {"optimizer": "adam", "clip_norm": 0.1}),
        (5, DEEP, "interleaved 1 recompute", {"optimizer": "momentum"}),
    ],
    ids=str,
)
def test_resumed_is_never_stopped_to_the_bit(stop, model, own, options, resumes, world):
    resumes(stop, pipeline.train, model, fit(own, world.size), **options, **CONSTANT)


def test_pipedream_goes_on_with_an_empty_pipeline(follow, cut, world, mpi_tmp_path):
    """From the parameters of the checkpoint, the stages fill up anew: stages do not lag behind at first."""
    folder, data = str(mpi_tmp_path / "a"), cut.data(PLAIN, "float64")
    options = CONSTANT | {"optimizer": "sgd", "dtype": "float64", "allreduce": "ring"}
    follow(world, pipeline.train, data, PLAIN, DREAM, steps=4, out=folder, **options)
    start = Checkpoint.read(mpi_tmp_path / "a").vectors["parameters"]
    wanted = simulate(data, PLAIN, stages_of(PLAIN, data, world.size), 9, "sgd", start, 4)
    cut(world, pipeline.train, DREAM, PLAIN, 1e-13, wanted, steps=9, resume=folder, **options)
