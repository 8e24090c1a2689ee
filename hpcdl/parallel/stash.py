"""Weight stashing: versions of a stage's weights for the micro-batches in flight, while updates go on (PipeDream).

    stage 0 of 3     F0 F1 F2 B0           F3 B1           F4 B2
    updates in w              0  update          1  update          2  update
    stashed                      0 for 1         0 for 2         1 for 3
                                 0 for 2         1 for 3         2 for 4

A micro-batch's backward takes the version that its forward has taken. It is copied when the first update follows, for
each micro-batch in flight: p-1-s copies, which are used again.

(Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019)
"""

from hpcdl.models.layered import FlatWeights
from hpcdl.parallel.stage import Stage
from hpcdl.parallel.zero import Shards


class Stash:
    """Room for so many `versions` of the parameters in `shards`, which `stage` computes with."""

    def __init__(self, stage: Stage, shards: Shards, versions: int):
        self.stage, self.parameters, part = stage, shards.parameters, shards.part
        rooms = [shards.allocate("parameters", part.size) for _ in range(versions)]
        self.free = [FlatWeights(part, room, shards.gradient) for room in rooms]
        self.stashed: dict[int, FlatWeights] = {}  # by micro-batch
        self.current: list[int] = []  # micro-batches in flight whose version no update has followed

    def forward(self, microbatch: int) -> None:
        """Its forward has taken the current weights."""
        self.current.append(microbatch)

    def backward(self, microbatch: int) -> None:
        """Its backward is done, and an update follows: what others in flight have taken is copied for them."""
        if microbatch in self.stashed:
            self.free.append(self.stashed.pop(microbatch))
        for each in self.current:
            if each != microbatch:
                weights = self.stashed[each] = self.free.pop()
                weights.parameters[:] = self.parameters
                self.stage.use(each, weights)
        self.current.clear()
