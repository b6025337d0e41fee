"""The journal: what was written is there, whatever happened to the process; what was tampered with is found."""

import json
import os
import shutil

import pytest

from heloco.errors import UserError
from heloco.records import journal as journal_module
from heloco.records.events import Abandon, Pause, Receive, Resume
from heloco.records.journal import Journal, JournalTaken
from heloco.records.journal_reader import FOLDER, JournalDamaged, contribution_numbers, read_events, segments
from support.disks import fill_disk


def pause(i):
    return Pause(time_s=float(i), kind="admin", text=f"pause {i}")


def filled(path, count=5):
    journal = Journal(path)
    for i in range(count):
        journal.append(pause(i))
    return journal


def texts(path, since=None):
    return [event.text for event, _ in read_events(path / FOLDER, since)]


def segment(path):
    """The only one there is."""
    [(_, segment)] = segments(path / FOLDER)
    return segment


def test_events_come_back_numbered_and_go_on(tmp_path):
    filled(tmp_path, 3).close()
    journal = Journal(tmp_path)
    assert journal.end.number == 3
    assert journal.append(pause(3)) == 4
    events = list(read_events(journal.folder))
    assert [(mark.number, event.text) for event, mark in events] == [(i + 1, f"pause {i}") for i in range(4)]
    assert [event.text for event, _ in read_events(journal.folder, events[0][1])] == ["pause 1", "pause 2", "pause 3"]


def test_every_kind_of_event_comes_back_as_it_was(tmp_path):
    events = [
        pause(0),
        Resume(time_s=1.5),
        Abandon(time_s=2.0, worker=3, round=4, kind="lost", text='a "quoted" \\ text\n'),
        Receive(
            time_s=1e-9, worker=0, round=1, version=2, machine="m#1", bytes=10, digest="ab", loss=None, last_loss=0.1,
            samples=1, units=2,
        ),
    ]  # fmt: skip
    journal = Journal(tmp_path)
    for event in events:
        journal.append(event)
    assert [event for event, _ in read_events(journal.folder)] == events


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    filled(tmp_path, 3).close()
    os.truncate(segment(tmp_path), segment(tmp_path).stat().st_size - cut)
    journal = Journal(tmp_path)
    assert journal.end.number == 2
    journal.append(pause(9))
    assert texts(tmp_path) == ["pause 0", "pause 1", "pause 9"]


TAMPER = {
    "a line is missing": lambda lines: lines[:2] + lines[3:],
    "two are exchanged": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "a number was changed": lambda lines: [lines[0], lines[1].replace(b"pause 0", b"pause 7"), *lines[2:]],
    "a line was put in": lambda lines: [*lines[:2], b"{}\n", *lines[2:]],
    "rubbish": lambda lines: [*lines[:2], b"rubbish\n", *lines[3:]],
    "no record": lambda lines: [*lines[:2], b"[1]\n", *lines[3:]],
    "another header": lambda lines: [b'{"segment":{"number":5,"position":0,"seal":""}}\n', *lines[1:]],
    "zeros": lambda lines: [*lines[:3], bytes(100) + b"\n", *lines[4:]],
}


@pytest.mark.parametrize("tamper", TAMPER.values(), ids=TAMPER)
def test_tampering_with_what_was_acknowledged_is_found(tmp_path, tamper):
    journal = filled(tmp_path)
    journal.acknowledge(5)
    journal.close()
    path = segment(tmp_path)
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(UserError, match="was edited, or lines before it are missing"):
        Journal(tmp_path)


@pytest.mark.parametrize("rubbish", [bytes(512), bytes(512) + b"\n", b"rubbish\n", b'{"n":6,"event":"pause"}\n'])
def test_rubbish_after_the_acknowledged_event_is_cut_off(tmp_path, rubbish):
    """As a power cut leaves it: nobody was promised anything of it."""
    journal = filled(tmp_path)
    journal.acknowledge(4)
    journal.close()
    with segment(tmp_path).open("ab") as file:
        file.write(rubbish)
    reopened_journal = Journal(tmp_path)
    assert reopened_journal.end.number == 5 and texts(tmp_path) == [f"pause {i}" for i in range(5)]


def test_a_journal_that_lost_what_was_acknowledged_is_refused(tmp_path):
    journal = filled(tmp_path)
    journal.acknowledge(5)
    journal.close()
    lines = segment(tmp_path).read_bytes().splitlines(keepends=True)
    segment(tmp_path).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(UserError, match="is cut short: it reaches to event 4, and event 5 was acknowledged") as refused:
        Journal(tmp_path)
    assert f"heloco rollback {tmp_path}" in str(refused.value)


def test_what_a_checkpoint_stands_for_is_not_needed(tmp_path):
    """A line before it was damaged, and everything that was acknowledged is in the checkpoint: the journal goes on after it."""
    journal = filled(tmp_path)
    journal.acknowledge(5)
    mark = journal.end
    journal.close()
    segment(tmp_path).write_bytes(segment(tmp_path).read_bytes()[:100])
    reopened_journal = Journal(tmp_path, mark)
    assert reopened_journal.end.number == 5
    reopened_journal.append(pause(5))
    assert texts(tmp_path, mark) == ["pause 5"]
    assert [path.suffix for path in sorted((tmp_path / FOLDER).glob("events-*"))] == [".damaged", ".jsonl"]


def test_reading_begins_at_a_mark_and_reads_nothing_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 400)
    journal = filled(tmp_path, 40)
    marks = [mark for _, mark in read_events(journal.folder)]
    journal.close()
    segment_files = segments(journal.folder)
    assert len(segment_files) > 5
    for mark in marks[::7]:
        assert texts(tmp_path, mark) == [f"pause {i}" for i in range(mark.number, 40)]
    for _, path in segment_files[:3]:  # what is not needed may be gone
        path.unlink()
    assert texts(tmp_path, marks[-1]) == []
    assert Journal(tmp_path, marks[35]).end == marks[-1]
    first = next(mark for mark in marks if mark.position > segment_files[3][0]).number
    assert texts(tmp_path) == [f"pause {i}" for i in range(first - 1, 40)]


def test_a_segment_that_is_missing_in_the_middle_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 400)
    journal = filled(tmp_path, 40)
    journal.acknowledge(40)
    journal.close()
    segments(journal.folder)[2][1].unlink()
    with pytest.raises(JournalDamaged):
        Journal(tmp_path)


@pytest.mark.parametrize("cut", range(1, 60, 4))
def test_a_kill_while_a_segment_is_begun(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 400)
    journal = filled(tmp_path, 10)
    journal.close()
    path = segments(journal.folder)[-1][1]
    os.truncate(path, max(0, path.stat().st_size - cut * 10))
    reopened_journal = Journal(tmp_path)
    before = reopened_journal.end.number
    reopened_journal.append(pause(99))
    assert texts(tmp_path) == [*(f"pause {i}" for i in range(before)), "pause 99"]


def test_a_full_disk_leaves_nothing_of_an_event(small_disk):
    journal = filled(small_disk, 3)
    fill_disk(small_disk / "ballast", room=0)
    with pytest.raises(OSError, match="No space left"):
        for _ in range(10_000):  # the file's last block may still have room
            journal.append(Pause(time_s=0.0, kind="admin", text="x" * 500))
    (small_disk / "ballast").unlink()
    last = journal.end.number
    journal.append(pause(7))
    assert [mark.number for _, mark in read_events(journal.folder)] == list(range(1, last + 2))
    journal.close()


# ---- somebody else at the file while the run goes on


@pytest.mark.parametrize("damage", ["removed", "replaced", "folder removed"])
def test_a_journal_that_is_removed_while_it_is_written_is_put_back(tmp_path, damage):
    journal = filled(tmp_path, 3)
    path = segment(tmp_path)
    if damage == "folder removed":
        shutil.rmtree(journal.folder)
    else:
        path.unlink()
    if damage == "replaced":
        path.write_text("something else\n")
    journal.append(pause(3))
    journal.make_durable()
    journal.close()
    assert texts(tmp_path) == [f"pause {i}" for i in range(4)]


def test_a_journal_that_is_cut_while_it_is_written_stops_the_run(tmp_path):
    journal = filled(tmp_path, 3)
    os.truncate(segment(tmp_path), 100)
    with pytest.raises(JournalTaken, match="was changed by another process during the run"):
        journal.append(pause(3))


# ---- tensors


def received(journal, number, size=100):
    upload = journal.folder.parent / "upload"
    upload.write_bytes(b"x" * size)
    journal.take_in(upload)
    return journal.append(
        Receive(
            time_s=0.0, worker=0, round=number, version=number, machine="m#1", bytes=size, digest="", loss=None, last_loss=None,
            samples=0, units=0,
        )
    )  # fmt: skip


def pruned(journal, until, budget_bytes):
    paths = journal.to_prune(until, budget_bytes)
    for path in paths:
        path.unlink()
    return bool(paths)


def test_tensors_and_lines_go_when_a_checkpoint_stands_for_them_and_they_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 300)
    journal = Journal(tmp_path)
    marks = []
    for number in range(6):
        received(journal, number, 1000)
        marks.append(journal.end)
    assert not pruned(journal, marks[3], 20_000)
    assert contribution_numbers(journal.folder) == [1, 2, 3, 4, 5, 6]
    assert pruned(journal, marks[3], 5_000)
    assert contribution_numbers(journal.folder) == [5, 6] and segments(journal.folder)[0][0] == 0
    assert pruned(journal, marks[3], 2_200)
    assert segments(journal.folder)[0][0] > 0  # then lines go, too
    journal.close()
    assert Journal(tmp_path, marks[3]).end.number == 6


def test_tensors_without_an_event_are_removed(tmp_path):
    journal = Journal(tmp_path)
    received(journal, 0)
    upload = tmp_path / "upload"
    upload.write_bytes(b"half")
    journal.take_in(upload)  # and killed before the line was written
    journal.close()
    journal = Journal(tmp_path)
    journal.remove_orphans()
    assert contribution_numbers(journal.folder) == [1]


def test_foreign_files_in_the_folder_are_left_alone(tmp_path):
    journal = filled(tmp_path, 2)
    (journal.folder / "x.safetensors").mkdir()
    (journal.folder / f"{5:012d}.safetensors").mkdir()
    (journal.folder / "notes.txt").write_text("mine")
    journal.close()
    journal = Journal(tmp_path)
    journal.remove_orphans()
    pruned(journal, journal.end, 0.0)
    assert (journal.folder / "notes.txt").exists() and (journal.folder / "x.safetensors").is_dir()


def test_a_line_is_json_with_its_number_and_seal(tmp_path):
    filled(tmp_path, 1).close()
    _, line = segment(tmp_path).read_text().splitlines()
    assert list(json.loads(line)) == ["n", "event", "time_s", "kind", "text", "seal"]


@pytest.mark.parametrize("content", [None, b"", b"rubbish", bytes(21)])
def test_where_it_is_not_known_what_was_acknowledged_nothing_is_cut_off_but_a_torn_line(tmp_path, content):
    journal = filled(tmp_path, 4)
    journal.acknowledge(3)
    journal.close()
    (journal.folder / "acknowledged").unlink()
    if content is not None:
        (journal.folder / "acknowledged").write_bytes(content)
    os.truncate(segment(tmp_path), segment(tmp_path).stat().st_size - 10)
    reopened_journal = Journal(tmp_path)
    assert (reopened_journal.end.number, reopened_journal.acknowledged) == (3, -1)
    reopened_journal.close()
    with segment(tmp_path).open("ab") as file:
        file.write(b"rubbish\n")
    with pytest.raises(JournalDamaged):
        Journal(tmp_path)
