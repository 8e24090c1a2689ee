"""The command line of a job, as a supervisor reads and changes it: launcher, hosts, ranks, program, folder.

    mpiexec -n 8 -hosts a:4,b:4 hpcdl train-allreduce --lr 0.1 --out runs/a                 as the user wrote it
    mpiexec -n 4 -hosts a:4 hpcdl train-allreduce --lr 0.1 --resume runs/a --out runs/a     after the loss of host b

Programs that train into a folder, `search` and `compare` can be resumed. The words before the program are kept (env,
srun with its options, python -m hpcdl, python scripts/train_allreduce.py), except the number of ranks and the hosts."""

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hpcdl.checkpoint.rollback import folder_of
from hpcdl.errors import UsageError, blamed_on
from hpcdl.plugins import names_in_line
from hpcdl.programs import files, writes_folder

LAUNCHERS = re.compile(r"(mpiexec|mpirun|orterun|prterun)([.-]\w+)*|srun")
RANKS = re.compile(r"(-n|-np|--n|--np|--ntasks)(?:=?(\d+))?")
HOST_LISTS = ("-hosts", "-host", "--hosts", "--host", "-H")
HOST_FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
WHOLE = {  # programs of many runs, whose folder records their options -> options that a restart repeats
    "search": ("progress", "time-limit"),
    "compare": ("progress",),
    "train-ensemble": ("progress", "time-limit"),
}
ASKED = {"train-ensemble": "ensemble.yaml"}  # the file that records a program's options, if not config.yaml
NOT_AGAIN = {"--initial": 1, "--resume": 1, "--out": 1, "--force": 0}  # a restart leaves these out; numbers of values


@dataclass(frozen=True)
class Host:
    """A host in a launcher's list. slots: how many ranks it takes; 0: unknown."""

    name: str
    slots: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}" if self.slots else self.name


@dataclass(frozen=True)
class JobLine:
    """A command line. words: all its words. begin: index of the word after the program's name. program: that name."""

    words: tuple[str, ...]
    begin: int
    program: str

    @classmethod
    def read(cls, words: list[str]) -> "JobLine":
        """Parse a line. Raises UsageError if it starts no program that can be resumed, or names no folder."""
        for at, word in enumerate(words):
            name = Path(word).name
            if name == "hpcdl" and at + 1 < len(words):
                program, begin = words[at + 1].replace("_", "-"), at + 2
            elif name.endswith(".py") and name[:-3].replace("_", "-") in files():
                program, begin = name[:-3].replace("_", "-"), at + 1
            else:
                continue
            if not writes_folder(program):
                raise UsageError(f"{program} cannot be resumed; supervise starts train-..., search and compare")
            line = cls(tuple(words), begin, program)
            if line.folder is None:
                raise UsageError(f"give {program} an --out FOLDER, from whose files the job can be resumed")
            if program == "search" and line.option("only") is not None:
                raise UsageError("search --only trains one trial: start the command again, or search --resume")
            return line
        said = " ".join(words[:6])
        raise UsageError(f"{said!r} starts no program of hpcdl; write supervise -- mpiexec -n 4 hpcdl NAME ...")

    @property
    def own(self) -> tuple[str, ...]:
        """The words after the program's name: its options."""
        return self.words[self.begin :]

    def option(self, name: str) -> str | None:
        """Return the value of an option of the program, the last one if it is given twice; None if it is not given."""
        found = None
        for at, word in enumerate(self.own):
            if word == f"--{name}" and at + 1 < len(self.own):
                found = self.own[at + 1]
            elif word.startswith(f"--{name}="):
                found = word.partition("=")[2]
        return found

    @property
    def trusted(self) -> list[str]:
        """The values of --trust for a restart (hpcdl/plugins.py): all code and files that the line names or trusts. If
        a file is among them, the run's folder, whose files repeat names in that file, is added last."""
        texts = [shlex.join(self.own), *self.own, *(word.partition("=")[2] for word in self.own)]
        found = [*dict.fromkeys(name for text in texts for _, name in names_in_line(text))]
        return [*dict.fromkeys([*found, *([str(self.folder)] if any(":" not in each for each in found) else [])])]

    @property
    def folder(self) -> Path | None:
        """The folder into which the job writes; None if the options name none."""
        out, resume = self.option("out"), self.option("resume")
        if out:
            return None if out in ("auto", "none") else Path(out)
        return folder_of(resume) if resume else None

    @property
    def asked(self) -> Path:
        """The file, in the job's folder, that records the options of the job."""
        assert self.folder is not None
        return self.folder / ASKED.get(self.program, "config.yaml")

    @property
    def goes_on(self) -> bool:
        """True if --resume names the job's own folder, or a checkpoint in it."""
        resume, folder = self.option("resume"), self.folder
        if not resume or folder is None:
            return False
        return folder.resolve() in (Path(resume).resolve(), Path(resume).resolve().parent)

    def from_checkpoint(self, checkpoint: Path) -> "JobLine":
        """Return the line that resumes the run from a checkpoint in its folder; a job of many runs, from its folder."""
        if self.program in WHOLE:
            again = {name: self.option(name) for name in WHOLE[self.program]}
            own = [f"--{name}={value}" for name, value in again.items() if value is not None]
            own += [f"--trust={each}" for each in self.trusted]
            return self._with_own([*own, "--resume", str(self.folder)])
        own = self._without(NOT_AGAIN)
        if str(self.folder) in self.trusted and f"--trust={self.folder}" not in own:
            own.append(f"--trust={self.folder}")
        return self._with_own([*own, "--resume", str(checkpoint), "--out", str(self.folder)])

    def anew(self) -> "JobLine":
        """Return the line without --force, to begin anew in a folder that holds nothing to replace."""
        return self._with_own(self._without({"--force": 0}))

    def _without(self, names: dict[str, int]) -> list[str]:
        own, left = [], 0
        for word in self.own:
            name, equals, _ = word.partition("=")
            if left:
                left -= 1
            elif name in names:
                left = 0 if equals else names[name]
            else:
                own.append(word)
        return own

    def _with_own(self, own: list[str]) -> "JobLine":
        return dataclasses.replace(self, words=(*self.words[: self.begin], *own))

    @property
    def launcher(self) -> int | None:
        """The index of the launcher among the words; None if the program is started without a launcher."""
        places = (at for at, word in enumerate(self.words[: self.begin]) if LAUNCHERS.fullmatch(Path(word).name))
        return next(places, None)

    @property
    def _program(self) -> int:
        """The index of the word that the launcher starts: hpcdl, or the python before it or before a script."""
        names = [Path(word).name for word in self.words[: self.begin]]
        least = -1 if self.launcher is None else self.launcher
        pythons = [at for at, name in enumerate(names) if at > least and re.fullmatch(r"python[\d.]*", name)]
        own = [at for at, name in enumerate(names) if at > least and name == "hpcdl"]
        return min(pythons[-1:] + own[-1:] or [self.begin - 1])

    @property
    def _places(self) -> list[tuple[int, int, int]]:
        """The options that tell the number of ranks, each as (index of first word, number of words, ranks)."""
        found, start = [], self.launcher
        for at in range(len(self.words) if start is None else start + 1, self._program):
            match = RANKS.fullmatch(self.words[at])
            if match and match[2]:
                found.append((at, 1, int(match[2])))
            elif match and self.words[at + 1].isdecimal():
                found.append((at, 2, int(self.words[at + 1])))
        return found

    @property
    def ranks(self) -> int | None:
        """The number of ranks to start; None if the line does not tell it, or tells it for several programs."""
        return self._places[0][2] if len(self._places) == 1 else None

    def with_ranks(self, ranks: int) -> "JobLine":
        """Return the line with another number of ranks. It must tell a number already: `self.ranks` is not None."""
        ((at, length, _),) = self._places
        flag = RANKS.fullmatch(self.words[at])
        assert flag is not None
        new = (flag[1], str(ranks)) if length == 2 else (f"{flag[1]}{'=' * ('=' in self.words[at])}{ranks}",)
        return self._replaced(at, length, new)

    def _replaced(self, at: int, length: int, new: tuple[str, ...]) -> "JobLine":
        words = (*self.words[:at], *new, *self.words[at + length :])
        return dataclasses.replace(self, words=words, begin=self.begin + len(new) - length)

    @property
    def _hosts_at(self) -> int | None:
        start = self.launcher
        if start is None or Path(self.words[start]).name == "srun":  # Slurm knows which nodes are there
            return None
        places = (at for at in range(start + 1, self._program) if self.words[at] in (*HOST_LISTS, *HOST_FILES))
        return next(places, None)

    @property
    def hosts(self) -> list[Host]:
        """The hosts in the launcher's options, each once; [] without such an option. Raises UsageError."""
        at = self._hosts_at
        if at is None:
            return []
        told = self.words[at + 1]
        if self.words[at] in HOST_FILES:
            with blamed_on(f"the hosts in {told} cannot be read"):
                lines = [line.partition("#")[0].split() for line in Path(told).read_text().splitlines()]
            entries = [f"{line[0].partition(':')[0]}:{slots(line)}" for line in lines if line]
        else:
            entries = [each for each in told.split(",") if each]
        found: dict[str, int] = {}
        for entry in entries:
            name, _, number = entry.partition(":")
            found[name] = found.get(name, 0) + (int(number) if number.isdecimal() else 0)
        return [Host(name, number) for name, number in found.items()]

    def on_hosts(self, hosts: list[Host]) -> "JobLine":
        """Return the line on these hosts alone, with as many ranks as the hosts take, but no more than now."""
        at, before = self._hosts_at, self.hosts
        assert at is not None
        flag = self.words[at] if self.words[at] in HOST_LISTS else "--host"
        line = self._replaced(at, 2, (flag, ",".join(map(str, hosts))))
        if self.ranks is None or {*hosts} == {*before}:
            return line
        room = sum(host.slots for host in hosts)
        most = room if all(host.slots for host in hosts) else self.ranks * len(hosts) // len(before)
        return line.with_ranks(max(1, min(self.ranks, most)))

    def starting(self, *program: str) -> list[str]:
        """Return the words before the program, followed by those of another program."""
        return [*self.words[: self._program], *program]


def slots(line: list[str]) -> int:
    """Return how many ranks a host takes, from a line of a host file such as "a slots=4" or "a:4"; 0: unknown."""
    match = re.search(r"(?:slots\s*=\s*|:)(\d+)", " ".join(line))
    return int(match[1]) if match else 0
