"""Tensors as flat arrays for messages: the tensor's own memory if possible, else a copy.

A contiguous tensor on the CPU gives its memory. Any other (strided, on a GPU) gives a contiguous host copy, which is
copied back after the operation. Types that numpy lacks travel as integers of their size, bfloat16 as uint16."""

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
    """Return the type that ranks compare: numpy's, or the name of a type that only PyTorch has."""
    if kind is torch.float16:  # numpy has it, though it travels as an integer, too
        return np.dtype(np.float16)
    name = str(kind).removeprefix("torch.")
    return name if name in TYPES else torch.empty(0, dtype=AS_INTEGERS.get(kind, kind)).numpy().dtype


def memory_of(tensor: Tensor) -> np.ndarray | None:
    """Return the tensor's memory as a flat array; None if that is impossible, as on a GPU, strided, or misaligned.
    Raises UsageError for a tensor that is not dense."""
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        advice = "call to_dense(), and make Embedding without sparse=True"
        raise UsageError(f"the backend hpcdl sends dense tensors, and this one has layout {kind}; {advice}")
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


def array_to_send(tensor: Tensor) -> np.ndarray:
    """Return the array to send for the tensor: its memory or a copy."""
    return array_to_fill(tensor)[0]


def array_to_fill(tensor: Tensor, filled: bool = True) -> tuple[np.ndarray, Back]:
    """Return an array to receive into, and what to call after that, or None. filled: with the tensor's values."""
    array = memory_of(tensor)
    if array is not None:
        return array, None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    array = memory_of(copy.copy_(tensor.detach()) if filled else copy)
    assert array is not None
    return array, lambda: tensor.detach().copy_(copy)


def all_back(*backs: Back) -> Back:
    """Return a function that calls all of these functions in order; None if there is none."""
    callbacks = [callback for callback in backs if callback is not None]
    if len(callbacks) < 2:
        return callbacks[0] if callbacks else None
    return lambda: [callback() for callback in callbacks]
