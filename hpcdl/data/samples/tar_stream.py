"""Tars read as streams: members come in order, nothing is extracted, and a tar that ends early is refused.

tarfile takes a damaged header, and an end without the block of zeros that ends a tar, for the end. So the block that it
has read last is checked."""

import glob
import gzip
import os
import re
import tarfile
from collections.abc import Collection, Iterator
from typing import IO, Any

from hpcdl.data.hdf5 import shown
from hpcdl.errors import UsageError, blamed_on

MOST_BYTES = 256 << 20  # of a member that is read
SERIES = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", re.DOTALL)
BLOCK = 1 << 20


class ForwardFile:
    """A file that tarfile reads forwards. last: what it has read last."""

    def __init__(self, file: IO[bytes]):
        self.file, self.tell, self.seek, self.last = file, file.tell, file.seek, b""

    def read(self, size: int) -> bytes:
        if size > MOST_BYTES:
            raise ValueError(f"a member has {size:,} bytes; {MOST_BYTES:,} are the most")
        self.last = self.file.read(size)
        return self.last


def tar_members(path: str, wanted: Any) -> Iterator[tuple[str, bytes | None]]:
    """Yield (name, content) of the files in a tar, gzipped or not, in order. content: None unless wanted(name).
    UsageError for a tar that is damaged, cut off or followed by other bytes, and for links and devices."""
    with blamed_on(f"{path} cannot be read"):
        with open(path, "rb") as file:
            opened: Any = gzip.open if file.read(2) == b"\x1f\x8b" else open
        source = opened(path, "rb")
    with source, blamed_on(f"{path} is no tar, or is cut off or damaged"):
        stream = ForwardFile(source)
        with tarfile.TarFile.open(fileobj=stream, mode="r:", encoding="utf-8") as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                tar.members.clear()  # else it keeps all
                if member.isdir():
                    continue
                if not member.isreg():
                    raise UsageError(f"{path}: the member {shown(member.name)} is no file, but a link or a device")
                content = None
                if wanted(member.name):
                    content = _content(tar, member)
                yield member.name, content
        if stream.last.strip(b"\0") or len(stream.last) < tarfile.BLOCKSIZE:
            raise UsageError(f"{path} is cut off or damaged: it has no end behind its last file")
        while rest := source.read(BLOCK):  # of a gzipped one this checks the checksum
            if rest.strip(b"\0"):
                raise UsageError(f"{path} goes on behind its end; give tars that are joined one by one")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > MOST_BYTES:  # of a sparse file, which takes no space in the tar
        raise ValueError(f"a member has {member.size:,} bytes; {MOST_BYTES:,} are the most")
    file = tar.extractfile(member)
    content = file.read() if file else b""
    if len(content) < member.size:
        raise EOFError("it ends in a file")
    return content


def tar_samples(path: str, wanted: Collection[str]) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """Yield (key, content by suffix) of each sample. Suffixes are in small letters, contents None unless wanted.
    Hidden files and names without a dot belong to no sample. UsageError as of `tar_members`, and for keys and suffixes
    that come again."""
    last, files, keys = None, dict[str, bytes | None](), set[str]()
    for name, content in tar_members(path, lambda name: (parts := _parts(name)) is not None and parts[1] in wanted):
        if (parts := _parts(name)) is None:
            continue
        key, suffix = parts
        if key != last:
            if last is not None:
                yield last, files
            if key in keys:
                raise UsageError(f"{path}: the files of the sample {shown(key)} do not follow one another")
            keys.add(key)
            last, files = key, {}
        if suffix in files:
            raise UsageError(f"{path}: the sample {shown(key)} has two files .{suffix}")
        files[suffix] = content
    if last is not None:
        yield last, files


def _parts(name: str) -> tuple[str, str] | None:
    """Return (key, suffix) of a member; None if it belongs to no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem and dot else None


def tar_paths(pattern: str) -> Iterator[str]:
    """Yield the paths of a series, as a-{000..010}.tar, of a pattern, as *.tar, or of one tar. UsageError: no tar."""
    series = SERIES.fullmatch(pattern)
    if series and not os.path.exists(pattern):
        before, first, last, after = series.groups()
        if int(first) > int(last):
            raise UsageError(f"{shown(pattern, 200)}: a series begins with its smallest number, as in {{000..010}}")
        for number in range(int(first), int(last) + 1):
            yield from tar_paths(f"{before}{number:0{len(first)}d}{after}")
        return
    with blamed_on(f"{shown(pattern, 200)} cannot be read"):
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    if not paths:
        raise UsageError(f"{shown(pattern, 200)} does not exist")
    for path in paths:
        if os.path.isdir(path):
            raise UsageError(f"{path} is a folder; give its tars, as '{path.rstrip('/')}/*.tar'")
        yield path
