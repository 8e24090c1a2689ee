"""Checks that the vectors of a checkpoint lie in the checkpoint file itself, or in its own pieces (shards.py).
HDF5 lets a data set have its elements in any other file, by name (external storage, virtual data sets, links): a
foreign checkpoint could then read a user's file as parameters."""

from pathlib import Path
from typing import Any

import h5py

from hpcdl.checkpoint.shards import FOLDER, WrittenShard, extents
from hpcdl.errors import reason


def refuse_elsewhere(name: str, item: Any, joins: bool) -> None:
    """Raise ValueError if data set `item` lies in other files. joins: True if virtual data sets were checked before."""
    if item.external or (item.is_virtual and not joins):
        raise ValueError(f"{name} lies in other files")


def foreign_content(folder: Path, piece: WrittenShard) -> str:
    """Return a text on content of a piece that no rank has written; "" if ranks have written all of it."""
    path = folder / FOLDER / piece.file
    try:
        with h5py.File(path, "r") as file:
            for name, rows in piece.rows.items():
                if problem := _foreign_content(file, name, extents(rows)[piece.file]):
                    return f"its piece {path} is not as a rank writes it: {name} {problem}"
    except Exception as error:  # of any type
        return f"its piece {path} cannot be read: {reason(error)}"
    return ""


def _foreign_content(file: h5py.File, name: str, size: int) -> str:
    item: Any = file
    for part in name.split("/"):
        link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            return "is missing" if link is None else "lies in other files"
        item = item[part]
    if not isinstance(item, h5py.Dataset) or item.dtype.kind not in "biuf" or item.shape != (size,):
        return f"should be {size} numbers"
    return "lies in other files" if item.external or item.is_virtual else ""
