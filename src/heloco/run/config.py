"""A run's configuration: what is trained, by whom, under which rule. `settings.py` has its settings by name, and as TOML."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal, get_type_hints

from heloco.errors import UserError
from heloco.inner import InnerOptions
from heloco.methods import get_method
from heloco.policy import SHARD_POLICIES, Drop, make_guard, weight_knobs
from heloco.run.task_config import InputConfig, ModelConfig, resolve_model
from heloco.task import BUILT_IN_TASKS, TASKS
from heloco.wire.link_options import LinkOptions


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """The workers: how fast each one is, how long a round is, and which data it gets."""

    paces: list[float] = field(default_factory=lambda: [1.0, 1.0, 2.0, 3.0, 6.0])
    """Seconds per inner step of each worker, e.g. 1,1,6,6,6."""
    workers: int = 0
    """The number of workers; 0: as many as paces. Otherwise they get the paces in turn, from the first again after the last."""
    inner_steps: int = 10
    """H, the inner steps of a round."""
    steps: Literal["constant", "dylu"] = "constant"
    """How long rounds are: H inner steps for all workers, or in proportion to a worker's speed (dylu)."""
    assign: str = "fixed"
    """Which shard a round takes: the worker's own, the least visited, Liu's probability, or a policy of your own by its name."""
    grace: float = 0.0
    """How long the synchronizer waits after an arrival for others, so that workers start together, as a share of the fastest
    worker's round."""

    @property
    def grace_s(self) -> float:
        """The grace period in virtual seconds."""
        return self.grace * self.inner_steps * min(self.paces)


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """How contributions are applied: the outer method with its knobs, the arrival weight, dropping, and the norm guard."""

    method: str = "heloco-ramp"
    """The outer method; `heloco methods` lists them with their knobs."""
    knobs: dict[str, object] = field(default_factory=dict)
    """The rule's knobs that were given, by the names of their settings; once resolved, all of them. Also the options of the
    arrival weight that were given. In TOML and as flags they stand among the other settings."""
    weight: str | None = None
    """The arrival weight ρ; unset: the method's own."""
    drop: Literal["never", "zero", "skip"] = "never"
    """What happens to contributions staler than drop_above: applied, set to zero (the paper), or skipped."""
    drop_above: int = 0
    """The largest staleness at which a contribution is still applied."""
    norm_limit: float | Literal["off"] = 10.0
    """How many times the usual norm a pseudo-gradient may have, as a whole and in each block; off: any."""
    norm_policy: Literal["clip", "refuse"] = "clip"
    """What happens to a pseudo-gradient above norm_limit: it is scaled down to the usual norm, or refused."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long a run is, what it records, and where it is computed."""

    arrivals: int = 0
    """How many contributions the run takes in; 0: 120, or 20 from each worker if that is more."""
    seed: int = 0
    """The seed that everything random in the run is derived from."""
    eval_every: int = 10
    """Arrivals between evaluations; 0: only at the start and the end."""
    checkpoint_every: int = 20
    """Arrivals between checkpoints; 0: only at the start and the end."""
    max_refusals: int = 5
    """Refused contributions (NaN, Inf) in a row after which the run stops."""
    device: str = "auto"
    """The device that computes: cpu, cuda, cuda:1, or auto (a GPU if there is one)."""
    execution: Literal["auto", "stacked", "sequential"] = "auto"
    """How a simulation computes the rounds under way: as one stack of models, or one round after the other. auto: as a stack on a
    GPU, if that serves the model."""
    deterministic: bool = False
    """Whether a simulation uses deterministic algorithms, where torch has them. On a GPU others may change the last bits."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Settings of runs on real machines. They may be changed when a run is taken up again."""

    min_workers: int = 1
    """How many machines must take part; the run pauses if there are fewer."""
    give_up_after_s: float = 3600.0
    """How long a pause may last before the run ends."""
    participation: int = 0
    """The number of last arrivals that decide which machines take part; 0: four times the workers."""
    beat_s: float = 2.0
    """Seconds between a machine's signs of life."""
    patience: float = 10.0
    """A machine is lost after this many times its usual time between two signs of progress (at least a beat), and a round is
    given to another after this many times what the machine's rounds usually take."""
    round_limit_s: float = 3600.0
    """The longest that any round may take, in seconds after it was handed out; the only limit until rounds were measured."""
    model_limit_gb: float = 0.0
    """The largest model that a machine may bring to an external run; 0: half of the free space."""
    journal_gb: float = 10.0
    """Gigabytes of contributions that are kept for a replay from the start. Beyond that, those before the last checkpoints are
    deleted."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, in sections. `resolve` checks it and fills in what was left to a method or a preset."""

    input: InputConfig = field(default_factory=InputConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    inner: InnerOptions = field(default_factory=lambda: InnerOptions(batch_size=4, lr=0.0, lr_min=1e-4))
    links: LinkOptions = field(default_factory=LinkOptions)
    run: RunSettings = field(default_factory=RunSettings)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def digest(self) -> str:
        """Identifies everything that decides the result of the run. How it is computed and [cluster] are not part of it."""
        return hashlib.sha256(json.dumps(deciding_settings(self), sort_keys=True).encode()).hexdigest()


Settings = dict[str, object]
"""Settings by name, as flags, TOML files or Python give them: `with_fields` checks and converts them."""

ARRIVALS, ARRIVALS_EACH = 120, 20
"""Where their number is not given: of the run, and at least from each worker. The study `scale` has 20: with two each, a run of
64 workers ends before its loss falls steadily."""
LEARNING_RATES = {"adamw": 1.5e-3, "muon": 6.4e-3, "sgd": 1e-2}
"""Where none is given: for models as wide as `LEARNING_RATE_WIDTH`, from the studies `recipe` and `inner`."""
LEARNING_RATE_WIDTH = 128
LEARNING_RATE_ANYWHERE = 1.5e-3
"""For a model whose width is not known: one from Hugging Face, or your own."""

BEST: Settings = {
    "method": "heloco-adaptive", "assign": "flexible", "steps": "dylu", "grace": 0.025, "inner_optimizer": "muon",
    "keep_state": True, "second_moment": "rows", "lr_position": "run",
}  # fmt: skip
"""The recipe that won the study `recipe`, over the defaults of the fields: `heloco train`, `heloco.simulate`, `heloco serve`."""
PAPER: Settings = {
    "preset": "paper", "tokenizer": "gpt2", "inner_steps": 80, "arrivals": 300, "batch_size": 2,
    "lr": 2e-4, "lr_min": 1e-6, "eval_every": 30, "checkpoint_every": 60, "eval_windows": 128, "norm_limit": "off",
}  # fmt: skip
"""The paper's setting, over the defaults of the fields: `heloco train --recipe paper`. Studies are over it too."""
RECIPES: dict[str, Settings] = {"best": BEST, "paper": PAPER, "plain": {}}
"""plain: the fields' own defaults, each of them the simplest: rounds of one length, fixed shards, AdamW that starts afresh."""

SECTIONS: dict[str, type] = get_type_hints(RunConfig)
FIELDS: dict[str, str] = {f.name: section for section, kind in SECTIONS.items() for f in fields(kind) if f.name != "knobs"}
"""Field name -> section. Names are unique over the sections, so a flag needs no prefix. Knobs: see `settings.py`."""

GUARD = ("norm_limit", "norm_policy")
EXECUTION = ("execution", "compile", "recompute", "deterministic")
DERIVED: dict[str, tuple[str, ...]] = {
    "preset": ("width", "layers", "heads", "context", "hf", "lora", "lora_alpha", "lora_targets", "lr"),
    "hf": ("preset", "width", "layers", "heads", "context", "vocab_size", "tokenizer", "lr"),
    "lora": ("lora_alpha",),
    "width": ("lr",),
    "inner_optimizer": ("lr", "inner_momentum"),
    "assign": ("weight",),
    "data": ("languages", "vocab_size"),
    "tokenizer": ("vocab_size",),
    "paces": ("schedule_steps",),
    "inner_steps": ("schedule_steps",),
    "arrivals": ("schedule_steps",),
    "method": ("weight",),
}
"""Field -> the fields whose values `resolve` or the data fill in from it, or whose place it takes. A method decides knobs too."""


def deciding_settings(config: RunConfig) -> dict[str, Settings]:
    """What decides the result of a run, by section: all settings that are set, but for [cluster], those that say how it is
    computed, and those without an effect."""
    idle = {*EXECUTION} | (set(GUARD) if config.outer.norm_limit == "off" else set())
    idle_sections = {"cluster"} | (set() if config.links.changed_options else {"links"})
    return {
        section: {name: value for name, value in values.items() if value not in (None, "") and name not in idle}
        for section, values in by_section(config).items()
        if section not in idle_sections
    }


def knob_setting(knob: str) -> str:
    """The name of a rule's knob as a setting: its own, unless another section or an arrival weight may have that name."""
    return f"outer_{knob}" if knob in FIELDS or knob.startswith("weight_") else knob


def by_section(config: RunConfig) -> dict[str, Settings]:
    """All settings by section and name; None: unset."""
    sections = asdict(config)
    knobs = sections["outer"].pop("knobs")
    sections["outer"] |= knobs
    return sections


def outer_knobs(config: OuterConfig) -> Settings:
    """The rule's knobs that were given, by the rule's own names."""
    knobs = {knob_setting(name): name for name in (s.removeprefix("outer_") for s in config.knobs)}
    return {knobs.get(name, name): value for name, value in config.knobs.items() if not name.startswith("weight_")}


def weight_name(config: RunConfig) -> str:
    """The arrival weight that was chosen, or the method's own."""
    return config.outer.weight or get_method(config.outer.method).weight_for(config.rounds.assign)


def weight_options(config: RunConfig) -> Settings:
    """The arrival weight's settings that were given; one that the weight does not have is refused."""
    weight = weight_name(config)
    knobs = weight_knobs(weight)
    options = {name.removeprefix("weight_"): value for name, value in config.outer.knobs.items() if name.startswith("weight_")}
    for name in options:
        if name not in knobs:
            raise UserError(f"The {weight} weight has no weight_{name}: leave it out or choose another --weight.")
    return options


def resolve(config: RunConfig) -> RunConfig:
    """The effective config: checked, and with every value that was left to a method or a preset filled in."""
    if not config.input.tokenizer and not (config.model.hf and config.input.task == "language"):
        config = replace(config, input=replace(config.input, tokenizer="bytes"))
    rounds = _resolve_rounds(config.rounds)
    settings = config.run
    if settings.arrivals < 0:
        raise UserError(f"arrivals is {settings.arrivals}: a run takes in at least one contribution.")
    if not settings.arrivals:
        settings = replace(settings, arrivals=max(ARRIVALS, ARRIVALS_EACH * len(rounds.paces)))
    if settings.seed < 0:
        raise UserError(f"seed is {settings.seed}: give a number ≥ 0.")
    for name in ("eval_every", "checkpoint_every"):
        if getattr(settings, name) < 0:
            raise UserError(f"{name} is {getattr(settings, name)}: give a number ≥ 0 (0: only at the start and the end).")
    if settings.max_refusals < 1:
        raise UserError(f"max_refusals is {settings.max_refusals}: give a number ≥ 1.")
    for name in ("limit_mb", "alpha"):
        if not 0 < getattr(config.input, name) < math.inf:
            raise UserError(f"{name} is {getattr(config.input, name)}: give a finite number above 0.")
    _check_cluster(config.cluster)
    if config.input.task not in BUILT_IN_TASKS:
        TASKS.find(config.input.task)
    outer = _resolve_outer(config, len(rounds.paces))
    model = resolve_model(config.model, config.input)
    inner = config.inner
    if inner.inner_momentum is not None and inner.inner_optimizer == "adamw":
        raise UserError("inner_momentum is a setting of muon and sgd: leave it out, or set beta1 for adamw.")
    if not inner.schedule_steps:
        length = max(1, settings.arrivals * rounds.inner_steps // len(rounds.paces))
        inner = replace(inner, schedule_steps=length)
    if not inner.lr:
        if inner.has_own_optimizer:
            raise UserError(f"There is no default learning rate for the inner optimizer {inner.inner_optimizer}: give --lr.")
        inner = replace(inner, lr=default_learning_rate(inner.inner_optimizer, model.width))
    return replace(config, rounds=rounds, outer=outer, inner=inner, model=model, run=settings)


def default_learning_rate(optimizer: str, width: int) -> float:
    """The inner learning rate where none is given; `width` is the model's, or 0 if it is not known.

    In proportion to 1/√width for models wider than the one it was chosen for. At widths of 512 and 768 that was better or as
    good as 1/width, and better than no change (docs/log.md).
    """
    if width <= 0:  # a negative one is refused where the model is built
        return LEARNING_RATE_ANYWHERE
    return float(f"{LEARNING_RATES[optimizer] * min(1.0, math.sqrt(LEARNING_RATE_WIDTH / width)):.3g}")


def _resolve_outer(whole: RunConfig, workers: int) -> OuterConfig:
    config = whole.outer
    method, chosen_knobs = get_method(config.method), outer_knobs(config)
    Drop(config.drop, config.drop_above)
    make_guard(config.norm_limit, config.norm_policy)
    weight_options(whole)
    method.check(chosen_knobs)
    knobs = {**method.knobs_for(workers), **chosen_knobs}
    weight_settings = {name: value for name, value in config.knobs.items() if name.startswith("weight_")}
    rule_settings = {knob_setting(name): value for name, value in knobs.items()}
    return replace(config, weight=weight_name(whole), knobs={**rule_settings, **weight_settings})


def _check_cluster(config: ClusterConfig) -> None:
    if config.min_workers < 1:
        raise UserError(f"min_workers is {config.min_workers}: give a number ≥ 1.")
    if config.participation < 0:
        raise UserError(f"participation is {config.participation}: give a number of arrivals, or 0.")
    for name, minimum in (
        ("give_up_after_s", 0.0), ("beat_s", 0.01), ("patience", 2.0), ("journal_gb", 0.0), ("round_limit_s", 1.0),
        ("model_limit_gb", 0.0),
    ):  # fmt: skip
        if not minimum <= getattr(config, name) < math.inf:
            raise UserError(f"{name} is {getattr(config, name)}: give a finite number of at least {minimum:g}.")


def _resolve_rounds(config: RoundsConfig) -> RoundsConfig:
    paces = list(config.paces)
    if not paces:
        raise UserError("There are no paces: give one per worker, e.g. --paces 1,1,6,6,6.")
    for pace in paces:
        if not (math.isfinite(pace) and pace > 0):
            raise UserError(f"A pace is {pace}: paces are seconds per inner step, finite and above 0.")
        if not 1e-9 <= pace <= 1e9:
            raise UserError(f"A pace of {pace:g} s is outside the clock's 1e-9 to 1e9: give paces in other units.")
    if config.workers < 0:
        raise UserError(f"workers is {config.workers}: give a number ≥ 1, or leave it out.")
    if config.workers:
        paces = [paces[worker % len(paces)] for worker in range(config.workers)]
    if config.inner_steps < 1:
        raise UserError(f"inner_steps is {config.inner_steps}: a round needs at least one step.")
    if not 0 <= config.grace <= 1e6:
        raise UserError(f"grace is {config.grace}: give a share of a round, such as 0.025.")
    SHARD_POLICIES.find(config.assign)
    return replace(config, paces=paces, workers=0)  # the paces say it: `--config` with other --paces must not contradict
