"""Weight stashing: a micro-batch's backward finds the version that its forward has taken; copies are used again."""

import pytest

from hpcdl.parallel.stash import Stash
from hpcdl.strategies.pipeline_schedules import actions_of


class Stage:
    """In place of a stage of a pipeline: notes which weights a micro-batch's backward is to use."""

    def __init__(self):
        self.uses = {}

    def use(self, microbatch, weights):
        self.uses[microbatch] = weights


@pytest.mark.parametrize("versions", [0, 1, 2, 3])
def test_backward_finds_the_version_of_its_forward(versions, hold):
    """With as many copies as micro-batches run ahead; the parameters are the number of the update."""
    stages = versions + 1
    shards, stage = hold().shards, Stage()
    held = shards.memory.now["parameters"]
    stash, taken, updates = Stash(stage, shards, versions), {}, 0
    assert shards.memory.now["parameters"] == held + versions * shards.parameters.nbytes
    rooms = {id(weights) for weights in stash.free}
    shards.parameters[:] = 0
    for kind, k, _ in actions_of("pipedream", stages, 0, 9):
        if kind == "F":
            taken[k] = updates
            stash.forward(k)
            continue
        found = stage.uses[k].parameters if k in stage.uses else shards.parameters
        assert (found == taken[k]).all() and taken[k] == max(0, k - versions)
        stash.backward(k)
        updates += 1
        shards.parameters[:] = updates
    assert {id(weights) for weights in stash.free} == rooms and not stash.stashed
    assert all(id(weights) in rooms for weights in stage.uses.values())
