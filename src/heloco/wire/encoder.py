"""The codes of one worker's contributions, with error feedback.

    e ← βe + Δ,  send Q(e),  e ← e − Q(e)

What Q leaves out of a contribution is added to the worker's next one, so in the long run everything arrives. It must not be added
if the contribution did not count: then Δ is thrown away, and with it what was left out of it. So a residual belongs to a round,
and is used only if that round was the worker's last accepted one. This one rule covers refused and abandoned rounds, repeated
requests, a worker that another machine took over, and a machine that comes back with an old residual.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heloco.seeds import derive
from heloco.wire import blocks
from heloco.wire.codes import Noise
from heloco.wire.formats import Format, Rounding, name_parts
from heloco.wire.link_options import LinkOptions

NO_ROUND = -1
SCALE_LIMIT = 1e36
"""Scales are smaller: the largest code stands for 128 times its scale, which must be finite in float32."""


@dataclass
class Residual:
    """What the codes of a worker's contributions left out so far, block by block."""

    round: int = NO_ROUND
    """The index of the worker's round whose codes left this out; `NO_ROUND` if there was none."""
    blocks: dict[int, Tensor] | None = None
    """Block number -> what was left out of the block, in float32 and of its shape."""


class ContributionEncoder:
    """Encodes the contributions of one worker."""

    def __init__(self, format: Format, options: LinkOptions, *, seed: int, worker: int) -> None:
        self.format, self.options, self.seed, self.worker = format, options, seed, worker
        self.residual = Residual()

    @property
    def has_feedback(self) -> bool:
        """Whether there is a residual at all."""
        return self.format.has_feedback and self.options.error_feedback

    def encode(self, round_index: int, pseudo_gradient: Sequence[Tensor], *, last_accepted: int) -> dict[str, Tensor]:
        """The tensors of a contribution without its buffers. `last_accepted`: the worker's last round that counted."""
        if self.residual.round != last_accepted:
            self.residual = Residual()
        tensors: dict[str, Tensor] = {}
        for index, block in enumerate(pseudo_gradient):
            parts = self.format.encode(block, self._rounding(round_index, index, block))
            tensors |= name_parts(blocks.PSEUDO_GRADIENT, index, parts)
        self.residual.round = round_index
        return tensors

    def _rounding(self, round_index: int, index: int, block: Tensor) -> Rounding:
        noise = None
        if self.options.rounding == "stochastic":
            noise = Noise(derive(self.seed, "wire", self.worker, round_index, index) & 0xFFFFFFFF)
        return Rounding(self._residual_of(index, block), self.options.feedback_decay, noise)

    def _residual_of(self, index: int, block: Tensor) -> Tensor | None:
        if not self.has_feedback or len(self.format.parts(block.shape, block.dtype)) == 1:
            return None
        if self.residual.blocks is None:
            self.residual.blocks = {}
        if index not in self.residual.blocks:
            self.residual.blocks[index] = torch.zeros(block.shape, device=block.device)
        return self.residual.blocks[index]


def check_scales(tensors: Iterable[Tensor]) -> str | None:
    """A sentence about the first scale that makes no sense; None if there is none. Then all numbers of the codes are finite."""
    for scales in tensors:
        if not bool(((scales > 0) & (scales < SCALE_LIMIT)).all()):  # False for NaN
            return f"a scale is not a number above 0 and below {SCALE_LIMIT:g}"
    return None
