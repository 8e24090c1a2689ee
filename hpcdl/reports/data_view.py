"""The view of `hpcdl data show`: what a data set holds as lines and tables, and images drawn with characters.

    a terminal with colours    a character is two pixels, one above the other: the half block in two colours
    other output               a pixel is two characters of RAMP, or, where that is too wide, two pixels are one

Images wider than their part of the screen are reduced: a pixel is then the mean of several."""

from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from hpcdl.data.formats.contents import is_image
from hpcdl.errors import printable
from hpcdl.formatting import counted, size

RAMP = " .:-=+*#%@"  # from dark to light
MOST_LINES = 24  # classes or columns in a table
MOST_FEATURES = 6  # of a row in a table
BAR = 24  # characters of the largest class
MOST_TEXT = 600  # characters of a row of text
APART = 2  # columns between images


def data_view(found: dict[str, Any], width: int, colours: bool) -> list[Any]:
    """Return lines and tables for a screen of `width` columns. found: as of `contents`."""
    parts: list[Any] = [*map(Text, head(found)), group_table(found)]
    if any("by_class" in group for group in found["groups"].values()):
        parts.append(class_table(found))
    targets = [(name, each) for name, group in found["groups"].items() for each in group.get("targets", [])]
    if targets:
        rows = [[name, each["name"] or "y", *map(short_number, spread(each))] for name, each in targets]
        parts.append(table_of(["rows", "target", "least", "mean", "largest"], rows, 2))
    if "columns" in found:
        parts.append(column_table(found["columns"]))
    if "range" in found:
        low, mean, high = map(short_number, spread(found["range"]))
        parts.append(Text(f"features: {low} to {high}, mean {mean}"))
    return parts + example_parts(found, width, colours)


def head(found: dict[str, Any]) -> list[str]:
    """Return lines on the whole: rows, types, classes, origin, recipe, digest."""
    rows = sum(group["rows"] for group in found["groups"].values())
    shape = "x".join(map(str, found["features"]))
    where = "in one file" if found["shards"] is None else f"in {counted(found['shards'], 'shard')}"
    task = counted(found["classes"], "class", ",") if found["classes"] else "values to predict"
    if found["vocabulary"] is not None:
        task = f"text, a vocabulary of {counted(found['vocabulary'], 'token', ',')}"
    said = f"{'sparse ' * found['sparse']}{found['type']}"
    lines = [
        f"{found['name']}: {counted(rows, 'row', ',')} of {shape} {said}, scale {found['scale']:.6g}, {task}",
        f"{found['path']}, {where} of {size(found['bytes'])}",
        f"digest {found['digest']}",
    ]
    if found["origin"]:
        lines.append(f"origin: {found['origin']}")
    if isinstance(found["recipe"], dict):
        options = (f"{name} {each}" for name, each in found["recipe"].items() if each is not False)
        lines.append(f"made by prepare-data from {', '.join(options)}")
    return [printable(each, allowed="") for each in lines]


def table_of(headings: list[str], rows: list[list[str]], left: int, lines: int = MOST_LINES) -> Table:
    """Return a table of texts. left: number of columns that go left. lines: rows at most; the last tells of others."""
    table = Table(caption=None if len(rows) <= lines else f"and {len(rows) - lines:,} more", caption_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(Text(printable(heading, allowed="")), justify="left" if number < left else "right")
    for row in rows[:lines]:
        table.add_row(*(Text(printable(cell, allowed="")) for cell in row))
    return table


def group_table(found: dict[str, Any]) -> Table:
    """Return the table of groups: rows, elements of a sparse row, other columns."""
    rows = []
    for name, group in found["groups"].items():
        elements = f"{group['elements'] / max(1, group['rows']):.3g}" if "elements" in group else ""
        rows.append([name, f"{group['rows']:,}", elements, ", ".join(group["columns"])])
    headings, used = ["group", "rows", "elements of a row", "other columns"], [0, 1]
    used += [k for k in (2, 3) if any(row[k] for row in rows)]
    return table_of([headings[k] for k in used], [[row[k] for k in used] for row in rows], 1)


def class_table(found: dict[str, Any]) -> Table:
    """Return the table of rows by class, with bars for the first group."""
    groups = {name: group["by_class"] for name, group in found["groups"].items() if "by_class" in group}
    first = next(iter(groups.values()))
    total, most = max(1, sum(first.values())), max(1, *first.values())
    rows = []
    for name, count in first.items():
        counts = [f"{each[name]:,}" for each in groups.values()]
        rows.append([name, *counts, f"{count / total:.1%}", "\u2588" * round(BAR * count / most)])
    table = table_of(["class", *groups, f"of {next(iter(groups))}", ""], rows, 1)
    table.columns[-1].justify = "left"
    return table


def column_table(columns: list[dict[str, Any]]) -> Table:
    """Return the table of a table's columns: kind, range or number of texts, missing values."""
    rows = []
    for each in columns:
        values = f"{each['values']:,} texts" if "values" in each else ""
        ends = [""] * 3 if "values" in each else [*map(short_number, spread(each))]
        rows.append([each["name"], each["kind"], values, *ends, f"{each['missing']:,}" if "missing" in each else "-"])
    return table_of(["column", "kind", "values", "least", "mean", "largest", "missing"], rows, 2)


def spread(each: dict[str, float]) -> list[float]:
    return [each[name] for name in ("min", "mean", "max")]


def short_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def example_parts(found: dict[str, Any], width: int, colours: bool) -> list[Any]:
    """Return the examples: images, texts, or a table of features."""
    examples = found["examples"]
    if not examples:
        return []
    if "text" in examples[0]:
        texts = ((k, each["text"]) for k, each in enumerate(examples))
        return [Text(f"row {k}: {printable(text[:MOST_TEXT], allowed='')}") for k, text in texts]
    if "elements" in examples[0]:
        return [Text(f"{label(k, each)}: {elements(each['elements'])}") for k, each in enumerate(examples)]
    if is_image(tuple(found["features"])):
        return image_lines(examples, width, colours)
    named = isinstance(examples[0]["x"], dict)
    rows = [[*map(short_number, each["x"].values() if named else np.ravel(each["x"]).tolist())] for each in examples]
    names = list(examples[0]["x"]) if named else [str(k) for k in range(len(rows[0]))]
    shown, more = names[:MOST_FEATURES], ["..."] * (len(names) > MOST_FEATURES)
    headings = ["row", *shown, *more, *["label"] * ("y" in examples[0])]
    lines = [
        [str(each.get("id", k)), *row[: len(shown)], *more, *[short_label(each["y"])] * ("y" in each)]
        for k, (row, each) in enumerate(zip(rows, examples, strict=True))
    ]
    return [table_of(headings, lines, 1, len(lines))]


def elements(row: dict[str, Any]) -> str:
    """Return the first elements of a sparse row as libsvm writes them, INDEX:VALUE with indices from 0."""
    shown = [f"{index}:{short_number(value)}" for index, value in row.items()]
    return " ".join(shown[:MOST_LINES]) + " ..." * (len(shown) > MOST_LINES)


def short_label(y: Any) -> str:
    return ", ".join(map(short_number, y)) if isinstance(y, list) else short_number(y)


def label(number: int, example: dict[str, Any]) -> str:
    """Return the number of a row, with its class or its target."""
    return printable(f"row {number}" + (f", {short_label(example['y'])}" if "y" in example else ""), allowed="")


def image_lines(examples: list[dict[str, Any]], width: int, colours: bool) -> list[Text]:
    """Return images side by side, as many as fit, below their labels; further ones follow below."""
    pixels = [np.asarray(each["x"], np.float64) for each in examples]
    pixels = [each[:, :, None] if each.ndim == 2 else each for each in pixels]
    low, high = min(each.min() for each in pixels), max(each.max() for each in pixels)
    pixels = [(each - low) / (high - low or 1.0) for each in pixels]
    labels = [label(k, each) for k, each in enumerate(examples)]
    wide, most = pixels[0].shape[1], max(1, (width + APART) // len(pixels) - APART)  # of each, if all stand in a line
    own = max(2 * wide if 2 * wide <= most and not colours else wide, *map(len, labels))
    beside = max(1, min(len(pixels), (width + APART) // (own + APART)))
    room = min(width, own)
    drawn = [half_blocks(each, room) if colours else ramp(each, room) for each in pixels]
    lines: list[Text] = []
    for start in range(0, len(drawn), beside):
        some = drawn[start : start + beside]
        lines.append(Text((" " * APART).join(f"{each:{room}}" for each in labels[start : start + beside]).rstrip()))
        for row in range(max(map(len, some))):
            lines.append(Text(" " * APART).join([each[row] for each in some]))
            lines[-1].no_wrap = True
    return lines


def reduced(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return an image (height, width, channels) of at most rows x columns pixels, which are means of its own."""
    for axis, most in ((0, rows), (1, columns)):
        length = image.shape[axis]
        if length > most:
            edges = np.arange(most) * length // most
            counts = np.diff(np.append(edges, length))
            image = np.add.reduceat(image, edges, axis) / counts.reshape([-1 if k == axis else 1 for k in range(3)])
    return image


def half_blocks(image: np.ndarray, room: int) -> list[Text]:
    """Return the lines of an image in colours, `room` columns wide at most and padded to it; values 0 to 1."""
    height, width, channels = image.shape
    wide = min(width, room)
    image = reduced(image, max(2, height * wide // width), wide)
    colour = np.repeat(image, 3, axis=2) if channels == 1 else image[:, :, :3]
    codes = np.rint(colour * 255).astype(int)
    lines = []
    for row in range(0, len(codes), 2):
        text, below = Text(), codes[row + 1] if row + 1 < len(codes) else None
        for column, above in enumerate(codes[row]):
            style = f"rgb({','.join(map(str, above))})"
            style += f" on rgb({','.join(map(str, below[column]))})" if below is not None else ""
            text.append("\u2580", style)
        text.append(" " * (room - wide))
        lines.append(text)
    return lines


def ramp(image: np.ndarray, room: int) -> list[Text]:
    """Return the lines of an image in characters of RAMP, `room` columns wide at most and padded to it."""
    height, width, _ = image.shape
    doubled = 2 * width <= room
    wide = width if doubled else min(width, room)
    image = reduced(image, max(1, height * wide // width // (1 if doubled else 2)), wide).mean(axis=2)
    codes = np.rint(image * (len(RAMP) - 1)).astype(int)
    return [Text("".join(RAMP[code] * (1 + doubled) for code in row).ljust(room)) for row in codes]
