"""A run's folder as pandas DataFrames, for notebooks: `heloco.load_run`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, fields

from heloco.errors import UserError
from heloco.records.config_facts import read_all_settings
from heloco.records.evaluations import EvaluationRecord
from heloco.records.lines import read_records
from heloco.records.run_facts import RunFacts, read_facts
from heloco.records.run_files import CONFIG, EVALS, META, TAPE
from heloco.records.tape import CASES, ArrivalRecord, BlockColumns

if TYPE_CHECKING:
    import pandas

OPTIONAL_NUMBERS = ("loss", "last_loss", "clipped")
"""The columns of the tape that have NaN where the tape has no number."""
BLOCK_NUMBERS = tuple(field.name for field in fields(BlockColumns) if field.name != "case")


@dataclass(frozen=True, repr=False)
class RunData:
    """A run as its folder tells it. Each table is read when it is first asked for, and kept."""

    path: Path
    facts: RunFacts
    """What run.json says: method, paces, blocks with their shapes, shards."""

    def __repr__(self) -> str:
        return f"<heloco.RunData: {self.facts.method} in {self.path}>"

    @cached_property
    def settings(self) -> "pandas.Series":
        """The settings of config.toml by section and name, such as "outer.method"."""
        import pandas

        sections = read_all_settings(self.path / CONFIG)
        values = {f"{section}.{name}": value for section, entries in sections.items() for name, value in entries.items()}
        return pandas.Series(values, name="settings", dtype=object)

    @cached_property
    def tape(self) -> "pandas.DataFrame":
        """A row per arrival, also of refused contributions; the columns are the fields of tape.jsonl (docs/tape.md), without the
        blocks. `shard_name` comes from run.json."""
        import pandas

        names = [field.name for field in fields(ArrivalRecord) if field.name != "blocks"]
        frame = pandas.DataFrame([asdict(record) for record in self._arrivals], columns=names)
        frame = frame.astype(dict.fromkeys(OPTIONAL_NUMBERS, float))
        shards = [self.facts.shards[record.shard].name for record in self._arrivals]
        frame.insert(names.index("shard") + 1, "shard_name", shards)
        return frame

    @cached_property
    def evals(self) -> "pandas.DataFrame":
        """A row per evaluation of the run's model: where the run was, the mean of each measure over the sources, such as `loss`,
        and the measures of each source, such as `loss/de`."""
        records = [record for record in read_records(self.path / EVALS, EvaluationRecord) if record.is_of_run]
        return _evaluation_frame(records, without=("own_steps",))

    @cached_property
    def own_evals(self) -> "pandas.DataFrame":
        """The same of evaluations of machines' own models within their rounds: `machine` says whose, and `own_steps` how many
        inner steps after this arrival. These are no scores of the run's model."""
        records = [record for record in read_records(self.path / EVALS, EvaluationRecord) if not record.is_of_run]
        return _evaluation_frame(records)

    @cached_property
    def blocks(self) -> "pandas.DataFrame":
        """A row per arrival and block of the model, by the block's name: what the outer rule did with it (kept, damped, turned
        or skipped) and its numbers. Contributions without an outer step have no rows."""
        import pandas

        columns: dict[str, list[Any]] = {name: [] for name in ("arrival", "outer_step", "time_s", "worker", "block", "case")}
        columns |= {name: [] for name in BLOCK_NUMBERS}
        names = [block.name for block in self.facts.blocks]
        for record in self._arrivals:
            if record.blocks is not None:
                _add_blocks(columns, record, record.blocks, names)
        return pandas.DataFrame(columns).astype(dict.fromkeys(BLOCK_NUMBERS, float))

    @cached_property
    def _arrivals(self) -> list[ArrivalRecord]:
        return list(read_records(self.path / TAPE, ArrivalRecord))


def _evaluation_frame(records: Sequence[EvaluationRecord], without: Sequence[str] = ()) -> "pandas.DataFrame":
    import pandas

    names = [field.name for field in fields(EvaluationRecord) if field.name not in ("mean", "scores", *without)]
    places, measures = [], []
    for record in records:
        places.append([getattr(record, name) for name in names])
        row = dict(record.mean)
        for source, scores in record.scores.items():
            row |= {f"{measure}/{source}": value for measure, value in scores.items()}
        measures.append(row)
    return pandas.concat([pandas.DataFrame(places, columns=names), pandas.DataFrame(measures, dtype=float)], axis=1)


def _add_blocks(columns: dict[str, list[Any]], record: ArrivalRecord, blocks: BlockColumns, names: Sequence[str]) -> None:
    count = len(blocks.case)
    for name in ("arrival", "outer_step", "time_s", "worker"):
        columns[name] += [getattr(record, name)] * count
    columns["block"] += names if len(names) == count else [str(i) for i in range(count)]
    columns["case"] += [CASES.get(letter, letter) for letter in blocks.case]
    for name in BLOCK_NUMBERS:
        columns[name] += getattr(blocks, name) or [None] * count


def check_pandas(function: str) -> None:
    """Refuses to go on without pandas. `function`: what needs it."""
    if find_spec("pandas") is None:
        raise UserError(f'{function} needs pandas, which is not installed: pip install "heloco[pandas]"')


def load_run(path: str | PathLike[str]) -> RunData:
    """A run's folder as pandas DataFrames: `tape`, `evals` and `blocks`; `settings` and `facts`. The run may still be going.

        run = heloco.load_run("runs/heloco-adaptive-001")
        run.evals.plot(x="time_s", y="loss")
        run.tape.groupby("worker").staleness.mean()
        run.blocks.pivot_table(index="block", columns="case", values="cosine", aggfunc="count")

    docs/tape.md says what each column means. Needs pandas: pip install "heloco[pandas]".
    """
    check_pandas("heloco.load_run")
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} is no run folder (it has no {CONFIG}): give the folder that `heloco train` or heloco.simulate(out=…) made."
        )
    return RunData(folder, read_facts(folder / META))
