"""Runs of one strategy whose parameters are kept step by step, so that two runs can be compared step by step."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from local_ranks import circulant_traffic
from mpi4py import MPI
from paths import places

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.allreduce.circulant import SHORT
from hpcdl.comm.progress import activity
from hpcdl.data import from_arrays
from hpcdl.models import TRANSFORMERS, for_data
from hpcdl.models.mixture import counted_choices
from hpcdl.runs import Options, Replicas, Run
from hpcdl.runs.accumulated import accumulated
from hpcdl.runs.context import RunContext
from hpcdl.strategies import parameter_server, sequential


def watched(run):
    """The run, which keeps the parameters, and this rank's replica, after every update, and its sums of losses."""
    run.path, run.own_path, run.own_losses = [], [], []

    def keep(run, loss, total):
        run.held.refresh()  # where parameters live elsewhere
        run.path.append(run.parameters.copy())
        if isinstance(run.held, Replicas):
            run.own_path.append(run.held.replica.copy())
        run.own_losses.append(loss)

    run.observe(keep)
    return run


def examples(dtype):
    """29 examples of 3 classes: batches of 13 leave a last one of 3, of which a fourth rank gets nothing."""
    random = np.random.default_rng(4)
    y = random.integers(0, 3, 29)
    x = random.standard_normal((29, 6)) + y[:, None]
    return from_arrays(x, y, x[:11], y[:11], dtype=dtype)


def tokens(dtype, length=12):
    """29 sequences of 12 tokens of 7 kinds, and the token after each."""
    random = np.random.default_rng(5)
    x, y = random.integers(0, 7, (40, length)), random.integers(0, 7, 40)
    return from_arrays(x[:29], y[:29], x[29:], y[29:], classes=7, dtype=dtype)


def long_sequences(dtype):
    """The same of 24 tokens: two chunks for each of 1, 2, 3, 4 or 6 ranks."""
    return tokens(dtype, 24)


@dataclass(frozen=True)
class Rounds(Options):
    """Rounds are steps and epochs, as in federated learning."""

    rounds: int = 0

    def plan(self, ranks, data):
        return data.examples, 1, self.rounds


@pytest.fixture
def follow():
    """A function: train on `bare`, a communicator of mpi4py; returns the run, with its `path` of parameters.
    own: the strategy's own arguments. workers: how many ranks compute, where not all do. rounds: so many are steps.
    Where rank 0 runs the run alone, it alone has a path. `follow.examples(dtype)` are the data."""

    def run(bare, train, data=None, model="mlp:5", own=None, workers=None, **options):
        options = (Rounds if "rounds" in options else Options)(
            **{"batch_size": 13, "epochs": 4, "dtype": "float64", "allreduce": "ring", "progress": "none"} | options
        )
        comm = Communicator(bare, options.allreduce)
        data = data or examples(options.dtype)
        made = for_data(model, data, options.dtype)
        made = accumulated(made, options.accumulate)
        with watched(Run(comm, options, RunContext(workers=workers or 0))) as running:
            train(comm, made, data, running.make_optimizer(made, data), running, **(own or {}))
        comm.free()  # of thousands, MPI has no more than some
        return running

    run.examples = examples
    return run


@pytest.fixture
def serve(follow):
    """A function: train with parameter servers; own: arguments of the strategy, the others are options."""

    def run(comm, own, data=None, **options):
        workers = comm.size - (0 if own.get("on_workers") else own.get("servers", 1))
        return follow(comm, parameter_server.train, data, own=own, workers=workers, **options)

    return run


def whole(bare, vector, pieces, size):
    """The whole vector of so many elements, of which each rank gives what it speaks for; one speaks for each."""
    mine = [(places(each), vector[each.local : each.local + each.size]) for each, speaks in pieces if speaks]
    found, times = np.zeros(size, vector.dtype), np.zeros(size, int)
    for at, values in itertools.chain(*bare.allgather(mine)):
        found[at] = values
        times[at] += 1
    assert (times == 1).all()
    return found


@pytest.fixture(scope="session")
def references():
    """Runs on one rank that several tests compare with."""
    return {}


def on_one_rank(follow, references):
    """A function: the same run on one rank, sequentially, made once for all tests; data(dtype): if not `examples`."""

    def run(model="mlp:5", data=examples, **options):
        key = model, data, repr(sorted(options.items()))
        if key not in references:
            made = data(options.get("dtype", "float64"))
            references[key] = follow(MPI.COMM_SELF, sequential.train, made, model, **options)
        return references[key]

    return run


@pytest.fixture
def alone(follow, references):
    return on_one_rank(follow, references)


@pytest.fixture
def cut(follow, references):
    """A function: train by a strategy that cuts the model, and hold each step against that of a reference.

    Losses, parameters wherever they lie, and scores are those of sequential SGD, or of `wanted`, which has a path,
    own_losses and scores. Models gpt and llama read `tokens`, those with context=24 `long_sequences`. Returns the run.
    Members: `alone`, the reference; `data`; `state`, what a run holds as whole vectors; `micro_batches`, their rows."""
    alone = on_one_rank(follow, references)  # not by the fixture: under tests of PyTorch that is another

    def source(model):
        if "context=24" in model:
            return long_sequences
        return tokens if model.startswith(TRANSFORMERS) else examples

    def data(model, dtype):
        return source(model)(dtype)

    def reference(model, options):
        return alone(model, source(model), **options)

    def run(bare, train, own=None, model="mlp:12", tolerance=1e-10, wanted=None, **options):
        options = {"dtype": "float64", "allreduce": "ring"} | ({} if "epochs" in options else {"steps": 4}) | options
        wanted = wanted or reference(model, options)
        found = follow(bare, train, data(model, options["dtype"]), model, own, **options)
        assert len(found.path) == len(wanted.path) > 0
        losses = np.sum(bare.allgather(found.own_losses), axis=0)
        assert losses == pytest.approx(wanted.own_losses, rel=tolerance)
        for step, (mine, whole) in enumerate(zip(found.path, wanted.path, strict=True)):
            for piece, _ in found.held.shards.parameter_pieces:  # also of those that another rank speaks for
                apart = mine[piece.local : piece.local + piece.size] - whole[places(piece)]
                assert np.abs(apart).max(initial=0) <= tolerance * max(1, np.abs(whole).max()), f"step {step}"
        assert found.scores == pytest.approx(wanted.scores, rel=tolerance)
        if "experts=" in model:  # choices and drops
            of_ranks, of_one = bare.allgather(counted_choices(found.model)), counted_choices(wanted.model)
            assert all((sum(each[name] for each in of_ranks) == of_one[name]).all() for name in of_one)
        assert found.agree in (None, True) and not activity.in_flight
        assert found.memory.now["activations"] == 0 < found.memory.peak["activations"]
        state(found, bare)
        return found

    def state(run, bare):
        """All that a run holds, parameters and optimizer state, as whole vectors by name."""
        shards = run.held.shards
        held = {"parameters": (run.parameters, shards.parameter_pieces)}
        held |= {f"optimizer/{name}": (vector, shards.pieces) for name, vector in shards.optimizer.state.items()}
        return {name: whole(bare, *each, run.model.layout.size) for name, each in held.items()}

    def micro_batches(parts):
        """The rows of each micro-batch of an epoch, 29 rows in batches of 13."""
        return [part.stop - part.start for rows in (13, 13, 3) for part in chunks(rows, parts)]

    run.alone, run.data, run.state, run.micro_batches = reference, data, state, micro_batches
    return run


@pytest.fixture
def ring():
    """Bytes that a rank sends for so many values of float64: ring.all_reduce(values, rank, size) by the ring, and by it
    or, for short vectors on 4 ranks or more, on a circulant graph: all_gather and reduce_scatter; messages of both."""

    def on_ring(values, size, *left_out):
        length = [cut.stop - cut.start for cut in chunks(values, size)]
        return 8 * (values - sum(length[c % size] for c in left_out)) if size > 1 else 0

    def halves(values, rank, size):
        if size > 3 and 8 * values <= SHORT:
            return [(8 * sent, messages) for sent, messages in circulant_traffic(values, size, rank)]
        return [(on_ring(values, size, left_out), size - 1) for left_out in (rank, rank + 1)]

    return SimpleNamespace(
        all_gather=lambda *where: halves(*where)[1][0],
        reduce_scatter=lambda *where: halves(*where)[0][0],
        messages=lambda *where: [messages for _, messages in halves(*where)],
        all_reduce=lambda values, rank, size: sum(on_ring(values, size, rank + i) for i in (1, 2)),
    )


@pytest.fixture
def resumes(follow, cut, world, mpi_tmp_path):
    """A function: 11 steps in float32, stopped after `stop` and resumed, are those of a run never stopped, to the bit.
    So is all else that a checkpoint holds, as each rank has it. data(dtype): if not those of `cut`. Returns both
    runs."""

    def run(stop, train, model="mlp:5", own=None, data=None, **options):
        options = {"schedule": "constant", "dtype": "float32", "allreduce": "ring"} | options

        def steps(count, **more):
            rows = data(options["dtype"]) if data else cut.data(model, options["dtype"])
            return follow(world, train, rows, model, own, steps=count, **options, **more)

        whole, folder = steps(11), str(mpi_tmp_path / "a")
        steps(stop, out=folder)
        again = steps(11, resume=folder)
        assert np.array_equal(again.path, whole.path[stop:])
        for name, vector in whole.state.tracked.items():
            assert np.array_equal(again.state.tracked[name].array, vector.array), name
        return whole, again

    return run
