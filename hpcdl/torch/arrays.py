"""Tensors as the flat arrays that travel: the tensor's own memory where it can be, else a copy of it.

    on the CPU, contiguous           the memory itself
    else (strided, on a GPU)         a contiguous copy on the host, which goes back when the operation is over

Types that numpy does not have travel as the integers of their size: bfloat16 as uint16, those of 8 bits as uint8.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpcdl.comm.diagnostics.call_signature import TYPES
from hpcdl.errors import UsageError

# bfloat16 and float16 are known as what they are where values are combined (`CODED`).
AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.complex32: torch.int32}
AS_INTEGERS |= {kind: torch.uint8 for name, kind in vars(torch).items() if name.startswith("float8_")}
CODED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
Back = Callable[[], object] | None  # what takes a copy back into the tensor


@functools.cache
def element_type(kind: torch.dtype) -> np.dtype | str:
    """The type that ranks compare, whatever travels: numpy's, or the name of one that only PyTorch has."""
    if kind is torch.float16:  # numpy has it, though it travels as an integer, too
        return np.dtype(np.float16)
    name = str(kind).removeprefix("torch.")
    return name if name in TYPES else torch.empty(0, dtype=AS_INTEGERS.get(kind, kind)).numpy().dtype


def own(tensor: Tensor) -> np.ndarray | None:
    """The tensor's memory as a flat array, or None where it is not on the CPU, not contiguous, or at an odd address.

    Raises UsageError for a tensor that is not dense.
    """
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise UsageError(
            f"the backend hpcdl sends dense tensors, not one of layout {kind}; take to_dense(), and Embedding without "
            "sparse=True"
        )
    if not tensor.is_cpu or not tensor.is_contiguous():
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype in AS_INTEGERS:
        tensor = tensor.view(-1).view(AS_INTEGERS[tensor.dtype])
    if tensor.is_conj() or tensor.is_neg():
        return None
    array: np.ndarray = tensor.numpy()
    if not array.flags.aligned:  # as torch.frombuffer with an odd offset makes it
        return None
    return array if array.ndim == 1 else array.reshape(-1)


def copied(tensor: Tensor, filled: bool = True) -> Tensor:
    """A contiguous tensor on the host of the same shape and type; in pinned memory where the tensor is on a GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach()) if filled else copy


def reading(tensor: Tensor) -> np.ndarray:
    """What is sent of the tensor."""
    array = own(tensor)
    if array is None:
        array = own(copied(tensor))
        assert array is not None
    return array


def writing(tensor: Tensor, filled: bool = True) -> tuple[np.ndarray, Back]:
    """Where what comes for the tensor is put, and what is left to do then. filled: it holds the values before."""
    array = own(tensor)
    if array is not None:
        return array, None
    copy = copied(tensor, filled)
    array = own(copy)
    assert array is not None
    return array, lambda: tensor.detach().copy_(copy)


def all_back(*backs: Back) -> Back:
    """All of these, one after the other."""
    left = [each for each in backs if each is not None]
    if len(left) < 2:
        return left[0] if left else None
    return lambda: [each() for each in left]
