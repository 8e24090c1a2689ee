"""docs/data.md on images, tars, arrays and folders of tables, as printed."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import duckdb
import numpy as np
import pytest
from printed import assert_said, commands, shell

Image = pytest.importorskip("PIL.Image")
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def write_sources(folder):
    """The sources that the page shows."""
    random = np.random.default_rng(0)

    def picture():
        return Image.fromarray(random.integers(0, 256, (40, 50, 3)).astype("u1"))

    for name, files in {"cat": "1.jpg 2.png 3.png 4.png", "dog": "1.png 2.png 3.png 4.jpg"}.items():
        (folder / "photos" / name).mkdir(parents=True)
        for file in files.split():
            picture().save(folder / "photos" / name / file)
    (folder / "photos/dog/4.jpg").write_bytes(b"")
    for at in range(3):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for number in range(4):
                image = io.BytesIO()
                picture().save(image, "PNG")
                for end, content in (
                    ("png", image.getvalue()),
                    ("json", json.dumps({"kind": ("cat", "dog")[number % 2]}).encode()),
                ):
                    member = tarfile.TarInfo(f"{number}.{end}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        end, content = (".gz", gzip.compress(file.getvalue())) if at == 2 else ("", file.getvalue())
        (folder / f"pets-{at:03d}.tar{end}").write_bytes(content)
    (folder / "arrays").mkdir()
    (folder / "parts").mkdir()
    with duckdb.connect() as db:
        for part in range(2):
            columns = "i / 7 as size, i % 5 as age, chr(97 + (i % 3)::int) as kind"
            rows = f"select {columns} from range({50 * part}, {50 * part + 50}) t(i)"
            db.execute(f"copy ({rows}) to '{folder}/parts/part-{part}.parquet'")


@pytest.mark.long
def test_as_printed(environment, tmp_path):
    write_sources(tmp_path)
    parts = PAGE.split("\n## ")
    shown = [each for part in parts if part.startswith(("Images", "Tars", "Arrays")) for each in commands(part)]
    tables = next(part for part in parts if part.startswith("Tables"))
    shown += commands(tables[tables.index("The files of a pattern or a folder") :])
    assert len(shown) == 12
    for command, said in shown:
        done = shell(command, tmp_path, environment)
        assert done.returncode == 2 * ("error" in "".join(said)), f"{command}\n{done.stdout}{done.stderr}"
        assert_said(done, said)
    assert not list(tmp_path.glob(".*"))
