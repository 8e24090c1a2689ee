"""What each strategy loses beside other work on its cores: python tests/soak/beside.py [REPEATS [LINE...]]

Each line is run alone, beside one busy process for each core in a session of their own, as another user's job would be,
and beside as many in a session each; in turn, so many times. Printed are medians of the examples a second that a run
itself counts (of seconds, for programs that do not train), and how many times slower it is. A kernel that is fair to
processes leaves half of the cores in either case; one that is fair to sessions leaves a half, and on two cores a third.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcdl.machine.busy_processes import busy
from hpcdl.machine.launcher import clean_environment, mpiexec

GPT = ["--model", "gpt:layers=4,width=128,heads=4,context=64", "--data", "text", "--batch-size", "32"]
MLP = ["--model", "mlp:256,128", "--data", "digits", "--batch-size", "128", "--epochs", "30", "--evaluate-every", "99"]
TRAINED = ["train-sequential", *GPT, "--steps", "5", "--out", "trained"]  # runs first, and is read by the last lines
LINES = {
    "sequential, GPT": (1, ["train-sequential", *GPT, "--steps", "40"]),
    "all-reduce, GPT": (2, ["train-allreduce", *GPT, "--steps", "40"]),
    "all-reduce, shared": (2, ["train-allreduce", *MLP, "--allreduce", "shared"]),
    "all-reduce, ring": (2, ["train-allreduce", *MLP, "--allreduce", "ring"]),
    "all-reduce, 4 ranks": (4, ["train-allreduce", *MLP]),
    "servers, bsp": (3, ["train-parameter-server", *MLP]),
    "servers, async": (3, ["train-parameter-server", *MLP, "--consistency", "async"]),
    "gossip": (2, ["train-gossip", *MLP]),
    "local SGD": (2, ["train-local-sgd", *MLP]),
    "federated": (2, ["train-federated", "--data", "digits", "--model", "mlp:256,128", "--epochs", "20"]),
    "pipeline, 1F1B": (2, ["train-pipeline", *GPT, "--steps", "40", "--schedule", "1f1b", "--microbatches", "4"]),
    "tensor parallel": (2, ["train-tensor-parallel", *GPT, "--steps", "40"]),
    "fully sharded": (2, ["train-fully-sharded", *GPT, "--steps", "40", "--stage", "3"]),
    "HOGWILD!, 2 threads": (1, ["train-hogwild", "--data", "digits", "--threads", "2", "--epochs", "200"]),
    "evaluate": (1, ["evaluate", "trained"]),
    "evaluate --sample": (1, ["evaluate", "trained", "--sample", "500"]),
}


def measured(folder, ranks, line):
    """Examples a second of a run; of another program, runs a second."""
    trains = line[0].startswith("train-")
    more = ["--out", "run", "--force", "--progress", "none"] if trains else []
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "hpcdl", *line, *more]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{' '.join(line)}: status {done.returncode}\n{done.stderr}")
    if not trains:
        return 1 / (time.monotonic() - begun)
    return json.loads((folder / "run" / "summary.json").read_text())["examples_per_second"]


def main(repeats="3", *names):
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpcdl", *TRAINED, "--progress", "none"]
        subprocess.run(command, cwd=folder, env=clean_environment(), check=True, capture_output=True)
        print("| strategy | ranks | alone | beside a busy job | times slower | beside busy sessions | times slower |")
        print("|---|---|---|---|---|---|---|")
        for name in names or LINES:
            ranks, line = LINES[name]
            rates = {(0, 0): [], (1, cores): [], (cores, 1): []}
            for _ in range(int(repeats)):
                for others, found in rates.items():
                    with busy(*others):
                        found.append(measured(Path(folder), ranks, line))
            alone, job, sessions = map(statistics.median, rates.values())
            trains = line[0].startswith("train-")
            shown = [f"{each:,.0f} examples/s" if trains else f"{1 / each:.2f} s" for each in (alone, job, sessions)]
            cells = name, ranks, shown[0], shown[1], f"{alone / job:.1f}", shown[2], f"{alone / sessions:.1f}"
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
