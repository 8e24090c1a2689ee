"""Checkpoints come back to the bit; a damaged one is refused in one line; nothing half-written gets the final name."""

import hashlib
import json
import threading

import h5py
import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint, rotate
from hpcdl.errors import UsageError


def sample(step=3):
    vectors = {"parameters": np.random.default_rng(step).standard_normal(500), "optimizer/momentum": np.ones(500, "f4")}
    return Checkpoint(vectors, {"step": step, "seconds": 0.1 + 0.2, "best": None})


def test_round_trip_to_the_bit(tmp_path):
    sample().write(tmp_path / "checkpoint.h5")
    for path in (tmp_path, tmp_path / "checkpoint.h5"):
        found = Checkpoint.read(path)
        assert found.attributes == sample().attributes
        assert found.vectors.keys() == sample().vectors.keys()
        for name, vector in sample().vectors.items():
            assert found.vectors[name].dtype == vector.dtype and np.array_equal(found.vectors[name], vector)


def test_a_thread_is_started_for_a_large_one_alone(tmp_path, monkeypatch):
    """Python waits for ever for one that could not begin, for want of memory."""
    started = []

    def start(self, original=threading.Thread.start):
        started.append(self)
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    sample().write(tmp_path / "small.h5")
    assert not started
    large = Checkpoint({"parameters": np.arange(1 << 18, dtype="f4")}, {})
    large.write(tmp_path / "large.h5")
    assert started
    for name, written in (("small", sample()), ("large", large)):
        with h5py.File(tmp_path / f"{name}.h5") as file:
            assert file.attrs["checksum"] == written.digest()


def test_one_of_an_older_version_is_read_and_its_damage_found(tmp_path):
    vectors, attributes = sample().vectors, json.dumps(sample().attributes, sort_keys=True)
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(vectors):
        digest.update(name.encode() + str(vectors[name].dtype).encode() + vectors[name].tobytes())
    digest.update(attributes.encode())
    with h5py.File(tmp_path / "checkpoint.h5", "w") as file:
        for name, vector in vectors.items():
            file[name] = vector
        told = {"version": 1, "attributes": attributes, "checksum": digest.hexdigest()}
        file.attrs.update({"format": "hpcdl checkpoint"} | told)
    found = Checkpoint.read(tmp_path)
    assert found.attributes == sample().attributes
    assert all(np.array_equal(found.vectors[name], vector) for name, vector in vectors.items())
    with h5py.File(tmp_path / "checkpoint.h5", "a") as file:
        file["parameters"][3] += 1e-9
    refused(tmp_path, "checksum")


def refused(path, words):
    with pytest.raises(UsageError, match=words) as caught:
        Checkpoint.read(path)
    assert "\n" not in str(caught.value)


def test_every_kind_of_damage_is_refused(tmp_path):
    path = tmp_path / "checkpoint.h5"
    refused(path, "there is no checkpoint")
    sample().write(path)
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, "damaged")
    place = whole.find(sample().vectors["parameters"].tobytes()[:64])
    assert place > 0
    path.write_bytes(whole[: place + 7] + bytes([whole[place + 7] ^ 1]) + whole[place + 8 :])  # one bit of one value
    refused(path, "checksum")
    sample().write(path)
    with h5py.File(path, "a") as file:
        file.attrs["attributes"] = file.attrs["attributes"].replace('"step": 3', '"step": 4')
    refused(path, "checksum")
    with h5py.File(path, "w") as file:
        file["parameters"] = np.zeros(3)
    refused(path, "not a checkpoint")
    path.write_text("nothing of the kind")
    refused(path, "damaged")


def test_a_failure_while_writing_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.h5"
    sample(1).write(path)

    def fail(self):
        raise OSError("disk full")

    monkeypatch.setattr(Checkpoint, "digest", fail)
    with pytest.raises(OSError, match="disk full"):
        sample(2).write(path)
    monkeypatch.undo()
    assert Checkpoint.read(path).attributes["step"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint.h5"]


def test_the_last_k_are_kept_and_what_users_have_named(tmp_path):
    names = {"checkpoint-epoch2-for-the-paper.h5", "checkpoint-000000001-good.h5", "checkpoint-1.h5"}
    for name in names:
        sample(1).write(tmp_path / name)
    for step in range(1, 7):
        rotate(tmp_path, 3, sample(step), previous=step - 1 if step > 1 else None)
    assert Checkpoint.read(tmp_path).attributes["step"] == 6
    older = {f"checkpoint-{step:09d}.h5" for step in (4, 5)}
    assert {each.name for each in tmp_path.iterdir()} == older | names | {"checkpoint.h5"}
    for step in (4, 5):
        assert Checkpoint.read(tmp_path / f"checkpoint-{step:09d}.h5").attributes["step"] == step
    rotate(tmp_path, 1, sample(7), previous=6)
    assert {each.name for each in tmp_path.iterdir()} == names | {"checkpoint.h5"}
