"""The data sheet of a machine, a YAML file written by hand or measured, from which the time of a step is predicted.

    # site.yaml: seconds, bytes per second, operations per second
    cores: 64                   of a node; a rank computes on one of them
    ranks_per_node: 64          ranks fill node after node; default: cores
    latency: 2e-6               between nodes; this and further optional entries: cluster.py
    bandwidth: 12.5e9
    flops: 5e10                 floating-point operations that a rank reaches
    memory: 1e10                bytes a second that a rank moves where it computes little, as in updates
    start: 1e-4                 seconds of a step beyond its parts: bookkeeping, drawing a batch
    late: 6e-5                  seconds by which a sleeping rank (--pretend-compute) wakes late
    progress: 1                 share of a message's time that overlaps with computing: 1 if the network progresses by
                                itself, 0 if a core has to

    measured:                   measurements by number of ranks and nodes (measuring.py); none if written by hand
    - ranks: 2
      nodes: 1
      collectives:              by the name of the operation: bytes and seconds
        ring: {4096: 1.2e-5, 65536: 5.1e-5}
      programs:                 `start` of each
        train-allreduce: 9.0e-5
      models:
      - {model: 'mlp:256', data: digits, dtype: float32, optimizer: momentum, parameters: 19210, update: 1.1e-5,
         rows: {16: {draw: 9e-6, gradient: 2.1e-4, layers: [[3e-5, 9e-5], [1e-5, 2e-5], [1e-5, 0]]}}}

Measurements take priority over the numbers. (flops, memory: Williams, Waterman, Patterson, "Roofline", CACM 2009)"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpcdl.errors import UsageError, blamed_on, nearest
from hpcdl.files import atomic_write
from hpcdl.planning.cluster import Cluster

NEEDED = "cores", "latency", "bandwidth", "flops", "memory", "start"
LINKS = tuple(field.name for field in dataclasses.fields(Cluster))
WHOLE = "cores", "ranks_per_node", "nodes_per_switch"
LARGEST = 10_000_000  # bytes of a file
Curve = dict[int, float]  # seconds by bytes or rows


class RowTimes(NamedTuple):
    """Seconds of a gradient of some rows: drawing the batch, the gradient, and (forward, backward) of each layer."""

    draw: float
    gradient: float
    layers: list[tuple[float, float]]


class MeasuredModel(NamedTuple):
    """Measurements of a model: seconds of an update of all its parameters, and of gradients by rows."""

    model: str
    data: str
    dtype: str
    optimizer: str
    parameters: int
    update: float
    rows: dict[int, RowTimes]


class Section(NamedTuple):
    """Measurements of `ranks` ranks on `nodes` nodes, all at work at once."""

    ranks: int
    nodes: int
    collectives: dict[str, Curve]
    programs: dict[str, float]
    models: list[MeasuredModel]

    @property
    def per_node(self) -> int:
        return -(-self.ranks // self.nodes)


@dataclass(frozen=True)
class Machine:
    """A machine: the entries of its file, those of cluster.py as `links`. Raises UsageError for impossible numbers."""

    cores: int
    links: Cluster
    flops: float
    memory: float
    start: float = 0.0
    late: float = 0.0
    progress: float = 1.0
    measured: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("cores", 1), ("start", 0), ("late", 0), ("progress", 0)):
            if not getattr(self, name) >= least or math.isinf(getattr(self, name)):
                raise UsageError(f"a machine's {name} is at least {least}, not {getattr(self, name)}")
        for name in ("flops", "memory"):
            if not getattr(self, name) > 0:
                raise UsageError(f"a machine's {name} is more than 0, not {getattr(self, name)}")
        if self.progress > 1:
            raise UsageError(f"a machine's progress is a share, at most 1, not {self.progress}")

    def sharing(self, ranks: int) -> float:
        """Return how many of a job's `ranks` ranks share a core of their node; 1 if each has its own."""
        return max(1.0, min(ranks, self.links.ranks_per_node) / self.cores)

    def section(self, ranks: int) -> Section | None:
        """Return the measurements of `ranks` ranks on the number of nodes that they take, or None."""
        nodes = self.links.nodes(ranks)
        return next((each for each in self.measured if (each.ranks, each.nodes) == (ranks, nodes)), None)

    @classmethod
    def read(cls, path: str) -> "Machine":
        """Return the machine of a file. UsageError if it cannot be read, or a number is missing or impossible."""
        source = f"--machine {path}"
        with blamed_on(f"{source} cannot be read"), open(path, "rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise UsageError(f"{source} has more than {LARGEST:,} bytes, but a machine file has a few lines")
        try:
            content = yaml.safe_load(text.decode())
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{source}: the file is not valid YAML: {' '.join(str(error).split())}") from None
        try:
            return cls.of(content)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    @classmethod
    def of(cls, content: Any) -> "Machine":
        """Return the machine of a file's content. Raises UsageError."""
        if not isinstance(content, dict):
            raise UsageError("the file must hold lines such as latency: 2e-6")
        fields = [field.name for field in dataclasses.fields(cls) if field.name != "links"]
        for name in content:
            if name not in (*fields, *LINKS):
                raise UsageError(f"there is no entry {name!r}{nearest(str(name), (*fields, *LINKS))}")
        missing = [name for name in NEEDED if name not in content]
        if missing:
            raise UsageError(f"the file lacks {', '.join(missing)}")
        values: dict[str, Any] = {
            name: as_integer(value, name, 0) if name in WHOLE else as_number(value, name)
            for name, value in content.items()
            if name != "measured"
        }
        links = {"ranks_per_node": max(1, values["cores"])}
        links |= {"node_latency": values["latency"], "node_bandwidth": values["bandwidth"]}
        links |= {name: values[name] for name in LINKS if name in values}
        more = {name: values[name] for name in fields if name in values}
        sections = tuple(read_section(each) for each in as_list(content.get("measured") or [], "measured"))
        return cls(links=Cluster(**links), measured=sections, **more)

    def write(self, path: str) -> None:
        """Write the machine into a file, atomically. Raises UsageError if it cannot be written."""
        fields = [field.name for field in dataclasses.fields(self) if field.name not in ("links", "measured")]
        content: dict[str, Any] = {name: getattr(self, name) for name in fields}
        content |= {name: value for name, value in dataclasses.asdict(self.links).items() if value != math.inf}
        content = rounded(content | {"measured": self.measured})
        with blamed_on(f"--measure {path} cannot be written"), atomic_write(Path(path)) as file:
            header = "# seconds, bytes per second, operations per second (hpcdl plan time --measure)\n"
            file.write((header + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=118)).encode())


def rounded(value: Any) -> Any:
    """Return the value as YAML data; numbers have four digits, more than any measurement is worth."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def as_number(value: Any, name: str, least: float = 0.0) -> float:
    """Return a number of a file; YAML reads 2e-6 as a text. UsageError for another value, or a number below `least`."""
    try:
        result = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        result = math.nan
    if not result >= least:
        raise UsageError(f"{name} is a number, at least {least:g}, not {value!r}")
    return result


def as_integer(value: Any, name: str, least: int = 1) -> int:
    """Return an integer of a file; UsageError for another value, or an integer below `least`."""
    result = as_number(value, name, least)
    if result != int(result):
        raise UsageError(f"{name} is a whole number, not {value!r}")
    return int(result)


def as_list(value: Any, name: str) -> list:
    """Return a list of a file; UsageError for another value."""
    if not isinstance(value, list):
        raise UsageError(f"{name} is a list, not {value!r}")
    return value


def as_entries(value: Any, name: str, wanted: tuple[str, ...] = ()) -> dict:
    """Return a dictionary of a file; UsageError for another value, or if a `wanted` entry is missing."""
    missing = [each for each in wanted if not isinstance(value, dict) or each not in value]
    if not isinstance(value, dict) or missing:
        lacks = f" lacks {', '.join(missing)}" if missing else " must hold entries such as 4096: 1e-5"
        raise UsageError(f"{name}{lacks}")
    return value


def read_section(content: Any) -> Section:
    """Return the section of an entry of `measured` in a file. Raises UsageError."""
    section = as_entries(content, "measured", ("ranks", "nodes"))
    collectives: dict[str, Curve] = {}
    for name, curve in as_entries(section.get("collectives") or {}, "collectives").items():
        known = as_entries(curve, str(name)).items()
        collectives[str(name)] = {as_integer(n, f"bytes of {name}", 0): as_number(s, name) for n, s in known}
    if empty := [name for name, curve in collectives.items() if not curve]:
        raise UsageError(f"{empty[0]} of collectives has no measurement, such as 4096: 1e-5")
    starts = as_entries(section.get("programs") or {}, "programs")
    programs = {str(name): as_number(s, name) for name, s in starts.items()}
    models = [read_model(each) for each in as_list(section.get("models") or [], "models")]
    ranks, nodes = (as_integer(section[name], name) for name in ("ranks", "nodes"))
    return Section(ranks, nodes, collectives, programs, models)


def read_model(content: Any) -> MeasuredModel:
    """Return the measured model of an entry of `models` in a file. Raises UsageError."""
    names = "model", "data", "dtype", "optimizer"
    entry = as_entries(content, "models", (*names, "parameters", "update", "rows"))
    name = str(entry["model"])
    rows = {}
    for n, of in as_entries(entry["rows"], f"rows of {name}").items():
        of = as_entries(of, f"{n} rows of {name}", ("draw", "gradient"))
        pairs = [as_list(pair, f"layers of {name}") for pair in as_list(of.get("layers") or [], f"layers of {name}")]
        if any(len(pair) != 2 for pair in pairs):
            raise UsageError(f"layers of {name} are pairs of seconds, forward and backward")
        layers = [(as_number(a, "forward"), as_number(b, "backward")) for a, b in pairs]
        draw, gradient = (as_number(of[each], each) for each in ("draw", "gradient"))
        rows[as_integer(n, "rows")] = RowTimes(draw, gradient, layers)
    if not rows or len({len(each.layers) for each in rows.values()}) > 1:
        raise UsageError(f"rows of {name} must be one or more measurements of the same number of layers")
    model, data, dtype, optimizer = (str(entry[name]) for name in names)
    count, update = as_integer(entry["parameters"], "parameters"), as_number(entry["update"], "update")
    return MeasuredModel(model, data, dtype, optimizer, count, update, rows)


def interpolate(curve: Curve, at: float) -> float:
    """Return the seconds at `at` bytes or rows: linear between measurements, constant below the first, beyond the last
    extrapolated from the last two. Above a single measurement the seconds grow in proportion."""
    known = sorted(curve)
    if at <= known[0]:
        return curve[known[0]]
    if len(known) == 1:
        return curve[known[0]] * at / max(known[0], 1)
    high = next((i for i, n in enumerate(known) if n >= at), len(known) - 1)
    a, b = known[high - 1], known[high]
    slope = (curve[b] - curve[a]) / (b - a)
    return curve[b] + max(0.0, slope) * (at - b) if at > b else curve[a] + slope * (at - a)
