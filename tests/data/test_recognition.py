"""hpcdl/data/formats/recognition.py: files are recognized by their first bytes, and by their names."""

import gzip

import pytest

from hpcdl.data.formats.recognition import ARROW, format_of
from hpcdl.errors import UsageError


@pytest.mark.parametrize(
    ("name", "start", "form"),
    [
        ("a.svm", b"\x89HDF\r\n\x1a\n", "hdf5"),
        ("a.svm", b"PK\x03\x04", "npz"),
        ("A.LIBSVM.GZ", gzip.compress(b"1 1:1", mtime=0), "libsvm"),
        ("a.csv", b"\0\0\x08\x03", "idx"),
        ("a", gzip.compress(b"1 1:1", mtime=0), "gzip"),
        ("a.tsv", b"1\t2", "table"),
        *(("a", each, "table") for each in ARROW),
        ("a", b"1,2", "unknown"),
        ("a", b"", "unknown"),
    ],
)
def test_forms(name, start, form, tmp_path):
    (tmp_path / name).write_bytes(start)
    assert format_of(str(tmp_path / name)) == form


@pytest.mark.parametrize(("path", "words"), [(".", "is a folder; give a file"), ("nothing", "cannot be read")])
def test_what_is_no_file_is_refused(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        format_of(path)
