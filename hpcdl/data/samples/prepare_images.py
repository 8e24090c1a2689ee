"""Preparation of a folder of images, whose sub-folders are the classes.

    FOLDER/cat/1.jpg  FOLDER/cat/new/2.png  FOLDER/dog/3.jpg      split by a fraction, stratified
    FOLDER/train/cat/1.jpg  FOLDER/test/cat/2.png                 split as it is; or val/, validation/ for test/

Every file below a class is one of its images, except hidden ones. Classes are numbered in the order of their names.
Rows are shuffled, which a placement that reads them in blocks relies on. Memory holds the names of all files, and the
rows of a shard."""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpcdl.data.format import Info
from hpcdl.data.formats.prepare import Output, split_by_group
from hpcdl.data.hdf5 import FilePath, shown
from hpcdl.data.placement import Comm, on_first_rank, run_together
from hpcdl.data.samples.image_decoder import SIZE, ImageDecoder
from hpcdl.data.samples.prepare_samples import SampleSet, SourceSample, rows_of_shard, write_samples
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import files_below, hidden
from hpcdl.formatting import counted
from hpcdl.random import Random

TESTS = ("test", "val", "valid", "validation")  # names of the test part's folder, the first one found


class ImageFolder(NamedTuple):
    """The files of a folder of images by group ("": to be split): paths in the folder, and class numbers. names: of the
    classes. remarks: phrases on what is left out. digest: of all paths, sizes and times of modification."""

    paths: dict[str, list[str]]
    classes: dict[str, np.ndarray]
    names: list[str]
    remarks: list[str]
    digest: str


def prepare_images(
    folder: FilePath,
    output: Output,
    *,
    size: int = SIZE,
    color: bool = False,
    skip_broken: bool = False,
    test_fraction: float | None = None,
    seed: int = 0,
    comm: Comm = None,
) -> Info:
    """Make a data file of a folder of images, (size, size) or with color (size, size, 3). skip_broken: leave out files
    that are no images. Collective over `comm`. Raises UsageError."""
    decoder = run_together(comm, partial(ImageDecoder, size, color))
    found = on_first_rank(comm, partial(find_images, folder))
    groups = run_together(comm, partial(_split, folder, found, test_fraction, seed))
    paths = [path for part in found.paths.values() for path in part]
    y = np.concatenate(list(found.classes.values()))
    group_of = [group for group, rows in groups.items() for _ in rows]
    order = np.concatenate(list(groups.values()))
    most = rows_of_shard(output, int(np.prod(decoder.shape)))
    starts = range(0, len(order), most)

    def read(number: int) -> Iterator[SourceSample]:
        for at in range(starts[number], min(starts[number] + most, len(order))):
            row = int(order[at])
            decode = partial(decoder, os.path.join(folder, paths[row]))
            yield SourceSample(group_of[at], row, os.fsencode(paths[row]), int(y[row]), decode)

    samples = SampleSet(
        what=f"files of {folder}",
        lengths=[min(most, len(order) - start) for start in starts],
        read=read,
        longest=max(len(os.fsencode(path)) for path in paths),
        shape=decoder.shape,
        kind=np.dtype(np.uint8),
        scale=1 / 255,
        names=found.names,
        classes=len(found.names),
    )
    recipe: dict[str, Any] = {"kind": "images", "source": str(folder), "files": found.digest, "size": size}
    recipe |= {"color": color, "test_fraction": test_fraction, "seed": seed}
    output.summary += found.remarks
    return write_samples(samples, output, recipe, skip_broken, comm)


def find_images(folder: FilePath) -> ImageFolder:
    """Return the files of a folder of images; UsageError if they are not of two classes or more."""
    with blamed_on(f"{shown(folder, 200)} cannot be read"):  # a name may be too long
        if not os.path.isdir(folder):
            raise UsageError(f"{folder} is not a folder; give one that has a folder of images for each class")
        groups, remarks = _groups(folder)
        paths: dict[str, list[str]] = {}
        labels: dict[str, list[str]] = {}
        for group, part in groups.items():
            paths[group], labels[group] = [], []
            names, strays = _entries(os.path.join(folder, part))
            remarks += [f"{counted(len(strays), 'file')} in {part or 'no class'} left out"] * bool(strays)
            for name in names:
                below = files_below(str(folder), os.path.join(part, name))
                paths[group] += below
                labels[group] += [name] * len(below)
                remarks += [f"{os.path.join(part, name)}/ is empty"] * (not below)
        digest = hashlib.blake2b(digest_size=16)
        for path in itertools.chain(*paths.values()):
            digest.update(os.fsencode(path) + b"\0" + _state(os.path.join(folder, path)))
    first = next(iter(groups))
    names = sorted(set(labels[first]))
    where = os.path.join(folder, groups[first])
    if len(names) < 2:
        found = f"images of the class {shown(names[0])} alone" if names else "no images in folders"
        raise UsageError(f"{where} has {found}; give a folder with two classes or more, as cat/1.jpg and dog/2.jpg")
    number = {name: at for at, name in enumerate(names)}
    for group, mine in labels.items():
        if not mine:
            raise UsageError(f"{folder}/{groups[group]} has no images in folders, as cat/1.jpg")
        if unknown := sorted(set(mine) - set(names)):
            raise UsageError(f"{folder}/{groups[group]} has the class {shown(unknown[0])}, which {where} has not")
    classes = {group: np.array([number[name] for name in mine], np.int64) for group, mine in labels.items()}
    return ImageFolder(paths, classes, names, remarks, digest.hexdigest())


def _groups(folder: FilePath) -> tuple[dict[str, str], list[str]]:
    """Return the folders of train and test by group, or {"": ""} for a folder of classes; and what is left out."""
    parts, _ = _entries(folder)
    test = next((name for name in TESTS if name in parts), None)
    if test is None or "train" not in parts:
        return {"": ""}, []
    if others := sorted(set(parts) - {"train", *TESTS}):
        problem = f"{folder} has train/, {test}/ and {shown(others[0])}"
        raise UsageError(f"{problem}: give a folder of classes, or one of train/ and {test}/ alone")
    return {"train": "train", "test": test}, [f"{name}/ left out" for name in parts if name not in ("train", test)]


def _entries(folder: FilePath) -> tuple[list[str], list[str]]:
    """Return the names of the folders and of the files in a folder, but for hidden ones, sorted."""
    folders, files = list[str](), list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if not hidden(entry.name):
                (folders if entry.is_dir() else files).append(entry.name)
    return sorted(folders), sorted(files)


def _state(path: str) -> bytes:
    """Return size and time of modification of a file; of a broken link "-"."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return f"{found.st_size} {found.st_mtime_ns}".encode()
    return b"-"


def _split(folder: FilePath, found: ImageFolder, test_fraction: float | None, seed: int) -> dict[str, np.ndarray]:
    """Return the shuffled numbers of the files of train and test, of which those of `found.paths` come in order."""
    if "" in found.paths:
        groups = split_by_group(found.classes[""], len(found.names), test_fraction, seed)
    else:
        if test_fraction is not None:
            raise UsageError(f"{folder} is split already, into train/ and its test part: leave --test-fraction out")
        first, shuffle = 0, Random(seed)("shuffle")
        groups = {}
        for group, paths in found.paths.items():
            groups[group] = first + shuffle.permutation(len(paths))
            first += len(paths)
    return groups
