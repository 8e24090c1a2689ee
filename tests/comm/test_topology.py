"""Graphs of ranks: what holds for all, NetworkX's own of the same kind, and what is refused."""

import networkx
import pytest
from graphs import SIZES, graphs, pairs

from hpcdl.comm.gossip.topology import SETTINGS, matching, topology, without
from hpcdl.errors import UsageError


@pytest.mark.parametrize("spec", SETTINGS)
def test_what_holds_for_all(spec):
    for found in graphs(spec):
        edges = set()
        for step in range(found.period or 60):
            graph = found.graph(step)
            assert len(graph) == found.size
            assert all(list(to) == sorted(set(to) - {rank}) for rank, to in enumerate(graph))
            assert found.directed or all(rank in graph[to] for rank, to in pairs(graph))
            arrivals = [sum(rank in to for to in graph) for rank in range(found.size)]
            assert arrivals == [len(to) for to in graph], "as many receives as sends: else no doubly stochastic weights"
            edges |= pairs(graph)
            if found.period:
                assert graph == found.graph(step + found.period)
        if found.period or found.size < 8:
            assert found.edges == edges
        assert found.edges >= edges
        whole = networkx.DiGraph(edges)
        whole.add_nodes_from(range(found.size))
        assert set(whole) == set(range(found.size)) and networkx.is_strongly_connected(whole)


def test_graphs_are_those_of_networkx():
    def same(found, wanted):
        return found.edges == {pair for a, b in wanted.edges for pair in ((a, b), (b, a)) if a != b}

    for size in SIZES:
        assert same(topology("ring", size), networkx.cycle_graph(size))
        assert same(topology("complete", size), networkx.complete_graph(size))
        assert same(topology("star", size), networkx.star_graph(size - 1))
    for d in range(1, 5):
        cube = networkx.hypercube_graph(d)
        numbers = dict(zip(sorted(cube), range(2**d), strict=True))  # as bits, the highest first
        assert same(topology("hypercube", 2**d), networkx.relabel_nodes(cube, numbers))
    for rows, columns in ((3, 4), (2, 3), (4, 4), (1, 5)):
        grid = networkx.grid_2d_graph(rows, columns, periodic=True)
        numbers = {(y, x): y * columns + x for y, x in grid}
        assert same(topology(f"torus:{rows}x{columns}", rows * columns), networkx.relabel_nodes(grid, numbers))
    assert topology("torus", 12).edges == topology("torus:3x4", 12).edges


@pytest.mark.parametrize("size", SIZES)
def test_exponential_graphs(size):
    reach = [1 << k for k in range(8) if 1 << k < size]
    exponential, one_peer = topology("exponential", size), topology("one-peer", size)
    assert exponential.graph(5) == [tuple(sorted((rank + hop) % size for hop in reach)) for rank in range(size)]
    assert one_peer.period == max(1, len(reach))
    assert one_peer.edges == exponential.edges
    for step, hop in enumerate(reach):
        assert one_peer.graph(step + 3 * one_peer.period) == [((rank + hop) % size,) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_random_matchings_pair_all_but_one_and_each_pair_in_its_turn(size):
    degrees = [sum(map(len, matching(size, 1, step))) for step in range(100)]
    assert set(degrees) == {size // 2 * 2}
    met = set().union(*(pairs(matching(size, 1, step)) for step in range(300)))
    assert met == topology("random-matching", size).edges
    if size > 3:
        assert matching(size, 1, 0) != matching(size, 1, 1) or matching(size, 1, 1) != matching(size, 1, 2)


@pytest.mark.parametrize("spec", ["random-regular", "random-regular:degree=5", "erdos-renyi", "erdos-renyi:p=0.2"])
def test_random_graphs_depend_on_their_seed_only(spec):
    drawn = [topology(spec, 16, seed).graph(0) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    if spec.startswith("random-regular"):
        assert {len(to) for to in drawn[2]} == {int((spec + "=3").split("=")[1])}


def test_erdos_renyi_draws_again_what_falls_into_pieces():
    """At p = 0.2 hardly one graph of 12 in five is connected; the share of edges stays near p."""
    graphs = [topology("erdos-renyi:p=0.2", 12, seed) for seed in range(40)]
    share = sum(len(graph.edges) for graph in graphs) / (40 * 12 * 11)
    assert 0.2 < share < 0.35
    assert {len(topology(f"erdos-renyi:p={p}", 9).edges) for p in ("1", "1.0")} == {72}


def test_a_file_of_edges(tmp_path):
    path = tmp_path / "graph"
    path.write_text("# a path\n0 1\n\n  2 1  # and back\n1 2\n3 2\n")
    found = topology(str(path), 4)
    assert found.graph(7) == [(1,), (0, 2), (1, 3), (2,)]
    assert (found.period, found.directed, found.weights) == (1, False, None)
    path.write_text("0 1 0.25\n2 1 1e-1\n")
    assert topology(str(path), 3).weights == {(0, 1): 0.25, (1, 2): 0.1}


@pytest.mark.parametrize(
    "text, says",
    [
        ("0 1\n1\n", "line 2: write 'a b' or 'a b weight', not '1'"),
        ("0 1\n1 2 3 4\n", "line 2: write"),
        ("0 1\n1 two\n", "line 2: write"),
        ("0 1 x\n", "line 1: write"),
        ("0 1\n# more\n1 4\n", "line 3: there is no rank 4; the ranks are 0 to 3"),
        ("0 1\n-1 2\n", "line 2: there is no rank -1; the ranks are 0 to 3"),
        ("0 1\n2 2\n", "line 2: the edge leads from rank 2 to itself"),
        ("0 1 0\n", "line 1: a weight is above 0 and at most 1, not 0"),
        ("0 1 1.5\n", "line 1: a weight is above 0 and at most 1, not 1.5"),
        ("0 1 nan\n", "line 1: a weight is above 0 and at most 1, not nan"),
        ("0 1 0.5\n1 2\n", "line 2: give all edges a weight, or none"),
        ("0 1\n1 2 0.5\n", "line 2: give all edges a weight, or none"),
        ("0 1 0.5\n1 0 0.25\n", "line 2: the edge 1 0 had another weight before"),
        ("0 1\n2 3\n", "no path leads from rank 0 to ranks 2, 3"),
        ("0 1\n2 1\n", "no path leads from rank 0 to rank 3; add edges"),
        ("", "no path leads from rank 0 to ranks 1, 2, 3"),
        ("\xff\xfe\x00", "not a text file"),
    ],
)
def test_bad_files(tmp_path, text, says):
    path = tmp_path / "edges.txt"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError) as error:
        topology(str(path), 4)
    assert says in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "spec, size, says",
    [
        ("rng", 4, "unknown topology 'rng' (did you mean 'ring'?); known: complete, erdos-renyi"),
        ("ring:k=2", 4, "topology 'ring' has no setting 'k'"),
        ("hypercube", 6, "a hypercube has a power of two of ranks, not 6: start 4 or 8"),
        ("torus:2x3", 4, "a torus of 2x3 has 6 ranks, not 4"),
        ("torus:2", 4, "write torus:ROWSxCOLUMNS"),
        ("torus:", 4, "write torus:ROWSxCOLUMNS"),
        ("torus", 7, "torus: 7 is a prime number"),
        ("random-regular:degree=4", 4, "on 4 ranks the degree is 0 to 3, not 4"),
        ("random-regular:degree=-1", 4, "the degree is 0 to 3, not -1"),
        ("random-regular:degree=3", 5, "5 ranks of degree 3 would have half an edge"),
        ("random-regular:degree=1", 4, "none of 100 random graphs on 4 ranks was connected; raise degree"),
        ("random-regular:degree=x", 4, "degree should be of type int"),
        ("erdos-renyi:p=0.001", 8, "none of 100 random graphs on 8 ranks was connected; raise p"),
        ("erdos-renyi:p=1.5", 8, "p is a probability, from 0 to 1, not 1.5"),
        ("erdos-renyi:p=nan", 8, "p is a probability"),
        ("nowhere/graph", 4, "cannot read the edges in nowhere/graph: No such file"),
        ("graph.txt", 4, "cannot read the edges in graph.txt: No such file"),
        ("/", 4, "cannot read the edges in /: Is a directory"),
    ],
)
def test_bad_specs(spec, size, says):
    with pytest.raises(UsageError) as error:
        topology(spec, size)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["hypercube", "torus", "star", "ring", "complete", "random-regular"])
def test_a_graph_without_some_ranks_is_in_one_piece(spec):
    for before in graphs(spec):
        for lost in ([0], [before.size - 1], [0, before.size // 2]):
            if len(set(lost)) < before.size and len(set(lost)) == len(lost):
                left = without(before, lost)
                kept = [rank for rank in range(before.size) if rank not in lost]
                found = networkx.Graph(left.edges)
                found.add_nodes_from(range(left.size))
                assert left.size == len(kept) and networkx.is_connected(found)
                assert left.edges == {(b, a) for a, b in left.edges} and all(a != b for a, b in left.edges)
                old = {(kept.index(a), kept.index(b)) for a, b in before.edges if {a, b} <= {*kept}}
                assert old <= left.edges
                ends = {kept.index(a) for rank in lost for a in before.graph(0)[rank] if a in kept}
                joined = {rank for edge in left.edges - old for rank in edge}
                assert len(lost) > 1 or joined <= ends


def test_a_graph_that_is_mended():
    cube = without(topology("hypercube", 8), [3])  # whose neighbours were 1, 2 and 7
    assert cube.spec == "hypercube without rank 3" and cube.size == 7
    assert cube.graph(0) == [(1, 2, 3), (0, 2, 4, 6), (0, 1, 5, 6), (0, 4, 5), (1, 3, 6), (2, 3, 6), (1, 2, 4, 5)]
    assert without(topology("star", 4), [0]).graph(0) == [(1, 2), (0, 2), (0, 1)]
