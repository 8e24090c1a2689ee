"""Tensors as arrays that travel: their own memory, or a copy that goes back."""

import numpy as np
import pytest
import torch

from hpcdl.errors import UsageError
from hpcdl.torch.arrays import array_to_fill, array_to_send, memory_of


def test_a_contiguous_tensor_is_its_own_array():
    for kind in (torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64, torch.uint16):
        tensor = torch.ones(2, 3).to(kind)
        array = memory_of(tensor)
        assert array.shape == (6,) and array.ctypes.data == tensor.data_ptr() and array.nbytes == tensor.nbytes
        assert array_to_fill(tensor)[1] is None and array_to_send(tensor).ctypes.data == tensor.data_ptr()
    trained = torch.nn.Parameter(torch.ones(2))
    assert memory_of(trained).tolist() == [1, 1] and memory_of(torch.tensor(3.0)).shape == (1,)


def test_what_numpy_has_not_travels_as_integers():
    for kind, array_kind in ((torch.bfloat16, np.uint16), (torch.float16, np.uint16), (torch.float8_e5m2, np.uint8)):
        tensor = torch.tensor([1.0, -2.0]).to(kind)
        array = memory_of(tensor)
        assert array.dtype == array_kind and array.ctypes.data == tensor.data_ptr()


def test_a_strided_tensor_is_copied_and_taken_back():
    whole = torch.arange(6.0).view(2, 3)
    for part in (whole.t(), whole[:, 1], whole[:, ::2]):
        assert memory_of(part) is None and array_to_send(part).tolist() == part.flatten().tolist()
        array, back = array_to_fill(part)
        array += 1
        wanted = part + 1
        back()
        assert torch.equal(part, wanted)
    assert array_to_send(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    with pytest.raises(UsageError, match="dense"):
        array_to_fill(torch.eye(2).to_sparse())
