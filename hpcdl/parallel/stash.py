"""Weight stashing (PipeDream): versions of a stage's weights for the micro-batches in flight during updates.

    stage 0 of 3     F0 F1 F2 B0           F3 B1           F4 B2
    updates in w              0  update          1  update          2  update
    stashed                      0 for 1         0 for 2         1 for 3
                                 0 for 2         1 for 3         2 for 4

A micro-batch's backward uses the same version as its forward, copied at the first update after the forward: p-1-s
copies, whose memory is reused. (Narayanan et al., "PipeDream", SOSP 2019)"""

from hpcdl.models.layered import FlatWeights
from hpcdl.parallel.stage import Stage
from hpcdl.parallel.zero import Shards


class Stash:
    """Stashed versions, at most `versions`, of the parameters in `shards`, for the backward passes of `stage`."""

    def __init__(self, stage: Stage, shards: Shards, versions: int):
        self.stage, self.parameters, part = stage, shards.parameters, shards.part
        rooms = [shards.allocate("parameters", part.size) for _ in range(versions)]
        self.free = [FlatWeights(part, room, shards.gradient) for room in rooms]
        self.stashed: dict[int, FlatWeights] = {}  # by micro-batch
        self.current: list[int] = []  # micro-batches in flight that use the current version

    def forward(self, microbatch: int) -> None:
        """Note that this micro-batch's forward has used the current weights."""
        self.current.append(microbatch)

    def backward(self, microbatch: int) -> None:
        """Note this micro-batch's backward before the update: copy weights for other micro-batches that use them."""
        if microbatch in self.stashed:
            self.free.append(self.stashed.pop(microbatch))
        for each in self.current:
            if each != microbatch:
                weights = self.stashed[each] = self.free.pop()
                weights.parameters[:] = self.parameters
                self.stage.use(each, weights)
        self.current.clear()
