"""The cases of the matrix of faults: which program, on how many ranks, is struck by what; drawn by seed and number.

All pairs of a program's line and a kind of fault are shuffled by the seed; case i takes pair i (and begins anew behind
the last one), and draws ranks, the rank that is struck, step and settings from (seed, i). So a few hundred cases have
few pairs twice, and each can be made again by its number."""

import itertools
from dataclasses import dataclass

import numpy as np

from hpcdl.random import Random

STEPS, EVERY = 24, 5  # of a run; between checkpoints
FEW = ["--data", "few.h5", "--model", "mlp:8,8", "--batch-size", "5", "--steps", str(STEPS), "--evaluate-every", "2"]
DEEP = [*FEW[:3], "mlp:8,8,8,8", *FEW[4:]]
ROUNDS = [*FEW[:4], "--rounds", str(STEPS), "--evaluate-every", "6"]
LINEAR = [*FEW[:3], "softmax", *FEW[4:]]
TEXT = ["--data", "text", "--model", "gpt:layers=2,width=8,heads=2,context=64", "--batch-size", "6", "--steps", "12"]
ACT = ["--env", "chains:chain", "--model", "mlp:8", "--learning-starts", "20", "--batch-size", "8", "--replay", "400"]
ACT += ["--episodes", "2", "--evaluate-every", "120", "--train-every", "1", "--env-steps", "240"]
MANY = [*FEW[:6], "--epochs", "3"]  # each of several runs
LINES: dict[str, tuple[tuple[int, ...], str, list[str]]] = {  # name: ranks, command, options of it
    "sequential": ((1,), "train-sequential --optimizer adam", FEW),
    "sequential, in the background": ((1,), "train-sequential --checkpoint-async", FEW),
    **{
        f"all-reduce, {name}": ((2, 3, 4), f"train-allreduce --allreduce {name}", FEW)
        for name in ("naive", "direct", "ring", "tree", "recursive", "shared", "hierarchical", "mpi")
    },
    "all-reduce, overlap": ((2, 3), "train-allreduce --overlap --bucket-mib 0.0001", FEW),
    "all-reduce, compress": ((2, 3), "train-allreduce --compress topk:0.1", FEW),
    "servers, compress": ((2, 3), "train-parameter-server --compress int8 --compress-pull bfloat16", FEW),
    "gossip, compress": ((2, 3, 4), "train-gossip --compress sign", FEW),
    "local SGD, compress": ((2, 3), "train-local-sgd --sync-every 4 --compress powersgd:1", FEW),
    "federated, compress": ((2, 3), "train-federated --clients 10 --compress qsgd", ROUNDS),
    "all-reduce, streamed": ((2, 3), "train-allreduce --placement streamed --allreduce ring", FEW),
    "all-reduce, partitioned": ((2, 3), "train-allreduce --placement partitioned --allreduce tree", FEW),
    "all-reduce, data server": ((2, 3), "train-allreduce --data-servers 1 --allreduce ring", FEW),
    "all-reduce, compared": ((2, 3), "train-allreduce --allreduce ring --check collectives,replicas=1", FEW),
    "servers, bsp": ((2, 3), "train-parameter-server --consistency bsp", FEW),
    "servers, bsp, two": ((3, 4), "train-parameter-server --servers 2 --clip-norm 0.5", FEW),
    "servers, on workers": ((2, 3), "train-parameter-server --servers-on-workers", FEW),
    "servers, ssp": ((3,), "train-parameter-server --consistency ssp --staleness 2", FEW),
    "servers, async": ((3,), "train-parameter-server --consistency async --broadcast-every 2", FEW),
    "servers, data server": ((3,), "train-parameter-server --data-servers 1", FEW),
    **{
        f"gossip, {name}": ((2, 3, 4), f"train-gossip --method {name}", FEW)
        for name in ("adapt-then-combine", "dpsgd", "gradient-tracking", "detag", "defacto", "adpsgd")
    },
    "gossip, one-peer": ((2, 4), "train-gossip --topology one-peer --method dpsgd", FEW),
    "local SGD": ((2, 3), "train-local-sgd --sync-every 4", FEW),
    "local SGD, outer": ((2, 3), "train-local-sgd --sync-every 3 --outer nesterov --outer-lr 0.7", FEW),
    "federated": ((1, 2, 3), "train-federated --clients 10 --fraction 0.5", ROUNDS),
    "federated, secure": ((2, 3), "train-federated --clients 10 --fraction 0.5 --secure --drop-out 0.1", ROUNDS),
    "federated, late": ((2,), "train-federated --clients 10 --late 0.3 --server-optimizer adam", ROUNDS),
    "layers on ranks": ((2, 3), "train-model-parallel", DEEP),
    **{
        f"pipeline, {name}": ((2, 3), f"train-pipeline --microbatches 4 --schedule {name}", DEEP)
        for name in ("naive", "gpipe", "1f1b", "pipedream", "zb-h1", "zb-h2")
    },
    "pipeline, interleaved": ((2,), "train-pipeline --schedule interleaved --chunks 2 --microbatches 4", DEEP),
    "pipeline, zb-v": ((2,), "train-pipeline --schedule zb-v --microbatches 4", DEEP),
    "tensor parallel": ((2, 4), "train-tensor-parallel", FEW),
    "context parallel": ((2,), "train-context-parallel --attention ulysses", TEXT),
    "expert parallel": ((2,), "train-grid --grid expert=2", [*TEXT[:3], f"{TEXT[3]},experts=2", *TEXT[4:]]),
    "tensor parallel, gpt": ((2,), "train-tensor-parallel --sequence-parallel", TEXT),
    **{
        f"sharded, stage {stage}": ((2, 3), f"train-fully-sharded --stage {stage}", FEW) for stage in (1, 2, 3)
    },
    "sharded, broadcast": ((2,), "train-fully-sharded --gather broadcast --optimizer adam", FEW),
    "grid, data x pipeline": ((4,), "train-grid --grid data=2,pipeline=2", DEEP),
    "grid, data x tensor": ((4,), "train-grid --grid data=2,tensor=2 --stage 1", FEW),
    "HOGWILD!, threads": ((1,), "train-hogwild --threads 2", LINEAR),
    "HOGWILD!, shared": ((2,), "train-hogwild --shared", LINEAR),
    "HOGWILD!, compress": ((2, 3), "train-hogwild --compress topk:0.1", LINEAR),
    "HOGWILD!, joined": ((2, 3), "train-hogwild --join gossip --join-every 2", LINEAR),
    "SVRG": ((1, 2, 3), "train-svrg", LINEAR),
    "SAGA": ((2,), "train-svrg --method saga", LINEAR),
    "SGLD": ((2, 4), "train-sgld --chains 2 --burn-in 4 --thin 2", LINEAR),
    "coordinate descent": ((1, 2, 3), "train-coordinate-descent --data few.h5 --model svm", ["--rounds", "24"]),
    "DQN": ((1,), "train-dqn", ACT),
    "Gorila": ((2, 3), "train-gorila", ACT),
    "Gorila, apart": ((3, 4), "train-gorila --learners 1 --chunk 2", ACT),
    "Ape-X": ((3, 4), "train-apex --chunk 4", ACT),
    "search": ((2, 3), "search train-allreduce --space lr=log:0.001..0.5 --trials 4", MANY),
    "ensemble": ((2, 3), "train-ensemble --members 4 --bagging", MANY),
    "compare": ((2, 3), "compare --seeds 2", [*MANY, "train-allreduce", "train-gossip --topology ring"]),
}  # fmt: skip
SEVERAL = ("search", "ensemble", "compare")  # hold many runs
BY_CHANCE = {  # lines of which two runs need not be the same: who comes first decides
    *("servers, async", "servers, ssp", "gossip, adpsgd", "HOGWILD!, threads", "HOGWILD!, shared"),
    *("Gorila", "Gorila, apart", "Ape-X"),
}
ANEW = {"pipeline, pipedream"}  # gone on with, the pipeline is empty: other versions of the weights
FOUND = ("train-allreduce", "train-svrg")  # each rank goes on from its own parameters, and all must be the same
FAULTS = (
    *("kill", "stop", "exit, os", "exit, sys", "exit, status 0", "exception", "slow", "parameters", "data"),
    *("checkpoint", "message", "disk full", "memory", "clock ahead", "clock back", "random"),
)
WAITS = {"stop", "exit, status 0"}  # nothing but --timeout ends them
FLIPS = {"parameters", "data", "message"}
HARMLESS = {"slow", "clock back", "memory"}  # what is learned is the same, where memory lasts to the end


@dataclass
class Case:
    """One of them: `words` is the command without `--inject`, the run's folder is `run`."""

    number: int
    line: str
    ranks: int
    kind: str
    inject: str
    words: list[str]
    resumed: bool = False  # whether it is gone on with

    @property
    def timed(self) -> bool:
        """Whether it needs --timeout."""
        return self.kind in WAITS and self.line not in SEVERAL

    @property
    def wakes(self) -> bool:
        """Whether a stopped process is to go on after a while, as there is no rank that would wait for it."""
        return self.kind == "stop" and (self.ranks == 1 or self.line in SEVERAL)


def fault(kind: str, rank: int, step: int, draw: np.random.Generator) -> str:
    """What stands behind --inject."""
    at = f"rank={rank},step={step}"
    seed = int(draw.integers(1000))
    flip = f"corrupt:{at},what={kind},seed={seed}"
    forms = {
        "exit, os": lambda: f"exit:{at},how=os,status={draw.integers(3, 100)}",
        "exit, sys": lambda: f"exit:{at},how=sys,status={draw.integers(3, 100)}",
        "exit, status 0": lambda: f"exit:{at},status=0,how={['os', 'sys'][draw.integers(2)]}",
        "slow": lambda: f"slow:{at},seconds={[0.001, 0.02][draw.integers(2)]}",
        **dict.fromkeys(("parameters", "data", "message"), lambda: flip),
        "checkpoint": lambda: flip + (f" kill:rank={rank},step={step + 2}" if draw.integers(2) else ""),
        "disk full": lambda: f"diskfull:{at}",
        "memory": lambda: f"memory:{at},mib={draw.integers(8, 40)}",
        "clock ahead": lambda: f"clock:{at},seconds=3600",
        "clock back": lambda: f"clock:{at},seconds=-3600",
        "random": lambda: f"random:seed={seed},kinds=kill+exit+exception+slow+diskfull,faults=2,last={STEPS}",
    }
    return forms.get(kind, lambda: f"{kind}:{at}")()


def draw(seed: int, number: int) -> Case:
    """Case `number`."""
    pairs = list(itertools.product(LINES, FAULTS))
    line, kind = pairs[Random(seed)("pairs", number // len(pairs)).permutation(len(pairs))[number % len(pairs)]]
    source = Random(seed)("case", number)
    numbers = LINES[line][0]
    ranks = int(numbers[source.integers(len(numbers))])
    writes = kind in ("checkpoint", "disk full") and source.integers(3) > 0  # rank 0 writes nearly all
    alone = line in ("search", "ensemble")  # each rank trains by itself
    rank = 0 if writes or alone else int(source.integers(ranks))
    last = 4 if line in SEVERAL else STEPS  # some come too late
    step = [1, int(source.integers(1, last + 4)), int(source.integers(1, last))][source.integers(3)]
    return of(number, line, ranks, kind, fault(kind, rank, step, source), resumed=bool(source.integers(2)))


def of(number: int, line: str, ranks: int, kind: str, inject: str, resumed: bool = False) -> Case:
    """The case of a line, and what it is struck by."""
    _, command, options = LINES[line]
    first, *more = command.split()
    words = [first, *more, *options, "--progress", "none", "--out", "run"]
    if line not in SEVERAL:
        every = "50" if options is ACT else str(EVERY)
        words += ["--checkpoint-every", every] if "--fixed-delay" not in command else []
        words += ["--time-limit", "1000"] if kind == "clock ahead" else []
    return Case(number, line, ranks, kind, inject, words, resumed)
