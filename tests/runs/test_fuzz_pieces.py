"""Whatever is changed in a checkpoint of pieces: it is refused by one line, or holds what was saved; no other file is.

The changes are those that a program could make that writes such files: checksums are right again, but for some."""

import contextlib
import json
import zlib

import h5py
import numpy as np
import pytest
from fuzz import cases, damage, small_run
from hypothesis import given
from hypothesis import strategies as st
from in_process import assert_ends
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.checkpoint.shards import BLOCK, FOLDER, SEAL, JoinedPieces, Portion, crc_of, name_of_piece, seal, write_piece
from hpcdl.errors import UsageError
from hpcdl.models.layout import Hyperslab

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="one process stands for all ranks")
SECRET = 1234.5  # what another file holds
NAMES = ["../secret.h5", "/etc/passwd", "step-1.h5", "", "step-000000003-00000000-rank-0001.h5/..", "é\0", 7, None]
NUMBERS = [-1, 0, 1, 2**62, 1e300, "x", None, [1]]
WHERE, BITS = st.floats(0, 1, exclude_max=True), st.integers(1, 255)
LIES = ["external", "virtual", "link", "soft", "shorter", "longer", "text", "group", "none", "integers", "not finite"]
NUMBERS_ARE_OTHERS = {"shorter", "longer", "integers", "not finite"}  # a checkpoint of other numbers is a checkpoint
IN_PIECE = st.tuples(st.just("piece"), st.integers(0, 1), st.sampled_from(LIES))
IN_WHOLE = st.tuples(st.just("whole"), st.just(0), st.sampled_from(LIES[:9]))
IN_LIST = st.tuples(st.just("list"), st.integers(0, 2), st.sampled_from([*NAMES, *NUMBERS]))
IN_MAP = st.tuples(st.just("map"), st.sampled_from([*NAMES[:5], "pieces/../../secret.h5"]), st.just(0))
BYTE = st.tuples(st.sampled_from(["byte", "byte of a piece"]), WHERE, BITS)
CUT = st.tuples(st.sampled_from(["cut", "cut of a piece"]), WHERE, st.just(0))
GONE = st.tuples(st.just("gone"), st.integers(0, 1), st.just(0))


def pieces_of(folder):
    return sorted((folder / FOLDER).iterdir())


def joined(folder, found):
    """Write the vector of parameters as two pieces, and the rest as it was."""
    whole = found.vectors["parameters"]
    half, size, written = len(whole) // 2, len(whole), []
    for rank, at in enumerate((slice(0, half), slice(half, size))):
        length = at.stop - at.start
        portion = Portion(whole[at].copy(), [Hyperslab(0, at.start, 1, length, length)], size)
        written.append(write_piece(folder, name_of_piece(3, "0" * 8, rank), {"parameters": portion}))
    rest = {name: found.vectors[name] for name in found.vectors if name != "parameters"}
    checkpoint = Checkpoint(rest, found.attributes, JoinedPieces(written, {"parameters": (size, whole.dtype)}))
    checkpoint.write(folder / "checkpoint.h5")


def lie(path, how, folder):
    """Put something else in the place of the parameters in an HDF5 file."""
    secret = str(folder / "secret.h5")
    with h5py.File(path, "a", userblock_size=0 if FOLDER in str(path.parent) else BLOCK) as file:
        values = file["parameters"][()]
        values = np.where(values == SECRET, 0, values)  # read here, by an earlier change
        del file["parameters"]
        size = len(values)
        if how == "external":
            elsewhere = [(str(folder / "secret.raw"), 0, 4 * size)]
            file.create_dataset("parameters", (size,), values.dtype, external=elsewhere)
        elif how == "virtual":
            layout = h5py.VirtualLayout((size,), values.dtype)
            layout[:] = h5py.VirtualSource(secret, "secret", (size,))
            file.create_virtual_dataset("parameters", layout)
        elif how in ("link", "soft"):
            file["parameters"] = h5py.ExternalLink(secret, "/secret") if how == "link" else h5py.SoftLink("/else")
        elif how == "group":
            file.create_group("parameters")
        elif how != "none":
            made = {"shorter": values[:-1], "longer": np.append(values, SECRET), "text": values.astype("S3")}
            made |= {"integers": values.astype("i4"), "not finite": np.full_like(values, np.nan)}
            file["parameters"] = made[how]


def relist(path, change):
    """Change the list of the pieces."""
    with h5py.File(path, "a") as file:
        listed = json.loads(file.attrs[FOLDER])
        change(listed)
        file.attrs[FOLDER] = json.dumps(listed)


def plain(item):
    """Whether it is a data set that lies in no piece."""
    return isinstance(item, h5py.Dataset) and not item.is_virtual


def sign(path):
    """Set all checksums of the joining file anew, as a program would that means harm; where it can be read so."""
    with contextlib.suppress(Exception), h5py.File(path, "a") as file:
        held = JoinedPieces.read(file)
        vectors = {}
        file.visititems(lambda name, item: vectors.update({name: item[()]} if plain(item) else {}))
        found = Checkpoint(vectors, json.loads(file.attrs["attributes"]), held)
        file.attrs["checksum"] = found.digest()
    seal(path)


def change(folder, what, where, how):
    """Make one change; what h5py has none of, it leaves."""
    path, parts = folder / "checkpoint.h5", pieces_of(folder)
    if what == "piece":
        lie(parts[where], how, folder)
        told = parts[where].stat().st_size, crc_of(parts[where])
        relist(path, lambda listed: listed.__setitem__(where, [parts[where].name, *told]))
        sign(path)
    elif what == "whole":
        lie(path, how, folder)
        sign(path)
    elif what == "list":
        relist(path, lambda listed: listed[1].__setitem__(where, how))
        sign(path)
    elif what == "map":
        with h5py.File(path, "a") as file:
            if not isinstance(file.get("parameters"), h5py.Dataset):  # after another change
                return
            size, kind = len(file["parameters"]), file["parameters"].dtype
            del file["parameters"]
            layout = h5py.VirtualLayout((size,), kind)
            layout[:] = h5py.VirtualSource(where or "x", "parameters", (size,))
            file.create_virtual_dataset("parameters", layout)
        sign(path)
    elif what == "gone":
        parts[where].unlink()
    else:
        damage(parts[0] if "piece" in what else path, where, how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of three steps, and a file whose numbers are nobody's affair."""
    path = tmp_path_factory.mktemp("fuzz")
    small_run(path)
    with h5py.File(path / "a" / "secret.h5", "w") as file:
        file["secret"] = np.full(10_000, SECRET, "f4")
    np.full(10_000, SECRET, "f4").tofile(path / "a" / "secret.raw")
    return path


@pytest.fixture(scope="module")
def saved(folder):
    """What the run has saved, in memory."""
    found = Checkpoint.read(folder / "a")
    return Checkpoint(dict(found.vectors), found.attributes)


@given(st.lists(IN_PIECE | IN_WHOLE | IN_LIST | IN_MAP | BYTE | CUT | GONE, max_size=2))
@cases(100)
def check(folder, saved, changes):
    run = folder / "a"
    joined(run, saved)
    made, done = {how for _, _, how in changes if isinstance(how, str)}, 0
    for each in changes:
        try:
            change(run, *each)
        except (OSError, KeyError, RuntimeError, ValueError, TypeError, UnicodeError, IndexError, FileNotFoundError):
            break  # there is no such place any more
        done += 1
    try:
        found = Checkpoint.read(run).vectors.get("parameters", saved.vectors["parameters"])
        assert not (found == SECRET).any() or "longer" in made, "a file that is none of the checkpoint's was read"
        assert np.array_equal(found, saved.vectors["parameters"]) or made & NUMBERS_ARE_OTHERS, changes
    except UsageError as error:
        assert done and str(error).isprintable()
    read = assert_ends("evaluate", [str(run)])
    resumed = assert_ends("train_sequential", ["--resume", str(run), "--out", "none", "--steps", "4"])
    if not done:
        assert read == resumed == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_it_is_read_or_refused(folder, saved, monkeypatch):
    monkeypatch.chdir(folder)
    check(folder, saved)


@pytest.mark.parametrize("what, how", [("whole", "external"), *(("piece", how) for how in LIES[:3])])
def test_no_other_file_is_read_as_parameters(folder, saved, what, how):
    """Each checksum is right: only where the numbers lie is wrong."""
    run = folder / "a"
    joined(run, saved)
    before = (run / "checkpoint.h5").read_bytes()
    assert before.startswith(SEAL) and zlib.crc32(before[BLOCK:]) == crc_of(run / "checkpoint.h5", BLOCK)
    change(run, what, 0, how)
    with pytest.raises(UsageError, match="other files"):
        Checkpoint.read(run)
    joined(run, saved)
    assert np.array_equal(Checkpoint.read(run).vectors["parameters"], saved.vectors["parameters"])


def test_a_checkpoint_in_one_file_reads_no_other(folder, saved):
    """External storage, with the checksum of what lies there."""
    run, found = folder / "a", saved
    size = len(found.vectors["parameters"])
    forged = Checkpoint(dict(found.vectors) | {"parameters": np.full(size, SECRET, "f4")}, found.attributes)
    path = folder / "forged.h5"
    forged.write(path)
    with h5py.File(path, "a") as file:
        del file["parameters"]
        file.create_dataset("parameters", (size,), "f4", external=[(str(run / "secret.raw"), 0, 4 * size)])
    with pytest.raises(UsageError, match="other files"):
        Checkpoint.read(path)
