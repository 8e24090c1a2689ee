"""Fault injection (--inject): drills of failures and of the recovery from them.

    --inject kill:rank=1,step=20                   the process of rank 1 is killed when its step 20 begins
    --inject "slow:seconds=0.1 exit:step=9"        several faults, separated by blanks
    --inject random:seed=3,kinds=kill+exception    kind, rank and step drawn by a seed

    kind        effect on rank `rank` at the begin of its step `step`
    kill        SIGKILL, as by the kernel when memory runs out
    stop        SIGSTOP: the process exists, but does not run
    exit        the process exits with `status`; how=os: at once (os._exit), how=sys: by sys.exit
    exception   an InjectedFault is raised
    slow        this step and all later ones take `seconds` longer
    corrupt     a bit, drawn by `seed`, is flipped in what=parameters; in what=data: the rows in memory (no file),
                which the ranks of a node share; in what=checkpoint: the last file; or in what=message: the next
                one with floats (shared memory has no messages)
    diskfull    all later writes of this rank into the run's folder fail: no space left on the device
    memory      the rank may allocate `mib` MiB more than now (RLIMIT_AS), and leaks some in each step
    clock       the run's clock on this rank jumps by `seconds`, back if negative
    drop        the links of this rank's host are cut for `seconds`, 0: for ever; only on an emulated host
    random      `faults` faults; `seed` draws each one's kind from `kinds`, its rank, and its step, `first` to `last`

Steps are those of the run if ranks step together, and the rank's own in asynchronous strategies, counted from the first
step of this segment. A serving rank counts the messages that it receives; rank 0 of parameter servers counts the run's
steps. Ranks are those of the run, servers included. A fault strikes `times` times in all segments of a run, once by
default, so that a resumed run gets past it; times=0: in each segment. Each strike is first written to injected.jsonl
in the run's folder. Draws are Philox streams of the seed (hpcdl/random.py): a drill can be repeated."""

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl import drill
from hpcdl.drill import Drill
from hpcdl.errors import UsageError, parse_finite, parse_spec, unknown
from hpcdl.faults import network_faults
from hpcdl.faults.bit_flips import flip, flip_in_file, flip_in_message, rows_of
from hpcdl.files import parse_json
from hpcdl.random import Random

LONGEST = 1e9  # seconds or milliseconds: longest wait that all system calls accept
JOURNAL = "injected.jsonl"
WHERE = {"rank": 0, "step": 1, "times": 1}
KINDS: dict[str, dict[str, Any]] = {
    "kill": WHERE,
    "stop": WHERE,
    "exit": WHERE | {"status": 3, "how": "os"},
    "exception": WHERE,
    "slow": WHERE | {"seconds": 0.1},
    "corrupt": WHERE | {"what": "parameters", "seed": 0},
    "diskfull": WHERE,
    "memory": WHERE | {"mib": 64},
    "clock": WHERE | {"seconds": 3600.0},
    "drop": WHERE | {"seconds": 0.0},
    "random": {"seed": 0, "kinds": "kill", "faults": 1, "first": 1, "last": 100, "times": 1},
}
CHOICES = {"how": ("os", "sys"), "what": ("parameters", "data", "checkpoint", "message")}
MAX_FAULTS = 1000  # faults that a seed may draw
LEAK = 8 << 20  # bytes that `memory` leaks in each step
LAST_WORDS = 0.1  # seconds for a launcher to read the output of a process before it dies


class InjectedFault(RuntimeError):
    """The exception that --inject exception raises."""


@dataclass(frozen=True)
class Fault:
    """A fault with its settings. key: its name in the journal, injected.jsonl."""

    kind: str
    settings: dict[str, Any]
    key: str

    @property
    def rank(self) -> int:
        return int(self.settings["rank"])

    @property
    def step(self) -> int:
        return int(self.settings["step"])

    @property
    def lasts(self) -> bool:
        """True: it strikes at its step or, if it cannot, at a later one. False: at its step, or not at all."""
        return self.kind in ("slow", "memory") or self.settings.get("what") == "checkpoint"


def parse_faults(text: str) -> list[Fault]:
    """Parse the value of --inject; faults of kind `random` are drawn later (`expand_random`). Raises UsageError."""
    found = [parse_fault(word) for word in text.split()]
    for number, fault in enumerate(found):
        if fault in found[:number]:
            raise UsageError(f"--inject: {fault.key} is given twice; times=2 lets a fault strike in two legs")
    return found


def parse_fault(word: str) -> Fault:
    """Parse one fault. Raises UsageError."""
    try:
        kind, settings = parse_spec("fault", word, KINDS)
    except UsageError as error:
        raise UsageError(f"--inject: {error}") from None
    for name, least in (("rank", 0), ("step", 1), ("times", 0), ("first", 1), ("faults", 1), ("mib", 0), ("seed", 0)):
        if settings.get(name, least) < least:
            raise UsageError(f"--inject {word}: {name} is {least} or more, not {settings[name]}")
    for name, known in CHOICES.items():
        if settings.get(name, known[0]) not in known:
            raise UsageError(f"--inject {word}: {name} is {' or '.join(known)}, not {settings[name]}")
    if not 0 <= settings.get("status", 0) <= 255:
        raise UsageError(f"--inject {word}: a status is 0 to 255, not {settings['status']}")
    seconds, shortest = settings.get("seconds", 0.0), -LONGEST if kind == "clock" else 0.0
    try:
        parse_finite(seconds)
    except ValueError:
        seconds = shortest - 1
    if not shortest <= seconds <= LONGEST:
        raise UsageError(f"--inject {word}: seconds are {shortest:,.0f} to {LONGEST:,.0f}, not {settings['seconds']}")
    if kind == "random":
        chosen = settings["kinds"].split("+")
        for each in chosen:
            if each not in KINDS or each == "random":
                raise UsageError(f"--inject {word}: {unknown('kind of fault', each, set(KINDS) - {'random'})}")
        if settings["last"] < settings["first"]:
            raise UsageError(f"--inject {word}: the last step, {settings['last']}, is before the first")
        if settings["faults"] > MAX_FAULTS:
            raise UsageError(f"--inject {word}: at most {MAX_FAULTS:,} faults are drawn")
    return Fault(kind, settings, word)


def expand_random(fault: Fault, ranks: int) -> list[Fault]:
    """Return the faults that a fault of kind `random` draws for `ranks` ranks; any other fault alone, as it is."""
    if fault.kind != "random":
        return [fault]
    settings, found = fault.settings, []
    for number in range(settings["faults"]):
        generator = Random(settings["seed"])("inject", number)
        kinds = settings["kinds"].split("+")
        kind = kinds[generator.integers(len(kinds))]
        where = {"rank": int(generator.integers(ranks)), "times": settings["times"]}
        where["step"] = int(generator.integers(settings["first"], settings["last"] + 1))
        found.append(Fault(kind, KINDS[kind] | where, f"{fault.key}#{number}"))
    return found


def check(options: Any, ranks: int) -> None:
    """Raise UsageError if a fault does not fit the run's options or, unless the run is resumed, `ranks` ranks."""
    out = options.out
    for fault in parse_faults(options.inject):
        if fault.settings.get("rank", 0) >= ranks and not options.resume:
            raise UsageError(f"--inject {fault.key}: the ranks are 0 to {ranks - 1}, and there is no rank {fault.rank}")
        if out == "none" and (fault.kind == "diskfull" or fault.settings.get("what") == "checkpoint"):
            raise UsageError(f"--inject {fault.key}: nothing is written with --out none; give a folder")
        if "drop" in (fault.kind, *fault.settings.get("kinds", "").split("+")) and (why := network_faults.obstacle()):
            raise UsageError(f"--inject {fault.key}: {why}; no link is cut")


def struck_keys(folder: Path | None) -> list[str]:
    """Return the key of each strike in a folder's journal, [] without a folder; invalid lines are ignored."""
    if folder is None:
        return []
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / JOURNAL).read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found.append(str(parse_json(line)["fault"]))
    return found


def arm(run: Any) -> None:
    """Arm the faults of --inject on this rank, for the segment of a run that begins now. Raises UsageError."""
    options, everyone = run.options, run.everyone
    if run.outlived:  # after a loss of ranks the faults stay armed
        drill.current.attach(run)
        return
    drill.begin(Drill())  # not that of an earlier run in this process
    if not options.inject:
        return
    check(options, everyone.size)
    out = run.folder.path or (Path(options.out) if options.out not in ("", "auto", "none") else None)
    resume = Path(options.resume) if options.resume else None
    before = resume.parent if resume is not None and resume.is_file() else resume
    known = struck_keys(out)
    if before is not None and (out is None or before.resolve() != out.resolve()):
        known += struck_keys(before)
    faults = [fault for each in parse_faults(options.inject) for fault in expand_random(each, everyone.size)]
    waiting = [fault for fault in faults if not 0 < fault.settings["times"] <= known.count(fault.key)]
    if mine := [fault for fault in waiting if fault.rank == everyone.rank]:
        drill.begin(Faults(mine, out, everyone.rank))
        drill.current.attach(run)


class Faults(Drill):
    """The armed faults of this rank in this segment. out: the run's folder; None if the run has none."""

    run: Any  # hpcdl.runs.Run; set by `attach`, as the count of steps

    def __init__(self, faults: list[Fault], out: Path | None, rank: int):
        self.waiting, self.out, self.rank = faults, out, rank
        self.lasting: list[Fault] = []
        self.count, self.serving = 0, False
        self.full: Path | None = None  # absolute path of the folder on the full disk
        self.leaked: list[np.ndarray] = []
        self.limit = resource.getrlimit(resource.RLIMIT_AS)

    def attach(self, run: Any) -> None:
        self.run, self.count = run, run.step
        run.observe(self.recorded)

    def step_begins(self, name: str) -> None:
        self.serving = name == "serve"
        if not self.serving:
            self.count += 1
            self.reach(self.count)

    def recorded(self, run: Any, loss: float, total: int) -> None:
        """Count a step that has ended, on rank 0 of parameter servers; strike with the faults of the next step."""
        if self.serving:
            self.count = run.step
            self.reach(run.step + 1)

    def check_room(self, path: str | os.PathLike[str]) -> None:
        if self.full is not None and self.full in Path(path).resolve().parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def message_taken(self) -> None:
        if self.serving and (self.run.comm.rank > 0 or self.run.model is None):
            self.count += 1
            self.reach(self.count)

    def reach(self, step: int) -> None:
        """Strike with all faults that are due at this step."""
        for fault in self.lasting:
            LATER[fault.kind](self, fault, step)
        for fault in [each for each in self.waiting if step == each.step or (each.lasts and step > each.step)]:
            if fault.settings.get("what") == "checkpoint" and not (self.out and (self.out / "checkpoint.h5").exists()):
                continue  # wait for the first checkpoint
            self.waiting.remove(fault)
            STRIKE[fault.kind](self, fault, step)

    def announce(self, fault: Fault, step: int, what: str) -> None:
        """Announce the fault on stderr and in the journal, before it strikes. what: the words for its effect."""
        line = {"fault": fault.key, "kind": fault.kind, "rank": self.rank, "step": step, "time": time.time()}
        if self.out is not None:
            with contextlib.suppress(OSError), open(self.out / JOURNAL, "a") as file:  # on a full disk it strikes again
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        sys.stdout.flush()
        print(f"inject: rank {self.rank}, step {step}: {what}", file=sys.stderr, flush=True)

    def kill(self, fault: Fault, step: int) -> None:
        self.announce(fault, step, "the process is killed (SIGKILL)")
        time.sleep(LAST_WORDS)
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, fault: Fault, step: int) -> None:
        self.announce(fault, step, "the process is stopped (SIGSTOP); --timeout ends a job that waits for it")
        time.sleep(LAST_WORDS)
        os.kill(os.getpid(), signal.SIGSTOP)

    def exit(self, fault: Fault, step: int) -> None:
        status, at_once = fault.settings["status"], fault.settings["how"] == "os"
        self.announce(fault, step, f"the process leaves by {'os._exit' if at_once else 'sys.exit'}({status})")
        time.sleep(LAST_WORDS)
        os._exit(status) if at_once else sys.exit(status)

    def exception(self, fault: Fault, step: int) -> None:
        self.announce(fault, step, "an exception is raised")
        raise InjectedFault(f"--inject {fault.key}: rank {self.rank}, step {step}")

    def slow(self, fault: Fault, step: int) -> None:
        seconds = fault.settings["seconds"]
        self.announce(fault, step, f"from here on each step takes {seconds:g} s longer")
        self.lasting.append(fault)
        time.sleep(seconds)

    def diskfull(self, fault: Fault, step: int) -> None:
        self.announce(fault, step, f"no space is left for {self.out}")
        self.full = self.out.resolve() if self.out is not None else None

    def clock(self, fault: Fault, step: int) -> None:
        self.announce(fault, step, f"the run's clock jumps by {fault.settings['seconds']:g} s")
        self.ahead += round(fault.settings["seconds"] * 1e9)

    def drop(self, fault: Fault, step: int) -> None:
        seconds, cut = fault.settings["seconds"], [name for _, name in socket.if_nameindex() if name != "lo"]
        how_long = f"for {seconds:g} s" if seconds else "for good"
        self.announce(fault, step, f"the links of this host are cut {how_long}: {' '.join(cut) or 'it has none'}")
        time.sleep(LAST_WORDS)
        network_faults.set_links(cut, up=False)
        if seconds:
            mended = threading.Timer(seconds, network_faults.set_links, (cut, True))
            mended.daemon = True
            mended.start()

    def memory(self, fault: Fault, step: int) -> None:
        room = fault.settings["mib"] << 20
        self.announce(fault, step, f"{fault.settings['mib']} MiB of memory are left, and each step takes some")
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        most = used + room if self.limit[1] == resource.RLIM_INFINITY else min(used + room, self.limit[1])
        resource.setrlimit(resource.RLIMIT_AS, (most, self.limit[1]))
        self.lasting.append(fault)
        self.leak(fault, step)

    def leak(self, fault: Fault, step: int) -> None:
        try:
            self.leaked.append(np.ones(LEAK, np.uint8))
        except MemoryError:
            self.leaked.clear()
            resource.setrlimit(resource.RLIMIT_AS, self.limit)  # the end of the job needs memory
            raise MemoryError(f"--inject {fault.key}: rank {self.rank} has no memory left at step {step}") from None

    def corrupt(self, fault: Fault, step: int) -> None:
        what, generator = fault.settings["what"], Random(fault.settings["seed"])("corrupt", self.rank)
        if what == "checkpoint":
            assert self.out is not None
            place, bit = flip_in_file(self.out / "checkpoint.h5", generator)
            self.announce(fault, step, f"bit {bit} of byte {place} of {self.out / 'checkpoint.h5'} is flipped")
            return
        if what == "message":
            self.announce(fault, step, "a bit of the next message of floats from this rank is flipped")
            flip_in_message(self.run.comm, generator, getattr(self.run.options, "compress", "none") != "none")
            return
        held = getattr(self.run, "held", None)  # None on a data server
        vector = (held and held.parameters) if what == "parameters" else rows_of(self.run)
        if not isinstance(vector, np.ndarray) or not vector.size:
            self.announce(fault, step, f"this rank has no {what} in its memory, and nothing is flipped")
            return
        index = int(generator.integers(vector.size))
        flip(vector, index)
        self.announce(fault, step, f"a bit of element {index} of its {what} is flipped")


Strike = Callable[[Faults, Fault, int], None]
STRIKE: dict[str, Strike] = {kind: getattr(Faults, kind) for kind in KINDS if kind != "random"}
LATER: dict[str, Strike] = {"slow": lambda _, fault, step: time.sleep(fault.settings["seconds"]), "memory": Faults.leak}
