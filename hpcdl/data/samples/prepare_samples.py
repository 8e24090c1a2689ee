"""Samples that are decoded one by one, as images, written as shards by all ranks; the broken ones go into one report.

    shard k     samples in the order of the source -> decoded -> rows of train and test, in that order
    broken      left out of a shard by --skip-broken; else their shard is not written, and all are refused together
    train/row, train/id     the number of each sample in the source from 0, and its name

All samples are tried before the refusal, so the report lists all broken ones. A call that goes on with finished shards
of another call decodes again the samples that these leave out. Memory holds the rows of a shard."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from hpcdl.data.format import Info
from hpcdl.data.formats.prepare import Groups, Output
from hpcdl.data.formats.shard_writer import ShardWriter
from hpcdl.data.hdf5 import dataset, open_file, slabs
from hpcdl.data.placement import Comm, run_together
from hpcdl.data.samples.image_decoder import BrokenError
from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.files import atomic_write
from hpcdl.formatting import counted

PART_BYTES = 8 << 20  # of the rows of a part, where the parts become one file
MOST_NAME = 255  # bytes of a sample's name that are kept
HEADER = "# prepare-data could not read these "  # of the report
Broken: TypeAlias = tuple[int, bytes, str]  # row, name and reason


class SourceSample(NamedTuple):
    """A sample. row: its number in the source. decode: returns x, or raises BrokenError."""

    group: str
    row: int
    name: bytes
    y: float
    decode: Callable[[], np.ndarray]


class SampleSet(NamedTuple):
    """All samples of a source. what: their name in messages. lengths: samples of each shard. read: yields the samples
    of a shard. longest: bytes of the longest name. kind, shape: of x. names: of the classes."""

    what: str
    lengths: Sequence[int]
    read: Callable[[int], Iterator[SourceSample]]
    longest: int
    shape: tuple[int, ...]
    kind: np.dtype
    scale: float
    names: list | None
    classes: int


def rows_of_shard(output: Output, row_bytes: int) -> int:
    """Return how many rows a shard gets; fewer where the shards become one file, so that all ranks have some."""
    return max(1, (output.shard_size if output.folder else min(PART_BYTES, output.shard_size)) // row_bytes)


def write_samples(samples: SampleSet, output: Output, recipe: dict, skip_broken: bool, comm: Comm) -> Info:
    """Write all samples; return the structure of the data set. recipe: of `ShardWriter`. Collective; UsageError."""
    writer = ShardWriter(output, recipe, len(samples.lengths), comm)
    mine = run_together(comm, partial(_write, samples, writer, writer.missing(), skip_broken))
    seen = [mine] if comm is None else comm.allgather(mine)
    finished = sorted(set(range(len(samples.lengths))).difference(*seen))[writer.rank :: writer.size]
    mine |= run_together(comm, lambda: {number: _left_out(samples, number, writer) for number in finished})
    seen = [mine] if comm is None else comm.allgather(mine)
    broken = sorted(each for shards in seen for found in shards.values() for each in found)
    report = output.path.with_name(f"{output.path.name}.broken.txt")
    work = partial(_report, report, samples.what, broken, skip_broken, sum(samples.lengths))
    run_together(comm, work, here=writer.rank == 0)
    if names := samples.names:
        output.summary.append(f"classes {', '.join(names[:20])}{' ...' * (len(names) > 20)}")
    if broken:
        output.summary.append(f"{counted(len(broken), 'broken file')} left out, listed in {report}")
    return writer.finish()


def _write(samples: SampleSet, writer: ShardWriter, numbers: list[int], skip_broken: bool) -> dict[int, list[Broken]]:
    """Write these shards; return the broken samples of each."""
    broken: dict[int, list[Broken]] = {}
    for number in numbers:
        groups, broken[number] = _decoded(samples, number)
        if skip_broken or not broken[number]:
            writer.write(number, groups, samples.kind, samples.scale, samples.names, samples.classes)
    return broken


def _decoded(samples: SampleSet, number: int) -> tuple[Groups, list[Broken]]:
    """Return the rows of a shard, and its broken samples."""
    found: dict[str, tuple[np.ndarray, list[SourceSample]]] = {}
    broken = []
    for sample in samples.read(number):
        try:
            x = sample.decode()
        except BrokenError as error:
            broken.append((sample.row, sample.name, str(error)))
            continue
        if sample.group not in found:
            found[sample.group] = np.empty((samples.lengths[number], *samples.shape), samples.kind), []
        rows, kept = found[sample.group]
        rows[len(kept)] = x
        kept.append(sample)
    groups: Groups = {}
    for group in ("train", "test"):
        if group in found:
            rows, kept = found[group]
            parts = [rows[slab] for slab in slabs(len(kept), rows[:1].nbytes)]
            y = np.array([each.y for each in kept])
            row = np.array([each.row for each in kept], np.int64)
            names = np.array([each.name for each in kept], f"S{min(MOST_NAME, max(1, samples.longest))}")
            groups[group] = (len(kept), *samples.shape), parts, y, {"row": row, "id": names}
    return groups, broken


def _left_out(samples: SampleSet, number: int, writer: ShardWriter) -> list[Broken]:
    """Return the broken samples of a finished shard: those that it lacks are decoded again."""
    path, there = writer.path(number), set[int]()
    if path.exists():  # else all were broken
        with open_file(path) as file:
            there = {row for group in file for row in dataset(file, f"{group}/row")[:].tolist()}
    broken = []
    if len(there) < samples.lengths[number]:
        for sample in samples.read(number):
            if sample.row not in there:
                try:
                    sample.decode()
                except BrokenError as error:
                    broken.append((sample.row, sample.name, str(error)))
    return broken


def _report(path: Path, what: str, broken: list[Broken], skip_broken: bool, total: int) -> None:
    """Write the report on broken samples, or remove an old one; UsageError for broken samples, unless `skip_broken`."""
    with blamed_on(f"{path} cannot be written"):
        if path.exists() and not path.read_bytes().startswith(HEADER.encode()):
            raise UsageError(f"{path} is needed for the list of broken files, but exists and is none; move it away")
        lines = [f"{printable(os.fsdecode(name), allowed='')}: {reason}" for _, name, reason in broken]
        if not lines:
            path.unlink(missing_ok=True)
            return
        with atomic_write(path) as file:
            file.write("\n".join([f"{HEADER}{what}", *lines, ""]).encode())
    if not skip_broken:
        todo = "correct or remove them, or leave them out by --skip-broken"
        problem = f"{len(broken)} of {total} {what} cannot be read, as {lines[0]}"
        raise UsageError(f"{problem}; {path} lists all, with the reasons: {todo}")
