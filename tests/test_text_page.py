"""The commands on texts in docs/data.md, each on sources of its kind, and the walk of docs/gpt.md, with fewer steps."""

import json
import re
import shutil
from pathlib import Path

import h5py
import pytest
import zstandard
from printed import shell

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "data.md").read_text().split("\n## Text\n")[1].split("\n## ")[0]
WALK = (DOCS / "gpt.md").read_text().split("\n## From a folder of text")[1].split("\n## ")[0]
COMMAND = re.compile(r"^    ((?:hpcdl|mpiexec) .*)$", re.MULTILINE)


def succeeds(command, folder, environment):
    done = shell(command, folder, environment, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def sources(folder):
    """Write what the page's commands read."""
    texts = [f"Note {k} says, for the {k}th time, what a note says.\n" * 20 for k in range(12)]
    for name in ("notes", "mail", "texts", "src/inner", "web"):
        (folder / name).mkdir(parents=True)
        for k, each in enumerate(texts):
            (folder / name / f"{k}.{'py' if 'src' in name else 'txt'}").write_text(each)
    shutil.rmtree(folder / "web")
    (folder / "book.txt").write_text("".join(texts))
    (folder / "dump.txt").write_text("%%\n".join(texts))
    lines = "".join(json.dumps({"body": each}) + "\n" for each in texts)
    (folder / "web.jsonl").write_text(lines)
    for k in range(2):
        packed = zstandard.compress(lines.replace('"body"', '"text"').encode())
        (folder / f"web-{k}.jsonl.zst").write_bytes(packed)
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (folder / "web").mkdir()
    parquet.write_table(pyarrow.table({"body": texts}), folder / "web" / "a.parquet")


@pytest.mark.long
def test_sources_of_every_kind(environment, tmp_path):
    sources(tmp_path)
    for command in COMMAND.findall(TEXT)[:2]:
        said = succeeds(command, tmp_path, environment)
        assert "12 documents by " in said and " 292 tokens; " in said
    for row in re.findall(r"^\| .* \| (`.*`.*) \| .* \|$", TEXT.split("### What a token")[0], re.MULTILINE)[1:]:
        for given in re.findall("`(.*?)`", row):
            if ".h5" in given:
                succeeds(f"hpcdl prepare-data text {given} --force --length 8", tmp_path, environment)
                (made,) = re.findall(r"\S+\.h5", given)
                with h5py.File(tmp_path / made) as file:
                    assert len(file["train/x"]) > 100


@pytest.mark.long
def test_walk(environment, tmp_path):
    """The commands of the page, with a tokenizer of fewer texts and few steps."""
    said = []
    for command in COMMAND.findall(WALK):
        short = re.sub(r"--steps \d+", "--steps 4", command)
        short = re.sub(r"--evaluate-every \d+", "--evaluate-every 2", short)
        said.append(succeeds(short.replace("/*.py", "/js*/*.py"), tmp_path, environment))
    assert len(said) == 4 and "documents by bpe:1024" in said[0] and "test_bits_per_byte" in said[2]
    assert said[3].startswith("def ")
