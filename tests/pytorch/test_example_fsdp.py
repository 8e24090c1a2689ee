"""docs/examples/fsdp.py: what it prints over hpcdl is what it prints over gloo."""

import pytest

pytest.importorskip("torch")


@pytest.mark.long
def test_the_example_of_the_page(same_over_gloo):
    same_over_gloo("fsdp.py", "parameters")
