"""The element type of a kernel's arrays."""

import pytest


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param
