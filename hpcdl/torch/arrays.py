"""Tensors as flat arrays for messages: the tensor's own memory if possible, else a copy.

    on the CPU, contiguous           the memory itself
    else (strided, on a GPU)         a contiguous copy on the host, copied back when the operation is complete

Types that numpy lacks travel as integers of their size: bfloat16 as uint16, 8-bit types as uint8.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpcdl.comm.diagnostics.call_signature import TYPES
from hpcdl.errors import UsageError

# Reductions know bfloat16 and float16 by their names (`CODED`).
AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.complex32: torch.int32}
AS_INTEGERS |= {kind: torch.uint8 for name, kind in vars(torch).items() if name.startswith("float8_")}
CODED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
Back = Callable[[], object] | None  # copies a received copy back into the tensor


@functools.cache
def element_type(kind: torch.dtype) -> np.dtype | str:
    """Return the type that ranks compare: numpy's, or the name of one that only PyTorch has."""
    if kind is torch.float16:  # numpy has it, though it travels as an integer, too
        return np.dtype(np.float16)
    name = str(kind).removeprefix("torch.")
    return name if name in TYPES else torch.empty(0, dtype=AS_INTEGERS.get(kind, kind)).numpy().dtype


def memory_of(tensor: Tensor) -> np.ndarray | None:
    """Return the tensor's memory as a flat array; None if it is not on the CPU, not contiguous, or misaligned.

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
    if not array.flags.aligned:  # from torch.frombuffer with an odd offset
        return None
    return array if array.ndim == 1 else array.reshape(-1)


def copied(tensor: Tensor, filled: bool = True) -> Tensor:
    """Return a contiguous tensor on the host, of the same shape and type; in pinned memory for a GPU tensor."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach()) if filled else copy


def array_to_send(tensor: Tensor) -> np.ndarray:
    """Return the array to send for the tensor."""
    array = memory_of(tensor)
    if array is None:
        array = memory_of(copied(tensor))
        assert array is not None
    return array


def array_to_fill(tensor: Tensor, filled: bool = True) -> tuple[np.ndarray, Back]:
    """Return the array to receive into, and the function to call afterwards. filled: it holds the tensor's values."""
    array = memory_of(tensor)
    if array is not None:
        return array, None
    copy = copied(tensor, filled)
    array = memory_of(copy)
    assert array is not None
    return array, lambda: tensor.detach().copy_(copy)


def all_back(*backs: Back) -> Back:
    """Return a function that calls all of these in order."""
    callbacks = [callback for callback in backs if callback is not None]
    if len(callbacks) < 2:
        return callbacks[0] if callbacks else None
    return lambda: [callback() for callback in callbacks]
