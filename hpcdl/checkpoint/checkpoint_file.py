"""Checkpoints: one HDF5 file with the whole state of a run, which any number of ranks can load.

    parameters            the flat vector, in the order of the layout
    optimizer/NAME        each of the optimizer's vectors
    ranks/NAME            per-rank vectors, one row per rank (these need the same number of ranks)
    attributes            model, layout, data, step, position, ... as one JSON text, and a checksum of everything

The vectors of a model that is cut are virtual data sets over files of the ranks (shards.py). A checkpoint is written
under a temporary name, synced and renamed, so a file with its own name is complete. The checksum (BLAKE2 over the
attributes, and name, type and CRC-32 of each vector; for pieces, their places) is computed while the file is written,
and checked slab by slab: a checkpoint may be larger than memory."""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpcdl.checkpoint.shard_checks import foreign_content, refuse_elsewhere
from hpcdl.checkpoint.shards import FOLDER, JoinedPieces, files_of, joining_file, joins_pieces, problem_of, sweep
from hpcdl.data.hdf5 import SLAB_BYTES, new_file
from hpcdl.errors import UsageError, blamed_on, refuse_beyond
from hpcdl.files import atomic_path, parse_json, temporary_name
from hpcdl.memory import available

VERSION = 2
READ = (1, VERSION)  # 1: no pieces; checksum over all bytes of the vectors
LARGE = 1 << 18  # numbers from which a checksum thread pays off
OLDER = re.compile(r"checkpoint-([0-9]{9,})\.h5")  # names that `rotate` gives; others are the user's


class Damaged(UsageError):
    """An existing checkpoint that is damaged."""


@dataclass
class Checkpoint:
    """Contents of a checkpoint file. vectors: arrays by name, or `Stored`. attributes: as in JSON. joined: the vectors
    in pieces, which are not among `vectors` of a checkpoint to be written; None: no pieces."""

    vectors: Mapping[str, np.ndarray]
    attributes: dict
    joined: JoinedPieces | None = None

    def digest(self, version: int = VERSION) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self._inline):
            digest.update(name.encode())
            digest.update(str(form_of(self.vectors, name)[1]).encode())
            slabs, crc = map(np.ascontiguousarray, slabs_of(self.vectors, name)), 0
            for slab in slabs:
                if version == 1:
                    digest.update(slab)  # type: ignore[arg-type]
                crc = zlib.crc32(slab, crc)  # type: ignore[arg-type]
            digest.update(b"" if version == 1 else b"%08x" % crc)
        digest.update(json.dumps(self.attributes, sort_keys=True).encode())
        if self.joined is not None:
            digest.update(self.joined.described().encode())
        return digest.hexdigest()

    @property
    def _inline(self) -> list[str]:
        return [name for name in self.vectors if self.joined is None or name not in self.joined.forms]

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError if there is no room; an older file of that name is then unchanged."""
        large = sum(math.prod(form_of(self.vectors, name)[0]) for name in self._inline) >= LARGE
        with (
            joining_file(path) if self.joined else new_file(path) as file,
            computed_beside(self.digest, large) as checksum,
        ):
            for name in self._inline:
                shape, dtype = form_of(self.vectors, name)
                if isinstance(self.vectors, Stored):
                    dataset, start = file.create_dataset(name, shape, dtype), 0
                    for slab in slabs_of(self.vectors, name):
                        dataset[start : start + len(slab)] = slab
                        start += len(slab)
                else:
                    file[name] = self.vectors[name]
            if self.joined is not None:
                self.joined.join(file)
            file.attrs["format"] = "hpcdl checkpoint"
            file.attrs["version"] = VERSION
            file.attrs["attributes"] = json.dumps(self.attributes, sort_keys=True)
            file.attrs["checksum"] = checksum()

    @classmethod
    def read(cls, path: Path, pieces: bool = True) -> "Checkpoint":
        """Read a checkpoint, its vectors on access. Raises UsageError, one line, if the file is missing, damaged, cut
        off or no checkpoint. pieces: True to read the pieces, too, and detect damage."""
        path = Path(path)
        if os.path.isdir(path):  # unlike Path.is_dir, also where a folder above may not be searched
            path = path / "checkpoint.h5"
        if not os.path.isfile(path):
            raise UsageError(f"there is no checkpoint {path}")
        with blamed_on(f"{path} is damaged or cut off; {other_checkpoints(path)}", Damaged):
            return cls._read(path, pieces)

    @classmethod
    def _read(cls, path: Path, pieces: bool) -> "Checkpoint":
        forms: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        joins = joins_pieces(path)  # checked before HDF5 opens it
        with h5py.File(path, "r") as file:
            if file.attrs.get("format") != "hpcdl checkpoint":
                raise UsageError(f"{path} is not a checkpoint of hpcdl")
            if file.attrs["version"] not in READ:
                known = " and ".join(map(str, READ))
                raise UsageError(f"{path} is of format version {file.attrs['version']}; this program reads {known}")
            attributes, checksum = parse_json(file.attrs["attributes"]), file.attrs["checksum"]
            joined = JoinedPieces.read(file) if joins else None

            def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
                if isinstance(item, h5py.Dataset):
                    if item.dtype.kind not in "biuf" or item.shape is None:
                        raise ValueError(f"{name} holds no numbers")
                    refuse_elsewhere(name, item, joined is not None)
                    if not item.is_virtual and item.id.get_storage_size() < item.nbytes:  # a few bytes that claim much
                        refuse_beyond(f"{path}: {name}", item.nbytes, available())
                    forms[name] = item.shape, item.dtype

            file.visititems(visit)
            checkpoint = cls(Stored(path, forms, joined), attributes, joined)
            if problem := next(filter(None, checkpoint.problems(False)), ""):
                raise ValueError(problem)
            if checkpoint.digest(file.attrs["version"]) != checksum:
                raise ValueError("its checksum does not fit its contents")
        if pieces and (problem := next(filter(None, checkpoint.problems(True)), "")):
            raise ValueError(problem)
        return checkpoint

    def problems(self, contents: bool, first: int = 0, step: int = 1) -> Iterator[str]:
        """Yield the fault, or "", of every step-th piece from `first` on. contents: True to read the pieces, too."""
        if self.joined is not None:
            assert isinstance(self.vectors, Stored)
            for piece in self.joined.pieces[first::step]:
                folder = self.vectors.path.parent
                yield problem_of(folder, piece, contents) or (foreign_content(folder, piece) if contents else "")


class Stored(Mapping[str, np.ndarray]):
    """Vectors of a checkpoint file, read on access. Reading raises Damaged if the file or a piece has been replaced."""

    def __init__(self, path: Path, forms: dict[str, tuple[tuple[int, ...], np.dtype]], joined: JoinedPieces | None):
        self.path, self.forms, self.joined = Path(os.path.abspath(path)), forms, joined
        self.was = self._now()

    def _now(self) -> tuple[int, int, int]:
        """Return the file's identity, which changes if another file takes its name."""
        status = os.stat(self.path)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    def __getitem__(self, name: str) -> np.ndarray:
        shape, dtype = self.forms[name]
        refuse_beyond(f"{self.path}: {name}", int(np.prod(shape, dtype=object)) * dtype.itemsize, available())
        with self.opened() as file:
            return file[name][()]  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def opened(self) -> Iterator[h5py.File]:
        """Context with the opened file. HDF5 reads zeros for a missing piece, so pieces are checked afterwards."""
        with blamed_on(f"{self.path} cannot be read", Damaged), h5py.File(self.path, "r") as file:
            yield file
            if not self.visible():
                raise ValueError("the file, or a piece of it, has been replaced meanwhile")

    def visible(self) -> bool:
        """True if this process sees the file and all of its pieces unchanged."""
        with contextlib.suppress(OSError):
            pieces = self.joined.pieces if self.joined else []
            return self._now() == self.was and not any(problem_of(self.path.parent, each, False) for each in pieces)
        return False


@contextlib.contextmanager
def computed_beside(compute: Callable[[], str], large: bool) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the result of `compute`, which runs in a thread beside the body if `large`. Small
    results need no thread: with hardly any memory left, Python may wait for ever for a thread that could not start."""
    with ThreadPoolExecutor(1) if large else contextlib.nullcontext() as pool:
        yield pool.submit(compute).result if pool else compute


def form_of(vectors: Mapping[str, np.ndarray], name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of a checkpoint's vector without reading it."""
    return vectors.forms[name] if isinstance(vectors, Stored) else (vectors[name].shape, vectors[name].dtype)


def slabs_of(vectors: Mapping[str, np.ndarray], name: str) -> Iterator[np.ndarray]:
    """Yield a vector in parts along its first axis, of about SLAB_BYTES if it is on disk."""
    if not isinstance(vectors, Stored) or not vectors.forms[name][0]:
        yield vectors[name]
        return
    with vectors.opened() as file:
        dataset = file[name]
        rows = max(1, SLAB_BYTES * len(dataset) // max(1, dataset.nbytes))
        for start in range(0, len(dataset), rows):
            yield dataset[start : start + rows]


def older_of(folder: Path) -> list[Path]:
    """Return the files with names of older checkpoints, the latest first."""
    return sorted((each for each in folder.iterdir() if OLDER.fullmatch(each.name)), reverse=True)


def other_checkpoints(path: Path) -> str:
    """Return the advice of a message on a damaged checkpoint: the other checkpoints in its folder, newest first."""
    with contextlib.suppress(OSError):
        candidates = [*older_of(path.parent), path.with_name("best.h5")]
        if existing := [str(each) for each in candidates if each != path and each.exists()]:
            return f"take {' or '.join(existing)} instead"
    return "there is no older checkpoint beside it"


def rotate(folder: Path, keep: int, checkpoint: Checkpoint, previous: int | None, same: Path | None = None) -> None:
    """Write checkpoint.h5, and keep `keep - 1` older ones as checkpoint-STEP.h5. previous: step of the replaced one.
    same: a file with the same contents to link; None: write one. A complete checkpoint.h5 exists at all times."""
    last = folder / "checkpoint.h5"
    if previous is not None and keep > 1 and last.exists():
        link(last, folder / f"checkpoint-{previous:09d}.h5")
    if same is None:
        checkpoint.write(last)
    else:
        link(same, last)
    older = {int(name[1]): path for path in folder.iterdir() if (name := OLDER.fullmatch(path.name))}
    for step in sorted(older)[: max(0, len(older) - (keep - 1))]:
        older[step].unlink()
    sweep(folder)


def link(source: Path, target: Path) -> None:
    """Give a checkpoint a second name, replacing a file there; in another folder, its pieces are linked, too."""
    if source.parent.resolve() != target.parent.resolve():
        link_pieces(source, target.parent)
    hard_link(source, target)


def link_pieces(source: Path, folder: Path) -> None:
    """Link the pieces of a checkpoint into another folder."""
    for name in files_of(source) or ():
        if not (folder / FOLDER / name).exists() and (source.parent / FOLDER / name).exists():
            (folder / FOLDER).mkdir(exist_ok=True)
            hard_link(source.parent / FOLDER / name, folder / FOLDER / name)


def hard_link(source: Path, target: Path) -> None:
    """Create a hard link, or a copy on file systems without links."""
    temporary = temporary_name(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        with atomic_path(target) as copied:
            shutil.copyfile(source, copied)
        return
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # rename does nothing if both are the same file


def move(paths: Iterable[Path], folder: Path) -> None:
    """Move checkpoints, with their pieces, to another folder, where they replace files of the same names."""
    for each in paths:
        link_pieces(each, folder)
        os.replace(each, folder / each.name)


def pack(source: Path, target: Path) -> Checkpoint:
    """Write a checkpoint in pieces as one file (`target` may be the same), slab by slab; return the new checkpoint.
    Raises UsageError if a piece is damaged, OSError if there is no room."""
    checkpoint = Checkpoint.read(source)
    Checkpoint(checkpoint.vectors, checkpoint.attributes).write(target)
    return Checkpoint.read(target)


def checkpoints_of(path: Path) -> list[Path]:
    """Return the checkpoint files of a run's folder, the last one first; [path] for a file. UsageError if none."""
    if not os.path.isdir(path):
        if not os.path.isfile(path):
            raise UsageError(f"there is no file or folder {path}")
        return [path]
    candidates = path / "checkpoint.h5", *older_of(path), path / "best.h5"
    paths = [each for each in candidates if os.path.isfile(each)]
    if not paths:
        raise UsageError(f"there is no checkpoint in {path}")
    return paths
