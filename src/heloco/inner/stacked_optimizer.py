"""The inner optimizers of a stack: what each block's state is called, where it lies, and the step that moves all blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heloco.inner.adamw import AdamW, adamw_factors
from heloco.inner.muon import SGD, Muon
from heloco.inner.optimizers import hidden_matrices
from heloco.inner.options import InnerOptions

ADAMW_STATE = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)


def state_names(options: InnerOptions, model: nn.Module) -> list[tuple[str, ...]]:
    """The tensors that the optimizer keeps of each parameter, by torch's names; AdamW's count of steps is kept apart."""
    if options.inner_optimizer == "sgd":
        return [MOMENTUM if options.optimizer_momentum else ()] * len(list(model.parameters()))
    hidden = hidden_matrices(model) if options.inner_optimizer == "muon" else [False] * len(list(model.parameters()))
    return [MOMENTUM if is_hidden else ADAMW_STATE for is_hidden in hidden]


class StackedOptimizer:
    """The inner optimizer of all slices of a stack. It moves the blocks where they are. `states` has a mapping from name to
    tensor for each block, see `state_names`."""

    def __init__(self, options: InnerOptions, parameters: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        by_adamw = [ADAMW_STATE[0] in state for state in states]
        self._adamw_blocks = [i for i, is_so in enumerate(by_adamw) if is_so]
        self._momentum_blocks = [i for i, is_so in enumerate(by_adamw) if not is_so]
        adamw_parameters = [parameters[i] for i in self._adamw_blocks]
        moments = ([states[i][name] for i in self._adamw_blocks] for name in ADAMW_STATE)
        self._adamw = AdamW(adamw_parameters, *moments) if adamw_parameters else None
        momenta = [states[i][MOMENTUM[0]] for i in self._momentum_blocks if MOMENTUM[0] in states[i]]
        kind = SGD if options.inner_optimizer == "sgd" else Muon
        self._momentum: SGD | Muon = kind([parameters[i] for i in self._momentum_blocks], momenta, options.optimizer_momentum)

    def move(self, gradients: Sequence[Tensor], steps_taken: Tensor, lr: Tensor, active: Tensor, settings: Tensor) -> None:
        """One step of all slices; the last four have a column for each slice."""
        if self._adamw:
            self._adamw.move([gradients[i] for i in self._adamw_blocks], adamw_factors(steps_taken, lr, active, settings))
        if self._momentum_blocks:
            self._momentum.move([gradients[i] for i in self._momentum_blocks], lr, settings[3], active)

    def finish_recording(self) -> None:
        """After a graph was recorded with a `move` in it."""
        if self._adamw:
            self._adamw.finish_recording()
        self._momentum.finish_recording()


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, made in a few launches instead of one for each tensor."""
    copies = [torch.empty_like(t) for t in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies
