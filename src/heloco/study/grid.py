"""The grid of a study: rows × methods × seeds, each place with the run that fills it. Equal runs are one run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from heloco.engine.schedule import planned_arrivals
from heloco.errors import UserError, nearest
from heloco.methods import get_method
from heloco.policy import inner_steps
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.config import RECIPES, Settings, deciding_settings
from heloco.run.values import convert
from heloco.study.spec import GridPart, Study

FORMAT = 1
"""The version of the format of a kept run. It is part of the run's digest: raise it when the same config would
give another run, or a run another record."""
EQUAL_STEPS = "equal_steps"
"""A setting of studies alone, see `_with_equal_steps`."""
NEUTRAL_SETTINGS = ("device", "checkpoint_every", "data", "tokenizer", "field", "limit_mb")
"""Settings that do not change a run: where and how often it is saved, and those that its data's digest covers."""


@dataclass(frozen=True)
class Place:
    """A row and a method under one seed, and the run that fills it."""

    row: str
    method: str
    seed: int
    config: RunConfig
    """The config that the run is made with."""
    paces: tuple[float, ...]
    """The paces of the row. The run may have others, see `stretch`."""
    sources: int
    """How many sources the row is made for: one per pace that it names."""
    stretch: float = 1.0
    """What the run's virtual time is multiplied with: see `once_for_all_paces`."""

    @property
    def name(self) -> tuple[str, str, int]:
        return self.row, self.method, self.seed


def grid(
    study: Study,
    *,
    scale: str,
    seeds: int | None = None,
    rows: Sequence[str] = (),
    methods: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
) -> list[Place]:
    """Every place, seed by seed. `seeds`: how many, in place of what each row says. `settings` come over everything else: which
    data, for one."""
    if seeds is not None and seeds < 1:
        raise UserError(f"seeds is {seeds}: a study needs at least one.")
    pairs = [
        (row, method)
        for row in pick_parts(study.rows, rows, "row", study)
        for method in pick_parts(study.methods, methods, "method", study)
        if (not row.only or method.name in row.only) and (not method.only or row.name in method.only)
    ]
    if not pairs:
        raise UserError(f"{study.name} pairs none of these rows with any of these methods: leave out --rows or --methods.")
    places = [_place(study, scale, row, method, settings or {}) for row, method in pairs]
    most_seeds = seeds or max(row.seeds for row, _ in pairs)
    return [
        replace(place, seed=seed, config=replace(place.config, run=replace(place.config.run, seed=seed)))
        for seed in range(study.first_seed, study.first_seed + most_seeds)
        for place in places
        if seed < study.first_seed + (seeds or study.rows[place.row].seeds)
    ]


def pick_parts(parts: Mapping[str, GridPart], names: Sequence[str], what: str, study: Study) -> list[GridPart]:
    """The parts of these names, in the study's order; all where none was asked for."""
    for name in names:
        if name not in parts:
            raise UserError(f"{study.name} has no {what} {name!r}; {nearest(name, list(parts))}")
    return [part for name, part in parts.items() if not names or name in names]


def _place(study: Study, scale: str, row: GridPart, method: GridPart, settings: Mapping[str, object]) -> Place:
    values = {**_settings(study, scale), **row.at(scale), **method.at(scale), **settings}
    config = _resolved(values)
    run, stretch = once_for_all_paces(config, every_round="eval_every" not in method.at(scale))
    sources = len(_paces(values))
    return Place(row.name, method.name, 0, _without_idle_settings(run), tuple(config.rounds.paces), sources, stretch)


def _settings(study: Study, scale: str) -> Settings:
    return {**RECIPES["paper"], **study.settings, **(study.small if scale == "small" else {})}


def _resolved(values: Settings) -> RunConfig:
    config = resolve(with_fields(RunConfig(), {name: value for name, value in values.items() if name != EQUAL_STEPS}))
    return _with_equal_steps(config) if values.get(EQUAL_STEPS) else config


def _paces(values: Settings) -> list[float]:
    """The pattern of paces, before it is repeated for more workers."""
    paces: list[float] = convert("paces", values.get("paces", RunConfig().rounds.paces), list[float])
    return paces


def _with_equal_steps(config: RunConfig) -> RunConfig:
    """With as many arrivals as it takes until `arrivals` × `inner_steps` inner steps are done, and as many evaluations as before.

    Under DyLU slow workers' rounds are shorter, so the same number of arrivals would bring fewer tokens.
    """
    rounds, run = config.rounds, config.run
    steps = inner_steps(rounds.steps, rounds.inner_steps, rounds.paces)
    steps_left, arrivals = run.arrivals * rounds.inner_steps, 0
    longest = -(-steps_left // min(steps))
    barrier = get_method(config.outer.method).barrier
    events = planned_arrivals(config, longest)
    while steps_left > 0:
        steps_left, arrivals = steps_left - next(events)[1].inner_steps, arrivals + 1
    if barrier:  # a round that not all have handed in would count for nothing
        arrivals = -(-arrivals // len(steps)) * len(steps)
    every = round(run.eval_every * arrivals / run.arrivals)
    return replace(config, run=replace(run, arrivals=arrivals, eval_every=every))


def once_for_all_paces(config: RunConfig, every_round: bool = True) -> tuple[RunConfig, float]:
    """The run that stands for this one whatever its paces, and how its time is to be stretched.

    With a barrier every worker starts from the same parameters and nobody's contribution counts before the slowest is there: the
    paces only say how long a round takes. So one run with all paces 1 serves all rows: T(n rounds) = n · H · slowest pace. It is
    evaluated after every round, so that its loss is known at any time, unless the method itself says after how many arrivals.
    (Under DyLU the paces decide the steps, and then they matter; a grace period adds to the time what is no multiple of it.)
    """
    rounds = config.rounds
    if not get_method(config.outer.method).barrier or rounds.steps != "constant" or rounds.grace:
        return config, 1.0
    count = len(rounds.paces)
    every = count if every_round else config.run.eval_every
    if every % count:
        raise UserError(
            f"eval_every is {every}, but {config.outer.method} waits for all {count} workers: give a multiple of {count}."
        )
    equal = replace(rounds, paces=[1.0] * count)
    return replace(config, rounds=equal, run=replace(config.run, eval_every=every)), max(rounds.paces)


def _without_idle_settings(config: RunConfig) -> RunConfig:
    """The config with the settings that have no effect at their defaults, so that equal runs get equal digests."""
    default = RunConfig()
    if config.outer.drop == "never":
        config = replace(config, outer=replace(config.outer, drop_above=default.outer.drop_above))
    if config.input.split != "dirichlet":
        config = replace(config, input=replace(config.input, alpha=default.input.alpha))
    return config


# ---- what identifies a run, and what it costs


def settings_of(config: RunConfig) -> Settings:
    """The settings that decide what a run does on the same data, by name."""
    sections = deciding_settings(config).values()
    return {name: value for section in sections for name, value in section.items() if name not in NEUTRAL_SETTINGS}


def digest(config: RunConfig, task_digest: str) -> str:
    """The name of a run: a hash of its settings and its data. It is the same on every machine and in every folder."""
    content = {"format": FORMAT, "task": task_digest, "settings": settings_of(config)}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def total_steps(config: RunConfig) -> int:
    """The inner steps of a run that nothing disturbs."""
    if config.rounds.steps == "constant":
        return config.run.arrivals * config.rounds.inner_steps
    return sum(inner for _, inner in _arrivals(config))


def row_time(study: Study, scale: str, row: str) -> float:
    """T of a row: the virtual time of the last arrival of an asynchronous run with the row's own settings."""
    config = _resolved({**_settings(study, scale), **study.rows[row].at(scale), "method": "heloco"})
    return max(time for time, _ in _arrivals(config))


def _arrivals(config: RunConfig) -> list[tuple[float, int]]:
    return [(time, arrival.inner_steps) for time, arrival in planned_arrivals(config)]
