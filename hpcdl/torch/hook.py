"""A communication hook for DDP: gradients travel in compressed messages, with error feedback where the method has it.

    ddp.register_comm_hook(hpcdl.torch.CompressState("bfloat16"), hpcdl.torch.compress_hook)

Each bucket has its own `Compressed` (comm/compression/): its method, and the number of the bucket as
seed. DDP rebuilds its buckets after the first step; the residuals of the first step are then dropped. Methods that take
over a part of the optimizer (dgc, onebit-adam) are refused."""

from typing import Any

import torch
from torch import distributed
from torch.distributed import GradBucket
from torch.futures import Future

from hpcdl.comm.compression import Compressed, compressed, parse
from hpcdl.errors import UsageError
from hpcdl.models.layout import Layout, Tensor
from hpcdl.torch.arrays import array_to_fill
from hpcdl.torch.work import engine


class CompressState:
    """State of the hook between steps. kind: a method, as in --compress. group: the process group; None: all ranks."""

    def __init__(self, kind: str = "bfloat16", group: Any = None):
        if optimizers := parse(kind)[0].optimizers:
            raise UsageError(f"{kind} is a part of the optimizer {' or '.join(optimizers)}, and DDP hands on gradients")
        self.kind, self.group = kind, group
        self.states: dict[tuple[int, int, torch.dtype], Compressed] = {}  # by number, length and type of the bucket

    @property
    def residuals(self) -> list[Any]:
        """The residual of each bucket, which is still to be sent; none without feedback."""
        states = [state for _, state in sorted(self.states.items(), key=lambda each: each[0][0])]
        return [state.tracked["residual"] for state in states if "residual" in state.tracked]

    def of(self, bucket: GradBucket) -> Compressed:
        tensor = bucket.buffer()
        key = bucket.index(), tensor.numel(), tensor.dtype
        if key not in self.states:
            for other in [each for each in self.states if each[0] == key[0]]:
                del self.states[other]  # DDP has rebuilt its buckets
            if tensor.dtype not in (torch.float32, torch.float64):
                raise UsageError(f"compress_hook takes gradients of float32 or float64, not of {tensor.dtype}")
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout = layout_of(bucket, dtype)
            self.states[key] = compressed(self.kind, tensor.numel(), dtype, bucket.index(), layout)
        return self.states[key]


def layout_of(bucket: GradBucket, dtype: str) -> Layout:
    """Return the layout of the bucket's tensors, which lie one after the other."""
    tensors, offset = [], 0
    for number, each in enumerate(bucket.gradients()):
        tensors.append(Tensor(str(number), tuple(each.shape), offset, str(number)))
        offset += each.numel()
    return Layout(tensors, dtype)


def compress_hook(state: CompressState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Return the mean of the bucket over the ranks, as a future; for `ddp.register_comm_hook`."""
    group = state.group or distributed.group.WORLD
    comm = getattr(group, "comm", None)
    if comm is None:
        raise UsageError('compress_hook needs a process group of the backend hpcdl; call init_process_group("hpcdl")')
    tensor = bucket.buffer()
    vector, back = array_to_fill(tensor)
    work = engine.start(lambda: [comm.iall_reduce_compressed(vector, state.of(bucket), "mean")], [tensor], back)
    return work.get_future().then(lambda each: each.value()[0])  # the only tensor, as DDP expects it
