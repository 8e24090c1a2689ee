"""hpcdl data: what is shown of each kind of data, what verify finds, and the commands of docs/data.md as printed."""

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from printed import as_printed, commands

from hpcdl.csr import CSR
from hpcdl.data import hdf5
from hpcdl.data.format import read_info
from hpcdl.data.formats.contents import contents, is_image
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_table import prepare_table
from hpcdl.reports.data_view import data_view, half_blocks, ramp, reduced
from hpcdl.scripts import data

PAGE = (
    (Path(__file__).parents[2] / "docs" / "data.md")
    .read_text()
    .split("## Folders of shards")[1]
    .split("## Placement")[0]
)


def said(capsys, *arguments, status=0):
    """What the program prints on its way to this exit status."""
    with pytest.raises(SystemExit) as ended:
        data.main([*map(str, arguments)])
    assert ended.value.code == status
    return capsys.readouterr().out


def written(path, x, y, **about):
    classes = 3 if y.dtype.kind in "iu" else 0
    Output(path, **about).write(
        {"train": (x.shape, [x], y, {})}, x.dtype, 1.0, None, classes, sparse=isinstance(x, CSR)
    )


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A folder of 4 shards: 40 images whose first pixels count up."""
    monkeypatch.chdir(tmp_path)
    x = np.arange(40, dtype=np.uint8)[:, None, None] * np.ones((1, 6, 4), np.uint8)
    written("many/", x, np.arange(40) % 3, shard_size=240, origin="counted")
    return tmp_path / "many"


def test_verify_names_each_corrupt_shard(images, capsys):
    assert said(capsys, "verify", "many") == "many: 40 rows in 4 shards: good\n"
    for number in (1, 3):
        shard = images / f"0000{number}.h5"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])  # the last pixels, which HDF5 can read
    (images / "00002.h5").unlink()
    lines = said(capsys, "verify", "many/", status=1).splitlines()
    assert [line.split(" is ")[0] for line in (lines[0], lines[2])] == [f"shard many/0000{k}.h5" for k in (1, 3)]
    assert "damaged: its checksum is not that of its contents" in lines[0]
    assert "00002.h5, which is missing" in lines[1] and lines[3:] == ["many: 3 problems found"]
    (images / "index.json").write_text("[")
    assert "index.json is no index of shards" in said(capsys, "verify", "many", status=1)


def test_verify_of_one_file_reads_its_rows(images, capsys):
    """Rows that were changed below HDF5, with the file's time kept: only the digest of all rows shows it."""
    one = images / "00000.h5"
    assert said(capsys, "verify", one).endswith("in one file: good\n")
    stat, whole = one.stat(), one.read_bytes()
    with h5py.File(one) as file:
        at = file["train/x"].id.get_offset()
    one.write_bytes(whole[: at + 30] + bytes([7]) + whole[at + 31 :])
    os.utime(one, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "holds other rows than those whose digest" in said(capsys, "verify", one, status=1)
    one.write_bytes(whole[:1000])
    assert "00000.h5 is damaged" in said(capsys, "verify", one, status=1)


def test_show_a_table(tmp_path, monkeypatch, capsys):
    """Ranges, means and missing values are those of the table, whatever the slabs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 100)
    random = np.random.default_rng(0)
    age, colour, sick = random.integers(20, 90, 60), random.choice(["red", "blue", ""], 60), random.integers(0, 2, 60)
    lines = [f"{'' if k % 7 == 3 else age[k]},{colour[k]},{k / 2},{['no', 'yes'][sick[k]]}" for k in range(60)]
    Path("t.csv").write_text("\n".join(["age,colour,dose,sick", *lines]) + "\n")
    prepare_table("t.csv", Output("t/", shard_size=500), test_fraction=0.0)
    found = json.loads(said(capsys, "show", "t", "--json", "--rows", 2))
    columns = {each["name"]: each for each in found["columns"]}
    known = age[np.arange(60) % 7 != 3]
    assert (columns["age"]["min"], columns["age"]["max"], columns["age"]["missing"]) == (known.min(), known.max(), 9)
    assert (columns["dose"]["mean"], columns["dose"]["missing"]) == (14.75, 0) and found["shards"] > 2
    counts = {name: int((colour == name).sum()) for name in ("red", "blue")}
    assert columns["colour"]["counts"] == counts and columns["colour"]["missing"] == (colour == "").sum()
    assert found["groups"]["train"]["by_class"] == {"no": int((sick == 0).sum()), "yes": int((sick == 1).sum())}
    assert len(found["examples"]) == 2 and [*found["examples"][0]["x"]][:2] == ["age", "colour=blue"]
    text = said(capsys, "show", "t")
    assert all(word in text for word in ("colour", "2 texts", "14.75", "yes", "digest"))


def test_show_other_kinds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x = np.arange(35, dtype=np.float64).reshape(7, 5)
    written("plain.h5", x, np.linspace(-2, 4, 7))
    found = json.loads(said(capsys, "show", "plain.h5", "--json"))
    assert found["range"] == {"min": 0, "mean": 17, "max": 34}
    assert found["groups"]["train"]["targets"] == [{"name": "", "min": -2, "mean": 1, "max": 4}]
    assert found["examples"][1] == {"x": [5, 6, 7, 8, 9], "y": -1}
    written("sparse.h5", CSR.of((x % 3 == 0) * x), np.arange(7) % 3)
    found = json.loads(said(capsys, "show", "sparse.h5", "--json"))
    assert found["examples"][1]["elements"] == {"1": 6, "4": 9} and found["groups"]["train"]["elements"] == 11
    text = said(capsys, "show", "text", "--rows", 1)
    assert "row 0: # Changelog" in text and "vocabulary of 105 tokens" in text
    assert "0:15" in said(capsys, "show", "sparse.h5", "--rows", 7)
    assert said(capsys, "show", "plain.h5", "--rows", 0)


def test_images_are_drawn_side_by_side(images):
    assert is_image((8, 8)) and is_image((8, 8, 3)) and not is_image((64,)) and not is_image((2, 8, 9))
    found = contents(read_info("many"), 3)
    plain = [str(line) for line in data_view(found, 100, False) if hasattr(line, "plain")][-7:]
    assert plain[0] == "row 0, 0  row 1, 1  row 2, 2"
    assert plain[1:] == [f"{'':10}{'=' * 8}  {'@' * 8}"] * 6
    coloured = [line for line in data_view(found, 100, True) if hasattr(line, "plain")][-4:]
    assert coloured[1].plain.count("\u2580") == 12 and "rgb(128,128,128) on rgb(128,128,128)" in str(coloured[1].spans)


def test_pixels_of_a_smaller_picture_are_means():
    image = np.arange(24.0).reshape(4, 6, 1) / 24
    small = reduced(image, 2, 3)
    assert np.allclose(small[0, 0, 0], image[:2, :2].mean()) and small.shape == (2, 3, 1)
    uneven = reduced(image, 3, 4)
    assert uneven.shape == (3, 4, 1) and np.allclose(uneven[0, 1, 0], image[0, 1:3].mean())
    assert [len(line) for line in ramp(image, 20)] == [20] * 4 and len(ramp(image, 3)) == 1
    odd = half_blocks(np.ones((3, 2, 3)), 5)
    assert [line.plain for line in odd] == ["\u2580\u2580   "] * 2


@pytest.mark.long
def test_the_page_as_printed(environment, tmp_path):
    shown = commands(PAGE)
    assert len(shown) == 6
    np.savez(tmp_path / "images.npz", x=np.arange(64000).reshape(1000, 8, 8) % 251, y=np.arange(1000) % 4)
    as_printed(shown, tmp_path, environment)
