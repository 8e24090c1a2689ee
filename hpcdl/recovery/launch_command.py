"""The command line of a job, as a supervisor reads it: launcher, hosts, ranks, program, folder; and another one of it.

    mpiexec -n 8 -hosts a:4,b:4 hpcdl train-allreduce --lr 0.1 --out runs/a        as told
    mpiexec -n 4 -hosts a:4 hpcdl train-allreduce --lr 0.1 --resume runs/a --out runs/a

Programs that can be gone on with are those that train into a folder, search and compare. What starts them is left as it
stands (env, srun with its options, python -m hpcdl, python scripts/train_allreduce.py), but for ranks and hosts.
"""

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hpcdl.errors import UsageError, blamed_on
from hpcdl.plugins import names_in_line
from hpcdl.programs import TRAINS, files

LAUNCHERS = re.compile(r"(mpiexec|mpirun|orterun|prterun)([.-]\w+)*|srun")
RANKS = re.compile(r"(-n|-np|--n|--np|--ntasks)(?:=?(\d+))?")
HOST_LISTS = ("-hosts", "-host", "--hosts", "--host", "-H")
HOST_FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
WHOLE = {  # programs of many runs, which know from their folder what was asked for; what may be told them again
    "search": ("progress", "time-limit"),
    "compare": ("progress",),
    "train-ensemble": ("progress", "time-limit"),
}
ASKED = {"train-ensemble": "ensemble.yaml"}  # the file of it, where it is not config.yaml
NOT_AGAIN = {"--initial": 1, "--resume": 1, "--out": 1, "--force": 0}  # how many values they have


@dataclass(frozen=True)
class Host:
    """A host of a launcher's list; slots: how many ranks it takes, 0 where that is not said."""

    name: str
    slots: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}" if self.slots else self.name


@dataclass(frozen=True)
class JobLine:
    """words: all of them; begin: where the program's own begin, after its name; program: as train-allreduce."""

    words: tuple[str, ...]
    begin: int
    program: str

    @classmethod
    def read(cls, words: list[str]) -> "JobLine":
        """Raises UsageError where it starts no program that can be gone on with, or its folder is not told."""
        for at, word in enumerate(words):
            name = Path(word).name
            if name == "hpcdl" and at + 1 < len(words):
                program, begin = words[at + 1].replace("_", "-"), at + 2
            elif name.endswith(".py") and name[:-3].replace("_", "-") in files():
                program, begin = name[:-3].replace("_", "-"), at + 1
            else:
                continue
            trains = program.startswith(TRAINS) and program != "train-kmeans"
            if not trains and program not in WHOLE:
                raise UsageError(f"{program} cannot be gone on with; supervise starts train-..., search and compare")
            line = cls(tuple(words), begin, program)
            line.refuse()
            return line
        said = " ".join(words[:6])
        raise UsageError(f"{said!r} starts no program of hpcdl; write it as: supervise -- mpiexec -n 4 hpcdl NAME ...")

    def refuse(self) -> None:
        """Raise UsageError where a supervisor cannot know what becomes of it."""
        if self.folder is None:
            raise UsageError(f"give {self.program} an --out FOLDER: from what lies there a job is gone on with")
        if self.program == "search" and self.option("only") is not None:
            raise UsageError("search --only is one job of many; start its command again, or search --resume")

    # -- the program's options ---------------------------------------------------------------------------------------

    @property
    def own(self) -> tuple[str, ...]:
        """The words of the program."""
        return self.words[self.begin :]

    def option(self, name: str) -> str | None:
        """The value of one of its options, the last one where it is told twice; None where it is not told."""
        found = None
        for at, word in enumerate(self.own):
            if word == f"--{name}" and at + 1 < len(self.own):
                found = self.own[at + 1]
            elif word.startswith(f"--{name}="):
                found = word.partition("=")[2]
        return found

    @property
    def trusted(self) -> list[str]:
        """What a restart is to trust (hpcdl/plugins.py): what the line names or trusts.

        Where the line trusts a file, the last is the run's own folder, which repeats the names of that file.
        """
        texts = [shlex.join(self.own), *self.own, *(word.partition("=")[2] for word in self.own)]
        found = [*dict.fromkeys(name for text in texts for _, name in names_in_line(text))]
        return [*dict.fromkeys([*found, *([str(self.folder)] if any(":" not in each for each in found) else [])])]

    @property
    def folder(self) -> Path | None:
        """The folder that it writes; None where that is not told."""
        out, resume = self.option("out"), self.option("resume")
        if out in ("auto", "none"):
            return None
        if out:
            return Path(out)
        if resume:
            return Path(resume).parent if Path(resume).is_file() else Path(resume)
        return None

    @property
    def asked(self) -> Path:
        """The file of its folder in which it keeps what was asked for."""
        assert self.folder is not None
        return self.folder / ASKED.get(self.program, "config.yaml")

    @property
    def goes_on(self) -> bool:
        """Whether it goes on with what its folder holds."""
        resume, folder = self.option("resume"), self.folder
        if not resume or folder is None:
            return False
        return folder.resolve() in (Path(resume).resolve(), Path(resume).resolve().parent)

    def from_checkpoint(self, checkpoint: Path) -> "JobLine":
        """The same, going on with the run in its folder from a checkpoint there, or from what the folder holds."""
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
        """The same, from the beginning, in a folder in which there is nothing to replace."""
        return self._with_own(self._without({"--force": 0}))

    def _without(self, names: dict[str, int]) -> list[str]:
        """The program's words without these options, of which each has so many values."""
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

    # -- the launcher's ----------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> int | None:
        """Where the launcher stands among the words; None where the program is started alone."""
        places = (at for at, word in enumerate(self.words[: self.begin]) if LAUNCHERS.fullmatch(Path(word).name))
        return next(places, None)

    @property
    def _program(self) -> int:
        """Where what the launcher starts begins: at hpcdl, or at the python before that or before a script."""
        names = [Path(word).name for word in self.words[: self.begin]]
        least = -1 if self.launcher is None else self.launcher
        pythons = [at for at, name in enumerate(names) if at > least and re.fullmatch(r"python[\d.]*", name)]
        own = [at for at, name in enumerate(names) if at > least and name == "hpcdl"]
        return min(pythons[-1:] + own[-1:] or [self.begin - 1])

    @property
    def _places(self) -> list[tuple[int, int, int]]:
        """Of each word that says how many ranks: where it stands, how many words it takes, and the number."""
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
        """How many ranks are started; None where that is not told, or told for several programs."""
        return self._places[0][2] if len(self._places) == 1 else None

    def with_ranks(self, ranks: int) -> "JobLine":
        """The same on so many ranks, where it tells how many."""
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
        """Where the option that names the hosts stands."""
        start = self.launcher
        if start is None or Path(self.words[start]).name == "srun":  # Slurm knows which nodes are there
            return None
        places = (at for at in range(start + 1, self._program) if self.words[at] in (*HOST_LISTS, *HOST_FILES))
        return next(places, None)

    @property
    def hosts(self) -> list[Host]:
        """The hosts that the launcher is told, each once; [] where it is told none. Raises UsageError."""
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
        """The same on these hosts alone, with as many ranks as they take."""
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
        """The launcher's words, with another program."""
        return [*self.words[: self._program], *program]


def slots(line: list[str]) -> int:
    """Of a line of a file of hosts, as "a slots=4" or "a:4", how many ranks the host takes; 0: it does not say."""
    match = re.search(r"(?:slots\s*=\s*|:)(\d+)", " ".join(line))
    return int(match[1]) if match else 0
