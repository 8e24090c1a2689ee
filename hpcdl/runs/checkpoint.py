"""Checkpoints: one HDF5 file with the whole state of a run, from which any number of ranks can go on.

    parameters            the flat vector, in the order of the layout
    optimizer/NAME        each of the optimizer's vectors
    ranks/NAME            what belongs to a rank, one row for each (these need the same number of ranks)
    attributes            model, layout, data, step, position, ... as one JSON text, and a checksum of all of it

A checkpoint is written under a temporary name, synced and renamed, so that under its own name there is never half of
one. The checksum (BLAKE2 over the names, bytes and attributes) tells a damaged one.
"""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpcdl.data.format import new_file
from hpcdl.errors import UsageError, blamed_on, refuse_beyond
from hpcdl.memory import available

VERSION = 1
OLDER = re.compile(r"checkpoint-([0-9]{9,})\.h5")  # as `rotate` names them; what users name otherwise is theirs


@dataclass
class Checkpoint:
    """What a checkpoint file holds: named vectors, and attributes that JSON can express."""

    vectors: dict[str, np.ndarray]
    attributes: dict

    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self.vectors):
            digest.update(name.encode())
            digest.update(str(self.vectors[name].dtype).encode())
            digest.update(np.ascontiguousarray(self.vectors[name]))  # type: ignore[arg-type]
        digest.update(json.dumps(self.attributes, sort_keys=True).encode())
        return digest.hexdigest()

    def write(self, path: Path) -> None:
        """Raises OSError where there is no room; what stood under that name is then as it was."""
        with new_file(path) as file:
            for name, vector in self.vectors.items():
                file[name] = vector
            file.attrs["format"] = "hpcdl checkpoint"
            file.attrs["version"] = VERSION
            file.attrs["attributes"] = json.dumps(self.attributes, sort_keys=True)
            file.attrs["checksum"] = self.digest()

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Raises UsageError, one line, when the file is missing, damaged, cut off or something else."""
        path = Path(path)
        if os.path.isdir(path):  # unlike Path.is_dir, also where a folder above may not be searched
            path = path / "checkpoint.h5"
        if not os.path.isfile(path):
            raise UsageError(f"there is no checkpoint {path}")
        vectors: dict[str, np.ndarray] = {}
        with blamed_on(f"{path} is damaged or cut off; {others(path)}"), h5py.File(path, "r") as file:
            if file.attrs.get("format") != "hpcdl checkpoint":
                raise UsageError(f"{path} is not a checkpoint of hpcdl")
            if file.attrs["version"] != VERSION:
                raise UsageError(f"{path} is of format version {file.attrs['version']}; this program reads {VERSION}")
            attributes, checksum = json.loads(file.attrs["attributes"]), file.attrs["checksum"]

            def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
                if isinstance(item, h5py.Dataset):
                    if item.dtype.kind not in "biuf" or item.shape is None:
                        raise ValueError(f"{name} holds no numbers")
                    refuse_beyond(f"{path}: {name}", item.nbytes, available())
                    vectors[name] = item[()]

            file.visititems(visit)
            found = cls(vectors, attributes)
            if found.digest() != checksum:
                raise ValueError("its checksum does not fit its contents")
        return found


def others(path: Path) -> str:
    """What a message on a damaged checkpoint says of others that lie beside it, the newest first."""
    with contextlib.suppress(OSError):
        names = sorted((each.name for each in path.parent.iterdir() if OLDER.fullmatch(each.name)), reverse=True)
        wanted = [path.with_name(name) for name in [*names, "best.h5"] if name != path.name]
        if there := [str(each) for each in wanted if each.exists()]:
            return f"take {' or '.join(there)} instead"
    return "there is no older checkpoint beside it"


def rotate(folder: Path, keep: int, checkpoint: Checkpoint, previous: int | None) -> None:
    """Write `checkpoint.h5`, and keep `keep - 1` older ones as checkpoint-STEP.h5; `previous` is the last one's step.

    The last one gets its second name by a hard link, so that at each moment there is a whole checkpoint.h5.
    """
    last = folder / "checkpoint.h5"
    if previous is not None and keep > 1 and last.exists():
        link(last, folder / f"checkpoint-{previous:09d}.h5")
    checkpoint.write(last)
    older = {int(name[1]): path for path in folder.iterdir() if (name := OLDER.fullmatch(path.name))}
    for step in sorted(older)[: max(0, len(older) - (keep - 1))]:
        older[step].unlink()


def link(source: Path, target: Path) -> None:
    """Give the file a second name, replacing what bore that name."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)
    os.link(source, temporary)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # rename does nothing when both are the same file already
