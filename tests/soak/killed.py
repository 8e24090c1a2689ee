"""Jobs that are killed with signal 9 at any moment, and gone on with: python tests/soak/killed.py SEED COUNT [NAME...]

NAME is one of PROGRAMS, all of them without it; each is tried until COUNT kills have struck a job. Case i draws its
options, its ranks, who is killed (a rank, the launcher, or all at once) and when from (SEED, NAME, i); three of four
jobs are killed again where they go on. When: after so many lines of all metrics.jsonl, and a moment more. `full-disk`
kills nobody: a tmpfs of its own (root mounts it) is filled up beside a run with --checkpoint-async, and emptied again.
SEED:i repeats case i alone. Checked:

    killed    no process is left, and no half-written file but such as the next leg removes
    gone on   status 0; nothing temporary is left; each run has each step once; the parameters of all checkpoints are,
              where the pages promise it, those of a run that nobody disturbed, to the bit"""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.judging import Job, Wrong, clean, parameters, trust
from few import write_few

from hpcdl.errors import UsageError
from hpcdl.launch.isolated_run import BEGUN

BASE = "--data few.h5 --model mlp:8,8 --batch-size 5 --checkpoint-every 4 --progress none"
LINEAR = "--data few.h5 --model softmax --batch-size 5 --checkpoint-every 4 --progress none --steps 60"
DEEP = BASE.replace("mlp:8,8", "mlp:8,8,8,8") + " --steps 60"
ACT = "--env chains:chain --model mlp:8 --learning-starts 20 --batch-size 8 --replay 400 --episodes 2 --progress none"
ACT += " --evaluate-every 240 --train-every 1 --env-steps 320 --checkpoint-every 40"
CODECS = "float16", "bfloat16", "int8", "qsgd", "terngrad", "sign", "topk:0.1", "randomk:0.1"
ALIKE = 0


def compressed_lines() -> list[tuple[tuple[int, ...], str, int]]:
    """Each strategy whose messages may be compressed, by each method that it takes."""
    steps = f"{BASE} --steps 60"
    rounds = f"{BASE.replace('--batch-size 5', '--local-batch 5')} --rounds 30"
    of_gradients = [*CODECS, "sign:vote", "powersgd:1", "dgc:0.1", "onebit-adam --optimizer adam"]
    lines = [
        *((f"allreduce{more} {steps}", of_gradients) for more in ("", " --overlap --bucket-mib 0.0001")),
        (f"local-sgd --sync-every 3 {steps}", [*CODECS, "powersgd:1"]),
        (f"hogwild --join-every 2 {LINEAR}", [*CODECS, "powersgd:1"]),
        (f"hogwild --join gossip {LINEAR}", CODECS),
        *((f"parameter-server{more} {steps}", CODECS) for more in ("", " --servers-on-workers")),
        (f"gossip {steps}", CODECS),
        (f"federated --clients 10 {rounds}", CODECS),
    ]
    found = [((2, 3, 4), f"train-{line} --compress {spec}", ALIKE) for line, specs in lines for spec in specs]
    return found + [((2,), f"train-hogwild --join servers {LINEAR} --compress {spec}", ALIKE) for spec in CODECS]


# Ranks, command, and ALIKE where what is gone on with ends with the bits of a run that nobody disturbed, and all is
# compared with one; else about how many lines of metrics.jsonl a run writes.
PROGRAMS: dict[str, list[tuple[tuple[int, ...], str, int]]] = {
    "compare": [
        ((2, 3), f"compare --seeds 2 {BASE} --epochs 3 train-allreduce 'train-gossip --topology ring'", ALIKE),
        ((2,), f"compare --seeds 2 {BASE} --epochs 3 --at-once '-n 1: train-sequential' '-n 1: train-svrg'", ALIKE),
    ],
    "train-ensemble": [
        ((2, 3), f"train-ensemble --members 4 --bagging {BASE} --epochs 4", ALIKE),
        ((2, 3), f"train-ensemble --snapshots 3 {BASE} --epochs 9", ALIKE),
        ((2,), f"train-ensemble --members 3 --boost samme {BASE} --epochs 4", ALIKE),
        ((3,), f"train-ensemble train-gossip --members 3 --ranks-per-member 2 {BASE} --epochs 4", ALIKE),
        ((2,), f"train-ensemble --members 4 --combine stacking --validation 0.2 {BASE} --epochs 4", ALIKE),
    ],
    "train-gorila": [
        ((2, 3), f"train-gorila {ACT}", 160),
        ((2, 3), f"train-gorila {ACT} --save-replay", 160),
        ((3,), f"train-gorila --learners 1 --chunk 2 {ACT}", 160),
    ],
    "train-apex": [
        ((3,), f"train-apex --chunk 4 {ACT}", 260),
        ((3,), f"train-apex --chunk 4 {ACT} --save-replay", 260),
        ((3,), f"train-apex --replays 0 --learners 1 {ACT}", 260),
    ],
    "pipedream": [((2, 3), f"train-pipeline --schedule pipedream --microbatches 4 {DEEP}", 70)],
    "hogwild": [
        ((1,), f"train-hogwild --threads 2 {LINEAR}", 70),
        ((2,), f"train-hogwild --shared {LINEAR}", 70),
        ((2,), f"train-hogwild --threads 2 --join gossip --join-every 2 {LINEAR}", 70),
    ],
    "compressed": compressed_lines(),
    "full-disk": [
        ((1,), f"train-sequential --checkpoint-async {BASE} --steps 60 --keep 3", ALIKE),
        ((2,), f"train-allreduce --checkpoint-async {BASE} --steps 60 --keep 3", ALIKE),
        ((2,), f"train-fully-sharded --checkpoint-async {BASE} --steps 60", ALIKE),
    ],
}  # fmt: skip
DISK = 4 << 20  # bytes of the tmpfs
RANK = "PMI_RANK", "OMPI_COMM_WORLD_RANK"  # what tells a process its rank, under MPICH and Open MPI
WHO = "a rank", "a rank", "the launcher", "all"
START, MOMENT = 3.0, 0.2  # seconds, at most, from a job's start, and from a line of metrics.jsonl to the kill


class Case:
    """Case `number` of a program: its command, its ranks, and how many of its legs are struck."""

    def __init__(self, seed: int, name: str, number: int):
        self.name, self.number, self.draw = name, number, random.Random(f"{seed} {name} {number}")
        ranks, self.command, self.lines = self.draw.choice(PROGRAMS[name])
        self.ranks, self.words, self.filled = self.draw.choice(ranks), shlex.split(self.command), name == "full-disk"
        self.program, self.key = self.words[0], (self.command, self.ranks)
        self.legs = 2 if self.draw.random() < 0.75 and not self.filled else 1


class Undisturbed(NamedTuple):
    """A run that nothing has struck: its lines, and its outcome."""

    lines: int
    parameters: dict[str, bytes]
    scores: dict[str, dict]


class Kill:
    """Strikes a job when it has written so many lines, and a moment later."""

    def __init__(self, case: Case, whole: Undisturbed, run: Path):
        self.run, self.filled, draw = run, case.filled, case.draw
        self.who = "the disk" if case.filled else draw.choice(WHO)
        self.rank = draw.randrange(case.ranks)
        self.lines = draw.randint(0, whole.lines)
        self.moment = draw.random() * (MOMENT if self.lines else START)

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.who == "a rank" else self.who
        return f"{who} after {self.lines} lines and {self.moment:.3f} s"

    def __call__(self, job: Job) -> None:
        while job.process.poll() is None and lines_of(self.run) < self.lines:
            time.sleep(0.005)
        time.sleep(self.moment)
        if job.process.poll() is not None:
            return
        if self.filled:
            fill(self.run.parent)
        else:
            for pid in [job.process.pid] if self.who == "the launcher" else self.victims(job):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        job.struck = time.monotonic()

    def victims(self, job: Job) -> list[int]:
        found = job.ours()
        return found if self.who == "all" else [pid for pid in found if rank_of(pid) == self.rank]


def rank_of(pid: int) -> int | None:
    """The rank of a process; None where it is none, or has ended."""
    with contextlib.suppress(OSError):
        told = dict(each.partition("=")[::2] for each in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        return next((int(told[name]) for name in RANK if name in told), None)
    return None


def lines_of(run: Path) -> int:
    """Of all metrics.jsonl that are there by now."""
    found = 0
    with contextlib.suppress(OSError):  # a folder that has just been removed
        for path in run.rglob("metrics.jsonl"):
            found += path.read_bytes().count(b"\n")
    return found


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def steps_once(run: Path) -> None:
    """Whether each run below has each of its steps once, in all its legs."""
    for path in run.rglob("metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line["step"] for line in lines if not any(name.startswith(("test_", "validation_")) for name in line)]
        summary = json.loads((path.parent / "summary.json").read_text())
        where = path.parent.relative_to(run)
        if steps != [*range(1, summary["steps"] + 1)]:
            raise Wrong(f"{where}: {len(steps)} lines of steps, {len(set(steps))} of them once, of {summary['steps']}")
        if sum(leg["steps"] for leg in summary["legs"]) != summary["steps"]:
            raise Wrong(f"{where}: the steps of the legs are not {summary['steps']}")
        if summary["stopped"] not in ("finished", None):
            raise Wrong(f"{where}: it has stopped: {summary['stopped']}")


def rounded(score: object) -> object:
    """The score to 12 digits: servers add up the losses of a step as they arrive."""
    return float(f"{score:.12g}") if isinstance(score, float) else score


def outcome(run: Path) -> tuple[dict[str, bytes], dict[str, dict]]:
    """The parameters of the checkpoints, and what all summaries say of losses and scores. Raises Wrong."""
    scores = {}
    for path in sorted(run.rglob("summary.json")):
        found = json.loads(path.read_text())
        names = [name for name in found if name.startswith(("test_", "validation_", "train_loss"))]
        scores[str(path.relative_to(run))] = {name: rounded(found[name]) for name in names}
    try:
        return parameters(run), scores
    except UsageError as error:
        raise Wrong(f"a checkpoint cannot be read: {error}") from None


def finished(job: Job, run: Path) -> tuple:
    """The outcome of a job that has done all it had to; else raises Wrong."""
    if job.status:
        raise Wrong(f"status {job.status}\n{job.text}")
    clean(job, run)
    if left := [path.name for path in run.rglob("*") if path.name == BEGUN]:
        raise Wrong(f"left: {', '.join(left)}")
    steps_once(run)
    return outcome(run)


def interrupted(job: Job, run: Path, kill: Kill) -> None:
    """Whether a job that was struck has ended, and left nothing but what the next one removes. Raises Wrong."""
    filled = kill.filled
    if kill.who in ("the launcher", "all"):  # Open MPI's launcher removes what its library has there
        job.shm = [name for name in job.shm if not name.startswith("sm_segment")]
    clean(job, run, killed=job.status != 0 and not filled)
    told = len(re.findall("error: .*No space left on device", job.text)) == 1 and "Traceback" not in job.text
    if filled and job.status and not told:
        raise Wrong(f"a full disk is not told of in a line\n{job.text}")


def resumable(program: str, run: Path) -> bool:
    """Whether there is something to go on with."""
    several = {"compare": "config.yaml", "train-ensemble": "ensemble.yaml"}
    return (run / several[program]).exists() if program in several else any(run.glob("checkpoint*.h5"))


def one(case: Case, folder: Path, wanted: dict) -> int:
    """Run a case in a folder that is there; returns how many kills have struck. Raises Wrong."""
    disk, run = folder / "disk", folder / "disk/run"
    write_few(folder, classes=2)
    begin = [*case.words, "--out"]
    if case.lines:
        wanted[case.key] = Undisturbed(case.lines, {}, {})
    elif case.key not in wanted:
        job = Job(case.ranks, [*begin, "disk/whole"], folder)
        found = finished(job, disk / "whole")
        wanted[case.key] = Undisturbed(lines_of(disk / "whole"), *found)
        shutil.rmtree(disk / "whole")
    kills = 0
    for leg in range(case.legs + 1):
        more = resumable(case.program, run)
        words = [case.program, "--resume", "disk/run", "--progress", "none"] if more else [*begin, "disk/run"]
        words += trust(case.words) if more else []
        words += ["--force"] if leg and not more else []
        kill = Kill(case, wanted[case.key], run) if leg < case.legs else None
        print(f"; {kill}" if kill else "" if more else ", anew", end="", flush=True)
        job = Job(case.ranks, words, folder, strike=kill)
        (folder / f"said-{leg}").write_text(job.text)
        if kill is not None:
            interrupted(job, run, kill)
            kills += bool(job.struck and job.status)
            (disk / "filler").unlink(missing_ok=True)
    found = finished(job, run)
    if not case.lines and found != (wanted[case.key].parameters, wanted[case.key].scores):
        raise Wrong("other parameters, or scores, than those of a run that nobody disturbed")
    return kills


@contextlib.contextmanager
def disk_of(case: Case, top: Path) -> Iterator[Path]:
    """A folder with a folder `disk` in it, which is a file system of its own where it is to be filled."""
    folder = top / f"{case.name}-{case.number}"
    (folder / "disk").mkdir(parents=True)
    if case.filled:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder / "disk"], check=True)
    try:
        yield folder
    finally:
        if case.filled:
            subprocess.run(["umount", folder / "disk"], check=True)


def main(seed: str, count: int, *names: str) -> None:
    """Each program, until so many kills have struck."""
    begun, wrong, (seed, _, only) = time.monotonic(), [], seed.partition(":")
    top = Path(tempfile.mkdtemp(prefix="killed-"))
    for name in names or PROGRAMS:
        kills, bad, cases, wanted = 0, 0, 0, {}
        while kills < count and not (only and cases):
            case = Case(int(seed), name, int(only or cases))
            print(f"{name} {case.number}: {case.ranks} ranks, {case.command}", end="", flush=True)
            start = time.monotonic()
            try:
                with disk_of(case, top) as folder:
                    kills += one(case, folder, wanted)
            except Wrong as error:
                kills, bad = kills + 1, bad + 1
                print(f": WRONG: {error}", flush=True)
            else:
                print(f": as it should ({time.monotonic() - start:.1f} s)", flush=True)
                shutil.rmtree(folder)
            cases += 1
        wrong += [name] * bad
        print(f"{name}: {cases} jobs, {kills} kills, {bad} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"see {top}" if wrong else "all as they should be")
    if not wrong:
        shutil.rmtree(top)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
