"""A run's folder: what is half-written is not read, and what JSON cannot say is not written."""

import pytest

from hpcdl.runs.folder import Folder, absolute, read_lines


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_lines(path) == ['{"step": 1}\n', '{"step": 2}\n']
    assert read_lines(tmp_path / "absent") == []


def test_lines_of_later_steps_are_dropped_when_a_run_resumes(tmp_path):
    (tmp_path / "logs").mkdir()
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    folder = Folder(tmp_path, 0)
    folder.open(2)
    folder.record([{"step": 3, "again": True}])
    folder.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2}', '{"step": 3, "again": true}']


def test_only_numbers_that_json_has_are_written(tmp_path):
    folder = Folder(tmp_path, 0)
    with pytest.raises(ValueError, match="JSON"):
        folder.write("summary.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_file_is_named_in_full_and_a_known_name_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.h5").write_text("")
    assert absolute("a.h5") == str(tmp_path / "a.h5") and absolute("digits") == "digits"
