"""Whether the vectors of a checkpoint lie where it says, and in no file that is not a checkpoint's.

HDF5 lets a data set have its elements in any other file, by name (external storage, virtual data sets, links), and then
a checkpoint that came from elsewhere would read a file of yours as parameters. So vectors lie in the file itself, or,
as virtual data sets, in pieces beside it with names that pieces have (shards.py), and those in the piece itself.
"""

from pathlib import Path
from typing import Any

import h5py

from hpcdl.checkpoint.shards import FOLDER, WrittenShard, extents
from hpcdl.errors import reason


def refuse_elsewhere(name: str, item: Any, joins: bool) -> None:
    """Raise ValueError where a data set has its elements in other files; joins: virtual ones were looked at before."""
    if item.external or (item.is_virtual and not joins):
        raise ValueError(f"{name} lies in other files")


def strange(folder: Path, piece: WrittenShard) -> str:
    """What a piece holds that no rank has written there, in words that name its file; "" where nothing."""
    path = folder / FOLDER / piece.file
    try:
        with h5py.File(path, "r") as file:
            for name, rows in piece.rows.items():
                if problem := _strange(file, name, extents(rows)[piece.file]):
                    return f"its piece {path} is none: {name} {problem}"
    except Exception as error:  # whatever h5py raises
        return f"its piece {path} cannot be read: {reason(error)}"
    return ""


def _strange(file: h5py.File, name: str, size: int) -> str:
    at: Any = file
    for part in name.split("/"):
        link = at.get(part, getlink=True) if isinstance(at, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            return "is not there" if link is None else "lies in other files"
        at = at[part]
    if not isinstance(at, h5py.Dataset) or at.dtype.kind not in "biuf" or at.shape != (size,):
        return f"should be {size} numbers"
    return "lies in other files" if at.external or at.is_virtual else ""
