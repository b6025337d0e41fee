"""The journal: what was written is there, whatever happened to the process; what was tampered with is found."""

import json
import os

import pytest

from conftest import fill_disk
from heloco.errors import UserError
from heloco.run.journal import EVENTS, FOLDER, Journal, read_events


def filled(path, count=5):
    journal = Journal(path)
    for i in range(count):
        journal.append({"event": "note", "i": i})
    return journal


def events(path):
    return [event for event, _, _ in read_events(path / FOLDER / EVENTS)]


def test_events_come_back_numbered_and_go_on(tmp_path):
    filled(tmp_path, 3).close()
    journal = Journal(tmp_path)
    assert journal.last == 3
    assert journal.append({"event": "note", "i": 3})["n"] == 4
    assert [(e["n"], e["i"]) for e in journal.read(after=1)] == [(2, 1), (3, 2), (4, 3)]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    filled(tmp_path, 3).close()
    path = tmp_path / FOLDER / EVENTS
    os.truncate(path, path.stat().st_size - cut)
    journal = Journal(tmp_path)
    assert journal.last == 2
    journal.append({"event": "note", "i": "again"})
    assert [e["i"] for e in events(tmp_path)] == [0, 1, "again"]


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda lines: lines[:1] + lines[2:], id="a line is missing"),
        pytest.param(lambda lines: [lines[1], lines[0], *lines[2:]], id="two are exchanged"),
        pytest.param(lambda lines: [lines[0].replace(b'"i":0', b'"i":7'), *lines[1:]], id="a number was changed"),
        pytest.param(lambda lines: [lines[0], b"{}\n", *lines[1:]], id="a line was put in"),
        pytest.param(lambda lines: [lines[0], b"rubbish\n", *lines[2:]], id="rubbish"),
        pytest.param(lambda lines: [lines[0], b"[1]\n", *lines[2:]], id="no record"),
    ],
)
def test_tampering_is_found(tmp_path, tamper):
    filled(tmp_path).close()
    path = tmp_path / FOLDER / EVENTS
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(UserError, match="was edited, or lines before it are missing"):
        Journal(tmp_path)


def test_a_full_disk_leaves_nothing_of_an_event(small_disk):
    journal = filled(small_disk, 3)
    fill_disk(small_disk / "ballast", room=0)
    with pytest.raises(OSError, match="No space left"):
        for i in range(10_000):  # the file's last block may still have room
            journal.append({"event": "note", "i": i, "text": "x" * 500})
    (small_disk / "ballast").unlink()
    last = journal.last
    journal.append({"event": "note", "i": "after"})
    assert [e["n"] for e in events(small_disk)] == list(range(1, last + 2))


def received(journal, number, size=100):
    journal.tensors(0, number, number).write_bytes(b"x" * size)
    return journal.append({"event": "receive", "worker": 0, "round": number, "version": number, "bytes": size})


def test_tensors_go_when_a_checkpoint_stands_for_them_and_they_are_too_many(tmp_path):
    journal = Journal(tmp_path)
    for number in range(6):
        received(journal, number)
    journal.prune(until=4, budget_bytes=600)
    assert journal.whole_since == 0 and len(list(journal.path.glob("*.safetensors"))) == 6
    journal.prune(until=4, budget_bytes=599)
    assert journal.whole_since == 4
    assert sorted(p.name for p in journal.path.glob("*.safetensors")) == ["0-4-4.safetensors", "0-5-5.safetensors"]
    journal.close()
    again = Journal(tmp_path)
    assert again.whole_since == 4 and [number for number, _, _ in again.kept] == [5, 6]


def test_transfers_that_did_not_end_are_removed(tmp_path):
    journal = Journal(tmp_path)
    received(journal, 0)
    journal.tensors(1, 0, 0).write_bytes(b"half")
    journal.remove_unfinished()
    assert [p.name for p in journal.path.glob("*.safetensors")] == ["0-0-0.safetensors"]


def test_a_line_is_json_with_its_seal(tmp_path):
    filled(tmp_path, 1).close()
    [line] = (tmp_path / FOLDER / EVENTS).read_text().splitlines()
    assert json.loads(line).keys() == {"n", "event", "i", "seal"}
