"""Steps at scale: exact without noise, and with it what theory says of the slowest of many."""

import math

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.planning import failures
from hpcdl.planning.cluster import Cluster
from hpcdl.planning.collective_time import seconds
from hpcdl.planning.step_simulation import Noise, StepWork, read_strategy, simulate
from hpcdl.random import Random

CLUSTER = Cluster(latency=1e-4, bandwidth=1e9)
BYTES = 4e6


def work(noise="none", compute=0.1, bytes=BYTES):
    return StepWork(compute, bytes, Noise.read(noise))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "naive", "recursive", "hierarchical"])
def test_all_reduce_without_noise(alone, algorithm):
    found = simulate(f"allreduce:algorithm={algorithm}", CLUSTER, work(), 64, 5)
    assert found.seconds == pytest.approx(0.1 + seconds(algorithm, CLUSTER, 64, BYTES))
    assert found.waiting == pytest.approx(0, abs=1e-12)
    local = simulate(f"local:every=4,algorithm={algorithm}", CLUSTER, work(), 64, 8)
    assert local.seconds == pytest.approx(0.1 + seconds(algorithm, CLUSTER, 64, BYTES) / 4)


def test_gossip_and_servers_without_noise(alone):
    wire = BYTES / 1e9
    assert simulate("gossip", CLUSTER, work(), 100, 5).seconds == pytest.approx(0.1 + 1e-4 + 2 * wire)
    assert simulate("gossip:topology=exponential", CLUSTER, work(), 100, 5).seconds == pytest.approx(0.1 + 1e-4 + wire)
    bsp = simulate("servers:count=4", CLUSTER, work(), 64, 5)
    assert bsp.seconds == pytest.approx(0.1 + 2e-4 + 2 * wire + 2 * 63 / 4 * wire)  # a worker's own port, and others


def test_compressed_messages_without_noise(alone):
    coding, selected = 3 * BYTES / CLUSTER.adding, 8 * BYTES / 4 / 1000
    topk = simulate("allreduce:compress=topk:0.001", CLUSTER, work(), 64, 5).seconds
    assert topk == pytest.approx(0.1 + 4e-4 + 63 * (selected / 64 + selected + 16) / 1e9 + coding)
    local = simulate("local:every=4,compress=int8", CLUSTER, work(), 64, 8)
    whole = simulate("allreduce:compress=int8", CLUSTER, work(), 64, 8)
    assert local.seconds - 0.1 == pytest.approx((whole.seconds - 0.1) / 4)
    plain, sign = (simulate(f"gossip:compress={name}", CLUSTER, work(), 100, 5).messages for name in ("none", "sign"))
    assert sign < plain / 20
    servers = [simulate(f"servers:compress={name}", CLUSTER, work(), 64, 5).seconds for name in ("none", "qsgd")]
    assert 0.5 < (servers[1] - 0.1) / (servers[0] - 0.1) < 0.7  # pushes of an eighth; pulls as they are
    factors = simulate("allreduce:compress=powersgd:rank=2", CLUSTER, work(), 64, 5).messages
    assert factors == pytest.approx(2 * seconds("ring", CLUSTER, 64, 4 * 2 * 1000) + coding)  # of 1000 x 1000 values


def test_a_queue_of_one_worker_waits_for_nobody(alone):
    for text in ("servers:consistency=async,count=2", "servers:consistency=ssp,staleness=3,count=2"):
        found = simulate(text, CLUSTER, work(), 1, 50)
        assert found.seconds == pytest.approx(0.1 + 2e-4 + 2 * BYTES / 1e9) and found.staleness == 0


def test_a_server_that_is_full_serves_one_after_the_other(alone):
    """Many workers on one server: its port bounds the rate; a gradient is as many versions old as there are others."""
    found = simulate("servers:consistency=async,count=1", CLUSTER, work(compute=1e-4), 200, 20)
    assert found.seconds == pytest.approx(200 * BYTES / 1e9, rel=0.05)
    assert found.staleness == pytest.approx(199, rel=0.1)


def test_a_bound_holds_workers_back_and_a_large_one_does_not(alone):
    noise = "slow:ranks=1,factor=3"
    steps = [
        simulate(f"servers:consistency={text},count=64", CLUSTER, work(noise, bytes=4000), 64, 40).seconds
        for text in ("bsp", "ssp,staleness=2", "ssp,staleness=39", "async")
    ]
    assert steps[0] >= steps[1] >= steps[2] == steps[3] >= 0.3  # until the slowest has ended, all the same
    # How far the others are when the slowest has made half: under ssp at most the bound ahead.
    noise = "lognormal:sigma=0.5"
    tight, loose, free = (
        simulate(f"servers:consistency={text},count=64", CLUSTER, work(noise, bytes=4000), 64, 200).seconds
        for text in ("bsp", "ssp,staleness=8", "async")
    )
    assert tight > 1.5 * loose and loose >= free


def test_the_slowest_of_many(alone):
    """Exponential times: the mean of the largest of N is the harmonic number; normal ones: about sqrt(2 ln N)."""
    found = simulate("allreduce", Cluster(latency=0, bandwidth=1e18), work("exponential", 1.0), 1000, 400)
    harmonic = sum(1 / k for k in range(1, 1001))
    assert found.seconds == pytest.approx(harmonic, rel=0.05) and found.compute == pytest.approx(1, rel=0.01)
    found = simulate("allreduce", CLUSTER, work("lognormal:sigma=0.1", 1.0, 0), 10_000, 50)
    assert math.exp(0.1 * 3.4) < found.seconds - seconds("ring", CLUSTER, 10_000, 0) < math.exp(0.1 * 4.4)


def test_gossip_waits_less_than_all(alone):
    noisy = work("lognormal:sigma=0.3")
    everyone = simulate("allreduce:algorithm=hierarchical", CLUSTER, noisy, 1024, 50).waiting
    ring = simulate("gossip", CLUSTER, noisy, 1024, 50).waiting
    assert 0 < ring < 0.6 * everyone


def test_distributions_have_the_mean_one_and_are_the_same_for_all(alone):
    for text in ("none", "lognormal:sigma=0.5", "exponential", "pareto:alpha=3"):
        drawn = Noise.read(text).draw(Random(0), 3, 200_000)
        assert drawn.mean() == pytest.approx(1, rel=0.02) and drawn.dtype == np.float32
        np.testing.assert_array_equal(drawn, Noise.read(text).draw(Random(0), 3, 200_000))
    np.testing.assert_array_equal(Noise.read("slow:ranks=2,factor=4").draw(Random(0), 0, 4), [4, 4, 1, 1])


def test_a_pipeline_as_a_strategy(alone):
    name = "pipeline:stages=4,microbatches=12"
    found = simulate(name, Cluster(latency=0), work(), 8, 3)
    reduced = seconds("ring", Cluster(latency=0), 2, BYTES / 4)
    assert found.seconds == pytest.approx(0.1 * 15 / 12 + reduced)
    with pytest.raises(UsageError, match="10 ranks are not a multiple of 4 stages"):
        simulate(name, CLUSTER, work(), 10, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("allreduce:algorithm=star", "algorithm is one of naive"),
        ("gossip:topology=star", "topology is one of"),
        ("servers:consistency=ssp,staleness=-1", "staleness is at least 0"),
        ("servers:staleness=2", "needs consistency=ssp"),
        ("local:every=0", "every is at least 1"),
        ("fork", "fork"),
        ("allreduce:compress=signs", "did you mean 'sign'"),
        ("gossip:compress=powersgd", "works in an all-reduce"),
    ],
)
def test_what_is_no_strategy(alone, text, words):
    with pytest.raises(UsageError, match=words):
        read_strategy(text)


@pytest.mark.parametrize("text", ["lognormal:sigma=-1", "pareto:alpha=1", "slow:factor=0", "gauss"])
def test_what_is_no_distribution(alone, text):
    with pytest.raises(UsageError):
        Noise.read(text)


def test_how_often_to_save(alone):
    """The best is where the expected time is least; Young's and Daly's are near it; a simulation agrees."""
    between, checkpoint, restart = 10.0, 0.1, 0.3
    best = failures.optimal_interval(between, checkpoint, restart)
    cost = failures.slowdown(best, between, checkpoint, restart)
    for factor in (0.9, 1.1):
        assert failures.slowdown(best * factor, between, checkpoint, restart) > cost
    assert failures.young(between, checkpoint) == pytest.approx(math.sqrt(2 * between * checkpoint))
    assert failures.daly(between, checkpoint) == pytest.approx(best, rel=1e-3)
    assert failures.daly(1.0, 3.0) == 1.0 and failures.slowdown(1e6, 1, 1, 1) == math.inf
    taken = failures.simulate_runs(100 * best, best, between, checkpoint, restart, 4000, Random(1))
    assert taken.mean() / (100 * best) == pytest.approx(cost, rel=0.01)
    certain = failures.simulate_runs(10, 1, 1e12, 0.5, 1, 3, Random(0))
    np.testing.assert_allclose(certain, 15)
