"""hpcdl checkpoint: what is shown, verified and packed; that nothing else is touched, and how it refuses."""

from pathlib import Path

import numpy as np
import pytest
from in_process import ends

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.runs.folder import Folder
from hpcdl.scripts import checkpoint

TRAIN = Path(__file__).parents[2] / "scripts" / "train_fully_sharded.py"
OPTIONS = ["--model", "mlp:8", "--optimizer", "adam", "--steps", "9", "--checkpoint-every", "3", "--keep", "9"]
OPTIONS += ["--progress", "none", "--out", "a"]
SIZE = 64 * 8 + 8 + 8 * 10 + 10


@pytest.fixture
def saved(run_on, tmp_path, monkeypatch):
    """A run of a model in two parts: checkpoints of the steps 3, 6 and 9, the last one the best, too."""
    run_on(2, TRAIN, *OPTIONS, check=0)
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "a" / "best.h5").samefile(tmp_path / "a" / "checkpoint.h5")
    return tmp_path / "a"


def said(capsys, *arguments, status=0):
    """The lines that the program prints on its way to this exit status."""
    with pytest.raises(SystemExit) as ended:
        checkpoint.main([*map(str, arguments)])
    assert ended.value.code == status
    return capsys.readouterr().out.splitlines()


def test_show(saved, capsys):
    about = f"of fully_sharded, mlp:8, {12 * SIZE:,} bytes in 2 pieces"
    lines = said(capsys, "show", "a/checkpoint-000000003.h5")
    assert lines[0] == f"a/checkpoint-000000003.h5: step 3 {about}"
    assert [line.split()[:3] for line in lines[1:4]] == [
        [name, str(SIZE), "float32"] for name in ("optimizer/first_moment", "optimizer/second_moment", "parameters")
    ]
    assert all(f"rank-000{rank}.h5" in line and "hyperslabs" in line for rank, line in enumerate(lines[4:]))
    names = ("checkpoint.h5: step 9", "checkpoint-000000006.h5: step 6", "checkpoint-000000003.h5: step 3")
    heads = [line for line in said(capsys, "show", "a") if line[0] != " "]
    assert heads == [f"a/{name} {about}" for name in (*names, "best.h5: step 9")]


def test_verify_names_what_is_damaged(saved, capsys):
    assert all(line.endswith(": good") for line in said(capsys, "verify", "a"))
    piece = next((saved / "pieces").glob("step-000000006-*-rank-0001.h5"))
    whole = piece.read_bytes()
    piece.write_bytes(whole[:900] + bytes([whole[900] ^ 1]) + whole[901:])
    lines = said(capsys, "verify", "a", status=1)
    assert [line.endswith(": good") for line in lines] == [True, False, True, True]
    assert f"{piece.name} is damaged: the checksum does not fit the contents" in lines[1]
    assert said(capsys, "show", "a")  # which reads no contents


def test_pack_in_the_place_of_the_pieces(saved, capsys):
    before = {path.name: dict(Checkpoint.read(path).vectors) for path in saved.glob("*.h5")}
    (saved / "pieces" / "mine.txt").write_text("a user's")
    lines = said(capsys, "pack", "a")
    assert len(lines) == 3 and all(line.endswith("bytes in one file") for line in lines)  # the best is the last
    assert [each.name for each in (saved / "pieces").iterdir()] == ["mine.txt"]
    assert (saved / "best.h5").samefile(saved / "checkpoint.h5")
    for name, vectors in before.items():
        found = Checkpoint.read(saved / name)
        assert found.joined is None and set(found.vectors) == set(vectors)
        assert all(np.array_equal(found.vectors[each], vector) for each, vector in vectors.items())
    assert all(line.endswith(": it is one file already") for line in said(capsys, "pack", "a"))


def test_pack_elsewhere_leaves_the_pieces(saved, capsys, tmp_path):
    files = sorted(saved.rglob("*"))
    assert said(capsys, "pack", "a", "--out", "one.h5")[0].startswith("one.h5: step 9 of fully_sharded")
    assert Checkpoint.read(tmp_path / "one.h5").attributes == Checkpoint.read(saved).attributes
    assert sorted(saved.rglob("*")) == files
    code, said_then = ends("checkpoint", ["pack", "a", "--out", "one.h5"])
    assert code == 2 and "--out one.h5 exists" in said_then
    assert said(capsys, "pack", "a/checkpoint-000000003.h5", "--out", "one.h5", "--force")
    assert Checkpoint.read(tmp_path / "one.h5").attributes["step"] == 3


def test_pack_while_a_job_writes_there_and_what_is_damaged(saved):
    other = Folder(saved, 0)
    other.claim()
    code, words = ends("checkpoint", ["pack", "a"])
    assert code == 2 and "another job is writing to a" in words
    other.close()
    piece = next((saved / "pieces").glob("step-000000009-*-rank-0000.h5"))
    piece.write_bytes(piece.read_bytes()[:-1])
    for more in ([], ["--out", "one.h5"]):
        code, words = ends("checkpoint", ["pack", "a", *more])
        assert code == 2 and f"{piece.name} is cut off" in words and not Path("one.h5").exists()
    assert Checkpoint.read(saved / "checkpoint-000000006.h5").joined is not None


def test_a_text_is_a_damaged_checkpoint(alone, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.h5").write_text("nothing of the kind")
    assert "text.h5 is damaged" in said(capsys, "verify", "text.h5", status=1)[0]
