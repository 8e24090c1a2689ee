"""hpcdl/search/journal.py: what is on the disk is whole, and is not another search's."""

import json
import os
import threading

import numpy as np
import pytest

from hpcdl.errors import TrainingError, UsageError
from hpcdl.files import json_value
from hpcdl.search.journal import NAME, Journal, SharedJournal

SETTINGS = {"method": "random", "seed": 3, "space": ["lr=log:0.001..0.5"], "ranks_per_trial": 2}


def written(folder, **options):
    journal = Journal.open(folder, SETTINGS, **options)
    journal.append(event="begin", trial=0, values={"lr": 0.1 + 0.2})
    journal.close()
    return journal


def test_what_was_written_is_there_again(tmp_path):
    journal = written(tmp_path)
    again = Journal.open(tmp_path, SETTINGS, resume=True)
    assert again.events == journal.events and again.events[0]["settings"] == SETTINGS
    assert again.events[1]["values"]["lr"] == 0.1 + 0.2
    again.append(event="end", trial=0, score=np.float32(0.5))
    again.close()
    lines = (tmp_path / NAME).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["search", "begin", "end"]


def test_each_line_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    journal = Journal.open(tmp_path, SETTINGS)
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append((tmp_path / NAME).read_bytes()), sync(file)))
    journal.append(event="begin", trial=0)
    assert len(synced) == 1 and synced[0].endswith(b'"trial": 0}\n')


@pytest.mark.parametrize("rest", [b"", b"{", b"\0" * 40, b"\0\n", b"[1]\n", b'{"event": "begin"', b'"event"\n'])
def test_what_a_crash_has_left_at_the_end_is_cut_off(tmp_path, rest):
    journal = written(tmp_path)
    with (tmp_path / NAME).open("ab") as file:
        file.write(rest)
    again = Journal.open(tmp_path, SETTINGS, resume=True)
    assert again.events == journal.events


def test_what_is_there_is_not_written_over(tmp_path):
    written(tmp_path)
    with pytest.raises(UsageError, match="holds a search already"):
        Journal.open(tmp_path, SETTINGS)
    assert len(Journal.open(tmp_path, SETTINGS, force=True).events) == 1
    assert len((tmp_path / NAME).read_text().splitlines()) == 1


def test_another_search_is_refused(tmp_path):
    written(tmp_path)
    with pytest.raises(UsageError, match="the journal of another search: its method is 'random', not 'grid'"):
        Journal.open(tmp_path, SETTINGS | {"method": "grid"}, resume=True)
    with pytest.raises(UsageError, match="its seeds is None, not 2"):
        Journal.open(tmp_path, SETTINGS | {"seeds": 2}, resume=True)
    other = SETTINGS | {"ranks_per_trial": 1}
    with pytest.raises(UsageError, match="ranks per trial"):
        Journal.open(tmp_path, other, resume=True)
    assert len(Journal.open(tmp_path, other, resume=True, free=("ranks_per_trial",)).events) == 2


@pytest.mark.parametrize("line", [1, 2])
def test_a_broken_line_in_the_middle_is_told(tmp_path, line):
    written(tmp_path)
    lines = (tmp_path / NAME).read_text().splitlines()
    lines.insert(line - 1, "{")
    (tmp_path / NAME).write_text("\n".join([*lines, ""]))
    with pytest.raises(UsageError, match=f"line {line} is broken, and others follow"):
        Journal.open(tmp_path, SETTINGS, resume=True)


def test_a_journal_of_another_version_is_refused(tmp_path):
    (tmp_path / NAME).write_text('{"event": "search", "version": 7, "settings": {}}\n')
    with pytest.raises(UsageError, match="of version 7"):
        Journal.open(tmp_path, {}, resume=True)


def test_where_the_disk_is_full_nothing_follows(tmp_path, monkeypatch):
    journal = Journal.open(tmp_path, SETTINGS)
    write = os.write

    def full(file, data):
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(TrainingError, match=f"{NAME} cannot be written: No space left"):
        journal.append(event="begin", trial=0)
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="is closed"):
        journal.append(event="begin", trial=0)
    assert len(Journal.open(tmp_path, SETTINGS, resume=True).events) == 1  # the torn line is cut off


def test_what_json_does_not_know_is_made_plain():
    found = json_value({"a": np.float64(0.5), 1: (np.int32(3), True), "b": np.nan, "c": {None}})
    assert found == {"a": 0.5, "1": [3, True], "b": None, "c": "{None}"}


def test_several_write_to_a_shared_one_and_who_dies_within_a_line_spoils_nothing(tmp_path):
    begun = []

    def work(number):
        journal = SharedJournal.join(tmp_path, SETTINGS, lambda: begun.append(number))
        for turn in range(20):
            journal.append(event="end", trial=number, score=turn)
            if turn % 5 == 4:
                with journal.locked(), (tmp_path / NAME).open("ab") as file:
                    file.write(b'{"event": "end", "tri')
        journal.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(begun) == 1
    last = SharedJournal.join(tmp_path, SETTINGS, lambda: begun.append("again"))
    last.append(event="leg")
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert len(begun) == 1 and [line["event"] for line in lines] == ["search", *["end"] * 80, "leg"]
    for number in range(4):
        assert [line["score"] for line in lines if line.get("trial") == number] == list(range(20))
    with pytest.raises(UsageError, match="another search: its seed is 3, not 4"):
        SharedJournal.join(tmp_path, SETTINGS | {"seed": 4}, lambda: None)
