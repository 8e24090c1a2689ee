"""Folders of images: pixels are Pillow's own, broken files are all named, any number of ranks makes the same rows."""

import os
import shutil

import h5py
import numpy as np
import pytest
from fuzz import cases, damaged
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.data import open_data
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.shard_writer import ShardWriter
from hpcdl.data.samples import image_decoder
from hpcdl.data.samples.image_decoder import BrokenError, ImageDecoder
from hpcdl.data.samples.image_rows import image_files, image_rows
from hpcdl.data.samples.prepare_images import prepare_images
from hpcdl.errors import UsageError

Image = pytest.importorskip("PIL.Image")
SHORT = 30 * 16  # bytes of a shard of 30 images of 4 x 4 pixels


def picture(number, mode="RGB"):
    """An image of another size and other pixels for each number."""
    random = np.random.default_rng(number)
    return Image.fromarray(random.integers(0, 256, (*random.integers(5, 30, 2), 3)).astype("u1")).convert(mode)


def write_folder(folder, classes=("cat", "dog"), files=50):
    for at, name in enumerate(classes):
        (folder / name / "more").mkdir(parents=True)
        for number in range(files):
            below = "more" if number % 3 == 0 else "."
            picture(number * 2 + at).save(folder / name / below / f"{number}.{'png' if number % 2 else 'bmp'}")
    return folder


def damage(folder):
    """Break six files in six ways; returns the beginning of each reason by name."""
    (folder / "cat/a.txt").write_text("no image")
    (folder / "cat/b.jpg").touch()
    (folder / "dog/c.png").write_bytes((folder / "dog/1.png").read_bytes()[:200])
    (folder / "dog/d.png").symlink_to("nowhere")
    os.mkfifo(folder / "dog/e.png")
    Image.fromarray(np.ones((4, 4), np.float32)).save(folder / "dog/f.tif")
    return {
        "cat/a.txt": "it is no image of a known format",
        "cat/b.jpg": "it is empty",
        "dog/c.png": "",
        "dog/d.png": "No such file or directory",
        "dog/e.png": "it is no regular file",
        "dog/f.tif": "its pixels are 32-bit numbers; convert them to 8 bits",
    }


def rows(path):
    """All rows of a data set by the name of their file: pixels, class and group."""
    found = {}
    for each in sorted(path.glob("0*.h5")) if path.is_dir() else [path]:
        with h5py.File(each) as file:
            for group in file:
                for name, x, y in zip(*(file[f"{group}/{column}"][:] for column in ("id", "x", "y")), strict=True):
                    assert name.decode() not in found
                    found[name.decode()] = x.tolist(), int(y), group
    return found


@pytest.mark.parametrize("color", [False, True])
def test_pixels_are_those_of_pillow(tmp_path, prepare, color):
    folder = tmp_path / "in"
    (folder / "a").mkdir(parents=True)
    (folder / "b").mkdir()
    turned = picture(1).getexif()
    turned[0x0112] = 6  # the camera was held upright
    picture(1).save(folder / "a/turned.jpg", exif=turned, quality=90)
    clear = np.array(picture(2, "RGBA"))
    clear[::2, :, 3] = 0
    Image.fromarray(clear).save(folder / "a/clear.png")
    deep = np.arange(20 * 30, dtype="u2").reshape(20, 30) * 100
    Image.fromarray(deep).save(folder / "b/deep.png")
    for number, mode in enumerate(("RGB", "L", "1", "P", "CMYK")):
        picture(number, mode).save(folder / f"b/{mode}.{'jpg' if mode == 'CMYK' else 'png'}")
    picture(3).save(folder / "b/moving.gif", save_all=True, append_images=[picture(4)])
    with prepare("images", folder, "--size", "8", *["--color"] * color, "--test-fraction", "0") as file:
        assert dict(file.attrs)["scale"] == 1 / 255 and list(file.attrs["labels"]) == ["a", "b"]
        names, x, y = (file[f"train/{column}"][:] for column in ("id", "x", "y"))
        assert sorted(file["train/row"]) == list(range(len(names)))
    assert x.shape == (9, 8, 8, 3) if color else (9, 8, 8)
    for name, pixels, label in zip(names, x, y, strict=True):
        path = folder / name.decode()
        with Image.open(path) as image:
            if path.stem == "turned":
                image = Image.fromarray(np.rot90(np.asarray(image), -1).copy())
            if path.stem == "clear":
                shown = np.where(clear[..., 3:] == 0, 255, clear[..., :3])
                image = Image.fromarray(shown.astype("u1"))
            if path.stem == "deep":
                image = Image.fromarray((deep // 256).astype("u1"))
            image = image.convert("RGB" if color else "L")
            width, height = image.size
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            box = left, top, left + side, top + side
            wanted = np.asarray(image.resize((8, 8), Image.Resampling.BICUBIC, box=box))
        np.testing.assert_array_equal(pixels, wanted, err_msg=str(path))
        assert label == ["a", "b"].index(path.parent.name)


@pytest.mark.parametrize("out", ["out/", "out.h5"])
def test_any_number_of_ranks_makes_the_same_rows(each_group, mpi_tmp_path, out):
    folder = mpi_tmp_path / "in"

    def body(comm):
        if comm.rank == 0 and not folder.exists():
            write_folder(folder)
            damage(folder)
        comm.Barrier()
        made = {}
        for name, ranks in (("one", None), ("all", comm)):
            output = Output(f"{mpi_tmp_path}/{name}-{comm.rank if ranks is None else ''}{out}", shard_size=SHORT)
            info = prepare_images(folder, output, size=4, skip_broken=True, test_fraction=0.25, comm=ranks)
            made[name] = rows(output.path), info.rows
            report = output.path.with_name(f"{output.path.name}.broken.txt")
            assert report.read_text().count("\n") == 7
            comm.Barrier()
            if ranks is None or comm.rank == 0:
                report.unlink()
                shutil.rmtree(output.path) if output.folder else output.path.unlink()
            comm.Barrier()
        assert made["one"] == made["all"] and len(made["one"][0]) == 100
        assert made["all"][1] == {"train": 77, "test": 23, "rows": 0}

    each_group(body)


def test_all_broken_files_are_refused_in_one_report(tmp_path, prepare):
    folder = write_folder(tmp_path / "in", files=4)
    reasons, report = damage(folder), tmp_path / "out.h5.broken.txt"
    said = prepare("images", folder, "--size", "4")
    first = f"6 of 14 files of {folder} cannot be read, as cat/a.txt: it is no image of a known format; {report} lists"
    assert first in said and "--skip-broken" in said and not (tmp_path / "out.h5").exists()

    def check():
        lines = report.read_text().splitlines()[1:]
        for line, (name, reason) in zip(lines, reasons.items(), strict=True):
            assert line.startswith(f"{name}: {reason}") and len(line) > len(name) + 5

    check()
    with prepare("images", folder, "--size", "4", "--skip-broken") as file:
        assert len(file["train/x"]) + len(file["test/x"]) == 8
    assert f"; 6 broken files left out, listed in {report}" in prepare.summary
    check()
    for name in reasons:
        (folder / name).unlink()
    prepare("images", folder, "--size", "4", "--force").close()
    assert prepare.summary.endswith("; classes cat, dog\n") and not report.exists()
    report.write_text("my notes")
    assert "move it away" in prepare("images", folder, "--size", "4", "--force")
    assert report.read_text() == "my notes"


def test_a_killed_call_is_gone_on_with(tmp_path, monkeypatch):
    """Finished shards are not decoded again, but for what they leave out, and the report is that of one call."""
    folder = write_folder(tmp_path / "in")
    broken = damage(folder)

    def run(name, skip_broken=True):
        output = Output(tmp_path / name, shard_size=SHORT)
        prepare_images(folder, output, size=4, skip_broken=skip_broken)
        return rows(output.path), (tmp_path / f"{name}.broken.txt").read_text()

    whole, write, decode, decoded = run("whole.h5"), ShardWriter.write, ImageDecoder.__call__, []

    def killed(writer, number, *arguments):
        if number == 2:
            raise KeyboardInterrupt
        write(writer, number, *arguments)

    def counted(decoder, path):
        decoded.append(path)
        return decode(decoder, path)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run("again.h5")
    monkeypatch.setattr(ImageDecoder, "__call__", counted)
    with pytest.raises(UsageError, match="6 of 106 files"):
        run("again.h5", skip_broken=False)
    # Two shards of 30 were finished, of which the broken ones are decoded again.
    assert {str(folder / name) for name in broken} < set(decoded) and 46 <= len(decoded) <= 46 + 6
    assert run("again.h5") == whole
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_is_split(tmp_path, prepare):
    folder = tmp_path / "in"
    write_folder(folder / "train", files=4)
    write_folder(folder / "val", classes=("dog",), files=3)
    (folder / "train/notes.txt").write_text("beside the classes")
    (folder / "train/empty").mkdir()
    (folder / "train/.hidden").mkdir()
    (folder / "train/cat/Thumbs.db").touch()
    (folder / "train/cat/more/loop").symlink_to(folder / "train/cat")
    with prepare("images", folder, "--size", "4") as file:
        assert sorted(file["train/y"]) == [0] * 4 + [1] * 4 and list(file["test/y"]) == [1] * 3
        assert {name.decode().split("/")[0] for name in file["test/id"]} == {"val"}
    assert prepare.summary.endswith("; 1 file in train left out; train/empty/ is empty; classes cat, dog\n")
    assert "is split already, into train/ and its test part" in prepare(
        "images", folder, "--force", "--test-fraction", "0.2"
    )
    write_folder(folder / "test", classes=("cow",), files=1)
    assert "test has the class 'cow', which" in prepare("images", folder, "--force")
    shutil.rmtree(folder / "test/cow")
    assert "test has no images in folders" in prepare("images", folder, "--force")
    shutil.rmtree(folder / "test")
    (folder / "bird").mkdir()
    assert "has train/, val/ and 'bird'" in prepare("images", folder, "--force")


def test_refusals(tmp_path, prepare, monkeypatch):
    folder = tmp_path / "in"
    assert "is not a folder; give one" in prepare("images", folder)
    folder.mkdir()
    assert "has no images in folders; give a folder with two classes" in prepare("images", folder)
    picture(1).save(folder / "1.png")
    assert "has no images in folders" in prepare("images", folder)
    write_folder(folder, classes=("cat",), files=3)
    assert "has images of the class 'cat' alone" in prepare("images", folder)
    write_folder(folder, classes=("dog",), files=3)
    assert "--size is the side of the images in pixels, 1 or more, not 0" in prepare("images", folder, "--size", "0")
    assert "the group test would have no rows" in prepare("images", folder, "--test-fraction", "0.01")
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
        assert "it has more than 10 pixels, as decompression bombs have" in prepare("images", folder)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    assert "images need the package pillow: pip install 'hpcdl[images]'" in prepare("images", folder)


def test_a_shard_whose_files_are_all_broken_is_left_out(tmp_path):
    folder = write_folder(tmp_path / "in", files=2)
    for name in ("cat", "dog"):
        for path in sorted((folder / name).rglob("*.*"))[1:]:
            path.write_text("")
    output = Output(f"{tmp_path}/out/", shard_size=1)
    assert prepare_images(folder, output, size=4, skip_broken=True, test_fraction=0).rows["train"] == 2
    assert len(list((tmp_path / "out").glob("*.h5"))) == 2
    data = open_data(tmp_path / "out")
    assert data.features == (4, 4) and data.train.examples == 2
    data.close()
    for path in folder.rglob("*.*"):
        path.write_text("")
    with pytest.raises(UsageError, match="would have no rows"):
        prepare_images(folder, Output(f"{tmp_path}/none/"), size=4, skip_broken=True)


def test_files_to_predict_are_rows_as_in_training(tmp_path, prepare):
    """A model's rows of a folder are those that prepare-data makes; a broken file is a row with its reason."""
    folder = write_folder(tmp_path / "in", files=4)
    with prepare("images", folder, "--size", "4", "--color", "--test-fraction", "0") as file:
        wanted = dict(zip((name.decode() for name in file["train/id"]), file["train/x"][:], strict=True))
    (folder / "cat/broken.png").write_text("no image")
    (folder / "notes.txt").write_text("no image, by its name")
    found = image_rows(str(folder), image_files(str(folder)), (4, 4, 3), 1 / 255, ranks=2)
    blocks = [load() for load in found.blocks()]
    ids, reasons, x = ([each for block in blocks for each in getattr(block, name)] for name in ("ids", "reasons", "x"))
    assert len(blocks) == 2 and len(ids) == 9
    for name, reason, pixels in zip(ids, reasons, x, strict=True):
        assert bool(reason) == name.endswith("broken.png")
        if not reason:
            np.testing.assert_array_equal(pixels, wanted[name.removeprefix(f"{folder}/")])
    assert image_files(str(folder / "cat/1.png")) == [str(folder / "cat/1.png")]
    assert image_files(str(folder / "notes.txt")) == image_files(str(folder / "none.png")) == []
    for features, scale in (((4, 5), 1 / 255), ((16,), 1 / 255), ((4, 4, 4), 1 / 255), ((4, 4), 1 / 16)):
        with pytest.raises(UsageError, match="holds images, but the model was trained on rows of shape"):
            image_rows("in", ["a.png"], features, scale, 1)


KINDS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")


@cases(200)
@given(st.sampled_from(KINDS), st.floats(0, 1), st.integers(0, 255))
def test_any_bytes_are_pixels_or_a_reason(tmp_path_factory, kind, where, bits):
    path = tmp_path_factory.getbasetemp() / f"image.{kind}"
    picture(5).save(path, kind)
    content = damaged(path.read_bytes(), where, bits)
    try:
        assert ImageDecoder(4, True)(content).shape == (4, 4, 3)
    except BrokenError as error:
        assert 0 < len(str(error)) < 1000
    for wanted in (content, b"", b"GIF89a"):
        path.write_bytes(wanted)
        try:
            assert ImageDecoder(4, False)(str(path)).dtype == np.uint8
        except BrokenError as error:
            assert str(error)
    assert set(KINDS) < set(image_decoder.FORMATS)
