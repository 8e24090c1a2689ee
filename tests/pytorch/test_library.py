"""The lines of docs/torch.md that use a module as a library."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcdl.data import open_data

PAGE = Path(__file__).parents[2] / "docs" / "torch.md"


def test_the_lines_train_a_module_that_plain_pytorch_uses(world, capsys):
    (code,) = re.findall(r"### As a library\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = {}
    exec(code, found)
    assert found["run"].agree is True
    data = open_data("digits", dtype="float32")
    x, y = data.test.rows(0, data.test.examples)
    with torch.no_grad():
        right = (found["net"].eval()(torch.tensor(x).view(-1, 8, 8)).argmax(1).numpy() == y).mean()
    assert right > 0.8
    if world.rank == 0:
        assert right == pytest.approx(found["run"].summary["test_accuracy"])
    assert np.array_equal(found["w"][: 64 * 32].reshape(32, 64), found["net"][1].weight.detach().numpy())
