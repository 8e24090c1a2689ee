"""The file system of a folder, by the mount points."""

import os


def file_system(folder: str | os.PathLike[str], mounts: str = "/proc/mounts") -> str:
    """Return the type of the file system at a folder's longest mount point, the latest of equal ones; "" if unknown."""
    longest, kind, path = "", "", os.path.realpath(folder)
    try:
        with open(mounts) as file:
            lines = [line.split() for line in file]
    except OSError:
        return ""
    for line in lines:
        place = line[1].encode().decode("unicode_escape").encode("latin-1").decode()  # a space is escaped as \040
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(longest):
            longest, kind = place, line[2]
    return kind
