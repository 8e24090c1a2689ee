"""A GPT of which ranks hold parts, rows for it, and what a rank holds."""

from types import SimpleNamespace

import numpy as np
import pytest
from paths import places

from hpcdl.comm import Communicator
from hpcdl.data import Batch
from hpcdl.memory import Memory
from hpcdl.models import make_model
from hpcdl.models.part import ModelPart
from hpcdl.optim import make_optimizer
from hpcdl.parallel.cut_model import CutModel
from hpcdl.parallel.zero import Shards
from hpcdl.random import Random

LENGTH, VOCABULARY = 5, 7
TIED = "gpt:layers=1,width=12,heads=12,context=5"


@pytest.fixture
def gpt():
    """Two specs, and functions: made(spec), a model; rows(count, seed), a batch; places(piece), in the whole vector."""

    def made(spec=TIED):
        return make_model(spec, (LENGTH,), VOCABULARY, "float64")

    def rows(count, seed=0):
        random = np.random.default_rng(seed)
        x, y = random.integers(0, VOCABULARY, (count, LENGTH)), random.integers(0, VOCABULARY, count)
        return Batch(x.astype(float), y, count, epoch=0, step=0, index=np.arange(count))

    return SimpleNamespace(tied=TIED, own=f"{TIED},head=own", made=made, rows=rows, places=places)


@pytest.fixture
def hold(world, gpt):
    """A function: what this rank holds of a model at a stage of ZeRO, over all ranks, as a run has it."""
    opened = []

    def make(stage=0, owners=False, spec=TIED, chunks=None, clip_norm=0.0, wrapped=lambda model: model, **more):
        comm, model = Communicator(world, "ring"), gpt.made(spec)
        opened.append(comm)
        optimizer = make_optimizer("adam", 0, "float64", lambda step: 0.1, 0.0, clip_norm)
        run = SimpleNamespace(random=Random(0), memory=Memory())
        shards = Shards(run, ModelPart(model, chunks), optimizer, comm, stage, owners)
        held = CutModel(comm, wrapped(model), shards, **more)
        held.join(comm, run.memory)
        return held

    yield make
    for comm in opened:
        comm.free()
