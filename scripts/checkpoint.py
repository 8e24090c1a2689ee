"""Look at checkpoints, verify them, make one file of one that lies in pieces: python scripts/checkpoint.py pack runs/a

    checkpoint.py show RUN       step, strategy, model; the vectors with their shapes, types and bytes; the pieces
    checkpoint.py verify RUN     read all of each checkpoint, its pieces too; exit status 1 where one is damaged
    checkpoint.py pack RUN       in the place of its pieces one file, or as --out FILE.h5, and the pieces stay

RUN is a run's folder, then all checkpoints in it are meant (with --out the last one), or a checkpoint file. Nothing is
held in memory but 8 MiB of it. One process is enough; MPI is not needed.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hpcdl.checkpoint.checkpoint_file import Checkpoint, Damaged, Stored, checkpoints_of, link, pack
from hpcdl.checkpoint.shards import sweep
from hpcdl.errors import UsageError, blamed_on, line
from hpcdl.files import check_writable
from hpcdl.formatting import counted
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.runs.folder import Folder
from hpcdl.runs.options import option


@dataclass
class CheckpointOptions:
    """What is done with which checkpoint."""

    action: Literal["show", "verify", "pack"] = option(..., "show, verify or pack")
    run: str = option(..., "a run's folder, or a checkpoint file")
    out: str = option("", "of pack: a file for the last checkpoint, instead of the place of its pieces")
    force: bool = option(False, "replace --out where it exists")

    def __post_init__(self):
        if self.out and self.action != "pack":
            raise UsageError(f"--out is where pack writes; {self.action} writes nothing")


def main(arguments=None):
    """Do one of the three."""
    with one_process("checkpoint"):
        options = parse(CheckpointOptions, "checkpoint", __doc__, arguments)
        good = {"show": show, "verify": verify, "pack": pack_all}[options.action](options)
        sys.exit(0 if good else 1)


def show(options):
    """What each checkpoint holds; their contents are not read."""
    for path in checkpoints_of(Path(options.run)):
        found = Checkpoint.read(path, pieces=False)
        print(line(f"{path}: {about(found)}"))
        for name, (shape, dtype) in found.vectors.forms.items():
            size = int(np.prod(shape)) * dtype.itemsize
            print(line(f"    {name:30} {' x '.join(map(str, shape)):>14} {dtype!s:8} {size:>16,} bytes"))
        for piece in found.joined.pieces if found.joined else []:
            rows = counted(sum(map(len, piece.rows.values())), "hyperslab")
            print(line(f"    pieces/{piece.file} {piece.bytes:>16,} bytes, {rows}"))
    return True


def verify(options):
    """Whether all are whole; a line for each."""
    good = True
    for path in checkpoints_of(Path(options.run)):
        try:
            print(line(f"{path}: {about(Checkpoint.read(path))}: good"), flush=True)
        except Damaged as error:
            good = False
            print(line(error), flush=True)
    return good


def pack_all(options):
    """Make one file of each, and remove the pieces that none needs any more."""
    sources = checkpoints_of(Path(options.run))
    if options.out:
        out = Path(options.out)
        if out.exists() and not options.force:
            raise UsageError(f"--out {out} exists; give another name, or --force to replace it")
        with blamed_on(f"--out {out} cannot be written"):
            check_writable(out)
            print(line(f"{out}: {about(pack(sources[0], out))}"))
        return True
    folder = Folder(sources[0].parent, 0)
    folder.claim()
    packed = {}  # files that are one file with several names stay that
    try:
        for path in sources:
            with blamed_on(f"{path} cannot be packed"):
                which = os.stat(path).st_ino
                if which in packed:
                    link(packed[which], path)
                elif Checkpoint.read(path, pieces=False).joined is None:
                    print(line(f"{path}: one file already"), flush=True)
                else:
                    print(line(f"{path}: {about(pack(path, path))}"), flush=True)
                packed.setdefault(which, path)
        sweep(sources[0].parent)
    finally:
        folder.close()
    return True


def about(found):
    """A checkpoint in a few words."""
    assert isinstance(found.vectors, Stored)
    size = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in found.vectors.forms.values())
    where = f"in {counted(len(found.joined.pieces), 'piece')}" if found.joined else "in one file"
    said = [str(found.attributes.get(name, "?")) for name in ("strategy", "model")]
    return f"step {found.attributes.get('step', '?')} of {', '.join(said)}, {size:,} bytes {where}"


if __name__ == "__main__":
    main()
