"""Machine topology: cores, SMT siblings, caches and NUMA nodes, from hwloc's lstopo or from /sys.

    node         processors with equal access to a part of the memory (NUMA)
    package      a chip in a socket
    core         a physical core; its SMT siblings share its arithmetic units and first-level caches
    processor    a logical CPU: one for each SMT sibling

Both sources give the same `MachineTopology`, with the system's numbers of processors."""

import contextlib
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

SYS = Path("/sys/devices/system")
CPUINFO = Path("/proc/cpuinfo")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
LSTOPO = ("lstopo-no-graphics", "lstopo")
PATIENCE = 20  # seconds for lstopo
KINDS = {"0": "unified", "1": "data", "2": "instruction"}  # as hwloc numbers them


@dataclass(frozen=True)
class Processor:
    """A logical CPU; core: the lowest number of its siblings; node: -1 if unknown."""

    number: int
    core: int
    package: int
    node: int


@dataclass(frozen=True)
class Cache:
    """A data or unified cache; size: bytes; shared: the processors that share it."""

    level: int
    size: int
    shared: frozenset[int]


@dataclass
class MachineTopology:
    """A machine's topology. source: hwloc or /sys. memory: bytes by node. usable: processors open to this process."""

    source: str
    model: str
    processors: list[Processor]
    caches: list[Cache]
    memory: dict[int, int]
    usable: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = {each.number for each in self.processors}
        self.usable = sorted(known & os.sched_getaffinity(0)) if not self.usable else self.usable

    def cores(self) -> dict[int, list[int]]:
        """Return the usable processors of each core."""
        return self._usable_by("core")

    def nodes(self) -> dict[int, list[int]]:
        """Return the usable processors of each NUMA node."""
        return self._usable_by("node")

    def _usable_by(self, unit: str) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for each in self.processors:
            if each.number in self.usable:
                found.setdefault(getattr(each, unit), []).append(each.number)
        return found

    def one_per_core(self) -> list[int]:
        """Return one usable processor of each core."""
        return [numbers[0] for numbers in self.cores().values()]

    def siblings(self) -> list[int]:
        """Return the usable processors of the first core that has several of them; [] without SMT."""
        return next((numbers for numbers in self.cores().values() if len(numbers) > 1), [])

    def caches_of(self, number: int) -> list[Cache]:
        """Return the caches of a processor, from the smallest to the largest."""
        return sorted((each for each in self.caches if number in each.shared), key=lambda cache: cache.level)

    def relation(self, a: int, b: int) -> str:
        """Return the nearest unit that two processors share, as text."""
        one, two = (next(each for each in self.processors if each.number == number) for number in (a, b))
        if one.core == two.core:
            return "SMT siblings of one core"
        for cache in self.caches_of(a):
            if b in cache.shared:
                return f"cores with one L{cache.level} cache"
        if one.node == two.node:
            return "cores of one NUMA node"
        return "cores of two NUMA nodes" if one.package == two.package else "cores of two packages"


def topology() -> MachineTopology:
    """Return this machine's topology, from lstopo if possible, else from /sys."""
    for name in LSTOPO:
        if shutil.which(name):
            with contextlib.suppress(OSError, subprocess.SubprocessError, ElementTree.ParseError, ValueError):
                asked = [name, "--no-io", "--of", "xml"]
                done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE, check=True)
                found = from_hwloc(done.stdout)
                if found.usable:
                    return found
    return from_sys()


def from_sys(root: Path = SYS, cpuinfo: Path = CPUINFO) -> MachineTopology:
    """Return the topology from /sys/devices/system; missing files are skipped."""
    numbers = numbers_of(text_of(root / "cpu" / "online")) or sorted(os.sched_getaffinity(0))
    nodes: dict[int, int] = {}
    memory: dict[int, int] = {}
    for folder in sorted((root / "node").glob("node[0-9]*")):
        node = int(folder.name.removeprefix("node"))
        nodes |= dict.fromkeys(numbers_of(text_of(folder / "cpulist")), node)
        total = re.search(r" MemTotal:\s*(\d+)", text_of(folder / "meminfo"))
        memory |= {node: int(total[1]) * 1024} if total else {}
    processors, caches = [], set()
    for number in numbers:
        about = root / "cpu" / f"cpu{number}"
        siblings = numbers_of(text_of(about / "topology" / "thread_siblings_list")) or [number]
        package = text_of(about / "topology" / "physical_package_id")
        chip = int(package) if package.isdecimal() else 0
        processors.append(Processor(number, min(siblings), chip, nodes.get(number, -1)))
        for folder in (about / "cache").glob("index[0-9]*"):
            level, size = text_of(folder / "level"), text_of(folder / "size")
            if text_of(folder / "type") in ("Data", "Unified") and level.isdecimal() and size:
                shared = numbers_of(text_of(folder / "shared_cpu_list")) or [number]
                caches.add(Cache(int(level), bytes_of(size), frozenset(shared)))
    model = re.search(r"^(?:model name|Model)\s*:(.*)", text_of(cpuinfo), re.MULTILINE)
    return MachineTopology("/sys", model[1].strip() if model else "", processors, ordered(caches), memory)


def from_hwloc(text: str) -> MachineTopology:
    """Return the topology from lstopo's XML of hwloc 2."""
    machine = ElementTree.fromstring(text)
    owner: dict[str, dict[int, int]] = {"Core": {}, "Package": {}, "NUMANode": {}}
    memory: dict[int, int] = {}
    caches, numbers, model = set(), [], ""
    for each in machine.iter("object"):
        kind, own = each.get("type", ""), bits_of(each.get("cpuset", ""))
        index = int(each.get("os_index", "0"))
        if kind == "PU":
            numbers.append(index)
        elif kind in owner:
            owner[kind] |= dict.fromkeys(own, min(own) if kind == "Core" else index)
            memory |= {index: int(each.get("local_memory", "0"))} if kind == "NUMANode" else {}
        elif kind.endswith("Cache") and KINDS.get(each.get("cache_type", ""), "") in ("data", "unified"):
            caches.add(Cache(int(each.get("depth", "0")), int(each.get("cache_size", "0")), frozenset(own)))
        said = {info.get("name"): info.get("value", "") for info in each.findall("info")}
        model = model or said.get("CPUModel", "")
    processors = [
        Processor(n, owner["Core"].get(n, n), owner["Package"].get(n, 0), owner["NUMANode"].get(n, -1))
        for n in sorted(numbers)
    ]
    return MachineTopology("hwloc", model, processors, ordered(caches), memory)


def ordered(caches: Iterable[Cache]) -> list[Cache]:
    """Return the caches by level, then by processor."""
    return sorted(caches, key=lambda cache: (cache.level, min(cache.shared)))


def text_of(path: Path) -> str:
    """Return a file's stripped text; "" if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


def numbers_of(text: str) -> list[int]:
    """Parse a list of numbers such as "0-2,8"."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        with contextlib.suppress(ValueError):
            found += range(int(first), int(last or first) + 1)
    return found


def bits_of(text: str) -> list[int]:
    """Return the numbers of the bits set in "0x00000003", or in words of 32 bits with commas between, highest first."""
    mask = 0
    for word in filter(None, text.split(",")):
        mask = mask << 32 | int(word, 16)
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


def bytes_of(text: str) -> int:
    """Parse bytes such as "48K"."""
    return int(text.rstrip("KMG")) * UNITS.get(text[-1:], 1)
