"""docs/examples/ddp.py: what it prints over hpcdl is what it prints over gloo."""

import pytest

pytest.importorskip("torch")


def test_the_example_of_the_page(same_over_gloo):
    same_over_gloo("ddp.py", "all-reduces")
