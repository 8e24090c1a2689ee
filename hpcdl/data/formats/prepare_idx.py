"""idx, the format of MNIST (LeCun, Cortes, Burges, 1998), as a data file or as rows to predict.

bytes   0, 0, element type, rank n | n sizes (big-endian 32 bits) | the elements (big-endian)"""

import contextlib
import gzip
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpcdl.data.batch import PredictionRows, RowBlock
from hpcdl.data.format import Info
from hpcdl.data.formats.prepare import Groups, Output, number_labels
from hpcdl.data.formats.recognition import format_of
from hpcdl.data.hdf5 import FilePath, check_memory, slabs
from hpcdl.errors import UsageError, blamed_on

MOST_RANK = 32  # of HDF5
NO_IMAGES = "{} holds one number for each row, as labels are; give the file of the images"
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def prepare_idx(folder: FilePath, output: Output) -> Info:
    """Make a data file of train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k- files, gzipped or not."""
    with blamed_on(f"{folder} cannot be read"):  # a name may be too long
        there = Path(folder).is_dir()
    if not there:
        wanted = "give the folder that holds train-images-idx3-ubyte and the other files of MNIST's format"
        raise UsageError(f"{folder} is not a folder; {wanted}")
    files = {
        "train": [_find_idx(folder, what, "train") for what in ("images", "labels")],
        "test": [_find_idx(folder, what, "t10k", "test") for what in ("images", "labels")],
    }
    kinds, shapes = zip(*(idx_header(images) for images, _ in files.values()), strict=True)
    labels = [_labels(path) for _, path in files.values()]
    if any(part.ndim != 1 or part.dtype.kind == "f" for part in labels):
        raise UsageError(f"{folder}: the label files must hold one whole number per row")
    for (images, path), shape, part in zip(files.values(), shapes, labels, strict=True):
        if len(part) != shape[0]:
            raise UsageError(f"{images} has {shape[0]} rows, but {path.name} has {len(part)}")
        if len(shape) < 2:
            raise UsageError(NO_IMAGES.format(images))
        if shape[1:] != shapes[0][1:]:
            train = f"{files['train'][0].name} has rows of shape {shapes[0][1:]}"
            raise UsageError(f"{images} has rows of shape {shape[1:]}, but {train}")
    numbers, names, classes = number_labels(labels)
    kind = np.result_type(*kinds)
    kind, scale = (kind, 1 / 255) if kind == np.uint8 else (kind.newbyteorder("="), 1.0)
    parts = zip(files.items(), shapes, numbers, strict=True)
    groups: Groups = {group: (shape, idx_slabs(images), y, {}) for (group, (images, _)), shape, y in parts}
    return output.write(groups, kind, scale, names, classes)


def _labels(path: Path) -> np.ndarray:
    parts = list(idx_slabs(path))
    if not parts:
        raise UsageError(f"{path} has no rows")
    return np.concatenate(parts)


def _find_idx(folder: FilePath, what: str, *prefixes: str) -> Path:
    """Return the one file named PREFIX-WHAT; an unpacked file has priority over its gzipped twin."""
    paths = {path for prefix in prefixes for path in Path(folder).glob(f"*{prefix}-{what}*")}
    files = {path.name.removesuffix(".gz"): path for path in sorted(paths, reverse=True)}
    if not files:
        raise UsageError(f"{folder} has no file {prefixes[0]}-{what}-idx{3 if what == 'images' else 1}-ubyte (or .gz)")
    if len(files) > 1:
        raise UsageError(f"{folder} has several files that fit: {', '.join(sorted(files))}; leave one of them there")
    return next(iter(files.values()))


@contextlib.contextmanager
def _open_idx(path: Path) -> Iterator[tuple[IO[bytes], np.dtype, tuple[int, ...]]]:
    """Open an idx file; yield the file after its header, the element type and the shape."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with blamed_on(f"{path} cannot be read"), opener(path, "rb") as file:
        zero, kind, ndim = file.read(2), file.read(1), file.read(1)
        if zero != b"\0\0" or not kind or kind[0] not in IDX_TYPES or not ndim or not ndim[0]:
            raise UsageError(f"{path} is not an idx file (it does not begin with 0, 0, a type and a number of axes)")
        sizes = file.read(4 * ndim[0])
        if len(sizes) < 4 * ndim[0]:
            raise EOFError("the header ends early")
        if ndim[0] > MOST_RANK:
            raise UsageError(f"{path} says that it has rank {ndim[0]}; HDF5 has rank {MOST_RANK} at most")
        dtype, shape = np.dtype(IDX_TYPES[kind[0]]), tuple(np.frombuffer(sizes, ">u4").tolist())
        check_memory(math.prod(shape[1:]) * dtype.itemsize, f"{path} says that its shape is {shape}; a row would")
        yield file, dtype, shape


def idx_header(path: Path) -> tuple[np.dtype, tuple[int, ...]]:
    """Return element type and shape of an idx file."""
    with _open_idx(path) as (_, kind, shape):
        return kind, shape


def idx_rows(path: str) -> PredictionRows:
    """Return the rows to predict of an idx file, gzipped or not."""
    if format_of(path) == "gzip":
        with blamed_on(f"{path} cannot be read"), gzip.open(path) as file:
            if file.read(2) != b"\0\0":
                raise UsageError(f"{path} is gzipped, and holds no idx file; unpack it first")
    _, shape = idx_header(Path(path))
    if len(shape) < 2:
        raise UsageError(NO_IMAGES.format(path))

    def blocks() -> Iterator[Callable[[], RowBlock]]:
        at = 0
        for part in idx_slabs(Path(path)):
            yield partial(RowBlock, part, np.arange(at, at + len(part)))
            at += len(part)

    return PredictionRows(path, blocks, features=shape[1:])


def idx_slabs(path: Path) -> Iterator[np.ndarray]:
    """Yield the rows of an idx file slab by slab."""
    with _open_idx(path) as (file, kind, shape):
        row_bytes = math.prod(shape[1:]) * kind.itemsize
        for slab in slabs(shape[0], row_bytes):
            rows = slab.stop - slab.start
            data = file.read(rows * row_bytes)
            if len(data) < rows * row_bytes:
                raise EOFError(f"it ends in row {slab.start + len(data) // row_bytes} of {shape[0]}")
            yield np.frombuffer(data, kind).reshape(rows, *shape[1:])
