"""Runs that differ in the seed alone, taken as one: their mean, its spread, and whether a difference is more than noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, stdev

from heloco.records.run_files import SEED_FOLDER
from heloco.report.run_reader import Run

NEUTRAL_SETTINGS = ("run.seed", "run.device", "run.checkpoint_every")
"""The settings in which runs of a group may differ: the seed, and what does not change a run."""
SeedValues = Mapping[int, float | None]
"""Seed -> a number of that seed's run; None or NaN if it has none."""


@dataclass
class RunGroup:
    """Runs whose settings differ in the seed alone; often a single one."""

    name: str
    runs: list[Run]

    @property
    def method(self) -> str:
        """The name of the runs' outer method."""
        return self.runs[0].method

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [seed_of(run) for run in self.runs]


@dataclass(frozen=True)
class SeedMean:
    """The mean over seeds."""

    mean: float | None
    """None if no run has a number."""
    spread: float | None
    """The sample standard deviation; None if there is one run."""


def seed_of(run: Run) -> int:
    """The seed that everything random in the run is derived from."""
    seed = run.config["run"]["seed"]
    return seed if isinstance(seed, int) else 0


def group_runs(runs: Sequence[Run]) -> list[RunGroup]:
    """The runs in groups, in the order of their first runs. A second run with the same seed begins a group of its own: it is the
    same run again, and says nothing about noise."""
    members: list[tuple[dict[str, object], list[Run]]] = []
    for run in runs:
        settings = _deciding(run)
        for others, part in members:
            if others == settings and seed_of(run) not in map(seed_of, part):
                part.append(run)
                break
        else:
            members.append((settings, [run]))
    parts = [part for _, part in members]
    return [RunGroup(name, part) for name, part in zip(_names(parts), parts, strict=True)]


def _deciding(run: Run) -> dict[str, object]:
    settings = {f"{section}.{name}": value for section, entries in run.config.items() for name, value in entries.items()}
    return {name: value for name, value in settings.items() if name not in NEUTRAL_SETTINGS} | {"clock": run.facts.clock}


def _names(parts: Sequence[Sequence[Run]]) -> list[str]:
    """Single runs have their own names. Groups have their method's, or what the names of their runs have in common."""
    first_names = [part[0].name for part in parts]
    for naming in (_method, _common_start, _common_end):
        names = [naming(part) if len(part) > 1 else part[0].name for part in parts]
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{name} and {len(part) - 1} more" if len(part) > 1 else name for name, part in zip(first_names, parts, strict=True)]


def _method(part: Sequence[Run]) -> str:
    return part[0].method


def _common_start(part: Sequence[Run]) -> str:
    prefix = _prefix([run.name for run in part]).rstrip("-_. /0123456789")
    return prefix.removesuffix(f"/{SEED_FOLDER}")


def _common_end(part: Sequence[Run]) -> str:
    return _prefix([run.name[::-1] for run in part])[::-1].lstrip("-_. /0123456789")


def _prefix(names: Sequence[str]) -> str:
    """The characters that all names begin with."""
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False)))


def has_seeds(groups: Sequence[RunGroup]) -> bool:
    """Whether there is a group of several seeds."""
    return any(len(group.runs) > 1 for group in groups)


def seed_mean(values: Sequence[float | None]) -> SeedMean:
    """Mean and spread of the numbers among these values."""
    numbers = finite_numbers(values)
    return SeedMean(fmean(numbers) if numbers else None, stdev(numbers) if len(numbers) > 1 else None)


def finite_numbers(values: Sequence[float | None]) -> list[float]:
    """The values without None, NaN and infinities."""
    return [value for value in values if value is not None and math.isfinite(value)]


def is_beyond_noise(values: SeedValues, others: SeedValues, usual_spread: float) -> bool:
    """Whether two groups differ by more than the standard deviation of their difference.

    It is taken seed by seed where both have the same seeds, so that what a seed does to both cancels out. Otherwise the
    difference of the means counts. `usual_spread` stands for the spread of a single run."""
    pairs = [(values[seed], others[seed]) for seed in values] if values.keys() == others.keys() else []
    differences = [a - b for a, b in pairs if a is not None and b is not None and math.isfinite(a - b)]
    if len(differences) > 1:
        return abs(fmean(differences)) > stdev(differences)
    ours, theirs = (seed_mean(list(each.values())) for each in (values, others))
    if ours.mean is None or theirs.mean is None:
        return False
    spreads = [usual_spread if each.spread is None else each.spread for each in (ours, theirs)]
    return abs(ours.mean - theirs.mean) > math.hypot(*spreads)
