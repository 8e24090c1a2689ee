"""WebDataset's tars: samples as its own reader gives them, on any number of ranks; a tar that ends early is named."""

import contextlib
import gzip
import io
import json
import os
import tarfile

import h5py
import numpy as np
import pytest
from fuzz import cases, damaged, tried
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.data.formats.prepare import Output
from hpcdl.data.samples.prepare_tar import prepare_tar
from hpcdl.data.samples.tar_stream import tar_samples
from hpcdl.errors import UsageError

Image = pytest.importorskip("PIL.Image")


def png(number):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 7, 3)).astype("u1")).save(file, "PNG")
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tar(members):
    """A tar of members (name, content); content None: a folder."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            made.addfile(member, io.BytesIO(content or b""))
    return file.getvalue()


def samples(numbers):
    """Members of a sample for each number, of three classes."""
    for number in numbers:
        described = json.dumps({"kind": "abc"[number % 3], "value": number / 4, "whole": number % 3, "none": None})
        yield f"part/{number}.png", png(number)
        yield f"part/{number}.cls", f"{number % 3}\n".encode()
        yield f"part/{number}.json", described.encode()


def write_tars(folder, tars=3, each=12):
    for at in range(tars):
        content = tar([("part", None), *samples(range(at * each, (at + 1) * each))])
        end = ".gz" if at == 1 else ""
        (folder / f"in-{at:03d}.tar{end}").write_bytes(gzip.compress(content) if end else content)
    return folder


def contents(path):
    """All rows of a data file or a folder of shards, by group."""
    found = {}
    for each in sorted(path.glob("0*.h5")) if path.is_dir() else [path]:
        with h5py.File(each) as file:
            for group in file:
                for name in file[group]:
                    found.setdefault(f"{group}/{name}", []).extend(file[f"{group}/{name}"][:].tolist())
    return found


def test_samples_are_those_of_webdataset(tmp_path, prepare):
    webdataset = pytest.importorskip("webdataset")
    write_tars(tmp_path)
    with prepare("tar", tmp_path / "in-*", "--size", "7", "--color", "--test-fraction", "0.25") as file:
        assert (len(file["train/x"]), len(file["test/x"]), file.attrs["classes"]) == (27, 9, 3)
        assert np.bincount(file["test/y"]).tolist() == [3, 3, 3]
        parts = [[file[f"{group}/{name}"][:] for name in ("row", "id", "x", "y")] for group in ("train", "test")]
    assert all((np.diff(part[0]) > 0).all() for part in parts), "rows keep their order"
    mine = {row: each for part in parts for row, *each in zip(*part, strict=True)}
    tars = [str(path) for path in sorted(tmp_path.glob("in-*"))]
    theirs = list(webdataset.WebDataset(tars, shardshuffle=False).decode("pil"))
    assert len(theirs) == len(mine) == 36
    for row, sample in enumerate(theirs):
        name, x, y = mine[row]
        assert (name.decode(), y) == (sample["__key__"], sample["cls"])
        np.testing.assert_array_equal(x, np.asarray(sample["png"].resize((7, 7), box=(0, 1, 7, 8))))


@pytest.mark.parametrize("out", ["out/", "out.h5"])
def test_any_number_of_ranks_makes_the_same_rows(each_group, mpi_tmp_path, out):
    def body(comm):
        if comm.rank == 0 and not list(mpi_tmp_path.iterdir()):
            write_tars(mpi_tmp_path)
        comm.Barrier()
        made = []
        for name, ranks in ((f"one-{comm.size}-{comm.rank}", None), (f"all-{comm.size}", comm)):
            output = Output(f"{mpi_tmp_path}/{name}-{out}", shard_size=5 * 16)
            prepare_tar([f"{mpi_tmp_path}/in-*"], output, size=4, label="kind", comm=ranks)
            made.append(contents(output.path))
            assert not output.folder or len(list(output.path.glob("0*.h5"))) == 9  # of 5, 5 and 2 samples of each tar
        assert made[0] == made[1] and sum(map(len, made[0].values())) == 4 * 36
        comm.Barrier()

    each_group(body)


def test_labels_arrays_and_tars_for_tests(tmp_path, prepare):
    write_tars(tmp_path)
    series = tmp_path / "in-{000..002}.tar"
    assert f"'{tmp_path}/in-001.tar' does not exist" in prepare("tar", series)
    tars = [tmp_path / name for name in ("in-000.tar", "in-002.tar")]

    def run(*options):
        with prepare("tar", tars[0], "--test", tars[1], "--size", "4", "--force", *options) as file:
            labels = [each.decode() if isinstance(each, bytes) else each for each in file.attrs.get("labels", [])]
            return file.attrs["classes"], labels, [*file["train/y"], *file["test/y"]]

    numbers = [*range(12), *range(24, 36)]
    assert run() == (3, [], [number % 3 for number in numbers])
    assert run("--label", "kind") == (3, ["a", "b", "c"], [number % 3 for number in numbers])
    assert run("--label", "value") == (0, [], [number / 4 for number in numbers])
    assert run("--label", "whole", "--regression") == (0, [], [number % 3 for number in numbers])
    assert "in-000.tar is given twice" in prepare("tar", tars[0], "--test", tars[0], "--force")
    fraction = ("--test-fraction", "0.5")
    assert "leave --test-fraction out" in prepare("tar", tars[0], "--test", tars[1], "--force", *fraction)
    for kind, scale in (("u1", 1 / 255), ("f4", 1), (">i2", 1)):
        arrays = [np.arange(6).reshape(2, 3).astype(kind, order="F") + number for number in range(4)]
        members = [
            (f"{n}.{end}", each)
            for n in range(4)
            for end, each in (("npy", npy(arrays[n])), ("cls", b"xy"[n % 2 :][:1]))
        ]
        (tmp_path / "a.tar").write_bytes(tar(members))
        with prepare("tar", tmp_path / "a.tar", "--force", "--test-fraction", "0") as file:
            np.testing.assert_array_equal(file["train/x"], arrays)
            assert file["train/x"].dtype == np.dtype(kind).newbyteorder("=") and file.attrs["scale"] == scale
    assert "holds arrays (.npy), not images: leave --size out" in prepare(
        "tar", tmp_path / "a.tar", "--size", "4", "--force"
    )
    (tmp_path / "in-004.tar").write_bytes((tmp_path / "a.tar").read_bytes())
    said = prepare("tar", tmp_path / "in-*", "--force")
    assert (
        "in-004.tar has samples with int16 of shape (2, 3), but" in said
        and "in-000.tar has samples with an image" in said
    )


def test_odd_names_are_harmless(tmp_path, prepare):
    names = ["../../up", "/absolute", "a\nb", "x" * 300, "dots.in.folder/é", "back\\slash", "\udcff"]
    members = [("../hidden/.x.png", b"?"), ("README", b"no dot"), ("._a.png", b"?")]
    for at, name in enumerate(names):
        members += [
            (f"{name}.png", png(at)),
            (f"{name}.left.jpg", b"of another suffix"),
            (f"{name}.CLS", b"%d" % (at % 2)),
        ]
    (tmp_path / "in.tar").write_bytes(tar(members))
    with prepare("tar", tmp_path / "in.tar", "--size", "4", "--test-fraction", "0") as file:
        wanted = [name.encode("utf-8", "surrogateescape")[:255] for name in names]
        assert file["train/id"][:].tolist() == wanted
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.tar", "out.h5"]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_tar_that_is_cut_off_is_named(tmp_path, end):
    whole = tar(samples(range(3)))
    content = gzip.compress(whole) if end else whole
    assert whole.endswith(bytes(2 * tarfile.BLOCKSIZE))
    used = len(whole.rstrip(b"\0")) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE + tarfile.BLOCKSIZE
    path = tmp_path / f"in.tar{end}"
    cuts = range(0, len(content), 97) if end else [*range(0, used, 211), *range(0, used + 1, tarfile.BLOCKSIZE)]
    for cut in cuts:
        path.write_bytes(content[:cut])
        with pytest.raises(UsageError, match=r"in\.tar") as caught:
            list(tar_samples(str(path), {"png", "cls"}))
        assert str(caught.value).count("\n") == 0, cut
    path.write_bytes(content * 2)  # two tars, one behind the other
    with pytest.raises(UsageError, match="goes on behind its end"):
        list(tar_samples(str(path), {"png"}))
    path.write_bytes(content)
    assert [len(files) for _, files in tar_samples(str(path), {"png"})] == [3, 3, 3]


def test_broken_images_and_a_tar_that_changes(tmp_path, prepare, monkeypatch):
    members = [(name, b"broken" if name == "part/4.png" else content) for name, content in samples(range(9))]
    (tmp_path / "in.tar").write_bytes(tar(members))
    where = tmp_path / "in.tar"
    said = prepare("tar", where, "--size", "4")
    assert f"1 of 9 samples of {where} cannot be read, as part/4: it is no image of a known format; " in said
    with prepare("tar", where, "--size", "4", "--skip-broken", "--test-fraction", "0") as file:
        assert file["train/row"][:].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert "1 broken file left out, listed in" in prepare.summary


LABEL, IMAGE = ("1.cls", b"a"), ("1.png", b"")
BAD = {
    "has no samples; a sample is files of one key": [("README", b"")],
    "'1' has neither an image nor .npy": [LABEL],
    "'1' has .jpg and .png; it must have one image, or one array": [IMAGE, ("1.jpg", b""), LABEL],
    "'1' has no label, .cls": [IMAGE],
    "'1' has no label, .cls; if .json has it, give its key by --label": [IMAGE, ("1.json", b"{}")],
    "'1' has an empty .cls": [IMAGE, ("1.cls", b" ")],
    "'1' has a label that is no text in UTF-8": [IMAGE, ("1.cls", b"\xff")],
    "'1' has two files .png": [IMAGE, IMAGE, LABEL],
    "the files of the sample '1' do not follow one another": [
        IMAGE,
        LABEL,
        ("2.png", b""),
        ("2.cls", b"a"),
        ("1.x", b""),
    ],
    "'1' has no array of numbers: it is cut off, or too long": [("1.npy", npy(np.ones(9))[:-3]), LABEL],
    "'1' has no array of numbers: it is object of shape (1,)": [("1.npy", npy(np.array([None]))), LABEL],
    "'2' has float64 of shape (3,), but the samples before have float64 of shape (2,)": [
        *(("1.npy", npy(np.ones(2))), LABEL),
        *(("2.npy", npy(np.ones(3))), ("2.cls", b"b")),
    ],
    "all rows have the label 'a'": [IMAGE, LABEL, ("2.png", b""), ("2.cls", b"a")],
}
BAD_JSON = {
    "'1' has no valid JSON": b"{",
    "'1' has no 'kind' in its .json; it has a, b": b'{"a": 1, "b": 2}',
    "'1' has no 'kind' in its .json": b"[1]",
    "'1' has the label None; it must be a number or a text": b'{"kind": null}',
    "has labels that are too large": b'{"kind": 99999999999999999999}',
}


def test_refusals(tmp_path, prepare):
    path = tmp_path / "in.tar"
    for message, members in BAD.items():
        path.write_bytes(tar(members))
        assert message in prepare("tar", path)
    for message, content in BAD_JSON.items():
        path.write_bytes(tar([IMAGE, ("1.json", content)]))
        assert message in prepare("tar", path, "--label", "kind")
    path.write_bytes(tar([IMAGE, ("1.json", b'{"kind": 1}'), ("2.png", b""), ("2.json", b'{"kind": "a"}')]))
    assert "has labels that are numbers and labels that are texts" in prepare("tar", path, "--label", "kind")
    with tarfile.open(path, "w") as made:
        link = tarfile.TarInfo("1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    assert "the member '1.png' is no file, but a link or a device" in prepare("tar", path)
    assert "does not exist" in prepare("tar", tmp_path / "none*.tar")
    assert "is a folder; give its tars, as" in prepare("tar", tmp_path)
    assert "a series begins with its smallest number" in prepare("tar", tmp_path / "in-{3..1}.tar")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.tar"]


@cases(200)
@given(st.booleans(), st.floats(0, 1), st.integers(0, 255))
def test_any_bytes_are_samples_or_one_line(tmp_path_factory, zipped, where, bits):
    folder = tmp_path_factory.getbasetemp()
    path, out = folder / "fuzzed.tar", folder / "fuzzed.h5"
    content = tar(samples(range(6)))
    path.write_bytes(damaged(gzip.compress(content) if zipped else content, where, bits))
    info = tried(prepare_tar, [str(path)], Output(out, force=True), size=4, test_fraction=0, skip_broken=True)
    assert info is None or 1 <= info.rows["train"] <= 6
    with contextlib.suppress(FileNotFoundError):
        os.unlink(out)
