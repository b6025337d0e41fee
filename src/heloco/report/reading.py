"""Run folders as plain records: what is on the tape, column by column, as far as it goes. Reads again what was added since."""

import json
import math
import sys
import tomllib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heloco.errors import UserError
from heloco.records.events import Event
from heloco.report.journal_summary import JournalSummary, JournalTail
from heloco.report.summary import Record, RunSummary

CONFIG, META, TAPE, EVALS = "config.toml", "run.json", "tape.jsonl", "evals.jsonl"
META_KEYS = ("method", "paces", "unit", "task_digest", "shards", "blocks")
BYTES_PER_NUMBER = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Models and pseudo-gradients travel in float32, unless the run's machines bring a model of another kind."""

WHOLE = ("arrival", "outer_step", "worker", "round", "staleness", "units")
NORMS = ("pseudo_gradient_norm", "momentum_norm", "movement")


@dataclass
class Columns:
    """The tape, a column per number. Of the norms only those of all blocks together are kept. NaN where there is no number."""

    arrival: list[int] = field(default_factory=list)
    outer_step: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    round: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    verdict: list[str] = field(default_factory=list)
    pseudo_gradient_norm: list[float] = field(default_factory=list)
    momentum_norm: list[float] = field(default_factory=list)
    movement: list[float] = field(default_factory=list)
    case: list[str] = field(default_factory=list)
    """A letter per block."""
    cosine: "list[array[float]]" = field(default_factory=list)
    """A number per block, in single precision: the tape has six digits."""
    machine: list[str] = field(default_factory=list)
    """Its id; empty in a simulation."""

    def __len__(self) -> int:
        return len(self.arrival)

    def append(self, line: Record) -> None:
        blocks = line.get("blocks") or {}
        values = {name: int(line[name]) for name in WHOLE} | {name: float(line[name]) for name in ("time_s", "start_s")}
        values |= {name: _norm(blocks.get(name)) for name in NORMS} | {"loss": _number(line["loss"])}
        cosine = array("f", map(_number, blocks.get("cosine") or ()))
        self.machine.append(sys.intern(str(line.get("machine", ""))))
        for name, value in {**values, "verdict": str(line["verdict"]), "case": str(blocks.get("case", ""))}.items():
            getattr(self, name).append(value)
        self.cosine.append(cosine)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _norm(values: Sequence[float | None] | None) -> float:
    """Of all blocks together."""
    return math.sqrt(sum(value * value for value in values if value is not None)) if values else math.nan


class Tail:
    """The whole lines of a file that may still grow, each once."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.number, self.cut = path, 0, 0, False

    def more(self) -> Iterator[Record]:
        """What was added since the last call. `cut`: behind it there is a line without its end, as a killed run leaves it."""
        self.cut = False
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    self.cut = True
                    return
                self.offset, self.number = self.offset + len(line), self.number + 1
                try:
                    yield json.loads(line)
                except ValueError:
                    raise self.edited() from None

    def edited(self) -> UserError:
        return UserError(f"{self.path}: line {self.number} was edited and is no record. Restore it, or start the run anew.")


class Run:
    """One run as its folder tells it; `refresh` takes in what was added."""

    def __init__(self, path: Path) -> None:
        if not (path / CONFIG).is_file():
            raise UserError(
                f"{path} is no run folder (it has no {CONFIG}): give the folder that `heloco train` or `serve` named."
            )
        self.path = path
        self.name = path.resolve().name
        self.config: dict[str, dict[str, Any]] = _config(path / CONFIG)
        self.meta: Record = _meta(path / META)
        self._start()
        self.refresh()

    def _start(self) -> None:
        self.tape, self.evals, self.marks = Columns(), list[Record](), list[Record]()
        self.summary = RunSummary(self.meta, self.window if self.meta.get("clock") == "real" else 0)
        self.journal = JournalSummary()
        self._tails = {name: Tail(self.path / name) for name in (TAPE, EVALS)}
        self._journal = JournalTail(self.path) if self.summary.real else None

    def refresh(self) -> bool:
        """Whether there was anything new. A run that was resumed cut its tape back: it is read anew."""
        try:
            is_shorter = any(
                tail.offset > (tail.path.stat().st_size if tail.path.exists() else 0) for tail in self._tails.values()
            )
            if is_shorter or (self._journal is not None and self._journal.was_cut()):
                self._start()
            before = self._known()
            for name, take in ((TAPE, self._arrived), (EVALS, self._evaluated)):
                self._take_in(self._tails[name], take)
            for event in self._journal.more() if self._journal is not None else ():
                self._noted(event)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror}): give folders that you may read.") from error
        return self._known() != before

    def _known(self) -> int:
        return len(self.tape) + len(self.evals) + self.journal.changes

    def _take_in(self, tail: Tail, take: Any) -> None:
        for line in tail.more():
            try:
                take(line)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
                raise tail.edited() from None

    def _arrived(self, line: Record) -> None:
        self.tape.append(line)
        self.summary.arrived(line)
        if self.summary.external and line["verdict"] != "refused":
            self._mark(line)

    def _mark(self, line: Record) -> None:
        """Where nothing is evaluated: as often as it would be, where the run stands and what its machines say of their losses."""
        every = self.config.get("run", {}).get("eval_every") or self.planned or 1
        if line["arrival"] % every == 0 or line["arrival"] == self.planned:
            losses = [loss for loss in self.tape.loss[-every:] if math.isfinite(loss)]
            kept = {name: line[name] for name in ("arrival", "outer_step", "time_s")}
            loss = sum(losses) / len(losses) if losses else None
            self.marks.append({**kept, "units": self.summary.units, "training_loss": loss})

    def _noted(self, event: Event) -> None:
        if refused := self.journal.follow(event):
            self.summary.verdicts["refused"] = self.summary.verdicts.get("refused", 0) + 1
            self.summary.refused(*refused)

    def _evaluated(self, line: Record) -> None:
        kept = {name: line[name] for name in ("arrival", "outer_step", "time_s", "units")}
        scores = {source: dict(measures) for source, measures in line["scores"].items()}
        self.evals.append(kept | {"mean": dict(line["mean"]), "scores": scores})
        self.summary.evaluated(line)

    # ---- what it says about itself

    @property
    def method(self) -> str:
        return str(self.meta["method"])

    @property
    def planned(self) -> int | None:
        """How many arrivals it was to take in."""
        found = self.config.get("run", {}).get("arrivals")
        return found if isinstance(found, int) else None

    @property
    def is_whole(self) -> bool:
        """Whether its last arrival is there, and what is shown of it: an evaluation is written after the arrival it follows."""
        return self.planned is not None and bool(lines := self.progress_lines) and lines[-1]["arrival"] >= self.planned

    @property
    def real(self) -> bool:
        """Whether real machines did it: then the tape's times are real, too."""
        return self.summary.real

    @property
    def external(self) -> bool:
        return self.summary.external

    @property
    def window(self) -> int:
        """Over so many arrivals it is counted who takes part."""
        found = self.config.get("cluster", {}).get("participation")
        return found if isinstance(found, int) and found > 0 else 4 * len(self.meta["paces"])

    @property
    def least(self) -> int:
        """So many machines must take part."""
        found = self.config.get("cluster", {}).get("min_workers")
        return found if isinstance(found, int) else 1

    @property
    def has_journal(self) -> bool:
        """A run that is watched from elsewhere may be here without it."""
        return self._journal is not None and self._journal.exists

    @property
    def progress_lines(self) -> list[Record]:
        """Its evaluations, or where there are none, its marks."""
        return self.marks if self.external else self.evals

    @property
    def cut(self) -> list[str]:
        """The files whose last line has no end."""
        return [name for name, tail in self._tails.items() if tail.cut]

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(source for line in self.evals for source in line["scores"]))

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(measure for line in self.evals for measure in line["mean"]))

    @property
    def round_bytes(self) -> int:
        """What a round moves: the model to the worker, and the pseudo-gradient back."""
        blocks = self.meta["blocks"]
        kinds = self.meta.get("dtypes") or ["float32"] * len(blocks)
        one_way: int = sum(BYTES_PER_NUMBER.get(k, 4) * math.prod(b["shape"]) for b, k in zip(blocks, kinds, strict=False))
        return 2 * one_way

    def task(self) -> tuple[str, str]:
        """Runs with the same can be compared: the task, and for a language model its text and tokenizer."""
        kind = str(self.config.get("data", {}).get("task", "language"))
        return kind, str(self.meta["task_digest"]) if kind == "language" else ""


def _config(path: Path) -> dict[str, dict[str, Any]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it, or start the run anew.") from error
    return {section: entries for section, entries in document.items() if isinstance(entries, dict)}


def _meta(path: Path) -> Record:
    try:
        meta: Record = json.loads(path.read_text(encoding="utf-8"))
        missing = set(META_KEYS) - set(meta)
        assert missing or all(math.prod(block["shape"]) and block["name"] for block in meta["blocks"])
    except (OSError, ValueError, TypeError, KeyError, AssertionError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it, or start the run anew.") from error
    if missing:
        raise UserError(f"{path} was edited: {min(missing)} is missing. Restore it, or start the run anew.")
    return meta


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs that can be laid beside each other, each by a name of its own."""
    given = {path.resolve(): path for path in reversed(paths)}
    runs = [Run(given[path]) for path in dict.fromkeys(path.resolve() for path in paths)]
    _name_apart(runs)
    _check_comparable(runs)
    if not any(run.evals or run.external for run in runs):
        names = ", ".join(str(run.path) for run in runs)
        raise UserError(f"Nothing has been evaluated yet in {names}: wait for the first evaluation, or `heloco resume` the run.")
    return runs


def _name_apart(runs: Sequence[Run]) -> None:
    """By the folder's name; where two share it, by as much of the path as tells them apart."""
    parts, length = [run.path.resolve().parts for run in runs], 1
    while length < max(map(len, parts)) and len({part[-length:] for part in parts}) < len(runs):
        length += 1
    for run, part in zip(runs, parts, strict=True):
        run.name = "/".join(part[-length:])


def _check_comparable(runs: Sequence[Run]) -> None:
    first = runs[0]
    for other in runs[1:]:
        (kind, digest), (other_kind, other_digest) = first.task(), other.task()
        if kind != other_kind:
            raise UserError(
                f"{first.path} trains on the task {kind} and {other.path} on {other_kind}: give runs of one task, the others "
                "in a command of their own."
            )
        if digest != other_digest:
            raise UserError(
                f"{first.path} and {other.path} were trained on different text or with different tokenizers, so their losses "
                "cannot be compared: give runs of one task, the others in a command of their own."
            )
