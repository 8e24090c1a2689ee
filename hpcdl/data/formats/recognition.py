"""Recognition of files by their first bytes and their names."""

import os
import stat

from hpcdl.data.hdf5 import shown
from hpcdl.data.shards import is_folder
from hpcdl.errors import UsageError, blamed_on

ARROW = (b"PAR1", b"PARE", b"ARROW1", b"FEA1", b"\xff\xff\xff\xff")  # Parquet, Arrow, Feather, a stream of Arrow
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson")
LIBSVM = (".svm", ".libsvm", ".svmlight")


def format_of(path: str) -> str:
    """Return hdf5 (also of shards), npz, libsvm, table, idx, gzip or unknown (csv or libsvm's text). UsageError: it is
    neither a regular file nor a folder of shards."""
    with blamed_on(f"{shown(path, 200)} cannot be read"):
        mode = os.stat(path).st_mode
        if is_folder(path):
            return "hdf5"
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "no file that can be read twice"
            raise UsageError(f"{path} is {what}; give a file: csv, Parquet, Arrow, npz, idx, libsvm or HDF5")
        with open(path, "rb") as file:
            start = file.read(8)
    name = path.lower()
    if start.startswith(b"\x89HDF"):
        return "hdf5"
    if start.startswith(b"PK"):
        return "npz"
    if name.removesuffix(".gz").endswith(LIBSVM):
        return "libsvm"
    if start.startswith(b"\0\0"):
        return "idx"
    if name.removesuffix(".gz").removesuffix(".zst").endswith(TABLES) or start.startswith(ARROW):
        return "table"
    return "gzip" if start.startswith(b"\x1f\x8b") else "unknown"
