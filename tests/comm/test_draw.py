"""Pictures of topologies."""

import sys

import numpy as np
import pytest

from hpcdl.comm.gossip.draw import coordinates, draw
from hpcdl.comm.gossip.topology import topology
from hpcdl.errors import UsageError
from hpcdl.formatting import counted

DRAWN = [("ring", 16), ("torus", 16), ("hypercube", 64), ("star", 9), ("torus:1x1", 1), ("ring", 1), ("star", 2)]


@pytest.mark.parametrize("spec, size", DRAWN)
def test_ranks_lie_apart(spec, size):
    places = np.array(list(coordinates(topology(spec, size)).values()))
    apart = np.linalg.norm(places[:, None] - places[None], axis=2) + 10 * np.eye(size)
    assert places.shape == (size, 2) and apart.min() > 0.1


@pytest.mark.parametrize(
    "spec, size, panels", [("ring", 1, 0), ("torus", 6, 0), ("exponential", 5, 0), ("one-peer", 8, 3)]
)
def test_pictures(tmp_path, spec, size, panels):
    pytest.importorskip("matplotlib")
    path = tmp_path / "graph.svg"
    draw(topology(spec, size), "uniform", path)
    text = path.read_text()
    assert f"<!-- {spec}, {counted(size, 'rank')} -->" in text and "spectral gap" in text
    assert sum(f"<!-- step {step} -->" in text for step in range(8)) == panels
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_cannot_be(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    ring = topology("ring", 4)
    with pytest.raises(UsageError, match="end its name with"):
        draw(ring, "uniform", tmp_path / "graph.txt")
    with pytest.raises(UsageError, match="No such file or directory"):
        draw(ring, "uniform", tmp_path / "nowhere" / "graph.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'hpcdl\[report\]'"):
        draw(ring, "uniform", tmp_path / "graph.png")
