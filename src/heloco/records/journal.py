"""The journal of a run on real machines: a write-ahead log of its events.

    journal/events-POSITION.jsonl     segments of one long file of lines, named by the byte at which they begin in it
    journal/NUMBER.safetensors        the tensors of a contribution, under the number of its `Receive` event
    journal/acknowledged              the number of the last event that was durable when a contribution was acknowledged

A line is an event with its number and a seal: a hash over the line's bytes and the previous seal.
So an edited, missing or exchanged line is detected. A segment begins with a header line that holds
the state of the chain, so that reading can begin at any segment. A restart reads from the last
checkpoint on, whatever the length of the run.

Contributions are recorded one at a time, and each is durable before it is acknowledged. Damaged lines after the last acknowledged
event were never promised to anybody, and are cut off. Damage before it is reported.
"""

import contextlib
import itertools
import os
import threading
from io import FileIO
from pathlib import Path

import msgspec

from heloco.disk import drop_cached_pages, file_digest, make_durable, make_folder_durable
from heloco.errors import RunStopped, UserError
from heloco.records.events import Event, Receive
from heloco.records.journal_reader import (
    FOLDER,
    SEAL_FIELD,
    Header,
    JournalDamaged,
    Mark,
    contribution_numbers,
    contribution_path,
    reaches,
    read_events,
    seal_of,
    segment_name,
    segments,
)

SEGMENT_BYTES = 4 << 20
"""When a segment has grown to this size, the next one is begun."""


class JournalTaken(RunStopped):
    """Another process changed the journal while the run was being served."""


class Journal:
    """The journal of the run in the folder `run`, open for writing.

    Opening it checks the events after `since` and cuts off damaged events, and events without
    their tensors, that were never acknowledged. It raises UserError if
    acknowledged events are missing."""

    def __init__(self, run: Path, since: Mark | None = None, *, may_begin_at_mark: bool = False) -> None:
        """`may_begin_at_mark`: the events before `since` are known to be lost, and the journal continues without them."""
        since = since or Mark()
        self.folder = run / FOLDER
        self.folder.mkdir(exist_ok=True)
        self._paths_to_remove: set[Path] = set()
        self._count_lock = threading.Lock()
        """Held while `_bytes_kept` changes: files are removed in another thread."""
        self._file = self._acknowledged_handle = self._folder_handle = -1
        try:
            self._folder_handle = os.open(self.folder, os.O_RDONLY)
            self._acknowledged_handle = os.open(self.folder / "acknowledged", os.O_RDWR | os.O_CREAT, 0o644)
            self.acknowledged = self._read_acknowledged()
            """Number of the last event that was durable when a contribution was acknowledged; -1 if it is not known."""
            if since.number and not may_begin_at_mark:
                self._check_not_lost()
            self.end = self._find_end(since)
            """The place after the last event."""
            self._open_segment()
            self._bytes_kept = sum(each.stat().st_size for each in os.scandir(self.folder) if each.is_file())
        except BaseException:
            self.close()
            raise
        make_folder_durable(run)

    def _read_acknowledged(self) -> int:
        text = os.pread(self._acknowledged_handle, 64, 0).strip(b"\n")
        if not text and not segments(self.folder):
            return 0  # a new journal
        return int(text) if text.isdigit() else -1

    def _check_not_lost(self) -> None:
        if not segments(self.folder):
            raise UserError(
                f"{self.folder} has lost its events. Restore it from a copy, or return to the last checkpoint with "
                f"`heloco rollback {self.folder.parent}`."
            )

    def _find_end(self, since: Mark) -> Mark:
        for _, path in segments(self.folder):
            with path.open("rb") as file:
                drop_cached_pages(file.fileno())
        end = since
        try:
            for event, mark in read_events(self.folder, since):
                if mark.number > self.acknowledged >= 0 and isinstance(event, Receive) and not self._has_tensors(event, mark):
                    break  # a power cut kept the line and lost the tensors; nobody was told that they are safe
                end = mark
        except JournalDamaged as damage:
            if damage.last_good.number < self.acknowledged or self.acknowledged < 0:
                raise
            end = damage.last_good  # later events were never acknowledged
        if end.number < self.acknowledged:
            raise UserError(
                f"{self.folder} is cut short: it reaches to event {end.number}, and event {self.acknowledged} was acknowledged. "
                f"Restore it from a copy, or return to what is left with `heloco rollback {self.folder.parent}`."
            )
        return end

    def _has_tensors(self, event: Receive, mark: Mark) -> bool:
        try:
            return file_digest(contribution_path(self.folder, mark.number)) == event.digest
        except OSError:
            return False

    def _open_segment(self) -> None:
        """Cuts the journal off at its end, and goes on there."""
        files = segments(self.folder)
        for base, path in files:
            if base >= self.end.position:
                path.unlink()
        before = [each for each in files if each[0] < self.end.position]
        if not before or not reaches(self.folder, before, self.end):
            if before:  # damaged, but before a checkpoint that has all that was acknowledged: kept aside
                before[-1][1].rename(before[-1][1].with_suffix(".damaged"))
            self._begin_segment()
            return
        self._base, self._path = before[-1]
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND)
        os.ftruncate(self._file, self.end.position - self._base)

    def _begin_segment(self) -> None:
        if self._file >= 0:
            make_durable(self._file, self._path)  # a later fsync covers only the new segment
            os.close(self._file)
            self._file = -1
        self._base, self._path = self.end.position, self.folder / segment_name(self.end.position)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write_header()
        make_durable(self._folder_handle, self.folder)

    def _write_header(self) -> None:
        line = msgspec.json.encode(Header(self.end)) + b"\n"
        self._write(line)
        self.end = Mark(self.end.number, self.end.position + len(line), self.end.seal)

    def append(self, event: Event) -> int:
        """Writes an event and returns its number. It is durable after the next `make_durable`.
        After an error nothing of it remains."""
        self._check_ours()
        if self.end.position - self._base > SEGMENT_BYTES:
            self._begin_segment()
        number = self.end.number + 1
        body = b'{"n":%d,' % number + msgspec.json.encode(event)[1:-1]
        seal = seal_of(self.end.seal, body)
        line = body + SEAL_FIELD + seal.encode() + b'"}\n'
        self._write(line)
        self._count(len(line))
        self.end = Mark(number, self.end.position + len(line), seal)
        return number

    def _write(self, line: bytes) -> None:
        try:
            bytes_written = 0
            while bytes_written < len(line):
                bytes_written += os.write(self._file, line[bytes_written:])
        except OSError:
            os.ftruncate(self._file, self.end.position - self._base)
            raise

    def _check_ours(self) -> None:
        """Checks that no other process has changed the file.

        1. If the file was removed or replaced, its content is still in the open file, and is put back.
        2. If it was cut or extended, acknowledged events may exist only in this process's memory: the run must stop."""
        size = self.end.position - self._base
        info = os.fstat(self._file)
        if info.st_size != size:
            raise JournalTaken(
                f"{self._path} was changed by another process during the run ({info.st_size} bytes instead of "
                f"{size}), so the run stops. Its state was saved: leave the journal alone and serve the run again."
            )
        try:
            is_in_place = os.path.samestat(self._path.stat(), info)
        except FileNotFoundError:
            is_in_place = False
        if not is_in_place:
            self._put_back(size)

    def _put_back(self, size: int) -> None:
        temporary = self.folder / f".{self._path.name}"
        self.folder.mkdir(exist_ok=True)
        copy = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            offset = 0
            while offset < size:
                offset += os.write(copy, os.pread(self._file, min(size - offset, 1 << 20), offset))
            make_durable(copy, self._path)
            temporary.replace(self._path)
            make_durable(self._folder_handle, self.folder)
        except BaseException:
            os.close(copy)
            raise
        os.close(self._file)
        self._file = copy

    def make_durable(self, tensors: int | None = None) -> None:
        """Makes all events durable, after the open file `tensors` of the last contribution, if given.

        One after the other, although together would be faster: if `acknowledged` is lost too, nobody knows afterwards whether an
        event without its tensors was ever acknowledged."""
        if tensors is not None:
            make_durable(tensors, contribution_path(self.folder, self.end.number))
            make_durable(self._folder_handle, self.folder)
        make_durable(self._file, self._path)

    def open_again(self) -> FileIO:
        """The file of the newest events. An fsync of it makes all events up to now durable, from any thread, and after later
        events. It is not a copy of the handle: the system reports a failed write once for each time a file was opened."""
        return self._path.open("rb", buffering=0)

    def acknowledge(self, number: int) -> None:
        """Notes that the event is durable, just before it is acknowledged."""
        os.pwrite(self._acknowledged_handle, b"%020d\n" % number, 0)
        self.acknowledged = number

    # ---- tensors of contributions

    def take_in(self, upload: Path) -> Path:
        """Moves a file to the path for the tensors of the next event."""
        path = contribution_path(self.folder, self.end.number + 1)
        upload.rename(path)
        self._count(path.stat().st_size)
        return path

    def give_back(self, path: Path, upload: Path) -> None:
        """Undoes `take_in` if the event could not be written."""
        self._count(-path.stat().st_size)
        path.rename(upload)

    def remove_orphans(self) -> None:
        """Removes tensor files without an event. Their contributions were never acknowledged."""
        for number in contribution_numbers(self.folder):
            if number > self.end.number:
                contribution_path(self.folder, number).unlink()

    def to_prune(self, until: Mark, budget_bytes: float) -> list[Path]:
        """If the journal is larger than its budget: the files that a checkpoint at `until` covers, tensors first, then segments.
        The caller removes them, in this order. A replay can then no longer begin at the first event. One thread at a time
        may call this, and another may append meanwhile."""
        self._paths_to_remove = {path for path in self._paths_to_remove if path.exists()}
        if self._bytes_kept <= budget_bytes:
            return []
        tensors = [contribution_path(self.folder, n) for n in contribution_numbers(self.folder) if n <= until.number]
        paths = [path for path in tensors if self._will_be_removed(path)]
        for (_, path), (next_base, _) in itertools.pairwise(segments(self.folder)):
            if next_base <= until.position and self._bytes_kept > budget_bytes and self._will_be_removed(path):
                paths.append(path)
        return paths

    def _count(self, size: int) -> None:
        with self._count_lock:
            self._bytes_kept += size

    def _will_be_removed(self, path: Path) -> bool:
        """Counts a file as removed, unless that was done before and the caller has not come to it yet."""
        with contextlib.suppress(FileNotFoundError):
            if path not in self._paths_to_remove:
                self._count(-path.stat().st_size)
                self._paths_to_remove.add(path)
                return True
        return False

    def close(self) -> None:
        """Closes the journal's files. Events that were not made durable may still be lost in a power cut. It may be called
        twice."""
        for handle in (self._file, self._acknowledged_handle, self._folder_handle):
            if handle >= 0:
                with contextlib.suppress(OSError):
                    os.close(handle)
        self._file = self._acknowledged_handle = self._folder_handle = -1
