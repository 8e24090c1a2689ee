"""What a page shows on its command lines: run as it stands there, and compared with what is printed below."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import ready_ranks

from hpcdl.machine.launcher import clean_environment

NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
NEAR = 0.02  # digits depend on the processor's arithmetic, and its sums' order


def commands(page):
    """The commands of a page, each with the lines that are printed below it."""
    found = []
    for line in page.splitlines():
        if line.startswith("    $ "):
            found.append((line[6:], []))
        elif found and found[-1][0] and line.startswith("    "):
            found[-1][1].append(line[4:])
        elif found:
            found.append((None, []))  # what follows belongs to no command
    return [(command, said) for command, said in found if command]


def program(command):
    """The ranks, script and arguments that a command starts; None if it is more than one program of ours."""
    words = shlex.split(command, comments=True) if not set("|&;<>$`") & set(command) else []
    ranks, words = (int(words[2]), words[3:]) if words[:2] == ["mpiexec", "-n"] else (1, words)
    if words[:1] == ["hpcdl"] and words[1:2] not in ([], ["supervise"]):
        return ranks, Path(sys.executable).with_name("hpcdl"), words[1:]
    return None


def shell(command, folder, environment, timeout=120):
    """Run a command as a user would who has activated the environment; one program of ours, on ranks that are up."""
    started = None if os.environ.get("HPCDL_TESTS") == "long" else program(command)
    if started:
        given = dict(environment.items() - clean_environment().items())
        given.pop("TMPDIR", None)
        return ready_ranks.run(*started, folder, timeout, given)
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    how = {"cwd": folder, "env": environment | {"PATH": path}, "timeout": timeout}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, **how)


def write_shown(shown, folder):
    """Write the files that a page shows by `cat NAME`."""
    for command, printed in shown:
        if command.startswith("cat "):
            (folder / command.split()[1]).write_text("".join(f"{line}\n" for line in printed))


def as_printed(shown, folder, environment):
    """Run commands with what is printed below them: all end well, and say so."""
    for command, printed in shown:
        done = shell(command, folder, environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert_said(done, printed)


def assert_said(done, printed):
    """The lines that are printed came out, in their order, and numbers near to those that are printed."""
    lines = (done.stdout + done.stderr).replace("\0", "").splitlines()  # Open MPI ends what it says by one
    texts = [NUMBER.sub("#", " ".join(line.split())) for line in lines]
    at = 0
    for line in printed:
        text = NUMBER.sub("#", " ".join(line.split()))
        assert text in texts[at:], f"{line!r} is not in\n" + "\n".join(lines[at:])
        at = texts.index(text, at) + 1
        for one, other in zip(NUMBER.findall(line), NUMBER.findall(lines[at - 1]), strict=True):
            one, other = (float(each.replace(",", "")) for each in (one, other))
            assert abs(one - other) <= NEAR * max(abs(one), 1), f"{line!r} is not near to {lines[at - 1]!r}"
