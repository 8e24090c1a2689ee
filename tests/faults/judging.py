"""Run a case of the matrix in a folder of its own, and say whether what came of it is right.

    it ended            before TOO_LONG seconds
    status 0            the run is complete; where a fault changes nothing, its parameters are those of a run without it
    another status      some seconds after the fault struck, with one line that names the cause
    then                no process of the job is there, no file of it in /dev/shm, no half-written file in its folder;
                        what is there can be read, and the run can be gone on with, or says in a line why not

Processes are known by a variable in their environment, whatever became of the launcher."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
from faults.cases import ANEW, BY_CHANCE, FLIPS, FOUND, HARMLESS, SEVERAL, Case, of
from few import write_few

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import UsageError
from hpcdl.launch.isolated_run import PATIENCE
from hpcdl.machine.launcher import clean_environment, mpiexec

HERE = Path(__file__).parent
ASLEEP = 1.0  # seconds for which a process is stopped that goes on
SHARED = Path("/dev/shm")
MARK = "HPCDL_FAULTS"
TOO_LONG = 120.0  # seconds, after which a job hangs
TIMEOUT = 4  # seconds of --timeout, on a machine with a core for each job, as SOON
SOON = 5.0  # seconds from a fault to the end of all processes, on a machine with a core for each job
KILLED = r"Killed \(signal 9\)|exited on\s+signal 9"
LEAVES = "leaves the program, with status"
CAUSES = {  # what names it, of the launchers (MPICH's, Open MPI's) or of ours
    "kill": KILLED,
    "stop": r"hpcdl watchdog: rank \d+: no answer|rank 0 does not answer",
    "exit, os": r"EXIT CODE: \d+|[Ee]xit(ed)? .*code|has left",
    "exit, sys": r"EXIT CODE: \d+|[Ee]xit(ed)? .*code|MPI_ABORT|MPI_Abort|has left|" + LEAVES,
    "exit, status 0": KILLED + r"|due to process rank|no answer|does not answer|has left|have left|has ended|" + LEAVES,
    "exception": r"rank \d+ of \d+ failed.*\n(.*\n)*.*InjectedFault|runs? failed: InjectedFault",
    "disk full": r"No space left on device",
    # HDF5 does not look whether it was given any.
    "memory": r"no memory left|[Mm]emory|[Ss]egmentation fault|can't start new thread",
    "parameters": r"replicas do not agree|holds other parameters|differ in parameters",
    "message": r"replicas do not agree|holds? other parameters|do not agree|an invalid request|are not finite",
    "data": r"do not agree|not a finite",
    "checkpoint": KILLED,
}
ENDS = {"kill", "stop", "exit, os", "exit, sys"}  # with status 0 after them nothing is well
CAUSES["random"] = "|".join(CAUSES[kind] for kind in ("kill", "exit, os", "exception", "disk full"))
OURS = re.compile(r"^(\S+: )?error: |^rank \d+ of \d+ failed|^hpcdl watchdog: a rank has", re.MULTILINE)


# What is said of a run that has ended so, and of a search whose trials have all failed.
IN_VAIN = re.compile("the replicas did not agree when the run in|no run has succeeded")


class Wrong(Exception):
    """What a case shows to be wrong."""


class Job:
    """A job under way, and afterwards what it has said and left. words: the command, without launcher. strike: a
    function of the job that a thread calls beside it, as one that kills its processes."""

    def __init__(self, ranks: int, words: list[str], folder: Path, wakes: bool = False, strike: Callable | None = None):
        self.mark = f"{MARK}={uuid.uuid4()}"
        environment = clean_environment() | dict([self.mark.split("=")])
        environment |= {"PYTHONPATH": str(HERE.parent), "HPCDL_CACHE": str(folder.parent / "cache")}
        environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
        self.temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        environment["TMPDIR"] = self.temporary.name  # what a killed launcher leaves stops one of the same number
        self.before = set(os.listdir("/proc"))
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "hpcdl", *words]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.struck, self.files, self.said = 0.0, set(), []
        self.begun = time.monotonic()
        self.process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)
        reader = threading.Thread(target=self.read)
        reader.start()
        striker = threading.Thread(target=strike or bool, args=[self])
        striker.start()
        self.hangs = False
        while self.process.poll() is None and not self.hangs:
            self.files |= self.shared()
            self.hangs = time.monotonic() - self.begun > TOO_LONG
            if wakes and self.struck and time.monotonic() - self.struck > ASLEEP:
                for pid in self.ours():
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
        striker.join()
        self.left = self.wait_for_all()
        self.seconds = time.monotonic() - (self.struck or self.begun)
        for pid in self.left:
            os.kill(pid, signal.SIGKILL)
        self.status = self.process.wait()
        reader.join(5)
        self.text = "".join(self.said)
        self.shm = sorted(self.files & set(os.listdir(SHARED)))
        for name in self.shm:
            (SHARED / name).unlink(missing_ok=True)

    def read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(b"inject: ") and not self.struck:
                self.struck = time.monotonic()
            self.said.append(line.decode(errors="replace").replace("\0", ""))

    def ours(self) -> list[int]:
        """The processes of the job."""
        found = []
        for pid in set(os.listdir("/proc")) - self.before:
            if pid.isdigit() and int(pid) != os.getpid():
                with contextlib.suppress(OSError):  # has just ended
                    if self.mark.encode() in Path("/proc", pid, "environ").read_bytes():
                        found.append(int(pid))
        return found

    def shared(self) -> set[str]:
        """The files in /dev/shm that are in their memory."""
        found = set()
        for pid in self.ours():
            with contextlib.suppress(OSError):
                found |= set(re.findall(rf"{SHARED}/(\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))
        return found

    def wait_for_all(self) -> list[int]:
        """Wait until all processes are gone, for a while; returns who is not."""
        until = time.monotonic() + (0 if self.hangs else SOON * load())
        while (left := self.ours()) and time.monotonic() < until:
            time.sleep(0.02)
        return left


def load() -> float:
    """How many want a core, for each that there is; 1 at least."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def judge(case: Case, top: Path, keep: dict) -> str:
    """Run a case in the folder `top`, which it makes; returns how it ended. Raises Wrong. keep: runs without faults."""
    top.mkdir()
    write_few(top, classes=2)
    patience = round(TIMEOUT * min(2.5, load()))
    words = [*case.words, "--inject", case.inject, *(["--timeout", str(patience)] if case.timed else [])]
    job = Job(case.ranks, words, top, case.wakes)
    run = top / "run"
    (top / "said").write_text(job.text)
    clean(job, run, killed=job.status != 0)
    ended = finished(case, job, run, keep, top) if job.status == 0 else broken(case, job, patience)
    if job.status and case.resumed and run.exists():
        ended += ", " + gone_on(case, top, keep)
    return ended


def clean(job: Job, run: Path, killed: bool = False) -> None:
    """Whether nothing is left that should not be; killed: a rank may have been so while it wrote."""
    if job.hangs:
        raise Wrong("it hangs")
    if job.left:
        raise Wrong(f"{len(job.left)} processes are left")
    if job.shm:
        raise Wrong(f"left in {SHARED}: {', '.join(job.shm)}")
    whole(run, killed)


def whole(run: Path, killed: bool = False) -> None:
    """Whether no file is half-written, but for such as the next leg removes where a process was killed."""
    for path in sorted(run.rglob("*")) if run.exists() else []:
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.name == "metrics.jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError as error:
            raise Wrong(f"{path.relative_to(run)} is broken: {error}") from None
        if path.name.endswith(".part") and not killed:
            raise Wrong(f"{path.relative_to(run)} is left")


def checkpoints(run: Path, damaged: bool) -> dict[str, Checkpoint]:
    """All that are there, by their names; damaged: only the last, as others may have been corrupted on purpose."""
    found = {}
    for path in sorted(run.rglob("*.h5")):
        last = path.name == "checkpoint.h5" and path.parent.name != "later"
        if last or (not damaged and path.name.startswith(("checkpoint", "best"))):
            found[str(path.relative_to(run))] = Checkpoint.read(path)
    return found


def finished(case: Case, job: Job, run: Path, keep: dict, top: Path) -> str:
    """Of a job with status 0."""
    struck = bool(job.struck)
    if struck and case.kind in ENDS and case.line not in SEVERAL and not case.wakes:
        raise Wrong("status 0 after it was struck")
    at_once = "status=0,how=os" in case.inject or ("status=0" in case.inject and case.ranks == 1)  # nobody may know
    if struck and at_once and not (run / "summary.json").exists():
        return "status 0, without a summary"
    complete(case, run)
    try:
        mine = parameters(run, struck and case.kind == "checkpoint")
    except UsageError as error:
        raise Wrong(f"a checkpoint cannot be read: {error}") from None
    if case.kind in FLIPS and struck:
        if "nothing is flipped" in job.text:
            return "finished, nothing to flip"
        if case.kind == "parameters" and case.words[0] in FOUND and case.ranks - ("data server" in case.line) > 1:
            same(case, mine, keep, top)  # the flip of so small a number was lost in rounding; else somebody must say so
            return "finished as undisturbed"
        return "finished, learned from it"
    if case.kind == "memory" and case.line in SEVERAL:  # one of the runs has failed, and the others have not
        return "finished"
    if not struck or case.kind in HARMLESS or case.wakes:
        same(case, mine, keep, top)
        return "finished as undisturbed" if struck else "not struck"
    return "finished"


def complete(case: Case, run: Path) -> None:
    """Whether a run that has ended well says so, and has every step once."""
    if case.line in SEVERAL:
        return
    summary = json.loads((run / "summary.json").read_text())
    if summary["stopped"] not in ("finished", "time limit"):
        raise Wrong(f"it has stopped: {summary['stopped']}")
    if summary["replicas_agree"] is False:
        raise Wrong("the replicas do not agree, and its status is 0")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "seconds" in line and not any(name.startswith("test_") for name in line)]
    if len(steps) != len(set(steps)):
        raise Wrong(f"a step counts twice: {steps}")
    if summary["stopped"] == "finished" and "--steps" in case.words:
        planned = int(case.words[case.words.index("--steps") + 1])
        if summary["steps"] != planned:
            raise Wrong(f"{summary['steps']} steps of {planned}")


def parameters(run: Path, damaged: bool = False) -> dict[str, bytes]:
    """Of the last checkpoints, by their names."""
    found = {name: each for name, each in checkpoints(run, damaged).items() if name.endswith("checkpoint.h5")}
    return {name: np.asarray(each.vectors["parameters"]).tobytes() for name, each in found.items()}


def same(case: Case, mine: dict[str, bytes], keep: dict, top: Path) -> None:
    """Whether the parameters are those of a run that nothing has struck."""
    if case.line in BY_CHANCE:
        return
    key = case.line, case.ranks
    if key not in keep:
        folder = top.parent / f"whole-{case.number}"
        folder.mkdir()
        write_few(folder, classes=2)
        job = Job(case.ranks, of(0, case.line, case.ranks, "kill", "").words, folder)
        if job.status:
            raise Wrong(f"without a fault: status {job.status}\n{job.text}")
        keep[key] = parameters(folder / "run")
    if keep[key].keys() != mine.keys() or any(keep[key][name] != mine[name] for name in mine):
        raise Wrong("other parameters than without a fault")


def broken(case: Case, job: Job, patience: float = 0.0) -> str:
    """Of a job with another status. patience: of its --timeout."""
    if not job.struck:
        raise Wrong(f"status {job.status}, and nothing has struck\n{job.text}")
    allowed = SOON * load() + (4 * patience + SOON if case.timed else 0)
    allowed += PATIENCE if case.line in SEVERAL else 0  # for which a rank waits for others to fail, too
    if job.seconds > allowed and case.kind not in HARMLESS | FLIPS:
        raise Wrong(f"{job.seconds:.1f} s until all had ended, of {allowed:.1f}")
    rest = "".join(line for line in job.text.splitlines(keepends=True) if not line.startswith(("inject: ", "load: ")))
    if case.kind == "message" and job.status == 85:  # in the word that somebody has had a signal
        return "ended as if by a signal"
    if job.status in left_with(job.text) and not rest.strip():
        return "ended, with the rank's status"  # MPICH says no more of a process that leaves
    if case.kind not in CAUSES or not re.search(CAUSES[case.kind], rest):
        raise Wrong(f"status {job.status}, and no line names the cause\n{job.text}")
    alone = "rank 0 does not answer" in rest  # then each rank speaks for itself
    if len(OURS.findall(rest)) > max(1, job.text.count("inject: ")) and not alone:
        raise Wrong(f"more than one line names a cause\n{job.text}")
    if rest.count("Traceback") > (case.kind in ("exception", "memory", "random")):
        raise Wrong(f"a traceback\n{job.text}")
    return "found" if case.kind in FLIPS else "ended, in a line"


def left_with(text: str) -> set[int]:
    """The statuses with which processes have left by themselves."""
    return {int(status) for status in re.findall(r"leaves by (?:os\._exit|sys\.exit)\((\d+)\)", text)}


def trust(words: list[str]) -> list[str]:
    """What a command takes that goes on with a run of these words: leave to call the environment that they name."""
    return ["--trust", words[words.index("--env") + 1]] if "--env" in words else []


def gone_on(case: Case, top: Path, keep: dict) -> str:
    """Go on with it: it ends as it would have, or is refused in a line."""
    more = [*trust(case.words), *(["--timeout", "0"] if case.timed else [])]
    job = Job(case.ranks, [*case.words[:1], "--resume", "run", *more], top)
    (top / "said").write_text(job.text)
    run = top / "run"
    clean(job, run)
    refusal = job.status == (1 if IN_VAIN.search(job.text) else 2) and len(re.findall("error: ", job.text)) == 1
    if refusal and "Traceback" not in job.text:
        return "refused"
    if job.status and job.struck:  # by the second of two faults, or in the next of several runs
        broken(case, job)
        return "struck again"
    if job.status:
        raise Wrong(f"gone on with: status {job.status}\n{job.text}")
    complete(case, run)
    if case.kind not in FLIPS and case.line not in ANEW:
        same(case, parameters(run, case.kind == "checkpoint"), keep, top)
    return "gone on with"
