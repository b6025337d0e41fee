"""A constant of a rule, declared once: its name, type, default, range, and one sentence of meaning."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from heloco.errors import nearest


@dataclass(frozen=True, slots=True)
class Knob:
    """One constant of a rule, as metadata of its type: `c: Annotated[float, Knob(0.0, "Its meaning.", "[0, 1)")]`."""

    default: Any = None
    """The value if none is given. If the knob annotates a parameter that has a default, that one counts instead."""
    about: str = ""
    interval: str = ""
    """The range of a number as in a paper: "[0, 1)", "[0, ∞)", "(−∞, ∞)"; empty: any."""
    is_worker_count: bool = False
    """Whether a method sets it to the run's number of workers, unless another value is given."""
    name: str = ""
    """This and `kind` come from the declaration that the knob stands in."""
    kind: Any = Any

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values to choose from; empty if the knob is a number or a switch."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def check(self, value: Any) -> None:
        """Raises ValueError, in a sentence, if the value is not one that this knob can have."""
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name} is {value!r}: choose one of {', '.join(map(str, self.choices))}.")
        if self.interval and not _contains(self.interval, value):
            raise ValueError(f"{self.name} is {value!r}: it must lie in {self.interval}. {self.about}")


Knobs = Mapping[str, Knob]


def _contains(interval: str, value: float) -> bool:
    low, high = (float(end.replace("∞", "inf").replace("−", "-")) for end in interval[1:-1].split(","))
    is_above = value > low if interval.startswith("(") else value >= low
    return is_above and (value < high if interval.endswith(")") else value <= high)


def declared_knobs(declaration: Any, **defaults: Any) -> dict[str, Knob]:
    """The knobs of a TypedDict such as `outer.constants.MomentumKnobs`; `defaults` take the place of declared ones."""
    hints = get_type_hints(declaration, include_extras=True)
    knobs = {name: _knob(name, hint) for name, hint in hints.items()}
    return knobs | {name: replace(knobs[name], default=value) for name, value in defaults.items() if name in knobs}


def knobs_of_signature(function: Callable[..., Any], skipped: tuple[str, ...] = ()) -> dict[str, Knob]:
    """The knobs of a function or class of the user's own: its parameters with a default, annotated with a `Knob` or not."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:  # a type that is imported for type checkers alone
        hints = {}
    parameters = inspect.signature(function).parameters.values()
    options = {p.name: p for p in parameters if p.default is not p.empty and p.name not in skipped}
    return {name: replace(_knob(name, hints.get(name, type(p.default))), default=p.default) for name, p in options.items()}


def _knob(name: str, hint: Any) -> Knob:
    kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    knob = next((item for item in metadata if isinstance(item, Knob)), Knob())
    return replace(knob, name=name, kind=kind)


def fill_knobs(knobs: Knobs, values: Mapping[str, object]) -> dict[str, object]:
    """A value for each knob: from `values`, or its default. Refuses names that are no knob, and values outside their range."""
    for name, value in values.items():
        if name not in knobs:
            raise TypeError(f"There is no knob {name!r}; {nearest(name, list(knobs))}")
        knobs[name].check(value)
    return {name: values.get(name, knob.default) for name, knob in knobs.items()}


def describe_knobs(knobs: Knobs) -> str:
    """Each knob with its default, its range and its meaning, two lines each."""
    lines = []
    for name, knob in knobs.items():
        choices = f", one of {', '.join(map(repr, knob.choices))}" if knob.choices else ""
        values = f", in {knob.interval}" if knob.interval else choices
        lines += [f"    {name} = {knob.default!r}{values}", f"        {knob.about}"]
    return "\n".join(lines)
