"""Whether two checkouts train alike: python tests/soak/same.py OLD NEW [--mpi mpich|openmpi] [--ranks 1 3 4]

Each command runs in both, on each number of ranks. Parameters, the optimizer's vectors and all else that a checkpoint
holds must be the same to the bit; so must losses and scores, and the calls, bytes and messages of each rank by kind.
Last, the new one goes on from a checkpoint of the old one. What is left to chance (asynchronous strategies on several
workers) is not asked for. Each checkout has what `make install` makes; a run of all takes a quarter of an hour."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

SHORT = ["--epochs", "2", "--seed", "3", "--progress", "none", "--allreduce", "ring", "--checkpoint-every", "40"]
GPT = ["--model", "gpt:layers=2,width=16,heads=4,context=64", "--data", "text", "--steps", "6", "--batch-size", "12"]
MLP = ["--model", "mlp:24,16"]
RL = ["--env", "CartPole-v1", "--env-steps", "3000", "--evaluate-every", "1000", "--episodes", "5"]
CASES = {  # name: (number of ranks, command)
    "sequential": ((1,), "train-sequential --model mlp:24 --optimizer adam"),
    "sequential gpt": ((1,), "train-sequential GPT"),
    **{
        f"all-reduce {name}": ((1, 3, 4), f"train-allreduce --allreduce {name} --optimizer momentum")
        for name in ("naive", "direct", "ring", "tree", "recursive", "shared", "hierarchical", "mpi")
    },
    "all-reduce adam": ((1, 3, 4), "train-allreduce --optimizer adam --accumulate 3 --clip-norm 0.5 --validation 0.2"),
    "all-reduce overlap": ((3, 4), "train-allreduce --overlap --bucket-mib 0.001 --accumulate 2 --dtype float64"),
    **{
        f"all-reduce {name}": ((1, 3, 4), f"train-allreduce --compress {name}")
        for name in ("bfloat16", "qsgd", "topk:0.05", "powersgd:rank=1", "dgc:0.05")
    },
    "all-reduce data server": ((3, 4), "train-allreduce --data-servers 1 --standardize"),
    "all-reduce streamed": ((3,), "train-allreduce --placement streamed --augment shift:1"),
    "server bsp": ((3, 4), "train-parameter-server --consistency bsp"),
    "server bsp on workers": ((1, 3, 4), "train-parameter-server --servers-on-workers --optimizer adam"),
    "server bsp two": ((4,), "train-parameter-server --servers 2 --clip-norm 0.5"),
    "server bsp unasked": ((3, 4), "train-parameter-server --broadcast-every 1"),
    "server delay": ((3,), "train-parameter-server --fixed-delay 2 --lr 0.01 --checkpoint-every 0"),
    "server ssp one worker": ((3,), "train-parameter-server --servers 2 --consistency ssp --staleness 2"),
    "server async one worker": ((3,), "train-parameter-server --servers 2 --consistency async"),
    **{
        f"gossip {name}": ((3, 4), f"train-gossip --topology ring --method {name}")
        for name in ("adapt-then-combine", "dpsgd", "gradient-tracking", "detag", "defacto")
    },
    "gossip one-peer": ((4,), "train-gossip --topology one-peer --method dpsgd --accumulate 2"),
    "local": ((1, 3, 4), "train-local-sgd --sync-every 4 --local-momentum average"),
    "local outer": ((3, 4), "train-local-sgd --sync-every 3 --local-from 1 --outer nesterov --outer-lr 0.7"),
    "federated": ((1, 3, 4), "train-federated --clients 20 --rounds 5 --local-epochs 2"),
    "federated late": (
        (1, 3, 4),
        "train-federated --clients 20 --rounds 6 --drop-out 0.2 --late 0.3 --server-optimizer fedadam",
    ),
    "federated proximal": ((3,), "train-federated --clients 20 --rounds 4 --proximal 0.1 --partition dirichlet:0.5"),
    "federated secure": (
        (1, 3, 4),
        "train-federated --clients 20 --rounds 4 --fraction 0.3 --secure --threshold 0.5 --drop-out 0.1",
    ),
    "federated private": ((3,), "train-federated --clients 20 --rounds 4 --fraction 0.5 --clip 1 --noise 1"),
    "averaged": ((1, 3), "train-allreduce --average from=1"),
    "hogwild": ((1,), "train-hogwild --model softmax --optimizer adagrad"),
    "hogwild joined": ((3,), "train-hogwild --model softmax --join gossip --join-every 2"),
    "dqn": ((1,), "train-dqn RL --double yes --prioritized --save-replay"),
    "gorila": ((2,), "train-gorila RL --consistency bsp"),
    "svrg": ((1, 3), "train-svrg --model softmax --weight-decay 0.01"),
    "saga": ((1, 3), "train-svrg --method saga --model softmax --weight-decay 0.01"),
    "sgld": ((1, 3), "train-sgld --model softmax"),
    "layers": ((3,), "train-model-parallel MLP"),
    "layers gpt": ((4,), "train-model-parallel GPT --accumulate 2"),
    **{
        f"pipeline {name}": ((3, 4), f"train-pipeline GPT --schedule {name} --microbatches 4")
        for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
    },
    "pipeline interleaved": ((2,), "train-pipeline GPT --schedule interleaved --chunks 2 --microbatches 4"),
    "pipeline zb-interleaved": ((2,), "train-pipeline GPT --schedule zb-interleaved --chunks 2 --microbatches 4"),
    "pipeline zb-v": ((2,), "train-pipeline GPT --schedule zb-v --microbatches 4"),
    "pipeline dualpipe-v": ((2,), "train-pipeline GPT --schedule dualpipe-v --microbatches 4 --optimizer muon"),
    "pipeline recomputing": ((3,), "train-pipeline GPT --recompute --clip-norm 0.5"),
    "pipeline pipedream": ((3,), "train-pipeline GPT4 --schedule pipedream"),
    "context ring": ((1, 2, 4), "train-context-parallel GPT --optimizer adam"),
    "context ulysses": ((2,), "train-context-parallel GPT --attention ulysses --stage 2 --accumulate 2"),
    "expert": ((2,), "train-grid EXPERTS --grid expert=2 --optimizer adam"),
    "expert, tensor": ((4,), "train-grid EXPERTS --grid expert=2,tensor=2 --stage 1 --recompute"),
    "tensor": ((1, 4), "train-tensor-parallel GPT --optimizer adam"),
    "tensor mlp": ((3,), "train-tensor-parallel MLP"),
    "tensor sequence": ((4,), "train-tensor-parallel GPT --sequence-parallel --clip-norm 0.5"),
    **{
        f"sharded {stage}": ((1, 3, 4), f"train-fully-sharded GPT --stage {stage} --optimizer adam")
        for stage in (1, 2, 3)
    },
    "sharded broadcast": ((3,), "train-fully-sharded GPT --gather broadcast --accumulate 2"),
    "grid": ((4,), "train-grid GPT --grid data=2,pipeline=2 --clip-norm 0.5"),
    "grid tensor": ((4,), "train-grid GPT --grid pipeline=2,tensor=2"),
    "grid sharded": ((4,), "train-grid GPT --grid data=2,tensor=2 --stage 1"),
    "grid context": ((4,), "train-grid GPT --grid context=2,tensor=2 --stage 2"),
}
RESUMED = {  # of an old checkpoint, on another number of ranks where that can be
    "all-reduce adam": "train-allreduce",
    "server bsp": "train-parameter-server",
    "local": "train-local-sgd",
    "federated late": "train-federated",
    "pipeline 1f1b": "train-pipeline",
    "sharded 3": "train-fully-sharded",
}


SCORES = "loss", "accuracy", "histogram", "old"
COUNTS = [
    "bytes_sent_per_rank",
    "messages_per_rank",
    "steps",
    "epochs",
    "parameters",
    "replicas_agree",
    "in_flight_per_rank",
]
COUNTED = "calls", "bytes", "messages"


def arguments(command: str) -> list[str]:
    words = []
    for word in command.split():
        many = {"GPT": GPT, "MLP": MLP, "RL": RL}
        for name, more in {"GPT4": "head=own", "EXPERTS": "experts=4"}.items():
            many[name] = [GPT[0], f"{GPT[1]},{more}", *GPT[2:]]
        words += many.get(word, [word])
    program = words.pop(0)
    first = 2 if program == "train-federated" or {"--steps", "--env-steps"} & {*words} else 0  # --epochs
    return [program, *SHORT[first : 6 if "--env" in words else None], *words]


def run(checkout: Path, venv: str, ranks: int, words: list[str], out: Path) -> dict:
    """Run a command; what it has left, or what it said when it failed."""
    program = checkout / "scripts" / f"{words[0].replace('-', '_')}.py"
    binaries = checkout / venv / "bin"
    command = [binaries / "mpiexec", "-n", str(ranks), binaries / "python", program, *words[1:], "--out", out]
    # One table of `auto` for both, one thread each, and Open MPI as the Makefile has it.
    settings = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    settings |= {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE", "OMPI_MCA_mpi_yield_when_idle": "1"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-2000:]}
    return {"summary": json.loads((out / "summary.json").read_text()), "vectors": vectors(out / "checkpoint.h5")}


def vectors(path: Path) -> dict[str, np.ndarray]:
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def differences(old: dict, new: dict) -> list[str]:
    """What is not the same."""
    if "failed" in old or "failed" in new:
        return [f"{which} failed: {each['failed']}" for which, each in (("old", old), ("new", new)) if "failed" in each]
    found = []
    if old["vectors"].keys() != new["vectors"].keys():
        found.append(f"vectors {sorted(old['vectors'])}, {sorted(new['vectors'])}")
    for name in old["vectors"].keys() & new["vectors"].keys():
        a, b = old["vectors"][name], new["vectors"][name]
        if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
            apart = np.abs(a.astype(float) - b.astype(float)).max() if a.shape == b.shape else "shape"
            found.append(f"vector {name}: {apart}")
    for name, value in old["summary"].items():
        if (name.endswith(SCORES) or name in COUNTS) and value != new["summary"].get(name):
            found.append(f"{name}: {value}, {new['summary'].get(name)}")
    for rank, (a, b) in enumerate(zip(*(each["summary"]["traffic_per_rank"] for each in (old, new)), strict=True)):
        for kind in (a.keys() | b.keys()) - {"wait_until"}:
            mine, yours = ({name: each.get(kind, {}).get(name) for name in COUNTED} for each in (a, b))
            if mine != yours:
                found.append(f"rank {rank}, {kind}: {mine}, {yours}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--mpi", choices=("mpich", "openmpi"), default="mpich")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    options = parser.parse_args()
    venv = ".venv" if options.mpi == "mpich" else ".venv-openmpi"
    checkouts = {"old": options.old.absolute(), "new": options.new.absolute()}
    wrong: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:

        def compare(name: str, ranks: int, words: list[str], out: str, what: str) -> None:
            ends = [run(path, venv, ranks, words, Path(folder, which, name, out)) for which, path in checkouts.items()]
            found = differences(*ends)
            wrong.append(bool(found))
            print("\n    ".join([f"{name}, {what}: {'' if found else 'the same'}", *found]), flush=True)

        cases = {name: case for name, case in CASES.items() if options.only in name}
        for name, (numbers, command) in cases.items():
            for ranks in [each for each in numbers if each in options.ranks]:
                compare(name, ranks, arguments(command), str(ranks), f"{ranks} ranks")
        for name, program in RESUMED.items():
            numbers, command = cases.get(name, ((), ""))
            if ranks := max((number for number in numbers if number in options.ranks), default=0):
                steps = ["--steps", "9" if "GPT" in command else "150"]
                more = ["--rounds", "9"] if "federated" in name else steps
                start = str(Path(folder, "old", name, str(ranks)))
                compare(name, ranks, [program, "--resume", start, *more], "resumed", "resumed")
    print(f"{wrong.count(False)} passed, {wrong.count(True)} failed")
    sys.exit(any(wrong))


if __name__ == "__main__":
    main()
