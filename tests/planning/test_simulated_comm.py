"""All-reduce algorithms on ranks that are not there: what they take without noise is what theory says, to rounding."""

import numpy as np
import pytest

from hpcdl.comm.allreduce import ALGORITHMS, circulant, double_tree, naive, recursive, ring, tree
from hpcdl.planning.cluster import Cluster
from hpcdl.planning.collective_time import COMPARED, fastest, seconds
from hpcdl.planning.simulated_comm import Simulation, simulate

MODULES = {"naive": naive, "ring": ring, "tree": tree, "recursive": recursive, "circulant": circulant}
SLOW = Cluster(latency=1e-5, bandwidth=1e9, adding=3e8)  # adds slower than it sends
SWITCHES = Cluster(nodes_per_switch=8, oversubscription=4)
QUICK = Cluster(latency=1e-5, bandwidth=1e9, adding=4e9)


@pytest.mark.parametrize("cluster", [SLOW, QUICK], ids=["adding", "sending"])
@pytest.mark.parametrize("name", sorted(MODULES))
@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_theory_without_noise(alone, name, ranks, cluster):
    bytes = 4 * ranks * 1000
    taken = simulate(MODULES[name].ALGORITHM.steps, cluster, ranks, bytes)
    assert taken.max() == pytest.approx(seconds(name, cluster, ranks, bytes), rel=1e-12)


@pytest.mark.parametrize("ranks", [3, 5, 12])
def test_theory_where_ranks_are_no_power_of_two(alone, ranks):
    bytes = 4 * ranks * 1000
    for name in ("naive", "ring", "recursive", "circulant"):
        taken = simulate(MODULES[name].ALGORITHM.steps, QUICK, ranks, 16 * bytes).max()
        assert taken == pytest.approx(seconds(name, QUICK, ranks, 16 * bytes), rel=1e-9)
    assert simulate(tree.ALGORITHM.steps, QUICK, ranks, bytes).max() <= seconds("tree", QUICK, ranks, bytes)


@pytest.mark.parametrize("cluster", [SLOW, QUICK], ids=["adding", "sending"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 33, 64])
def test_two_trees_fill_all_links(alone, ranks, cluster):
    """Segments do not wait for the other tree: the time of a long vector hardly grows with the depth."""
    for bytes in (8, 10_000, 400_000, 40_000_000):
        taken = simulate(double_tree.ALGORITHM.steps, cluster, ranks, bytes).max()
        assert seconds("double_tree", cluster, ranks, bytes) == pytest.approx(taken, rel=0.2)


@pytest.mark.parametrize("ranks", [4, 16, 32])
@pytest.mark.parametrize("cluster", [Cluster(), SWITCHES], ids=["flat", "switches"])
def test_the_fastest_by_theory_is_the_fastest_simulated(alone, ranks, cluster):
    chosen = set()
    for bytes in (1 << 10, 1 << 15, 1 << 20, 1 << 25):
        times = {name: simulate(ALGORITHMS[name].steps, cluster, ranks, bytes).max() for name in COMPARED}
        chosen.add(fastest(cluster, ranks, bytes))
        assert times[fastest(cluster, ranks, bytes)] <= 1.01 * min(times.values())
        for name, taken in times.items():
            rel = {"double_tree": 0.2, "recursive": 0.25 if cluster is SWITCHES else 1e-9}.get(name, 0.02)
            assert seconds(name, cluster, ranks, bytes) == pytest.approx(taken, rel=rel)
    assert len(chosen) > 1


def test_what_is_sent_is_what_the_algorithms_say(alone):
    for ranks, size in ((5, 1003), (8, 64)):
        simulation = Simulation(QUICK, ranks, size)
        simulation.run(ring.ALGORITHM.steps)
        length = [(each + 1) * size // ranks - each * size // ranks for each in range(ranks)]
        assert sum(length) == size
        np.testing.assert_array_equal(simulation.sent[:, 1], 2 * (ranks - 1))
        assert simulation.sent[:, 0].sum() == 4 * 2 * (ranks - 1) * size
    simulation = Simulation(QUICK, 8, 100)
    simulation.run(tree.ALGORITHM.steps)
    assert simulation.sent.sum(axis=0).tolist() == [2 * 7 * 400, 2 * 7]


def test_a_late_rank_holds_up_all(alone):
    start = np.zeros(8)
    begun = simulate(ring.ALGORITHM.steps, QUICK, 8, 32_000, start).max()
    start[3] = 1.0
    assert simulate(ring.ALGORITHM.steps, QUICK, 8, 32_000, start).min() >= 1.0
    assert 1.0 + begun * 0.4 < simulate(ring.ALGORITHM.steps, QUICK, 8, 32_000, start).max() <= 1.0 + begun


def test_the_ranks_of_a_node_share_its_port(alone):
    """Recursive doubling sends twice as much between nodes of two ranks; on a ring neighbours are side by side."""
    bytes, one = 8 * 4_000_000, Cluster(latency=0, node_latency=0, bandwidth=1e9, node_bandwidth=1e12)
    two = Cluster(2, latency=0, node_latency=0, bandwidth=1e9, node_bandwidth=1e12)
    for name in ("ring", "recursive"):
        times = [simulate(MODULES[name].ALGORITHM.steps, each, 8, bytes).max() for each in (one, two)]
        assert times[1] / times[0] == pytest.approx(1.0 if name == "ring" else 12 / 7, rel=0.1)
    for name, ranks in (("recursive", 8), ("circulant", 8), ("circulant", 12)):
        taken = simulate(MODULES[name].ALGORITHM.steps, two, ranks, bytes).max()
        assert seconds(name, two, ranks, bytes) == pytest.approx(taken, rel=0.01)


def test_switches_are_passed_by_all_of_theirs(alone):
    """With twice as many ports below as above, a message between switches takes twice as long where all send one."""
    flat = Cluster(latency=0, bandwidth=1e9)
    fat = Cluster(latency=0, bandwidth=1e9, nodes_per_switch=4, oversubscription=2)
    bytes = 8 * 4000
    times = [simulate(recursive.ALGORITHM.steps, each, 8, bytes).max() for each in (flat, fat)]
    assert times[1] - times[0] == pytest.approx(2 * bytes / 2 / 1e9, rel=1e-9)  # the one level that crosses, both ways
    assert seconds("recursive", fat, 8, bytes) == pytest.approx(times[1])


def test_segments_hide_the_adding(alone):
    """A ring's chunk of many segments: the next one travels while one is added."""
    bytes = 4 * 32 * (1 << 20)
    taken = simulate(ring.ALGORITHM.steps, Cluster(latency=0, bandwidth=1e9, adding=1e9), 4, bytes).max()
    assert taken < 0.8 * seconds("ring", Cluster(latency=0, bandwidth=1e9, adding=1e9), 4, bytes)
    assert taken > seconds("ring", Cluster(latency=0, bandwidth=1e9), 4, bytes)


def test_a_message_that_nobody_sends_is_told(alone):
    def steps(comm, vector, op):
        yield [comm.Irecv(vector, 1 - comm.Get_rank())]

    with pytest.raises(ValueError, match="rank 0 waits for a message that nobody sends"):
        simulate(steps, QUICK, 2, 400)
