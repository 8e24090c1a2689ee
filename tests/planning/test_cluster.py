"""A cluster's numbers: read from a file, refused where they are impossible, and where ranks are."""

import pytest

from hpcdl.errors import UsageError
from hpcdl.planning.cluster import Cluster


def test_a_file(alone, tmp_path):
    (tmp_path / "site.yaml").write_text("latency: 1e-5\nranks_per_node: 2\nnodes_per_switch: 4\noversubscription: 2\n")
    found = Cluster.read(str(tmp_path / "site.yaml"))
    assert (found.latency, found.ranks_per_node, found.bandwidth) == (1e-5, 2, Cluster().bandwidth)
    assert [found.node(rank) for rank in (0, 1, 2)] == [0, 0, 1] and found.nodes(5) == 3
    assert [found.switch(rank) for rank in (0, 7, 8)] == [0, 0, 1]
    assert Cluster().switch(10**6) == 0
    assert found.add(1e9) == 0 and Cluster(adding=2e9).add(1e9) == 0.5
    with pytest.raises(UsageError, match="cannot be read"):
        Cluster.read("/nowhere/site.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency: fast", "latency is a number, not 'fast'"),
        ("latency: -1", "latency is more than 0, not -1"),
        ("bandwidth: 0", "bandwidth is more than 0"),
        ("bandwidth: .nan", "bandwidth"),
        ("ranks_per_node: 0", "ranks_per_node is at least 1"),
        ("lattency: 1", "there is no entry 'lattency'"),
        ("- 1", "lines such as latency"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_is_no_cluster(alone, tmp_path, text, words):
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(UsageError, match=words):
        Cluster.read(str(tmp_path / "site.yaml"))
