"""The methods by name: an outer rule with its settings, the arrival weight it is used with, and whether it waits for all."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from heloco.errors import UserError, nearest
from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov, OuterOptimizer, make_rule
from heloco.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Method:
    """An outer rule under a name, as `--method` and `heloco.register_method` know it."""

    name: str
    rule: type[OuterOptimizer]
    """An optimizer class, or a function of one block: (θ, m, Δ, ρ, knobs) -> (θ, m)."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Values of knobs where they differ from the rule's defaults."""
    weight: str = "base"
    """The arrival weight that the rule is used with, unless `--weight` names another."""
    flexible_weight: str = ""
    """The arrival weight in runs where a round may take any shard; empty: `weight`."""
    barrier: bool = False
    """Whether every worker waits for all others, and the rule gets the sum of their weighted pseudo-gradients."""
    about: str = ""
    """A sentence for `heloco methods`; empty: the first line of the rule's docstring."""
    equation: str = ""
    """The rule in one line, for `heloco methods`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", make_rule(self.rule))
        self.check(self.options)

    def build(self, params: Iterable[Tensor], *, workers: int, **overrides: Any) -> OuterOptimizer:
        """The outer optimizer over `params`; overrides replace the method's own options, unknown ones are refused."""
        self.check(overrides)
        try:
            return self.rule(params, **{**self.knobs_for(workers), **overrides})
        except ValueError as error:
            raise UserError(f"{self.name}: {error}") from error

    def weight_for(self, assign: str) -> str:
        """The name of the arrival weight with this shard policy."""
        return self.weight if assign == "fixed" else self.flexible_weight or self.weight

    def check(self, overrides: Iterable[str]) -> None:
        """Refuses names that are no knob of this method."""
        knobs = self.knobs()
        for name in overrides:
            if name not in knobs:
                raise UserError(f"{self.name} has no knob {name!r}; {nearest(name, list(knobs))}")

    def knobs(self) -> dict[str, object]:
        """Every knob of the rule with its value in this method."""
        return {**{name: knob.default for name, knob in self.rule.knobs.items()}, **self.options}

    def knobs_for(self, workers: int) -> dict[str, object]:
        """Every knob with its value in a run with this many workers."""
        counts = {name: workers for name, knob in self.rule.knobs.items() if knob.is_worker_count}
        return {**self.knobs(), **counts, **self.options}


_MLA_STEP = "m ← μm + (1−μ)G,  θ ← θ − η(G + μm)"
_CORRECT = "Δ̂ per block: kept if cos ≥ c_ok, damped if cos < 0, else turned towards m"

_ALL = (
    Method(
        name="sync-nesterov",
        rule=Nesterov,
        weight="average",
        barrier=True,
        about="DiLoCo: all workers wait for the slowest, Nesterov momentum over their mean.",
        equation="m ← μm + Δ̄,  θ ← θ − η(Δ̄ + μm);  start: θ",
    ),
    Method(
        name="async-nesterov",
        rule=Nesterov,
        options={"lr": 0.07},
        about="Nesterov momentum at every arrival.",
        equation="m ← μm + ρΔ,  θ ← θ − η(ρΔ + μm);  start: θ",
    ),
    Method(
        name="delayed-nesterov",
        rule=DelayedNesterov,
        weight="constant",
        about="Liu et al. 2024, Alg. 3: plain steps, momentum at every N-th arrival (N = workers).",
        equation="N-th: m ← μm + ΣρΔ/N,  θ ← θ − η[(1−cN+c)μm + ρΔ/N];  else: θ ← θ − η[cμm + ρΔ/N];  start: θ",
    ),
    Method(
        name="mla",
        rule=MLA,
        about="Momentum look-ahead, Ajanthan et al. 2025, Eq. 7.",
        equation=f"G = ρΔ,  {_MLA_STEP};  start: θ",
    ),
    Method(
        name="mla-lookahead",
        rule=MLA,
        options={"lookahead": True},
        about="MLA whose workers start ahead: HeLoCo without its correction.",
        equation=f"G = ρΔ,  {_MLA_STEP};  start: θ − ημm",
    ),
    Method(
        name="heloco",
        rule=HeLoCo,
        about="The paper's text: λ = min(k_d(1−cos)·conf, 1), weighed after the correction.",
        equation=f"G = ρΔ̂,  {_MLA_STEP};  {_CORRECT};  start: θ − ημm",
    ),
    Method(
        name="heloco-ramp",
        rule=HeLoCo,
        options={"reorient": "ramp", "weigh": "before"},
        about="The authors' code: λ = min(k_d(c_ok−cos)/(c_ok−c_bad)·conf, 1), weighed before the correction.",
        equation=f"G = correct(ρΔ, m),  {_MLA_STEP};  {_CORRECT};  start: θ − ημm",
    ),
    Method(
        name="heloco-adaptive",
        rule=HeLoCo,
        options={"reorient": "ramp", "weigh": "before", "lr": 1.0},
        weight="annealed",
        flexible_weight="discounted",
        about="heloco-ramp with η 1 and a weight that grows from 1/K to 1/√K in the course of the run. The default.",
        equation=f"ρ = 1/√(K(1+(K−1)c)), c from 1 to 0 as a cosine,  G = correct(ρΔ, m),  {_MLA_STEP};  start: θ − ημm",
    ),
)


def _prepare(name: str, item: Any) -> Method:
    """A method of one's own: a `Method`, or a rule alone."""
    method = replace(item, name=name) if isinstance(item, Method) else Method(name=name, rule=item)
    for other in _ALL:
        for knob in method.rule.knobs.keys() & other.rule.knobs.keys():
            if method.rule.knobs[knob].kind != other.rule.knobs[knob].kind:
                raise UserError(f"{name}: the knob {knob!r} of {other.name} is of another type: give yours another name.")
    return method if method.about else replace(method, about=(method.rule.__doc__ or "").strip().partition("\n")[0])


METHODS: Registry[Method] = Registry("method", "heloco.methods", _prepare, {method.name: method for method in _ALL})
get_method = METHODS.find


def register_method(
    name: str,
    rule: Any,
    *,
    options: Mapping[str, object] | None = None,
    weight: str = "base",
    barrier: bool = False,
    about: str = "",
    equation: str = "",
) -> None:
    """Adds an outer rule of your own to this process: to `heloco.simulate`, and to all that runs in the same process.

    `rule` is a function of one block in plain torch operations, or a subclass of `heloco.OuterOptimizer`:

        def descent(theta, m, delta, rho, *, lr=0.5):
            "θ ← θ − ηρΔ"
            return theta - lr * rho * delta, m

        heloco.register_method("descent", descent)
        heloco.simulate(method="descent", outer_lr=…)

    Its parameters with defaults are the rule's knobs: settings and flags like those of the built-in rules. Other processes
    (`heloco train`, `serve`, studies) find rules of installed packages, under the entry point group `heloco.methods`.
    See docs/extend.md.
    """
    METHODS.register(
        name,
        Method(name=name, rule=rule, options=options or {}, weight=weight, barrier=barrier, about=about, equation=equation),
    )
