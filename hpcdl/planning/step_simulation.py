"""Simulation of a strategy's steps on up to 100,000 ranks with stragglers: all ranks at once, as vectors.

    c(r, t)          seconds that rank r computes in step t: the mean times what the distribution draws
    allreduce        T(t+1) = max_r (T(t) + c(r, t)) + the all-reduce        all wait for the slowest
    local            likewise, after H steps each: the sum of H draws varies less than H times one
    gossip           T_r(t+1) = max over r and its neighbours of (T_j(t) + c(j, t)) + its messages
    servers, bsp     as allreduce, with 2 L + 2 N K / (S B): W pushes through each server's port, and back
    servers, ssp K   a closed queue (kernels/queues.py), in which none is more than K clocks ahead of the slowest
    servers, async   the same, without a bound

Ring and exponential graphs: neighbours r +- 1, and r + 2^j of one j a step (Assran et al., "Stochastic gradient push",
ICML 2019). All begin a step's computing as soon as they may; nothing overlaps with it. Draws are keyed by (seed, step),
so that strategies are compared on the same ones. A distribution has the mean 1:

    none | lognormal:sigma=0.1 | exponential | pareto:alpha=3 | slow:ranks=1,factor=2     the first ranks, always
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError, parse_spec
from hpcdl.kernels.queues import queue
from hpcdl.planning import collective_time
from hpcdl.planning.cluster import Cluster
from hpcdl.random import Random

NOISES: dict[str, dict[str, Any]] = {
    "none": {},
    "lognormal": {"sigma": 0.1},
    "exponential": {},
    "pareto": {"alpha": 3.0},
    "slow": {"ranks": 1, "factor": 2.0},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "allreduce": {"algorithm": "ring"},
    "local": {"every": 16, "algorithm": "ring"},
    "gossip": {"topology": "ring"},
    "servers": {"consistency": "bsp", "staleness": 0, "count": 0},
    "pipeline": {"stages": 8, "microbatches": 32, "schedule": "1f1b", "algorithm": "ring"},
}
TOPOLOGIES, CONSISTENCIES, SCHEDULES = ("ring", "exponential"), ("bsp", "ssp", "async"), ("gpipe", "1f1b")
MOST = 2**31  # draws at once, in bytes


class Noise(NamedTuple):
    """The distribution of computing time, with mean 1, and its settings."""

    name: str
    settings: dict[str, Any]

    @classmethod
    def read(cls, text: str) -> "Noise":
        """Parse a distribution. Raises UsageError."""
        name, settings = parse_spec("straggler", text, NOISES)
        sigma, alpha = settings.get("sigma", 0.0), settings.get("alpha", 3.0)
        if not (0 <= sigma < 10 and 1 < alpha < math.inf):
            raise UsageError(f"--straggler {text}: sigma is from 0 to 10, alpha more than 1, where a mean is known")
        if settings.get("ranks", 0) < 0 or not 0 < settings.get("factor", 1.0) < math.inf:
            raise UsageError(f"--straggler {text}: ranks are 0 or more, and factor a positive number")
        return cls(name, settings)

    def draw(self, random: Random, step: int, ranks: int) -> np.ndarray:
        """Draw each rank's factor on the mean computing time of this step, float32 (ranks,)."""
        keyed = random("straggler", step)
        if self.name == "lognormal":
            sigma = self.settings["sigma"]
            return np.exp(sigma * keyed.standard_normal(ranks, np.float32) - np.float32(sigma**2 / 2))
        if self.name == "exponential":
            return keyed.standard_exponential(ranks, np.float32)
        if self.name == "pareto":
            alpha = self.settings["alpha"]
            return ((1 + keyed.pareto(alpha, ranks)) * (alpha - 1) / alpha).astype(np.float32)
        factors = np.ones(ranks, np.float32)
        if self.name == "slow":
            factors[: self.settings["ranks"]] = self.settings["factor"]
        return factors


@dataclass(frozen=True)
class StepWork:
    """The work of a step: seconds of computing, bytes of the gradient, and the distribution of computing time."""

    compute: float
    bytes: float
    noise: Noise
    seed: int = 0


class Simulated(NamedTuple):
    """A simulated strategy: seconds of a step, of mean computing, and of messages.

    staleness: of parameter servers, in updates.
    """

    strategy: str
    ranks: int
    seconds: float
    compute: float
    messages: float
    staleness: float = 0.0

    @property
    def waiting(self) -> float:
        """Seconds of waiting for stragglers, ports and a pipeline's neighbours."""
        return self.seconds - self.compute - self.messages

    @property
    def efficiency(self) -> float:
        """Share of a step in which a rank computes."""
        return self.compute / self.seconds


def read_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a strategy as allreduce:algorithm=tree or servers:consistency=ssp,staleness=4. Raises UsageError."""
    name, settings = parse_spec("strategy", text, STRATEGIES)
    known = {
        "algorithm": collective_time.ALGORITHMS,
        "topology": TOPOLOGIES,
        "consistency": CONSISTENCIES,
        "schedule": SCHEDULES,
    }
    for key, names in known.items():
        if key in settings and settings[key] not in names:
            raise UsageError(f"{text}: {key} is one of {', '.join(names)}, not {settings[key]!r}")
    least = {"every": 1, "staleness": 0, "count": 0, "stages": 1, "microbatches": 1}
    for key, smallest in least.items():
        if settings.get(key, smallest) < smallest:
            raise UsageError(f"{text}: {key} is at least {smallest}, not {settings[key]}")
    if settings.get("staleness") and settings["consistency"] != "ssp":
        raise UsageError(f"{text}: a staleness is that of consistency=ssp")
    return name, settings


def simulate(text: str, cluster: Cluster, work: StepWork, ranks: int, steps: int) -> Simulated:
    """Simulate steps of a strategy; return means per step. Raises UsageError if it cannot run on `ranks` ranks."""
    name, settings = read_strategy(text)
    random = Random(work.seed)
    if name == "servers":
        return servers(text, settings, cluster, work, ranks, steps, random)
    if name == "pipeline":
        from hpcdl.planning.pipeline_time import pipeline

        return pipeline(text, settings, cluster, work, ranks, steps, random)
    if name == "gossip":
        return gossip(text, settings, cluster, work, ranks, steps, random)
    every = settings.get("every", 1)
    message = collective_time.seconds(settings["algorithm"], cluster, ranks, work.bytes)
    rounds, slowest, own = max(1, steps // every), 0.0, 0.0
    for each in range(rounds):
        taken = sum(work.noise.draw(random, each * every + i, ranks).astype(np.float64) for i in range(every))
        taken = np.asarray(taken) * work.compute
        slowest, own = slowest + float(taken.max()), own + float(taken.mean())
    done = rounds * every
    return Simulated(text, ranks, slowest / done + message / every, own / done, message / every)


def gossip(
    text: str, settings: dict, cluster: Cluster, work: StepWork, ranks: int, steps: int, random: Random
) -> Simulated:
    """Simulate gossip: a rank waits for its neighbours of the step, and they for theirs."""
    ring = settings["topology"] == "ring"
    levels = max(1, math.ceil(math.log2(max(2, ranks))))
    wire = work.bytes / cluster.bandwidth
    inside = cluster.nodes(ranks) == 1
    messages = 0.0
    if ranks > 1:
        wire = work.bytes / cluster.node_bandwidth if inside else wire
        latency = cluster.node_latency if inside else cluster.latency
        count = 2 if ring and ranks > 2 else 1
        messages = latency + count * wire + count * cluster.add(work.bytes)
    now, own = np.zeros(ranks), 0.0
    for step in range(steps):
        taken = work.noise.draw(random, step, ranks) * work.compute
        own += float(taken.mean(dtype=np.float64))
        ready = now + taken
        if ranks > 1:
            offsets = (1, -1) if ring else (2 ** (step % levels) % ranks,)
            now = np.maximum.reduce([ready, *(np.roll(ready, offset) for offset in offsets)]) + messages
        else:
            now = ready
    return Simulated(text, ranks, float(now.max()) / steps, own / steps, messages)


def servers(
    text: str, settings: dict, cluster: Cluster, work: StepWork, ranks: int, steps: int, random: Random
) -> Simulated:
    """Simulate parameter servers with `ranks` workers. settings: count: of servers; 0: one per 8 workers."""
    count = settings["count"] or max(1, ranks // 8)
    service = work.bytes / count / cluster.bandwidth + cluster.add(work.bytes / count)
    back = work.bytes / count / cluster.bandwidth
    alone = 2 * cluster.latency + service + back
    if settings["consistency"] == "bsp" or (settings["consistency"] == "ssp" and not settings["staleness"]):
        slowest = own = 0.0
        for step in range(steps):
            taken = work.noise.draw(random, step, ranks)
            slowest, own = slowest + float(taken.max()), own + float(taken.mean(dtype=np.float64))
        whole = 2 * cluster.latency + ranks * (service + back)
        seconds, compute = slowest * work.compute / steps + whole, own * work.compute / steps
        return Simulated(text, ranks, seconds, compute, alone)
    if 8 * ranks * steps > MOST:
        raise UsageError(
            f"{ranks:,} workers and {steps:,} steps: a queue of so many is not simulated; take fewer steps"
        )
    taken = np.empty((ranks, steps), np.float64)
    for step in range(steps):
        taken[:, step] = work.noise.draw(random, step, ranks)
    taken *= work.compute
    bound = settings["staleness"] if settings["consistency"] == "ssp" else math.inf
    ended, stale = queue(taken, (service + back) / 2, cluster.latency, bound)
    return Simulated(text, ranks, ended / steps, float(taken.mean()), alone, stale)
