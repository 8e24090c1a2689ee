"""A communication hook for DDP: gradients travel in 16 bits, and what rounding leaves is not lost.

    ddp.register_comm_hook(hpcdl.torch.CompressState("bfloat16"), hpcdl.torch.compress_hook)

Each bucket has its own `Compressed` (comm/compressed.py): half of the bytes of float32, the sums in float32, error
feedback at both ends. DDP builds its buckets anew after the first step, and their order is that of the backward pass;
what was rounded away in the first step, in buckets of another shape, is dropped there.
"""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket
from torch.futures import Future

from hpcdl.comm.compressed import KINDS, Compressed
from hpcdl.errors import UsageError, unknown
from hpcdl.torch.arrays import writing
from hpcdl.torch.work import engine


class CompressState:
    """What the hook keeps from step to step. kind: bfloat16 or float16. group: None for all ranks."""

    def __init__(self, kind: str = "bfloat16", group: Any = None):
        if kind not in KINDS:
            raise unknown("compression", kind, KINDS)
        self.kind, self.group = kind, group
        self.states: dict[tuple[int, int, torch.dtype], Compressed] = {}  # by number, length and type of the bucket

    @property
    def residuals(self) -> list[Any]:
        """What was rounded away and is still to be sent, of each bucket."""
        return [state.residual for _, state in sorted(self.states.items(), key=lambda each: each[0][0])]

    def of(self, bucket: GradBucket) -> Compressed:
        """That of this bucket."""
        tensor = bucket.buffer()
        key = bucket.index(), tensor.numel(), tensor.dtype
        if key not in self.states:
            for other in [each for each in self.states if each[0] == key[0]]:
                del self.states[other]  # of buckets that DDP has had before
            if tensor.dtype not in (torch.float32, torch.float64):
                raise UsageError(f"compress_hook takes gradients of float32 or float64, not of {tensor.dtype}")
            self.states[key] = Compressed(tensor.numel(), str(tensor.dtype).removeprefix("torch."), self.kind)
        return self.states[key]


def compress_hook(state: CompressState, bucket: GradBucket) -> Future[Tensor]:
    """The mean of the bucket over the ranks: `ddp.register_comm_hook(CompressState("bfloat16"), compress_hook)`."""
    group = state.group or distributed.group.WORLD
    comm = getattr(group, "comm", None)
    if comm is None:
        raise UsageError('compress_hook is for process groups of the backend hpcdl; init_process_group("hpcdl")')
    tensor = bucket.buffer()
    vector, back = writing(tensor)
    work = engine.start(lambda: [comm.iall_reduce_compressed(vector, state.of(bucket), "mean")], [tensor], back)
    return one_of(work.get_future())


def one_of(future: Future[Any]) -> Future[Tensor]:
    """The only tensor of the operation, which is what DDP takes."""
    return future.then(lambda each: each.value()[0])
