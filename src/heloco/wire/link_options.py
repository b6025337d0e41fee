"""The settings of the links between workers and the synchronizer."""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from heloco.errors import UserError
from heloco.wire.formats import FormatName


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """What travels between the workers and the synchronizer, in which format, and in a simulation how long it takes."""

    wire: FormatName = "fp32"
    """The format in which contributions travel. int4 and e3m0 have 4 bits per number; topk is an experiment."""
    wire_down: Literal["", FormatName] = ""
    """The format in which starts travel, as differences from the worker's last start. With fp32 starts travel whole. Unset: in a
    simulation the format of contributions, on real machines fp32, the only one there so far."""
    full_every: int = 50
    """A worker gets a whole start instead of a difference once in this many rounds."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How the numbers of contributions are rounded to codes: to the nearest code, or at random so that the mean is right."""
    error_feedback: bool = True
    """Whether a worker adds what the codes of its last contribution left out to its next one, with 8 bits and below."""
    feedback_decay: float = 1.0
    """The factor β by which error feedback multiplies the residual of earlier contributions in each round; 1: nothing is lost."""
    overlap: bool = False
    """Whether a worker computes while its contribution and its next start travel, and merges the start when it arrives."""
    merge_share: float = 0.5
    """The share of a worker's own parameters when it merges a start that arrives late; the rest is the start's."""
    fragments: int = 1
    """The number of parts in which a start is sent when workers overlap; each part is merged when it arrives."""
    up_mbit_s: list[float] = field(default_factory=list)
    """In simulations: megabits per second from each worker to the synchronizer, in turn as for paces; unset: no time passes."""
    down_mbit_s: list[float] = field(default_factory=list)
    """In simulations: megabits per second from the synchronizer to each worker, in turn as for paces; unset: it takes no time."""
    latency_s: list[float] = field(default_factory=list)
    """In simulations: seconds before the first byte arrives, each way, in turn as for paces."""

    def __post_init__(self) -> None:
        if self.full_every < 1:
            raise UserError(f"full_every is {self.full_every}: give a number of rounds ≥ 1.")
        if not 0 <= self.feedback_decay <= 1:
            raise UserError(f"feedback_decay is {self.feedback_decay}: it must lie between 0 and 1.")
        if not 0 <= self.merge_share < 1:
            raise UserError(f"merge_share is {self.merge_share}: it must lie in [0, 1).")
        if self.fragments < 1:
            raise UserError(f"fragments is {self.fragments}: give a number ≥ 1.")
        for name in ("up_mbit_s", "down_mbit_s"):
            for speed in getattr(self, name):
                if not 0 < speed < math.inf:
                    raise UserError(f"{name} has {speed}: give speeds above 0, or leave it out for a link that takes no time.")
        for latency in self.latency_s:
            if not 0 <= latency < math.inf:
                raise UserError(f"latency_s has {latency}: give seconds ≥ 0.")

    @property
    def changed_options(self) -> list[str]:
        """The settings that are not at their defaults."""
        default = LinkOptions()
        return [each.name for each in fields(self) if getattr(self, each.name) != getattr(default, each.name)]

    @property
    def takes_time(self) -> bool:
        """Whether anything travels for a while in a simulation."""
        return bool(self.up_mbit_s or self.down_mbit_s or self.latency_s)

    @property
    def down_format(self) -> FormatName:
        """The format of starts: `wire_down`, or that of contributions if it is unset."""
        return self.wire_down or self.wire
