"""Show and verify checkpoints, join the pieces of one into one file: hpcdl checkpoint pack runs/a

    checkpoint.py show RUN       step, strategy, model; the vectors with their shapes, types and bytes; the pieces
    checkpoint.py verify RUN     read all of each checkpoint, its pieces too; exit status 1 if one is damaged
    checkpoint.py pack RUN       write one file in the place of the pieces; with --out FILE.h5 the pieces stay

RUN is a checkpoint file, or a run's folder, for all checkpoints in it (with --out for the last one). No more than 8 MiB
of a checkpoint are held in memory. One process is enough; MPI is not needed."""

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
    """Options of checkpoint: the action, and the checkpoints."""

    action: Literal["show", "verify", "pack"] = option(..., "show, verify or pack")
    run: str = option(..., "a run's folder, or a checkpoint file")
    out: str = option("", "with pack: the file to write the last checkpoint to; its pieces stay")
    force: bool = option(False, "replace the file of --out")

    def __post_init__(self):
        if self.out and self.action != "pack":
            raise UsageError(f"--out is an option of pack; {self.action} writes nothing")


def main(arguments=None):
    """Show, verify or pack checkpoints; exit with 1 if one is damaged."""
    with one_process("checkpoint"):
        options = parse(CheckpointOptions, "checkpoint", __doc__, arguments)
        good = {"show": show, "verify": verify, "pack": pack_all}[options.action](options)
        sys.exit(0 if good else 1)


def show(options):
    """Print what each checkpoint holds, without reading its vectors; return True."""
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
    """Read all checkpoints and print a line for each; return True if none is damaged."""
    good = True
    for path in checkpoints_of(Path(options.run)):
        try:
            print(line(f"{path}: {about(Checkpoint.read(path))}: good"), flush=True)
        except Damaged as error:
            good = False
            print(line(error), flush=True)
    return good


def pack_all(options):
    """Make one file of each checkpoint, and remove the pieces that no checkpoint needs any more; return True."""
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
    packed = {}  # packed files by inode: one file with several names stays one
    try:
        for path in sources:
            with blamed_on(f"{path} cannot be packed"):
                which = os.stat(path).st_ino
                if which in packed:
                    link(packed[which], path)
                elif Checkpoint.read(path, pieces=False).joined is None:
                    print(line(f"{path}: it is one file already"), flush=True)
                else:
                    print(line(f"{path}: {about(pack(path, path))}"), flush=True)
                packed.setdefault(which, path)
        sweep(sources[0].parent)
    finally:
        folder.close()
    return True


def about(found):
    """Return a description of a checkpoint in a few words."""
    assert isinstance(found.vectors, Stored)
    size = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in found.vectors.forms.values())
    where = f"in {counted(len(found.joined.pieces), 'piece')}" if found.joined else "in one file"
    said = [str(found.attributes.get(name, "?")) for name in ("strategy", "model")]
    return f"step {found.attributes.get('step', '?')} of {', '.join(said)}, {size:,} bytes {where}"


if __name__ == "__main__":
    main()
