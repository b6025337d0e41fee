"""The filled grid: what tables and figures ask of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from heloco.methods import get_method
from heloco.report.run_groups import SeedValues, is_beyond_noise, seed_mean
from heloco.report.table_data import Tone
from heloco.study.grid import Place, row_time
from heloco.study.kept_runs import RunRecord
from heloco.study.spec import Study

NOISE_OF_ONE_SEED = 0.01
"""A difference under this part of a loss may be noise where there is one seed."""


@dataclass(frozen=True)
class Stat:
    """Mean over seeds and sample standard deviation (None for one seed); the seeds that diverged are only counted."""

    mean: float
    spread: float | None
    n: int
    diverged_seeds: int = 0

    def text(self, digits: int = 3, sign: str = "") -> str:
        spread = "" if self.spread is None else f" ± {self.spread:.{digits}f}"
        diverged_note = f" ({self.diverged_seeds} of {self.n + self.diverged_seeds} diverged)" if self.diverged_seeds else ""
        return f"{self.mean:{sign}.{digits}f}{spread}{diverged_note}"

    @property
    def is_clear_percentage(self) -> bool:
        """Whether a difference in % is more than noise: than its own deviation over seeds, or 1 % where there is one seed."""
        return abs(self.mean) > (100 * NOISE_OF_ONE_SEED if self.spread is None else self.spread)


def stat(values: Iterable[float | None]) -> Stat | None:
    """Mean and deviation of values, one per seed. A None among them is a seed that diverged. Returns None if all diverged."""
    every = list(values)
    finite = [value for value in every if value is not None]
    if not finite:
        return None
    return Stat(fmean(finite), stdev(finite) if len(finite) > 1 else None, len(finite), len(every) - len(finite))


def usual_spread(losses: Iterable[SeedValues]) -> float:
    """What stands for the spread of a loss that has one seed: the largest of the others, or what makes 1 % of a difference."""
    means = [seed_mean(list(values.values())) for values in losses]
    spreads = [each.spread for each in means if each.spread is not None]
    largest = max((abs(each.mean) for each in means if each.mean is not None), default=0.0)
    return max(spreads, default=NOISE_OF_ONE_SEED * largest / 2**0.5)


def tones(losses: Mapping[str, SeedValues]) -> dict[str, Tone]:
    """Which of several methods is the best and which the worst, by their losses of each seed; neither, if it differs from one of
    the others by no more than noise. There is a worst one only among more than two."""
    means = {name: mean for name, values in losses.items() if (mean := seed_mean(list(values.values())).mean) is not None}
    result: dict[str, Tone] = dict.fromkeys(losses, "")
    if len(means) < 2:
        return result
    spread = usual_spread(losses.values())
    ends: list[tuple[str, Tone]] = [(min(means, key=means.__getitem__), "best")]
    ends += [(max(means, key=means.__getitem__), "worst")] if len(means) > 2 else []
    for name, tone in ends:
        if all(is_beyond_noise(losses[name], losses[other], spread) for other in means if other != name):
            result[name] = tone
    return result


@dataclass(frozen=True)
class PlacedRun:
    """A place and the run that fills it, on the row's own clock."""

    place: Place
    record: RunRecord

    @property
    def times_s(self) -> list[float]:
        return [time * self.place.stretch for time in self.record.evals.time_s]

    @property
    def time_s(self) -> float:
        return self.record.time_s * self.place.stretch

    @property
    def waits(self) -> bool:
        return get_method(self.place.config.outer.method).barrier

    def values(self, source: str = "", measure: str = "loss") -> list[float | None]:
        """The measure at every evaluation, of a source or (where it is the loss) the mean over them."""
        evals = self.record.evals
        if source:
            return evals.sources[source].get(measure, [None] * len(evals.loss))
        if measure == "loss":
            return evals.loss
        columns = [self.values(name, measure) for name in evals.sources]
        return [None if None in at else fmean(v for v in at if v is not None) for at in zip(*columns, strict=True)]

    def final(self, source: str = "", measure: str = "loss") -> float | None:
        """The measure at the end of the run; None if it diverged."""
        return self.values(source, measure)[-1] if self.record.finished else None

    def loss_at(self, time_s: float) -> float | None:
        """The loss at the last evaluation by this time: a barrier's last round that was over."""
        if not self.record.finished:
            return None
        return [loss for at, loss in zip(self.times_s, self.record.evals.loss, strict=True) if at <= time_s][-1]


class Results:
    """The runs of a study by row, method and seed, with the statistics that tables and figures show."""

    def __init__(self, study: Study, scale: str, records_of_places: Sequence[tuple[Place, RunRecord]]) -> None:
        self.study = study
        self.scale = scale
        self.runs = {place.name: PlacedRun(place, record) for place, record in records_of_places}
        self.rows = [row for row in study.rows if any(name[0] == row for name in self.runs)]
        self.methods = [method for method in study.methods if any(name[1] == method for name in self.runs)]
        self.seeds = sorted({seed for _, _, seed in self.runs})
        first = next(iter(self.runs.values()))
        self.sources = list(first.record.evals.sources)
        self.measures = list(first.record.evals.sources[self.sources[0]])
        self.digests = sorted({run.record.digest for run in self.runs.values()})

    @property
    def loss_unit(self) -> str:
        """What a loss is measured in, to follow its name; empty for a task that has no name for it."""
        tasks = {run.place.config.input.task for run in self.runs.values()}
        return ", nats per token" if tasks == {"language"} else ""

    def seeds_of(self, row: str) -> list[int]:
        return sorted({seed for at_row, _, seed in self.runs if at_row == row})

    def time_of(self, row: str) -> float:
        """T of a row: the virtual time when the last of its asynchronous runs ends."""
        ends = [run.time_s for name, run in self.runs.items() if name[0] == row and run.record.finished and not run.waits]
        return max(ends) if ends else row_time(self.study, self.scale, row)

    def at(self, row: str, method: str) -> list[PlacedRun]:
        """The runs of a place of the table, one per seed; none where the study does not pair the two."""
        return [self.runs[row, method, seed] for seed in self.seeds if (row, method, seed) in self.runs]

    def final(self, row: str, method: str, source: str = "", measure: str = "loss") -> Stat | None:
        return stat(run.final(source, measure) for run in self.at(row, method))

    def seed_values(self, row: str, method: str, source: str = "", measure: str = "loss") -> dict[int, float | None]:
        """The measure at the end of each seed's run."""
        runs = {seed: self.runs.get((row, method, seed)) for seed in self.seeds}
        return {seed: run.final(source, measure) for seed, run in runs.items() if run is not None}

    def diverged(self, row: str, method: str) -> bool:
        """Whether there are runs, and all of them diverged."""
        runs = self.at(row, method)
        return bool(runs) and not any(run.record.finished for run in runs)

    def waits(self, method: str) -> bool:
        """Whether the method has a barrier."""
        return any(name[1] == method and run.waits for name, run in self.runs.items())

    def note_on_seeds(self) -> str:
        minimum, maximum = (pick(len(self.seeds_of(row)) for row in self.rows) for pick in (min, max))
        if maximum == 1:
            return "One seed: differences under about 1 % may be noise, and are not marked."
        count = f"{maximum}" if minimum == maximum else f"{minimum} to {maximum}"
        return f"Mean ± sample standard deviation over n = {count} seeds. What lies within the noise is not marked."

    def records(self) -> list[dict[str, Any]]:
        """One record per (row, method, seed)."""
        return [
            {
                "row": row,
                "method": method,
                "seed": seed,
                "run": run.record.digest,
                "verdict": run.record.verdict,
                "loss": run.final(),
                "time_s": run.time_s,
                **{f"{m} by source": {s: run.final(s, m) for s in self.sources} for m in self.measures},
                "arrivals": run.record.arrivals,
                "mean_staleness": run.record.mean_staleness,
                "cases": run.record.cases,
            }
            for (row, method, seed), run in self.runs.items()
        ]

    def summary(self) -> list[dict[str, Any]]:
        """One record per (row, method): the final mean loss over seeds."""
        pairs = dict.fromkeys((row, method) for row, method, _ in self.runs)
        return [{"row": row, "method": method, "loss": plain(self.final(row, method))} for row, method in pairs]


def plain(value: Stat | None) -> dict[str, Any] | None:
    """A Stat as JSON has it, without the digits that no run has."""
    return None if value is None else {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(value).items()}
