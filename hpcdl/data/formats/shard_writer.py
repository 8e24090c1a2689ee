"""Shards of a data set, written by one process or by all ranks; a call that was killed is gone on with.

    .OUT.parts/recipe.json        what decides the content; shards of another recipe are discarded
    .OUT.parts/00003.h5           a shard, whole under this name
    .OUT.parts/00003.json         its entry of the index: the shard is finished (an empty shard has an entry alone)
    .OUT.parts/ -> OUT/           at the end, with the index; or all shards joined into the one file OUT.h5

Shard k is rank (place of k among the unfinished ones) mod size's: the content of a shard depends on its number alone,
so any number of ranks writes the same files."""

import dataclasses
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.csr import COLUMN, CSR, START
from hpcdl.data.digest import file_digest, joined_digest
from hpcdl.data.format import GROUPS, TOKEN_BYTES, Info, read_info
from hpcdl.data.formats.prepare import Groups, Output
from hpcdl.data.formats.sparse_file import SparseSet, open_rows, slab_elements
from hpcdl.data.hdf5 import dataset, open_file, slabs_of
from hpcdl.data.placement import Comm, on_first_rank, run_together
from hpcdl.data.schema import Schema
from hpcdl.data.shards import SHARD_FIELDS, Shard, checksum, columns_of, is_ours, write_index
from hpcdl.errors import UsageError
from hpcdl.files import atomic_write, parse_json, sync_folder

RECIPE = "recipe.json"


class ShardWriter:
    """Shards written by the ranks of `comm` (None: one process), each file whole under its name; finished shards of a
    killed call are kept."""

    def __init__(self, output: Output, recipe: dict, count: int | None, comm: Comm = None):
        """Collective. recipe: all that decides the content, as JSON data: sources with size and modification time,
        options. count: number of shards; None: known at the end, and no shards of an earlier call are kept. Raises
        UsageError."""
        self.output, self.recipe, self.comm = output, recipe, comm
        self.folder = output.path.with_name(f".{output.path.name}.parts")
        about = [recipe, output.name, output.scale, output.origin, output.compress, output.shard_size]
        self.content = json.dumps([*about, "" if count is not None else f"{os.getpid()} {time.time_ns()}"], default=str)
        self.counts: Counter[str] = Counter()
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)
        finished = on_first_rank(comm, self._begin)
        self.numbers = set(range(count or 0))
        self.unfinished = sorted(self.numbers - finished)[self.rank :: self.size]

    def _begin(self) -> set[int]:
        """Make the hidden folder, or tidy up that of a killed call; return the numbers of its finished shards."""
        folder, recipe = self.folder, self.folder / RECIPE
        with self.output.blamed():
            if folder.exists() and not (recipe.is_file() and recipe.read_text() == self.content):
                strange = [each.name for each in folder.iterdir() if not is_ours(each.name)]
                if strange:
                    problem = f"holds {strange[0]!r}, which prepare-data did not make"
                    raise UsageError(
                        f"the folder {folder} is needed for unfinished shards, but {problem}; move it away"
                    )
                shutil.rmtree(folder)
            folder.mkdir(exist_ok=True)
            if not recipe.exists():
                with atomic_write(recipe) as file:
                    file.write(self.content.encode())
            for left in folder.glob(".*.part"):
                left.unlink()
            return {int(each.stem) for each in folder.glob("[0-9]*.json")}

    def missing(self) -> list[int]:
        """Return the numbers of the shards that this rank has to write."""
        return list(self.unfinished)

    def write(
        self, number: int, groups: Groups, *arguments: Any, counts: Mapping[str, int] | None = None, **about: Any
    ) -> None:
        """Write a shard. Arguments and errors: of `Output.write_file`. Without groups the shard is left out. counts: of
        what the source had, by name, of which `finish` makes the sums over all shards."""
        path, entry = self.path(number), {"counts": {name: int(each) for name, each in (counts or {}).items()}}
        if groups:
            info = self.output.write_file(path, groups, *arguments, **about)
            with self.output.blamed():
                entry |= _entry(path, info)
        with self.output.blamed(), atomic_write(path.with_suffix(".json")) as file:
            file.write(json.dumps(entry).encode())
        self.numbers.add(number)
        self.unfinished = [each for each in self.unfinished if each != number]

    def path(self, number: int) -> Path:
        """Return the path of a shard that is or will be written."""
        return self.folder / f"{number:05d}.h5"

    def give_up(self) -> None:
        """Remove the hidden folder if it has no finished shard, after an error that all ranks know. Local."""
        if self.rank == 0 and not list(self.folder.glob("[0-9]*.json")):
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> Info:
        """Give the folder its name; or join all shards into the one file, in order, and remove them. Collective: each
        rank calls it after its last shard. Returns the structure of the data set. Raises UsageError."""
        run_together(self.comm, lambda: None)  # all have written
        info, self.counts = on_first_rank(self.comm, lambda: (self._finish(), self.counts))
        return info  # type: ignore[no-any-return]

    def _finish(self) -> Info:
        output, entries = self.output, dict[int, dict[str, Any]]()
        with output.blamed():
            for number in sorted(self.numbers):
                entry = parse_json(self.path(number).with_suffix(".json").read_text())
                self.counts += Counter(entry.pop("counts"))
                entries |= {number: entry} if entry else {}
            if not entries:
                raise UsageError(f"{output.path} would have no rows; look at the source")
            columns = _common_columns(entries)
            info = read_info(self.path(next(iter(entries))))
            info = dataclasses.replace(info, schema=_common_schema(info.schema, self.counts))
            if not output.folder:
                info = join(output, [(self.path(number), entry["rows"]) for number, entry in entries.items()], info)
                shutil.rmtree(self.folder)
                return info
            shards = [Shard(**{name: entry[name] for name in SHARD_FIELDS}) for entry in entries.values()]
            about = {"name": info.name, "classes": info.classes, "features": list(info.features)}
            about |= {"scale": info.scale, "schema": info.schema.describe(), "columns": columns}
            if info.schema.token_bytes:  # of the whole: a shard has those of its own rows
                about["attributes"] = {TOKEN_BYTES: json.dumps(info.schema.token_bytes)}
            about |= {"digest": joined_digest(shard.digest for shard in shards)}
            write_index(self.folder, about | {"recipe": self.recipe, "origin": output.origin}, shards)
            _replace_folder(self.folder, output.path)
            for left in (output.path / RECIPE, *output.path.glob("[0-9]*.json")):
                left.unlink()
        return read_info(output.path)


def _entry(path: Path, info: Info) -> dict[str, Any]:
    """Return the entry of a shard: that of the index, and its columns."""
    with open_file(path) as file:
        columns = columns_of(file)
    rows = {group: rows for group, rows in info.rows.items() if rows}
    shard = Shard(path.name, rows, info.elements, path.stat().st_size, checksum(path), file_digest(info))
    return dataclasses.asdict(shard) | {"columns": columns}


def _common_schema(first: Schema, counts: Mapping[str, int]) -> Schema:
    """Return the schema of all shards, of which `first` is one. counts: sums over shards; of texts, NAME_bytes and
    NAME_tokens of each group."""
    found = {
        name: counts[f"{name}_bytes"] / max(1, counts.get(f"{name}_tokens", 0))
        for name in GROUPS
        if counts.get(f"{name}_bytes")
    }
    return dataclasses.replace(first, token_bytes=found or first.token_bytes)


def _common_columns(entries: dict[int, dict]) -> dict[str, list]:
    """Return the columns of all shards; UsageError if they differ. entries: by number."""
    columns: dict[str, dict[str, list]] = {}
    for number, entry in entries.items():
        for group in entry["rows"]:
            mine = {name: form for name, form in entry["columns"].items() if name.split("/")[0] == group}
            if columns.setdefault(group, mine) != mine:
                raise UsageError(f"shard {number} has other columns in {group} than the shards before: {mine}")
    return {name: form for each in columns.values() for name, form in each.items()}


def _replace_folder(new: Path, path: Path) -> None:
    """Rename the folder `new` to `path`, which may be a folder of shards."""
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        os.replace(path, old)
    os.replace(new, path)
    sync_folder(path.parent)
    if old.is_dir() and all(is_ours(each.name) for each in old.iterdir()):
        shutil.rmtree(old)


def join(output: Output, parts: list[tuple[Path, dict[str, int]]], info: Info) -> Info:
    """Write the rows of shards into the one file of `output`, in order; return its structure. parts: paths, and rows by
    group. info: of the first shard."""
    groups: Groups = {}
    for group in GROUPS:
        paths, counts = [path for path, rows in parts if group in rows], [rows.get(group, 0) for _, rows in parts]
        if paths:
            with open_file(paths[0]) as file:
                others = sorted(set(map(str, file[group])) - {"x"})
            columns = {name: _column(paths, f"{group}/{name}") for name in others}
            groups[group] = (sum(counts), *info.features), _slabs(paths, group), columns.pop("y", None), columns
    schema, kind = info.schema, next(iter(info.kinds.values()))
    table = None if schema.recipe is None else json.dumps(schema.recipe)
    about: dict[str, Any] = {"vocabulary": schema.vocabulary, "table": table, "base": schema.base}
    about |= {"names": schema.labels and list(schema.labels), "classes": info.classes, "sparse": info.sparse}
    about["token_bytes"] = schema.token_bytes
    return output.write_file(output.path, groups, kind, info.scale, **about)


def _column(paths: list[Path], name: str) -> np.ndarray:
    parts = []
    for path in paths:
        with open_file(path) as file:
            parts.append(dataset(file, name)[...])
    return np.concatenate(parts)


def _slabs(paths: list[Path], group: str) -> Iterator[Any]:
    for path in paths:
        with open_file(path) as file:
            x = open_rows(file, f"{group}/x")
            if isinstance(x, SparseSet):
                for slab in x.slabs(slab_elements(x.dtype)):
                    part = CSR.empty(slab.stop - slab.start, x.shape[1], x.dtype)
                    x.read(slab.start, slab.stop, part)
                    yield part
            else:
                yield from (x[slab] for slab in slabs_of(x))


def write_shards(output: Output, groups: Groups, kind: np.dtype, *arguments: Any, **about: Any) -> Info:
    """Write a folder of shards, each with rows of one group; return its structure. Arguments: of `write_file`."""
    writer, number = ShardWriter(output, output.recipe, None), 0
    for group, ((rows, *features), parts, y, columns) in groups.items():
        stream, at, row = RowStream(parts, kind), 0, math.prod(features) * kind.itemsize
        while at < rows or not rows:  # without rows, `write_file` raises an error
            shape, taken, labels, others = (rows, *features), stream.take(output.shard_size), y, columns
            if not about.get("sparse"):
                count = min(rows - at, max(1, output.shard_size // row))
                shape, taken = (count, *features), stream.take(count * row)
                others = {name: column[at : at + count] for name, column in columns.items()}
            assert not others or not about.get("sparse"), "a sparse shard's number of rows is known at its end only"
            if y is not None:
                labels = partial(stream.labels, y, at)
            writer.write(number, {group: (shape, taken, labels, others)}, kind, *arguments, **about)
            number, at = number + 1, stream.taken
    return writer.finish()


def source_states(paths: Iterable[str]) -> list[list]:
    """Return [path, size, time of modification] of each source, for the recipe of a `ShardWriter`."""
    found = [(path, os.stat(path)) for path in paths]
    return [[path, about.st_size, about.st_mtime_ns] for path, about in found]


class RowStream:
    """The rows of slabs (arrays or CSR), to be taken in parts of other sizes. taken: number of rows so far."""

    def __init__(self, slabs: Iterable[Any], kind: np.dtype):
        self.slabs, self.itemsize, self.rest, self.taken = iter(slabs), kind.itemsize, None, 0

    def take(self, room: int) -> Iterator[Any]:
        """Yield the next rows, of at most `room` bytes together as they are stored, or a single row."""
        begun = False
        while (part := next(self.slabs, None) if self.rest is None else self.rest) is not None:
            ends = self._ends(part)
            fit = max(int(np.searchsorted(ends, room, side="right")), not begun)
            self.rest = part[fit:] if fit < len(part) else None
            if fit:
                begun, room, self.taken = True, room - int(ends[fit - 1]), self.taken + fit
                yield part[:fit]
            if self.rest is not None:
                return

    def _ends(self, part: Any) -> np.ndarray:
        """Return the bytes of the first row, of the first two rows, ..."""
        rows = np.arange(1, len(part) + 1)
        if isinstance(part, CSR):
            return (part.indptr[1:] - part.indptr[0]) * (self.itemsize + COLUMN.itemsize) + rows * START.itemsize
        return rows * (math.prod(part.shape[1:]) * self.itemsize)

    def labels(self, y: np.ndarray | Callable[[], np.ndarray], start: int) -> np.ndarray:
        """Return the labels of the rows from `start` to the last one taken."""
        return (y() if callable(y) else y)[start : self.taken]
