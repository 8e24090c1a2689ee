"""Simulation of a strategy's steps on up to 100,000 ranks with stragglers: all ranks at once, as vectors.

    c(r, t)          seconds that rank r computes in step t: the mean times what the distribution draws
    allreduce        T(t+1) = max_r (T(t) + c(r, t)) + the all-reduce        all wait for the slowest
    local            likewise, after H steps each: the sum of H draws varies less than H times one
    gossip           T_r(t+1) = max over j, r or a neighbour, of (T_j(t) + c(j, t)) + its messages
    servers, bsp     as allreduce, with the service of W workers, one after the other
    servers, ssp K   a closed queue (kernels/queues.py), in which none is more than K clocks ahead of the slowest
    servers, async   the same, without a bound

compress=topk:0.01 (a method of --compress) is a setting of all but pipelines; coding has the cost of three additions.
The messages of a step are those that the strategy declares (hpcdl/strategies/description.py); message_time.py gives
their seconds. Neighbours on a ring: r +- 1; on an exponential graph: r + 2^j, for one j in each step (Assran et al.,
"Stochastic gradient push", ICML 2019). No message overlaps with computing. Draws are keyed by (seed, step), so that
strategies are compared on the same draws. A distribution has the mean 1:

    none | lognormal:sigma=0.1 | exponential | pareto:alpha=3 | slow:ranks=1,factor=2     the first ranks, always"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcdl.comm import compression
from hpcdl.errors import UsageError, parse_spec
from hpcdl.kernels.queues import queue
from hpcdl.planning import collective_time
from hpcdl.planning.cluster import Cluster
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.message_time import RankGroup, call_seconds, one_matrix, service_seconds
from hpcdl.planning.pipeline_time import ActionTimes, last
from hpcdl.random import Random
from hpcdl.strategies import all_reduce, gossip, local_sgd, parameter_server
from hpcdl.strategies.compressing import check_codec
from hpcdl.strategies.description import Service, StepCost
from hpcdl.strategies.pipeline_schedules import actions_of

NOISES: dict[str, dict[str, Any]] = {
    "none": {},
    "lognormal": {"sigma": 0.1},
    "exponential": {},
    "pareto": {"alpha": 3.0},
    "slow": {"ranks": 1, "factor": 2.0},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "allreduce": {"algorithm": "ring", "compress": "none"},
    "local": {"every": 16, "algorithm": "ring", "compress": "none"},
    "gossip": {"topology": "ring", "compress": "none"},
    "servers": {"consistency": "bsp", "staleness": 0, "count": 0, "compress": "none"},
    "pipeline": {"stages": 8, "microbatches": 32, "schedule": "1f1b", "algorithm": "ring"},
}
TOPOLOGIES, CONSISTENCIES = ("ring", "exponential"), ("bsp", "ssp", "async")
SCHEDULES = "gpipe", "1f1b", "zb-h1", "zb-h2"
MOST = 2**31  # draws at once, in bytes
LONG = 10**6  # steps of a run, whose warm-up does not count
FORWARD, WEIGHTS = 1 / 3, 1 / 3  # of a micro-batch's computing


class Noise(NamedTuple):
    """The distribution of computing time, with mean 1, and its settings."""

    name: str
    settings: dict[str, Any]

    @classmethod
    def read(cls, text: str) -> "Noise":
        """Parse a distribution as lognormal:sigma=0.1. Raises UsageError."""
        name, settings = parse_spec("straggler", text, NOISES)
        sigma, alpha = settings.get("sigma", 0.0), settings.get("alpha", 3.0)
        if not (0 <= sigma < 10 and 1 < alpha < math.inf):
            raise UsageError(f"--straggler {text}: sigma is at least 0 and less than 10, and alpha greater than 1")
        if settings.get("ranks", 0) < 0 or not 0 < settings.get("factor", 1.0) < math.inf:
            raise UsageError(f"--straggler {text}: ranks is 0 or more, and factor a positive number")
        return cls(name, settings)

    def draw(self, random: Random, step: int, ranks: int) -> np.ndarray:
        """Draw the factor of each rank on the mean computing time of this step, float32 (ranks,)."""
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
    """The work of a step: mean seconds of computing and their distribution, bytes of the gradient. seed: of draws."""

    compute: float
    bytes: float
    noise: Noise
    seed: int = 0


Means: TypeAlias = tuple[float, ...]  # of a simulated strategy, in the order of `Simulated`


class Simulated(NamedTuple):
    """A simulated strategy: seconds of a step, of mean computing, of messages. staleness: of servers, in updates."""

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
        return self.compute / self.seconds


def read_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a strategy as allreduce:algorithm=tree or servers:consistency=ssp,staleness=4. Raises UsageError."""
    name, settings = parse_spec("strategy", text, STRATEGIES)
    known = {"algorithm": collective_time.ALGORITHMS, "topology": TOPOLOGIES}
    known |= {"consistency": CONSISTENCIES, "schedule": SCHEDULES}
    for key, names in known.items():
        if key in settings and settings[key] not in names:
            raise UsageError(f"{text}: {key} is one of {', '.join(names)}, not {settings[key]!r}")
    least = {"every": 1, "staleness": 0, "count": 0, "stages": 1, "microbatches": 1}
    for key, smallest in least.items():
        if settings.get(key, smallest) < smallest:
            raise UsageError(f"{text}: {key} is at least {smallest}, not {settings[key]}")
    try:
        if name in ("gossip", "servers"):
            check_codec(settings["compress"], "messages are of one rank")
        elif settings.get("compress", "none") != "none":
            compression.parse(settings["compress"])
    except UsageError as error:
        raise UsageError(f"{text}: {error}") from None
    if settings.get("staleness") and settings["consistency"] != "ssp":
        raise UsageError(f"{text}: staleness needs consistency=ssp")
    return name, settings


def step_at_scale(name: str, settings: dict[str, Any], bytes: float, ranks: int) -> tuple[Any, StepCost]:
    """Return a training (like Workload) of a vector of `bytes` bytes on `ranks` workers, and the cost of its step."""
    options: Any
    if name == "allreduce":
        how = {"allreduce": settings["algorithm"], "compress": settings["compress"]}
        strategy, options = all_reduce.STRATEGY, all_reduce.AllReduceOptions(**how)
    elif name == "local":
        how = {"allreduce": settings["algorithm"], "compress": settings["compress"]}
        strategy, options = local_sgd.STRATEGY, local_sgd.LocalOptions(sync_every=settings["every"], **how)
    elif name == "gossip":
        graph = "ring" if settings["topology"] == "ring" else "one-peer"
        strategy, options = gossip.STRATEGY, gossip.GossipOptions(topology=graph, compress=settings["compress"])
    else:
        servers = settings["count"] or max(1, ranks // 8)
        how = {each: settings[each] for each in ("consistency", "staleness", "compress")}
        strategy, options = parameter_server.STRATEGY, parameter_server.ServerOptions(servers=servers, **how)
    size = ranks + getattr(options, "servers", 0)
    length = round(bytes / 4)
    case = SimpleNamespace(options=options, size=size, ranks=size, bytes=bytes, length=length, dtype=np.dtype("f4"))
    case.model = SimpleNamespace(layout=one_matrix(length))
    case.batch, case.largest, case.share, case.vectors, case.plan = size, 1, lambda *_: 1, (), (size, 1, LONG)
    assert strategy.step is not None
    return case, strategy.step(case)


def simulate(text: str, cluster: Cluster, work: StepWork, ranks: int, steps: int) -> Simulated:
    """Simulate steps of a strategy; return means per step. Raises UsageError if it cannot run on `ranks` ranks."""
    name, settings = read_strategy(text)
    random, machine = Random(work.seed), Machine(cluster.ranks_per_node, cluster, flops=1.0, memory=1.0)
    if name == "pipeline":
        return pipeline(text, settings, machine, work, ranks, steps, random)
    case, step = step_at_scale(name, settings, work.bytes, ranks)
    if step.service is not None:
        group = RankGroup(machine, case.size)
        return Simulated(text, ranks, *simulate_servers(group, step.service, work, steps, random))
    messages = sum(call.times * call_seconds(case, machine, call) for call in step.calls)
    if name == "gossip":
        graph = case.options.topology
        return Simulated(text, ranks, *simulate_gossip(graph, messages, work, ranks, steps, random))
    every = settings.get("every", 1)
    rounds, slowest, own = max(1, steps // every), 0.0, 0.0
    for each in range(rounds):
        taken = sum(work.noise.draw(random, each * every + i, ranks).astype(np.float64) for i in range(every))
        taken = np.asarray(taken) * work.compute
        slowest, own = slowest + float(taken.max()), own + float(taken.mean())
    done = rounds * every
    return Simulated(text, ranks, slowest / done + messages, own / done, messages)


def simulate_gossip(graph: str, messages: float, work: StepWork, ranks: int, steps: int, random: Random) -> Means:
    """Return means per step of gossip: a rank waits for its neighbours of the step. messages: their seconds."""
    levels = max(1, math.ceil(math.log2(max(2, ranks))))
    now, own = np.zeros(ranks), 0.0
    for step in range(steps):
        taken = work.noise.draw(random, step, ranks) * work.compute
        own += float(taken.mean(dtype=np.float64))
        ready = now + taken
        offsets = (1, -1) if graph == "ring" else (2 ** (step % levels) % ranks,)
        now = np.maximum.reduce([ready, *(np.roll(ready, offset) for offset in offsets)]) + messages
    return float(now.max()) / steps, own / steps, messages


def simulate_servers(group: RankGroup, service: Service, work: StepWork, steps: int, random: Random) -> Means:
    """Return means per step of the workers of parameter servers; without rounds, also their staleness."""
    many = service.workers
    serving, answer, alone = service_seconds(group, service)
    if service.rounds:
        slowest = own = 0.0
        for step in range(steps):
            taken = work.noise.draw(random, step, many)
            slowest, own = slowest + float(taken.max()), own + float(taken.mean(dtype=np.float64))
        seconds = slowest * work.compute / steps + alone + (many - 1) * (serving + answer)
        return seconds, own * work.compute / steps, alone
    if 8 * many * steps > MOST:
        raise UsageError(f"{many:,} workers with {steps:,} steps each are too many to simulate: give fewer --steps")
    taken = np.empty((many, steps), np.float64)
    for step in range(steps):
        taken[:, step] = work.noise.draw(random, step, many)
    taken *= work.compute
    own = float(taken.mean())
    taken += alone - (2 * group.latency + serving + answer)  # at the worker's own port, beside the servers'
    ended, stale = queue(taken, (serving + answer) / 2, group.latency, service.bound)
    return ended / steps, own, alone, stale


def pipeline(
    text: str, settings: dict[str, Any], machine: Machine, work: StepWork, ranks: int, steps: int, random: Random
) -> Simulated:
    """Simulate a pipeline's replicas and their all-reduce. work.compute: seconds of a step on one rank of a stage."""
    stages, many = settings["stages"], settings["microbatches"]
    if ranks % stages:
        raise UsageError(f"{text}: {ranks} ranks are not a multiple of {stages} stages")
    replicas = ranks // stages
    plan = [list(actions_of(settings["schedule"], stages, stage, many)) for stage in range(stages)]
    reduced = RankGroup(machine, replicas, algorithm=settings["algorithm"]).all_reduce(work.bytes / stages)
    total = own = 0.0
    for step in range(steps):
        noise = work.noise.draw(random, step, ranks).reshape(replicas, stages).astype(np.float64)
        own += float(noise.mean()) * work.compute
        each = noise * work.compute / many
        times = ActionTimes(each * FORWARD, each * (1 - FORWARD), each * WEIGHTS)
        total += float(last(plan, times, machine.links.latency, together=False).max()) + reduced
    return Simulated(text, ranks, total / steps, own / steps, reduced)
