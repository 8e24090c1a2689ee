"""Pieces of ranks read as whole vectors, by any cut, in little memory; whatever breaks, whenever a run dies."""

import os
import shutil
import tracemalloc

import h5py
import numpy as np
import pytest
from cut_vectors import CUTS, SIZE, cut
from mpi4py import MPI

from hpcdl.checkpoint import checkpoint_file, shards
from hpcdl.checkpoint.checkpoint_file import Checkpoint, link, move, pack, rotate
from hpcdl.checkpoint.shards import JoinedPieces, Portion, merged, name_of_piece, read_into, sweep, write_piece
from hpcdl.errors import UsageError
from hpcdl.files import Sink
from hpcdl.models.layout import Hyperslab

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="one process stands for all ranks")


def vectors(step):
    parameters = np.random.default_rng(step).standard_normal(SIZE)
    return {"parameters": parameters, "optimizer/first_moment": np.arange(SIZE, dtype="f4") * step}


def saved(folder, step, how="tensors", ranks=3, keep=1, previous=None, token=None):
    """A checkpoint of so many ranks, as they write it one after the other."""
    token = f"{step:08x}" if token is None else token
    written, forms = [], {name: (SIZE, vector.dtype) for name, vector in vectors(step).items()}
    for rank in range(ranks):
        own, numbers = cut(how, rank, ranks)
        spoken = [each for each, speaks in own if speaks]
        portions = {name: Portion(vector[numbers], spoken, SIZE) for name, vector in vectors(step).items()}
        written.append(write_piece(folder, name_of_piece(step, token, rank), portions))
    joined = JoinedPieces([each for each in written if each], forms)
    found = Checkpoint({"data/mean": np.arange(3.0)}, {"step": step}, joined)
    rotate(folder, keep, found, previous)
    return found


def holds(found, step):
    """Whether it is the checkpoint of this step, to the bit."""
    assert found.attributes["step"] == step and set(found.vectors) == {*vectors(step), "data/mean"}
    for name, vector in vectors(step).items():
        assert found.vectors[name].dtype == vector.dtype
        np.testing.assert_array_equal(found.vectors[name], vector)
    np.testing.assert_array_equal(found.vectors["data/mean"], np.arange(3.0))
    return True


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("how", [*CUTS, "chunks"])
def test_what_one_cut_has_written_any_program_and_any_other_cut_reads(how, ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SLAB", 40)  # bytes
    saved(tmp_path, 5, how, ranks)
    assert holds(Checkpoint.read(tmp_path), 5)
    with h5py.File(tmp_path / "checkpoint.h5") as file:
        np.testing.assert_array_equal(file["parameters"][()], vectors(5)["parameters"])
        part = file["optimizer/first_moment"][10:20]
        np.testing.assert_array_equal(part, vectors(5)["optimizer/first_moment"][10:20])
    found = Checkpoint.read(tmp_path)
    for other in [*CUTS, "chunks"]:
        for of in (1, 3):
            for rank in range(of):
                own, numbers = cut(other, rank, of)
                array = np.full(len(numbers), np.nan)
                with found.vectors.opened() as file:
                    assert read_into(file["parameters"], [each for each, _ in own], array)
                np.testing.assert_array_equal(array, vectors(5)["parameters"][numbers])


def test_what_is_not_finite_is_found_by_who_reads_it(tmp_path):
    w = np.array([1.0, 2.0, np.inf, 4.0])
    written = write_piece(tmp_path, name_of_piece(1, "00000000", 0), {"w": Portion(w, [Hyperslab(0, 0, 1, 4, 4)], 4)})
    Checkpoint({}, {"step": 1}, JoinedPieces([written], {"w": (4, w.dtype)})).write(tmp_path / "checkpoint.h5")
    with Checkpoint.read(tmp_path).vectors.opened() as file:
        assert read_into(file["w"], [Hyperslab(0, 0, 1, 2, 2)], np.empty(2))
        assert not read_into(file["w"], [Hyperslab(0, 1, 1, 2, 2)], np.empty(2))


def test_a_strided_piece_is_a_few_numbers_and_neighbours_are_one(tmp_path):
    adjacent = (0, 4, 1, 3, 9), (3, 7, 2, 2, 2), (7, 20, 1, 0, 1), (7, 11, 1, 1, 1)
    assert merged([Hyperslab(*each) for each in adjacent]) == [Hyperslab(0, 4, 1, 8, 8)]
    apart = [Hyperslab(0, 4, 2, 3, 9), Hyperslab(6, 16, 1, 3, 3)]
    assert merged(apart) == apart
    rows = 5000
    for blocks, start in ((1, rows), (rows, 1)):
        piece = Hyperslab(0, 0, blocks, rows // blocks, 2 * rows // blocks)
        halves = [{"w": Portion(np.zeros(rows), [piece._replace(start=at)], 2 * rows)} for at in (0, start)]
        names = [name_of_piece(1, f"{blocks:08x}", rank) for rank in range(2)]
        written = [write_piece(tmp_path, name, portions) for name, portions in zip(names, halves, strict=True)]
        assert [len(each.rows["w"]) for each in written] == [1, 1]
        Checkpoint({}, {}, JoinedPieces(written, {"w": (2 * rows, np.dtype("f8"))})).write(tmp_path / "checkpoint.h5")
        assert (tmp_path / "checkpoint.h5").stat().st_size < 20_000


def test_memory_is_that_of_a_slab_whatever_the_size(tmp_path, monkeypatch):
    """What numpy and Python allocate at most while a rank writes, reads, verifies and packs: never its part again."""
    monkeypatch.setattr(shards, "SLAB", 1 << 16)
    monkeypatch.setattr(checkpoint_file, "SLAB_BYTES", 1 << 16)
    n, most = 1 << 20, 4 * (1 << 16) + (1 << 18)  # 4 MiB a rank; some slabs, and what HDF5's objects take
    columns = [[Hyperslab(0, rank * 512, n // 512, 512, 1024)] for rank in range(2)]
    arrays = [np.random.default_rng(rank).standard_normal(n).astype("f4") for rank in range(2)]

    def peak(body):
        tracemalloc.start()
        try:
            result = body()
            return result, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    written = []
    for rank in range(2):
        portions = {"parameters": Portion(arrays[rank], columns[rank], 2 * n)}
        name = name_of_piece(1, "00000000", rank)
        result, used = peak(lambda portions=portions, name=name: write_piece(tmp_path, name, portions))
        written.append(result)
        assert used < most
    whole = Checkpoint({}, {"step": 1}, JoinedPieces(written, {"parameters": (2 * n, np.dtype("f4"))}))
    assert peak(lambda: whole.write(tmp_path / "checkpoint.h5"))[1] < most
    found, used = peak(lambda: Checkpoint.read(tmp_path))
    assert used < most
    into = np.empty(n, "f4")
    with found.vectors.opened() as file:
        assert peak(lambda: read_into(file["parameters"], [Hyperslab(0, n, 1, n, n)], into))[1] < most
    np.testing.assert_array_equal(into.reshape(-1, 2, 512)[:, 1], arrays[1][n // 2 :].reshape(-1, 512))
    packed, used = peak(lambda: pack(tmp_path / "checkpoint.h5", tmp_path / "one.h5"))
    assert used < most and packed.joined is None
    assert peak(lambda: Checkpoint.read(tmp_path).vectors["parameters"])[1] > 8 * n  # the measure sees what is whole


def test_packed_it_is_one_file_with_the_same_contents(tmp_path):
    saved(tmp_path, 5)
    with h5py.File(tmp_path / "checkpoint.h5") as file:
        attributes = file.attrs["attributes"]
    pack(tmp_path / "checkpoint.h5", tmp_path / "checkpoint.h5")
    shutil.rmtree(tmp_path / "pieces")
    assert holds(Checkpoint.read(tmp_path), 5)
    with h5py.File(tmp_path / "checkpoint.h5") as file:
        assert not any(file[name].is_virtual for name in vectors(5)) and file.attrs["attributes"] == attributes


# -- damage ----------------------------------------------------------------------------------------------------------


def refused(folder, words):
    with pytest.raises(checkpoint_file.Damaged, match=words) as caught:
        Checkpoint.read(folder)
    assert "\n" not in str(caught.value)


def test_any_broken_byte_of_a_piece_is_found_and_the_piece_is_named(tmp_path):
    saved(tmp_path, 5)
    for path in sorted((tmp_path / "pieces").iterdir()):
        whole = path.read_bytes()
        for place in {*range(0, len(whole), 307), len(whole) - 1}:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            refused(tmp_path, rf"its piece \S*{path.name} is damaged: the checksum does not fit")
        for length in (0, 100, len(whole) - 1):
            path.write_bytes(whole[:length])
            refused(tmp_path, rf"its piece \S*{path.name} is cut off: {length:,} bytes, not {len(whole):,}")
            with pytest.raises(checkpoint_file.Damaged, match="cut off"):
                Checkpoint.read(tmp_path, pieces=False)
        path.unlink()
        refused(tmp_path, rf"its piece \S*{path.name} is missing")
        path.write_bytes(whole)
    assert holds(Checkpoint.read(tmp_path), 5)


def test_any_broken_byte_of_the_file_that_joins_them_is_found(tmp_path):
    saved(tmp_path, 5)
    path = tmp_path / "checkpoint.h5"
    whole = path.read_bytes()
    for place in {*range(0, shards.BLOCK, 5), *range(0, len(whole), 101)}:  # HDF5 would end the process at some of them
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        refused(tmp_path, "damaged")
        assert shards.files_of(path) is None or place < len(shards.SEAL)


@pytest.mark.parametrize("name", ["../outside.h5", "/etc/passwd", "pieces/x.h5", "step-1-0-rank-0.h5", 7])
def test_a_list_that_names_other_files_is_refused(name, tmp_path):
    found = saved(tmp_path, 5)
    found.joined.pieces[0] = found.joined.pieces[0]._replace(file=name, rows={})
    with h5py.File(tmp_path / "checkpoint.h5", "a") as file:
        file.attrs["pieces"] = found.joined.listed()
    refused(tmp_path, "its checksum does not fit")
    shards.seal(tmp_path / "checkpoint.h5")
    refused(tmp_path, "its pieces have other names than hpcdl gives")


def test_virtual_data_of_anybody_else_are_refused(tmp_path):
    saved(tmp_path, 5)
    path = tmp_path / "checkpoint.h5"
    with h5py.File(path, "a") as file:
        other = h5py.VirtualLayout((SIZE,), "f8")
        other[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "parameters", (SIZE,))
        del file["parameters"]
        file.create_virtual_dataset("parameters", other)
    shards.seal(path)
    refused(tmp_path, "made of other files")
    path.write_bytes(path.read_bytes()[shards.BLOCK :])  # without the seal it is a file of HDF5 alone
    refused(tmp_path, "lies in other files")


def test_a_checkpoint_that_is_replaced_while_it_is_read_gives_no_zeros(tmp_path):
    saved(tmp_path, 5)
    found = Checkpoint.read(tmp_path)
    saved(tmp_path, 6, previous=5)
    with pytest.raises(UsageError, match="replaced meanwhile"):
        assert found.vectors["parameters"] is None
    found = Checkpoint.read(tmp_path)
    next((tmp_path / "pieces").iterdir()).unlink()
    with pytest.raises(UsageError, match="replaced meanwhile"):
        assert found.vectors["parameters"] is None


# -- which pieces stay -----------------------------------------------------------------------------------------------


def test_pieces_stay_as_long_as_a_checkpoint_of_the_folder_needs_them(tmp_path):
    for step in range(1, 6):
        saved(tmp_path, step, keep=3, previous=step - 1 or None)
        if step == 2:
            link(tmp_path / "checkpoint.h5", tmp_path / "best.h5")
        if step == 1:
            shutil.copy(tmp_path / "checkpoint.h5", tmp_path / "for-the-paper.h5")
    steps = {int(each.name[5:14]) for each in (tmp_path / "pieces").iterdir()}
    assert steps == {1, 2, 3, 4, 5}
    for name, step in {"for-the-paper": 1, "best": 2, "checkpoint-000000003": 3, "checkpoint": 5}.items():
        assert holds(Checkpoint.read(tmp_path / f"{name}.h5"), step)
    (tmp_path / "for-the-paper.h5").unlink()
    (tmp_path / "pieces" / "mine.h5").write_text("a user's")
    (tmp_path / "pieces" / f".{name_of_piece(9, '00000000', 1)}.77.part").write_text("of a run that was killed")
    saved(tmp_path, 6, keep=3, previous=5)
    names = {each.name for each in (tmp_path / "pieces").iterdir()}
    assert {int(each[5:14]) for each in names - {"mine.h5"}} == {2, 4, 5, 6} and "mine.h5" in names
    assert not [each for each in names if each.endswith(".part")]
    (tmp_path / "best.h5").write_bytes((tmp_path / "best.h5").read_bytes()[:3000])  # whose are pieces that it named?
    saved(tmp_path, 7, previous=6)
    assert {int(each.name[5:14]) for each in (tmp_path / "pieces").glob("step*")} == {2, 4, 5, 6, 7}
    (tmp_path / "best.h5").unlink()
    sweep(tmp_path)
    assert {int(each.name[5:14]) for each in (tmp_path / "pieces").glob("step*")} == {7}


def test_in_another_folder_a_checkpoint_has_its_pieces(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "later").mkdir()
    link(tmp_path / "checkpoint.h5", tmp_path / "later" / "best.h5")
    for step in (2, 3):
        saved(tmp_path, step, previous=step - 1, keep=2)
    move([tmp_path / "checkpoint-000000002.h5"], tmp_path / "later")
    sweep(tmp_path)
    assert holds(Checkpoint.read(tmp_path / "later" / "best.h5"), 1) and holds(Checkpoint.read(tmp_path), 3)
    assert holds(Checkpoint.read(tmp_path / "later" / "checkpoint-000000002.h5"), 2)
    assert len(list((tmp_path / "pieces").iterdir())) == 3


# -- a run that dies -------------------------------------------------------------------------------------------------


class Died(BaseException):
    """The process is gone: it does nothing more, it cleans nothing up."""


def dying(monkeypatch, after):
    """The calls that change files: the first `after` do it, all others raise. Returns the list of those that did."""
    done = []

    def mortal(name, call):
        def run(*arguments, **more):
            if len(done) >= after:
                raise Died
            done.append(name)
            return call(*arguments, **more)

        return run

    for name in ("pwrite", "fsync", "replace", "link", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, mortal(name, getattr(os, name)))

    def write(sink, data, write=Sink.write):
        if len(done) >= after:
            return memoryview(data).nbytes  # HDF5 bears no error here; `check` comes next
        done.append("write")
        return write(sink, data)

    def check(sink):
        if len(done) >= after:
            raise Died

    monkeypatch.setattr(Sink, "write", write)
    monkeypatch.setattr(Sink, "check", check)
    return done


def test_whenever_a_run_dies_a_whole_checkpoint_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # some hundred of them; the machine goes on
    begun, how = tmp_path / "begun", {"keep": 2, "ranks": 2}
    begun.mkdir()
    saved(begun, 1, **how)
    saved(begun, 2, **how, previous=1)
    link(begun / "checkpoint.h5", begun / "best.h5")
    shutil.copytree(begun, tmp_path / "all")
    with monkeypatch.context() as patch:
        calls = dying(patch, 10**6)
        saved(tmp_path / "all", 3, **how, previous=2)
    assert {"pwrite", "fsync", "replace", "unlink", "write"} <= {*calls}
    seen = set()
    for after in range(len(calls)):
        folder = tmp_path / f"after-{after}"
        shutil.copytree(begun, folder)
        with monkeypatch.context() as patch, pytest.raises(Died):
            dying(patch, after)
            saved(folder, 3, **how, previous=2)
        step = Checkpoint.read(folder).attributes["step"]
        assert step in (2, 3) and holds(Checkpoint.read(folder), step) and holds(Checkpoint.read(folder / "best.h5"), 2)
        seen.add(step)
        sweep(folder)  # as a run does that goes on
        assert holds(Checkpoint.read(folder), step) and holds(Checkpoint.read(folder / "best.h5"), 2)
        saved(folder, 4, **how, previous=step, token=f"{after:08x}")
        assert holds(Checkpoint.read(folder), 4) and not list((folder / "pieces").glob(".*"))
        shutil.rmtree(folder)
    assert seen == {2, 3}
