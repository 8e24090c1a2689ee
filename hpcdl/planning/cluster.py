"""The cost model of a cluster: messages within a node and between nodes, and the addition of vectors.

    message of n bytes    its sender's port is busy n / B, it arrives L + n / B after its start, and the receiver's port
                          is busy n / B up to then; ports are full duplex
    within a node         each rank has a port of its own to memory
    between nodes         the ranks of a node share the node's port; nodes of several switches share these switches'
                          ports, too, of nodes_per_switch * B / oversubscription
    adding n bytes        n / adding

(Hockney, "The communication challenge for MPP", 1994; ports, as the gap of LogGP: Alexandrov et al., SPAA 1995)

    # site.yaml: seconds and bytes per second
    ranks_per_node: 2
    latency: 2e-6
    bandwidth: 12.5e9
    node_latency: 4e-7
    node_bandwidth: 8e9
    adding: 5e9
    nodes_per_switch: 32
    oversubscription: 2"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import yaml

from hpcdl.errors import UsageError, blamed_on, nearest


@dataclass(frozen=True)
class Cluster:
    """The numbers of a cluster, in seconds, bytes, and bytes per second. Raises UsageError for impossible numbers.
    latency, bandwidth: between nodes; with node_: within a node. adding: bytes added per second. nodes_per_switch: if
    0, one switch for all. oversubscription: bandwidth of a switch's nodes together / bandwidth of its own port."""

    ranks_per_node: int = 1
    latency: float = 2e-6
    bandwidth: float = 12.5e9
    node_latency: float = 5e-7
    node_bandwidth: float = 10e9
    adding: float = math.inf
    nodes_per_switch: int = 0
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = {"ranks_per_node": 1, "nodes_per_switch": 0, "oversubscription": 1}.get(field.name)
            fits = value >= least if least is not None else value > 0 or (value == 0 and "latency" in field.name)
            if not fits or math.isnan(value):
                requirement = f"at least {least}" if least is not None else "more than 0"
                raise UsageError(f"a cluster's {field.name} is {requirement}, not {value}")

    @classmethod
    def read(cls, path: str) -> "Cluster":
        """Return the cluster of a YAML file; missing fields have the defaults. Raises UsageError."""
        with blamed_on(f"--cluster {path} cannot be read"):
            content = yaml.safe_load(Path(path).read_text())
        if not isinstance(content, dict):
            raise UsageError(f"--cluster {path}: the file must hold lines such as latency: 2e-6")
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict = {}
        for name, value in content.items():
            if name not in known:
                raise UsageError(f"--cluster {path}: there is no entry {name!r}{nearest(str(name), known)}")
            try:  # YAML takes 2e-6 for a text
                values[name] = int(value) if known[name] in (int, "int") else float(value)
            except (TypeError, ValueError):
                raise UsageError(f"--cluster {path}: {name} is a number, not {value!r}") from None
        return cls(**values)

    def link(self, near: bool) -> tuple[float, float]:
        """Return (latency, bandwidth) within a node (near), or between nodes."""
        return (self.node_latency, self.node_bandwidth) if near else (self.latency, self.bandwidth)

    def node(self, rank: int) -> int:
        """Return the node of a rank; ranks fill node after node."""
        return rank // self.ranks_per_node

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes of `ranks` ranks."""
        return -(-ranks // self.ranks_per_node)

    def switch(self, rank: int) -> int:
        return self.node(rank) // self.nodes_per_switch if self.nodes_per_switch else 0

    def add(self, bytes: float) -> float:
        return bytes / self.adding
