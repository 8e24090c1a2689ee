"""The commands of docs/tour.md that make tables and comparisons, as they stand there."""

import pytest
from printed import shell
from test_tour import walk


@pytest.mark.long
def test_a_table(alone, environment, tmp_path):
    walk("a table", tmp_path, environment)


@pytest.mark.long
def test_a_comparison(alone, environment, tmp_path):
    done = shell("hpcdl train-allreduce --epochs 1 --out runs/a", tmp_path, environment)  # as another part makes it
    assert done.returncode == 0, done.stderr
    walk("a comparison", tmp_path, environment)
