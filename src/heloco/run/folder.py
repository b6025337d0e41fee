"""A run's folder, as the process that runs it sees it: `records.run_files` says what is in it."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from heloco.disk import disk_errors, write_atomically
from heloco.errors import UserError
from heloco.records.evaluations import EvaluationRecord
from heloco.records.events import EndKind
from heloco.records.folder_lock import lock_folder
from heloco.records.lines import Lines
from heloco.records.run_end import RunEnd, clear_end, write_end
from heloco.records.run_facts import RunFacts, read_facts
from heloco.records.run_files import CHECKPOINTS, CONFIG, EVALS, META, TAPE
from heloco.records.tape import ArrivalRecord
from heloco.registry import PLUGIN_FLAG, NotInstalled
from heloco.run import checkpoint
from heloco.run.checkpoint import NO_LINES, CheckpointState, LineSizes, State
from heloco.run.config import RunConfig, resolve
from heloco.run.settings import read_toml, to_toml, with_fields


def resume_command(path: Path) -> str:
    """The command that goes on with the run there: a real one is served."""
    try:
        is_real = read_facts(path / META).is_real
    except UserError:
        is_real = False
    return f"heloco {'serve' if is_real else 'resume'} {path}"


class RunFolder:
    """The folder of a run, for making it, finding it, and writing into it from one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tape: Lines[ArrivalRecord] | None = None
        self.evals: Lines[EvaluationRecord] | None = None
        self._lock: int | None = None

    @property
    def remedy(self) -> str:
        """A sentence for error messages: the command that resumes this run."""
        return f"`{resume_command(self.path)}` goes on from the last checkpoint."

    # ---- making and finding

    @classmethod
    def create(cls, path: Path, config: RunConfig, facts: RunFacts, among: tuple[str, ...] = ()) -> "RunFolder":
        """A new folder with its config, taken for this process; refuses one that exists and has more in it than `among`."""
        folder = cls(path)
        with disk_errors(path, "start the run again."):
            path.mkdir(parents=True, exist_ok=True)
            with folder._locked():
                cls.check_free(path, among)
                try:
                    write_atomically(path / META, facts.to_json())
                    write_atomically(path / CONFIG, to_toml(config).encode())  # last: a folder with a config is a run
                except OSError:
                    (path / META).unlink(missing_ok=True)
                    raise
        return folder

    @staticmethod
    def check_free(path: Path, among: tuple[str, ...] = ()) -> None:
        """Raises UserError if `path` holds a run already, is a file, or holds anything but the names in `among`."""
        if (path / CONFIG).is_file():
            raise UserError(f"The run folder {path} exists: choose another --out, or `{resume_command(path)}` to go on with it.")
        if path.exists() and (not path.is_dir() or any(each.name not in among for each in path.iterdir())):
            raise UserError(f"{path} exists and is no empty folder: choose another --out.")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """The folder of an existing run. Raises UserError if it has no config. It is not taken for this process: see `take`."""
        if not (path / CONFIG).is_file():
            raise UserError(
                f"{path} is no run folder (it has no {CONFIG}): give the folder that `heloco train` or `serve` named."
            )
        return cls(path)

    def config(self, *, for_task: bool = False) -> RunConfig:
        """The run's. `for_task`: the outer rule and the shard policy are left at their defaults, and need not be installed."""
        try:
            return resolve(with_fields(RunConfig(), read_toml(self.path / CONFIG, for_task=for_task)))
        except NotInstalled as error:
            package = self.facts().plugins.get(f"{error.kind} {error.name}")
            if package is None:
                raise
            remedy = f"give {package}" if package.startswith(PLUGIN_FLAG) else f"install {package}"
            raise UserError(
                f"The run in {self.path} uses the {error.kind} {error.name!r}, which is not installed here: {remedy}."
            ) from error

    def facts(self) -> RunFacts:
        """What run.json says."""
        return read_facts(self.path / META)

    # ---- writing

    def write_facts(self, facts: RunFacts) -> None:
        """Puts other facts in the place of run.json. Raises UserError if the disk is full."""
        with disk_errors(self.path / META, self.remedy):
            write_atomically(self.path / META, facts.to_json())

    def take(self) -> None:
        """Takes the folder for this process, until `close`."""
        with self._locked():
            pass

    def start_writing(self, since: LineSizes = NO_LINES, *, accept_shorter: bool = False) -> None:
        """Takes the folder for this process and cuts the tape and the evaluations back to where the state stands.

        `accept_shorter`: what they have lost cannot be had again, and the run goes on without it."""
        with self._locked(), disk_errors(self.path, self.remedy):
            if (short := self.shorter_than(since)) and not accept_shorter:
                raise UserError(f"{short} is cut short: its checkpoint is further. Restore it, or start the run again.")
            self.tape = Lines(self.path / TAPE, whole_lines(self.path / TAPE, since.tape_bytes), ArrivalRecord)
            self.evals = Lines(self.path / EVALS, whole_lines(self.path / EVALS, since.evals_bytes), EvaluationRecord)
            clear_end(self.path)

    def shorter_than(self, sizes: LineSizes) -> Path | None:
        """The tape or the evaluations, where they do not have a whole line up to this byte."""
        for name, size in ((TAPE, sizes.tape_bytes), (EVALS, sizes.evals_bytes)):
            path = self.path / name
            if size and (not path.is_file() or path.stat().st_size < size):
                return path
            if size:
                with path.open("rb") as file:
                    file.seek(size - 1)
                    if file.read(1) != b"\n":
                        return path
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder for this process, until `close` or until something goes wrong inside."""
        if self._lock is None:
            self._lock = os.open(self.path, os.O_RDONLY)
        try:
            lock_folder(self._lock)
            yield
        except BlockingIOError:
            self.close()
            raise UserError(f"Another process is writing {self.path}: wait for it to end, or stop it first.") from None
        except BaseException:
            self.close()
            raise

    def write_arrival(self, record: ArrivalRecord) -> None:
        """Appends a line to the tape, after `start_writing`. Raises UserError if the disk is full."""
        assert self.tape is not None
        with disk_errors(self.path / TAPE, self.remedy):
            self.tape.append(record)

    def write_eval(self, record: EvaluationRecord) -> None:
        """Appends a line to the evaluations, after `start_writing`. Raises UserError if the disk is full."""
        assert self.evals is not None
        with disk_errors(self.path / EVALS, self.remedy):
            self.evals.append(record)

    def note_end(self, kind: EndKind, text: str) -> None:
        """Notes for people how the run ended. It is forgotten when the run goes on."""
        write_end(self.path, RunEnd(kind=kind, text=text))

    def line_sizes(self) -> LineSizes:
        """Where the tape and the evaluations stand."""
        assert self.tape is not None and self.evals is not None
        return LineSizes(tape_bytes=self.tape.size, evals_bytes=self.evals.size)

    def save_checkpoint(
        self,
        state: CheckpointState,
        tensors: Mapping[str, Tensor],
        *,
        keep_first: bool = False,
        before_piece: Callable[[], None] = lambda: None,
        copied: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes a checkpoint, and makes the lines that it covers durable before it. `before_piece` is called again and again
        while the tensors are copied, and may raise; `copied` when they may change again."""
        assert self.tape is not None and self.evals is not None
        tape, evals = self.tape, self.evals

        def on_copied() -> None:
            copied()
            tape.sync()
            evals.sync()

        with disk_errors(self.path / CHECKPOINTS, self.remedy):
            folder = self.path / CHECKPOINTS
            checkpoint.save(folder, state, tensors, keep_first=keep_first, before_piece=before_piece, copied=on_copied)

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return checkpoint.list_checkpoints(self.path / CHECKPOINTS)

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint; None if there is none."""
        checkpoints = self.checkpoints()
        return checkpoints[-1] if checkpoints else None

    def load_latest(self, kind: type[State]) -> tuple[State, Mapping[str, Tensor]] | None:
        """The newest checkpoint, or None where the run was killed before its first."""
        latest = self.latest()
        return None if latest is None else checkpoint.load(latest, kind)

    def load_model(self) -> tuple[CheckpointState, Mapping[str, Tensor]]:
        """The newest checkpoint of a run that must have one."""
        model = self.load_latest(CheckpointState)
        if model is None:
            raise UserError(f"{self.path} has no checkpoint yet: `{resume_command(self.path)}` starts it.")
        return model

    def close(self) -> None:
        """Closes the tape and the evaluations, and lets other processes take the folder."""
        for lines in (self.tape, self.evals):
            if lines is not None:
                lines.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def whole_lines(path: Path, size: int) -> int:
    """Bytes of the whole lines within the first `size` bytes of a file."""
    if not size or not path.is_file():
        return 0
    with path.open("rb") as file:
        at = min(size, path.stat().st_size)
        while at:
            start = max(0, at - (1 << 16))
            file.seek(start)
            if (last := file.read(at - start).rfind(b"\n")) >= 0:
                return start + last + 1
            at = start
    return 0


def make_next(parent: Path, stem: str) -> Path:
    """Makes parent/stem-001, or the first number that is not taken, and gives its path: two runs at once get two folders."""
    with disk_errors(parent, "start the run again."):
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = parent / f"{stem}-{number:03d}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
