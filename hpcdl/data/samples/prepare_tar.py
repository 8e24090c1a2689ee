"""Preparation of tar shards in WebDataset's layout: files of one key, one after the other, are a sample.

    000/cat7.jpg  000/cat7.cls  000/cat8.jpg  000/cat8.cls      key: the name up to the first dot behind the folder

    x        one image (.jpg, .png, ...), or one array of numbers (.npy)
    label    the text of .cls, or the value of a key in .json

Each tar is read as a stream, twice: for the labels of all, then for the rows (tar_stream.py). Rows keep their order. A
shard of the data set has rows of one tar. Memory holds all labels, and the rows of a shard. (Aizman, Maltby, Breuel,
"High performance I/O for large scale deep learning", 2019)"""

import collections
import contextlib
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpcdl.data.format import Info
from hpcdl.data.formats.prepare import Output, class_numbers, split_by_group
from hpcdl.data.formats.shard_writer import source_states
from hpcdl.data.hdf5 import short, shown
from hpcdl.data.placement import Comm, run_together
from hpcdl.data.samples.image_decoder import SIZE, SUFFIXES, ImageDecoder
from hpcdl.data.samples.prepare_samples import SampleSet, SourceSample, rows_of_shard, write_samples
from hpcdl.data.samples.tar_stream import tar_paths, tar_samples
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import parse_json

ARRAY, LABEL, JSON = "npy", "cls", "json"  # suffixes


class TarIndex(NamedTuple):
    """What the first pass finds in a tar. shape, kind: of the arrays, None: images. longest: bytes of a key."""

    labels: np.ndarray
    shape: tuple[int, ...] | None
    kind: str
    longest: int


class TarRows(NamedTuple):
    """All rows in order: labels, True for the test part; names of the classes (None: numbers) and their number."""

    y: np.ndarray
    tested: np.ndarray
    names: list | None
    classes: int


class Form(NamedTuple):
    """The form of x: shape and type of a row, its decoder, and the suffixes of its files."""

    shape: tuple[int, ...]
    kind: np.dtype
    decode: Callable[[bytes], np.ndarray]
    suffixes: frozenset[str]


def prepare_tar(
    paths: Sequence[str],
    output: Output,
    *,
    size: int | None = None,
    color: bool = False,
    label: str | None = None,
    test: str | None = None,
    regression: bool = False,
    skip_broken: bool = False,
    test_fraction: float | None = None,
    seed: int = 0,
    comm: Comm = None,
) -> Info:
    """Make a data file of tars: paths, patterns as *.tar, or series as train-{000..010}.tar. size, color: of
    images (default 64, grey). label: key of the label in .json; None: .cls has it. test: tars of the test part; None: a
    fraction is split off. regression: labels are values to predict. skip_broken: leave out damaged images. Collective
    over `comm`. Raises UsageError."""
    sources = {"train": [*paths]} | ({} if test is None else {"test": [test]})
    path = short(" ".join(paths), 200)
    tars = run_together(comm, partial(_tars, sources))
    ranks, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    mine = run_together(comm, lambda: {at: _index(tars[at][1], label) for at in range(rank, len(tars), ranks)})
    seen = [mine] if comm is None else comm.allgather(mine)
    indices = [seen[at % ranks][at] for at in range(len(tars))]
    x_form = run_together(comm, partial(_decoder, path, tars, indices, size, color))
    rows = run_together(comm, partial(_rows, path, tars, indices, regression, test_fraction, seed))
    first = np.cumsum([0, *(len(each.labels) for each in indices)]).tolist()
    most = rows_of_shard(output, math.prod(x_form.shape) * x_form.kind.itemsize)
    shards = [
        (tar, start, min(start + most, stop))
        for tar, (begin, stop) in enumerate(itertools.pairwise(first))
        for start in range(begin, stop, most)
    ]

    def read(number: int) -> Iterator[SourceSample]:
        tar, row, stop = shards[number]
        part = itertools.islice(tar_samples(tars[tar][1], x_form.suffixes), row - first[tar], stop - first[tar])
        for key, files in part:
            content = b"".join(each for each in files.values() if each is not None)  # of one file: see `_index`
            group = "test" if rows.tested[row] else "train"
            yield SourceSample(group, row, _bytes(key), rows.y[row].item(), partial(x_form.decode, content))
            row += 1
        if row < stop:
            raise UsageError(f"{tars[tar][1]} has changed since its labels were read; start again")

    samples = SampleSet(
        what=f"samples of {path}",
        lengths=[stop - start for _, start, stop in shards],
        read=read,
        longest=max(each.longest for each in indices),
        shape=x_form.shape,
        kind=x_form.kind,
        scale=1 / 255 if x_form.kind == np.uint8 else 1.0,
        names=rows.names,
        classes=rows.classes,
    )
    states = source_states(tar for _, tar in tars)
    recipe: dict[str, Any] = {"kind": "tar", "source": sources, "tars": states, "size": size, "color": color}
    recipe |= {"label": label, "regression": regression, "test_fraction": test_fraction, "seed": seed}
    return write_samples(samples, output, recipe, skip_broken, comm)


def _tars(sources: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return (group, path) of all tars; UsageError for a tar that is there twice."""
    tars = [(group, tar) for group, paths in sources.items() for path in paths for tar in tar_paths(path)]
    given = [tar for _, tar in tars]
    if twice := sorted(tar for tar, count in collections.Counter(given).items() if count > 1):
        raise UsageError(f"{twice[0]} is given twice; give each tar once, for training or for --test")
    return tars


def _index(tar: str, label: str | None) -> TarIndex:
    """Return labels and form of the samples of a tar. label: as of `prepare_tar`. Raises UsageError."""
    labels: list[int | float | str] = []
    form: tuple[tuple[int, ...] | None, str] | None = None
    longest, suffix = 1, LABEL if label is None else JSON
    for key, files in tar_samples(tar, {suffix, ARRAY}):
        where = f"{tar}: the sample {shown(key)}"
        inputs = sorted(({ARRAY} | SUFFIXES) & set(files))
        if len(inputs) != 1:
            problem = f"has {' and '.join(f'.{each}' for each in inputs) or 'neither an image nor .npy'}"
            raise UsageError(f"{where} {problem}; it must have one image, or one array")
        content = files.get(suffix)
        if content is None:
            hint = f"; if .{JSON} has it, give its key by --label" if label is None and JSON in files else ""
            raise UsageError(f"{where} has no label, .{suffix}{hint}")
        labels.append(_label(where, content, label))
        array = files.get(ARRAY)
        mine: tuple[tuple[int, ...] | None, str] = (None, "u1")
        if array is not None:
            with blamed_on(f"{where} has no array of numbers"):
                x = _array(array)
            mine = x.shape, x.dtype.str
        if form not in (None, mine):
            raise UsageError(f"{where} has {_described(mine)}, but the samples before have {_described(form)}")
        form, longest = mine, max(longest, len(_bytes(key)))
    if form is None:
        raise UsageError(f"{tar} has no samples; a sample is files of one key, as 1.jpg and 1.cls")
    return TarIndex(_labels(tar, labels), *form, longest)


def _described(form: Any) -> str:
    return "an image" if form[0] is None else f"{np.dtype(form[1])} of shape {form[0]}"


def _label(where: str, content: bytes, key: str | None) -> int | float | str:
    """Return the label that a file holds. key: in JSON; None: the file is a text."""
    with blamed_on(f"{where} has a label that is no text in UTF-8"):
        text = content.decode().strip()
    if key is None:
        if not text:
            raise UsageError(f"{where} has an empty .{LABEL}")
        return text
    with blamed_on(f"{where} has no valid JSON"):
        value = parse_json(text)
    if not isinstance(value, dict) or key not in value:
        keys = f"; it has {short(', '.join(map(str, value)), 200)}" if isinstance(value, dict) else ""
        raise UsageError(f"{where} has no {shown(key)} in its .{JSON}{keys}")
    if not isinstance(value[key], int | float | str):
        raise UsageError(f"{where} has the label {shown(value[key])}; it must be a number or a text")
    return value[key]


def _labels(tar: str, labels: list) -> np.ndarray:
    """Return labels as an array of texts, of integers or of floats."""
    if all(isinstance(each, str) for each in labels):
        return np.array(labels)
    if any(isinstance(each, str) for each in labels):
        raise UsageError(f"{tar} has labels that are numbers and labels that are texts; give one kind")
    with blamed_on(f"{tar} has labels that are too large"):
        return np.array(labels, np.int64 if all(isinstance(each, int) for each in labels) else np.float64)


def _rows(
    path: str, tars: list, indices: list[TarIndex], regression: bool, test_fraction: float | None, seed: int
) -> TarRows:
    """Return the labels of all rows, and which ones are of the test part. Raises UsageError."""
    groups = [group for group, _ in tars]
    parts = [
        [index.labels for index, mine in zip(indices, groups, strict=True) if mine == group]
        for group in dict.fromkeys(groups)
    ]
    numbers, names, classes = class_numbers(path, [_joined(path, part) for part in parts], regression)
    y = np.concatenate(numbers)
    tested = np.arange(len(y)) >= len(numbers[0])
    if len(parts) == 1:
        tested[split_by_group(y, classes, test_fraction, seed).get("test", [])] = True
    elif test_fraction is not None:
        raise UsageError("--test already gives the test part as tars: leave --test-fraction out, or --test")
    return TarRows(y, tested, names, classes)


def _joined(path: str, parts: list[np.ndarray]) -> np.ndarray:
    """Return the labels of several tars; texts become numbers if all are whole numbers."""
    if len({part.dtype.kind == "U" for part in parts}) > 1:
        raise UsageError(f"{path}: labels are numbers in some tars, and texts in others; give one kind")
    y = np.concatenate(parts)
    if y.dtype.kind == "U":
        with contextlib.suppress(ValueError, OverflowError):
            return y.astype(np.int64)
    return y


def _decoder(path: str, tars: list, indices: list[TarIndex], size: int | None, color: bool) -> Form:
    """Return the form of x in all tars. Raises UsageError if tars differ, or for options that do not fit."""
    first = indices[0]
    for (_, tar), index in zip(tars, indices, strict=True):
        if index[1:3] != first[1:3]:
            here, there = _described(index[1:3]), _described(first[1:3])
            raise UsageError(f"{tar} has samples with {here}, but {tars[0][1]} has samples with {there}")
    if first.shape is None:
        decoder = ImageDecoder(SIZE if size is None else size, color)
        return Form(decoder.shape, np.dtype(np.uint8), decoder, SUFFIXES)
    if size is not None or color:
        option = "--color" if size is None else "--size"
        raise UsageError(f"{path} holds arrays (.npy), not images: leave {option} out")
    return Form(first.shape, np.dtype(first.kind), _array, frozenset([ARRAY]))


def _array(content: bytes) -> np.ndarray:
    """Return the array of a .npy file; bool becomes bytes. Raises ValueError for other content."""
    file = io.BytesIO(content)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in read:
        raise ValueError(f"its format has the version {version}")
    shape, fortran, kind = read[version](file)
    if kind.kind not in "biuf" or not shape or 0 in shape:
        raise ValueError(f"it is {kind} of shape {shape}")
    if math.prod(shape) * kind.itemsize != len(content) - file.tell():
        raise ValueError("it is cut off, or too long")
    x = np.frombuffer(content, kind, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    return x.view(np.uint8) if kind.kind == "b" else x.astype(kind.newbyteorder("="), copy=False)


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
