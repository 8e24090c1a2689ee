"""Draw a topology: ranks as nodes, messages as edges, mixing weights as widths."""

from pathlib import Path
from typing import Any

import networkx
import numpy as np

from hpcdl.comm.gossip.mixing import mixing, mixing_over_period, spectral_gap
from hpcdl.comm.gossip.topology import Topology, hops, sides
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_path
from hpcdl.formatting import counted

PANELS = 4  # steps drawn of a topology without a period
CUBE = np.array([[1, 0], [0, 1], [0.24, 0.51]])
TURN = np.array([[0.98, 0.19], [-0.19, 0.98]])  # rotates the next larger cube, so that edges do not cross nodes
EDGE, NODE = "#3b6ea5", "#f4e3c1"
THIN, WIDE = 0.5, 5  # points: the width of an edge, and what its weight adds


def draw(topology: Topology, rule: str, path: str | Path) -> None:
    """Draw `topology`, with the weights of `rule`, a panel per step, into a .png, .svg or .pdf (else UsageError)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a picture needs matplotlib: pip install 'hpcdl[report]'") from None
    steps = topology.period or PANELS
    columns = min(steps, PANELS)
    rows = -(-steps // columns)
    figure = Figure(figsize=(4.6 * columns + 0.4, 4.9 * rows + 0.6), layout="constrained")
    kind = Path(path).suffix.removeprefix(".")
    if kind not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"cannot draw into {path}: end its name with .png, .svg or .pdf")

    weights = [mixing(topology, step, rule) for step in range(steps)]
    places = coordinates(topology)
    corners = np.array([np.min([*places.values()], axis=0), np.max([*places.values()], axis=0)])
    middle, half = corners.mean(axis=0), max(1, np.ptp(corners, axis=0).max() / 2)
    limits = np.stack([middle - 1.25 * half, middle + 1.25 * half])
    for step, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.set(xlim=limits[:, 0], ylim=limits[:, 1])
        if step < steps:
            _panel(axes, topology, weights[step], places)
            if steps > 1:
                axes.set_title(f"step {step}", fontsize=11)
    _key(figure, weights)
    gap = spectral_gap(mixing_over_period(topology, rule))
    over = {1: "", None: " of squared distances, in the mean,"}.get(topology.period, f" over {topology.period} steps")
    said = f"{'weights of the file' if topology.weights else f'{rule} weights'}, spectral gap{over} {gap:.3g}"
    figure.suptitle(f"{topology.spec}, {counted(topology.size, 'rank')}\n{said}", fontsize=12)
    with blamed_on(f"cannot draw into {path}"), atomic_path(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=130)


def coordinates(topology: Topology) -> dict[int, np.ndarray]:
    """Return each rank's position: on its grid (torus), around rank 0 (star), in cubes (hypercube), or on a circle."""
    ranks: Any = np.arange(topology.size)
    if topology.name == "torus":
        columns = sides(topology.spec, topology.size)[1]
        return dict(enumerate(np.stack([ranks % columns, -(ranks // columns)], axis=1)))
    if topology.name == "hypercube":
        turns = [(np.linalg.matrix_power(TURN, bit // 3), bit) for bit in range(len(hops(topology.size)))]
        axes = [1.94 ** (bit // 3) * CUBE[bit % 3] @ turn for turn, bit in turns]
        return {rank: sum((axis for bit, axis in enumerate(axes) if rank >> bit & 1), np.zeros(2)) for rank in ranks}
    if topology.name == "star":
        return {0: np.zeros(2)} | dict(enumerate(_circle(topology.size - 1), 1))
    return dict(enumerate(_circle(topology.size)))


def _circle(size: int) -> np.ndarray:
    angle = np.pi / 2 - 2 * np.pi * np.arange(size) / max(size, 1)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _panel(axes: Any, topology: Topology, w: np.ndarray, places: dict[int, np.ndarray]) -> None:
    graph = networkx.DiGraph()
    graph.add_nodes_from(places)
    for i, j in np.argwhere(w):
        if i != j and (topology.directed or j < i):  # one line for both directions
            graph.add_edge(int(j), int(i), width=THIN + WIDE * w[i, j])
    size = float(np.clip(9000 / topology.size, 40, 560))
    length = {(a, b): abs(places[a] - places[b]).max() for a, b in graph.edges}
    far = {edge for edge in graph.edges if topology.name == "torus" and length[edge] > 1}  # wrap-around edges
    bow = min(0.2, 0.8 / max(length.values(), default=1))  # less than half a row high
    for rad, chosen in ((bow, far), (-0.12 if topology.directed else 0.0, set(graph.edges) - far)):
        edges = sorted(chosen)
        widths = [graph.edges[edge]["width"] for edge in edges]
        look: dict[str, Any] = {"arrowstyle": "-|>" if topology.directed else "-", "connectionstyle": f"arc3,rad={rad}"}
        look |= {"arrows": True, "arrowsize": 14, "node_size": size, "ax": axes}
        networkx.draw_networkx_edges(graph, places, edges, widths, EDGE, **look)
    networkx.draw_networkx_nodes(graph, places, node_size=size, node_color=NODE, edgecolors="black", ax=axes)
    if topology.size <= 64:
        networkx.draw_networkx_labels(graph, places, font_size=float(np.clip(160 / topology.size, 6, 11)), ax=axes)


def _key(figure: Any, weights: list[np.ndarray]) -> None:
    """Draw the legend of line widths: all weights, or the smallest, the median and the largest."""
    from matplotlib.lines import Line2D

    distinct = np.unique(np.concatenate([w[(w > 0) & ~np.eye(len(w), dtype=bool)] for w in weights]).round(9))
    if len(distinct) > 3:
        distinct = distinct[[0, len(distinct) // 2, -1]]
    lines = [Line2D([], [], color=EDGE, linewidth=THIN + WIDE * w, label=f"weight {w:.3g}") for w in distinct]
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
