"""Pictures by matplotlib, small enough for a phone: as SVG that takes its colours from the page, or as files.

Text, frame and grid are drawn in colours of their own, which become CSS variables in a page, for dark and light
schemes. Lines are grey or have colours of Okabe and Ito ("Color universal design", 2008: distinct for the colour-blind,
too), without black and yellow, which are not legible in both schemes. After the last colour, the style changes."""

import contextlib
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_write

INK, SOFT, GRID, PAPER = "#1a1b1c", "#5a5b5c", "#d9dadb", "#fdfefd"  # drawn so; in a page: variables
VARIABLES = {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--grid)", PAPER: "var(--paper)"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a8a8a")
STYLES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)))
DASHES = ("", "5 2", "1 1.4", "6 2 1 2")  # the same in SVG
WIDTH, HEIGHT, FONT = 4.2, 2.6, 9  # inches, points
LEFT, RIGHT, TOP, BOTTOM = 0.56, 0.16, 0.3, 0.46  # inches around the axes
DIGIT, PAD = 0.08, 0.1  # inches of a digit, and beside the labels of the y axis
LINE, TITLE_WIDTH, LEGEND_WIDTH = 0.17, 44, 58  # inches of a line of text, characters
OURS = "hpcdl report"  # the mark in all written files: only files with it are replaced


class Key(NamedTuple):
    """A row of a legend. style: index in STYLES, or None for an area instead of a line."""

    label: str
    colour: str
    style: int | None = 0


@dataclass
class Picture:
    """A picture: name (for files), title, sentence on how to read it, function that draws on matplotlib's axes."""

    name: str
    title: str
    sentence: str
    draw: Callable[[Any], None]
    legend: Sequence[Key] = field(default_factory=tuple)
    height: float = HEIGHT


def look(index: int) -> tuple[str, int]:
    """Return colour and style of line `index`; colours vary first, then styles."""
    return COLOURS[index % len(COLOURS)], index // len(COLOURS) % len(STYLES)


def check_library() -> None:
    """Raise UsageError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("pictures need matplotlib: pip install 'hpcdl[report]'") from None


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Context for all drawing: sets matplotlib's options, and restores them. Entering takes a while: do so once."""
    from matplotlib import rc_context

    absent = "text.usetex", "text.parse_math", "axes.spines.top", "axes.spines.right", "axes.unicode_minus"
    how = dict.fromkeys((*absent, "path.simplify"), False) | {"axes.axisbelow": True, "axes.facecolor": "none"}
    how |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    how |= {"axes.edgecolor": SOFT, "grid.color": GRID, "font.size": FONT, "font.family": "DejaVu Sans"}
    how |= {"axes.linewidth": 0.7, "grid.linewidth": 0.6, "lines.linewidth": 1.5}
    how |= {f"{axis}tick.major.{name}": value for axis in "xy" for name, value in (("size", 0), ("pad", 4))}
    how |= {"svg.fonttype": "none", "svg.hashsalt": OURS}
    with rc_context(how), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # of a name: a box stands for it
        yield


def drawn(picture: Picture, titled: bool) -> Any:
    """Return the picture as a matplotlib figure. titled: with title and legend, which a page holds as text instead."""
    from matplotlib.figure import Figure

    title = textwrap.wrap(picture.title, TITLE_WIDTH) if titled else []
    legend = list(picture.legend) if titled else []
    above, below = LINE * len(title) * 1.05, LINE * len(legend) + (0.08 if legend else 0)
    height = picture.height + above + below
    figure = Figure(figsize=(WIDTH, height), facecolor="white" if titled else "none")
    box = LEFT / WIDTH, (BOTTOM + below) / height, 1 - (LEFT + RIGHT) / WIDTH, (picture.height - TOP - BOTTOM) / height
    axes = figure.add_axes(box)
    picture.draw(axes)
    widest = DIGIT * max(map(len, axes.yaxis.get_major_formatter().format_ticks(axes.get_yticks())), default=0)
    if widest > LEFT - PAD:
        place = axes.get_position()
        left = (widest + PAD) / WIDTH
        axes.set_position([left, place.y0, place.x1 - left, place.height])
    for number, text in enumerate(title):
        figure.text(0.1 / WIDTH, 1 - (0.2 + LINE * 1.05 * number) / height, text, fontsize=FONT + 1, weight="bold")
    for number, key in enumerate(legend):
        add_key(figure, key, (below - LINE * (number + 0.5)) / height, height)
    return figure


def add_key(figure: Any, key: Key, y: float, height: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    left, right = 0.1 / WIDTH, 0.4 / WIDTH
    if key.style is None:
        size = 0.1 / height
        figure.add_artist(Rectangle((left, y - size / 2), right - left, size, facecolor=key.colour, edgecolor="none"))
    else:
        figure.add_artist(Line2D([left, right], [y, y], color=key.colour, linestyle=STYLES[key.style]))
    said = " ".join(key.label.split())
    if len(said) > LEGEND_WIDTH:  # its end may say that curves are equal
        said = f"{said[: LEGEND_WIDTH - 20]} ... {said[-15:]}"
    figure.text(0.48 / WIDTH, y, said, va="center_baseline", fontsize=FONT - 1)


def inline(picture: Picture, prefix: str) -> str:
    """Return the picture as SVG for a page; call this within `drawing`. prefix: of its ids, unique in the page."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure, text = drawn(picture, titled=False), io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return squeezed(text.getvalue(), picture.title, prefix)


def save(picture: Picture, path: Path) -> None:
    """Write the picture to a .png or .svg file, with our mark (OURS); call this within `drawing`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure, data = drawn(picture, titled=True), io.BytesIO()
    if path.suffix == ".png":
        figure.set_dpi(200)
        FigureCanvasAgg(figure).print_png(data, metadata={"Software": OURS})
    else:
        FigureCanvasSVG(figure).print_svg(data, metadata={"Date": None, "Creator": OURS})
    with blamed_on(f"{path} cannot be written"), atomic_write(path) as file:
        file.write(data.getvalue())


def write(picture: Picture, *paths: Path) -> None:
    with drawing():
        for path in paths:
            save(picture, path)


def is_ours(path: Path) -> bool:
    """True if a report has written the file. May raise OSError."""
    with open(path, "rb") as file:
        return OURS.encode() in file.read(3000)


def squeezed(svg: str, title: str, prefix: str) -> str:
    """Return matplotlib's SVG as a part of a page: with the page's colours, unique ids, a tenth of the size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    size = re.search(r'viewBox="([^"]*)"', svg)
    box = size[1] if size else "0 0 302 187"
    body = svg[svg.index(">") + 1 :].strip()
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", body))
    names = {name: f"{prefix}{number}" for number, name in enumerate(sorted(used))}
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{names[m[1]]}"' if m[1] in names else "", body)
    body = re.sub(r"(url\(#|href=\"#)([^)\"]+)", lambda m: m[1] + names[m[2]], body)
    body = re.sub(r"<[^>]*>", rounded, body)  # text, such as labels of ticks, stays as it is
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    body = body.replace("'DejaVu Sans'", "system-ui,sans-serif").replace("xlink:href", "href")
    body = re.sub(
        r"; stroke-linejoin: (?:miter|round)|; stroke-linecap: (?:square|butt|round)|stroke-miterlimit: \d+; ", "", body
    )
    body = re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", body))
    body = re.sub(r"<g>(<(?:path|use|text)[^<>]*(?:/>|>[^<>]*</text>))</g>", r"\1", body)
    escaped = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return f'<svg viewBox="{box}" role="img" aria-label="{escaped}">{body}'


def rounded(tag: re.Match[str]) -> str:
    """Return a tag of SVG with its coordinates rounded to hundredths of a point."""
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), tag[0])
