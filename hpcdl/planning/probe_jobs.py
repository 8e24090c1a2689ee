"""Jobs that measure the machine or run lines for some steps; each rank: `python -m hpcdl.planning.probe_jobs JOB`.

    parent    run(ranks, job)     starts ranks by mpiexec or --launcher, and waits for the output of rank 0
    ranks     {"models": [[line, [rows, ...]], ...], "operations": [...]}     measure the models of the lines, and these
                                                                              collectives (measuring.py)
              {"lines": [[line, steps], ...], "repeat": 3}                    run each line `repeat` times, in turns

Job and answer are JSON, on the command line and in the last line of the output, so no shared file system is needed. The
answer for a line is its seconds per step, one for each turn, or the reason why it cannot run."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from hpcdl.errors import AgreedExit, LoneError, UsageError, line
from hpcdl.launch.start import start_mpi
from hpcdl.machine.launcher import OVERSUBSCRIBED, clean_environment, mpiexec
from hpcdl.runs import signals

POLL_SECONDS = 0.2  # seconds between two checks for a signal
ANSWER = "hpcdl-answer "
Start = Callable[[int, list[str]], subprocess.CompletedProcess]  # (ranks, arguments of Python)


def run(ranks: int, job: dict[str, Any], start: Start | None = None) -> dict[str, Any]:
    """Start `ranks` ranks on a job; return their answer. LoneError, with a line of their output, if they give none."""
    done = (start or make_starter(""))(ranks, ["-m", "hpcdl.planning.probe_jobs", json.dumps(job)])
    answers = [text.partition(ANSWER)[2] for text in done.stdout.splitlines() if ANSWER in text]  # a label before it
    if done.returncode or not answers:
        output = [text for text in (done.stderr + done.stdout).splitlines() if text.strip()]
        message = next((text for text in output if "error:" in text), output[-1] if output else "no output")
        raise LoneError(f"a measuring job of {ranks} ranks ended with status {done.returncode}: {line(message)}")
    answer: dict[str, Any] = json.JSONDecoder().raw_decode(answers[-1])[0]
    return answer


def make_starter(launcher: str) -> Start:
    """Return a function that starts ranks. launcher: a command that takes -n RANKS; "": this Python's mpiexec."""
    try:
        words = shlex.split(launcher) or [mpiexec()]
    except ValueError as error:
        raise UsageError(f"--launcher {launcher}: quotes that do not close ({error})") from None
    if shutil.which(words[0]) is None:
        raise UsageError(f"--launcher {words[0]} cannot be started: there is no such program")

    def start(ranks: int, arguments: list[str]) -> subprocess.CompletedProcess:
        environment = OVERSUBSCRIBED | clean_environment()
        command = [*words, "-n", str(ranks), sys.executable, *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
            out, errors = communicate(process)
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    return start


def communicate(process: subprocess.Popen) -> tuple[str, str]:
    """Return the output and the errors of a process; on a signal end first the process, then this one."""
    while True:
        try:
            out, errors = process.communicate(timeout=POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            if signals.received:
                process.terminate()
        except BaseException:
            process.terminate()
            raise
    if signals.received:
        print("plan: stopped by a signal", file=sys.stderr, flush=True)
        raise AgreedExit(signals.STATUS)
    return out, errors


def main() -> None:
    """Measure and train as the job says; rank 0 prints the answer."""
    with start_mpi():
        from mpi4py import MPI

        from hpcdl.launch.command_lines import read_command
        from hpcdl.launch.option_parser import parse
        from hpcdl.launch.program import ended
        from hpcdl.machine.world import check_world
        from hpcdl.planning.measuring import measure

        world = MPI.COMM_WORLD
        with ended("plan", world.rank):
            check_world(world)
            job, answer = json.loads(sys.argv[1]), {}  # type: dict[str, Any], dict[str, Any]
            if "models" in job:
                lines = []
                for text, rows in job["models"]:
                    command = read_command(1, f"-n {world.size}: {text}", {}, world.size)
                    lines.append((command.options(parse, "--out=none"), set(rows)))
                answer["measured"] = measure(world, lines, job["operations"])
            if "lines" in job:
                answer["runs"] = run_lines(world, read_command, job["lines"], job.get("repeat", 1))
            if world.rank == 0:
                print(ANSWER + json.dumps(answer), flush=True)


def without_length(words: list[str]) -> list[str]:
    """Return a line's words without --steps, --epochs and --rounds."""
    words_left, skipped = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skipped or name in ("--steps", "--epochs", "--rounds"):
            skipped = not skipped and not equals
            continue
        words_left.append(word)
    return words_left


def run_lines(world: Any, read: Callable, lines: list, repeat: int) -> list[list[float] | str]:
    """Return the seconds per step of each line, one for each turn, or the reason why it could not run."""
    from hpcdl.errors import AgreedError, TrainingError
    from hpcdl.launch.isolated_run import abandon
    from hpcdl.launch.launch_consistency import reading

    results: list[Any] = [[] for _ in lines]
    for turn in range(repeat):
        for i in [(turn + k) % len(lines) for k in range(len(lines))]:
            if isinstance(results[i], str):
                continue
            text, steps = lines[i]
            opened: list = []
            try:
                with reading(world) as parse:
                    command = read(1, f"-n {world.size}: {text}", {}, world.size)
                    command = command._replace(words=without_length(command.words))
                    length = "rounds" if hasattr(command.training.strategy.options_class, "rounds") else "steps"
                    options = command.options(parse, "--out=none", f"--{length}={steps}", "--evaluate-every=1000000")
                run = command.training.run(world, options, opened)
                batch = min(run.batch, run.data.examples) if world.rank == 0 else 0
                results[i].append(batch / run.rate if world.rank == 0 else 0.0)
            except (AgreedError, TrainingError) as error:
                abandon(opened)
                results[i] = line(error)
            if world.allreduce(len(signals.received)):
                raise AgreedExit(signals.STATUS)
    return results


if __name__ == "__main__":
    main()
