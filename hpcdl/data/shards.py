"""A folder of shards: a data set in several files, which programs take in the place of one file.

    OUT/index.json          what the data set is, and of each shard: rows by group, bytes, CRC-32 of the file, digest
    OUT/00000.h5, ...       each a data file by itself (format.py); a shard may lack a group

The digest of the folder is BLAKE2 over the digests of its shards in order. The index is written last: a folder with an
index is complete."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import h5py

from hpcdl.errors import UsageError
from hpcdl.files import atomic_write, crc_of

INDEX = "index.json"
VERSION = 1  # of the index
SHARD_SIZE = 256 << 20  # bytes of a shard, by default
SHARD_NAME = re.compile(r"[0-9]{5,}\.h5")
GROUPS = ("train", "test", "rows")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard, as the index describes it. rows, elements (sparse rows only): by group. checksum: CRC-32 of the file."""

    file: str
    rows: dict[str, int]
    elements: dict[str, int]
    bytes: int
    checksum: str
    digest: str


SHARD_FIELDS = [field.name for field in dataclasses.fields(Shard)]


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file as 8 hexadecimal digits. Raises OSError."""
    return f"{crc_of(path):08x}"


def columns_of(file: h5py.File) -> dict[str, list]:
    """Return [type, shape of a row] of each data set in the groups of a data file, by name (as "train/x")."""
    columns: dict[str, list] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.split("/")[0] in GROUPS:
            columns[name] = [item.dtype.str, list(item.shape[1:])]

    file.visititems(visit)
    return columns


def write_index(folder: Path, about: dict[str, Any], shards: list[Shard]) -> None:
    """Write the index of a folder. about: the entries beside version and shards. Raises OSError."""
    entries = {"schema_version": VERSION, **about, "shards": [dataclasses.asdict(shard) for shard in shards]}
    with atomic_write(folder / INDEX) as file:
        file.write(json.dumps(entries, indent=1).encode() + b"\n")


def is_ours(name: str) -> bool:
    """True for the name of a file that a folder of shards holds, also while it is being written."""
    return bool(re.fullmatch(r"[0-9]{5,}\.(h5|json)|index\.json|recipe\.json|\..*\.part", name))


def refuse_replacing(folder: Path, force: bool) -> None:
    """Raise UsageError unless the folder is empty, or a folder of shards that `force` allows to replace."""
    names = [each.name for each in folder.iterdir()]
    strange = next((name for name in sorted(names) if not is_ours(name)), None)
    if strange is not None or (names and INDEX not in names):
        what = f"holds {strange!r}" if strange is not None else f"has no {INDEX}"
        raise UsageError(f"the folder {folder} exists, and is no folder of shards: it {what}; choose another name")
    if names and not force:
        raise UsageError(f"{folder} exists already; choose another name, or --force to replace it")
