"""The inner optimizer of one model: AdamW, Muon, or SGD, each of them torch's own, or one of the user's.

Muon orthogonalises the momentum of a matrix, so it is for the matrices between embedding and head. As in MuLoCo
(arXiv 2505.23725), AdamW moves everything else: embeddings, the head, norms and biases. Muon's steps are scaled to the RMS of
AdamW's (`match_rms_adamw`), so both take the same learning rate and weight decay.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim._muon import muon
from torch.optim.adamw import adamw

from heloco.errors import UserError
from heloco.inner.muon import COEFFICIENTS, EPS, ITERATIONS
from heloco.inner.options import InnerOptions
from heloco.inner.own_optimizers import INNER_OPTIMIZERS
from heloco.inner.second_moment import is_table

MUON_LR = "match_rms_adamw"

Memory = dict[str, Tensor]
"""An optimizer's state as named tensors: "3.exp_avg" belongs to the fourth parameter."""


class AdamW:
    """`torch.optim.AdamW` to the bit: it calls the same function of torch.

    That class imports torch's compiler with its first parameter. The import takes as long as the rest of torch, and a worker
    would start two seconds later."""

    def __init__(self, parameters: Sequence[nn.Parameter], options: InnerOptions) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": options.lr}]
        self.state: dict[Tensor, dict[str, Tensor]] = {p: {} for p in parameters}
        self._options, self._is_fused = options, parameters[0].device.type in ("cpu", "cuda")

    @torch.no_grad()
    def step(self) -> None:
        """Moves the parameters that have a gradient. The state of a parameter begins with its first gradient."""
        options, (group,) = self._options, self.param_groups
        trained = [p for p in group["params"] if p.grad is not None]
        states = [self.state[p] for p in trained]
        for p, state in zip(trained, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if self._is_fused else "cpu")
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        adamw(
            trained,
            [p.grad for p in trained],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=self._is_fused,
            amsgrad=False,
            beta1=options.beta1,
            beta2=options.beta2,
            lr=group["lr"],
            weight_decay=options.weight_decay,
            eps=options.adam_eps,
            maximize=False,
        )

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None


class Muon:
    """`torch.optim.Muon` to the bit, without the import that `AdamW` avoids too."""

    def __init__(self, parameters: Sequence[nn.Parameter], options: InnerOptions) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": options.lr}]
        self.state: dict[Tensor, dict[str, Tensor]] = {p: {} for p in parameters}
        self._options = options

    @torch.no_grad()
    def step(self) -> None:
        """Moves the matrices that have a gradient. The momentum of a matrix begins with its first gradient."""
        options, (group,) = self._options, self.param_groups
        trained = [p for p in group["params"] if p.grad is not None]
        for p in trained:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
        muon(
            trained,
            [p.grad for p in trained],
            [self.state[p]["momentum_buffer"] for p in trained],
            lr=group["lr"],
            weight_decay=options.weight_decay,
            momentum=options.optimizer_momentum,
            nesterov=True,
            ns_coefficients=COEFFICIENTS,
            ns_steps=ITERATIONS,
            eps=EPS,
            adjust_lr_fn=MUON_LR,
            has_complex=False,
        )

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None


class InnerOptimizer:
    """One or two torch optimizers over the parameters of a model, as one."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer | AdamW | Muon]) -> None:
        self.parameters, self.optimizers = list(parameters), list(optimizers)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameters, from the next step on."""
        for group in chain.from_iterable(each.param_groups for each in self.optimizers):
            group["lr"] = lr

    def step(self) -> None:
        """Makes a step of each optimizer and drops the gradients."""
        for each in self.optimizers:
            each.step()
            each.zero_grad()

    def load(self, memory: Memory) -> None:
        """Takes over a copy of the state that `memory` gave, of an optimizer over the same parameters."""
        owners = {p: each for each in self.optimizers for group in each.param_groups for p in group["params"]}
        for name, tensor in memory.items():
            index, _, key = name.partition(".")
            parameter = self.parameters[int(index)]
            owners[parameter].state[parameter][key] = tensor.clone()

    def memory(self) -> Memory:
        """The state as "INDEX.NAME" -> tensor, by the parameter's index. The tensors are no copies."""
        places: dict[Tensor, int] = {p: i for i, p in enumerate(self.parameters)}
        states = [(places[p], state) for each in self.optimizers for p, state in each.state.items()]
        memory = {f"{i}.{key}": value for i, state in states for key, value in state.items()}
        for name, value in memory.items():
            if not isinstance(value, Tensor):
                raise UserError(
                    f"keep_state is set, but the inner optimizer's state {name.partition('.')[2]!r} is {value!r}, and only "
                    "tensors stay with a worker: leave keep_state out, or keep it as a tensor."
                )
        return memory


def make_optimizer(options: InnerOptions, model: nn.Module) -> InnerOptimizer:
    """The optimizer that the options name. With muon, hidden matrices move by Muon and all other parameters by AdamW."""
    parameters = list(model.parameters())
    if options.has_own_optimizer:
        return InnerOptimizer(parameters, [INNER_OPTIMIZERS.find(options.inner_optimizer)(model, options)])
    if options.inner_optimizer == "sgd":
        sgd = torch.optim.SGD(
            parameters, lr=options.lr, momentum=options.optimizer_momentum, weight_decay=options.weight_decay, foreach=False
        )
        return InnerOptimizer(parameters, [sgd])
    hidden = hidden_matrices(model) if options.inner_optimizer == "muon" else [False] * len(parameters)
    matrices = [p for p, is_hidden in zip(parameters, hidden, strict=True) if is_hidden]
    others = [p for p, is_hidden in zip(parameters, hidden, strict=True) if not is_hidden]
    optimizers: list[Optimizer | AdamW | Muon] = []
    if others:
        optimizers.append(AdamW(others, options))
    if matrices:
        optimizers.append(Muon(matrices, options))
    return InnerOptimizer(parameters, optimizers)


def hidden_matrices(model: nn.Module) -> list[bool]:
    """Which parameters Muon moves: matrices that belong to no embedding and are not the head.

    The head is what the model names so (`head`, or Hugging Face's output embeddings), else its last matrix. A matrix with more
    than four times as many rows as columns counts as a table of tokens.
    """
    excluded_ids = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in excluded_ids]
    head = getattr(model, "head", None)
    find = getattr(model, "get_output_embeddings", None)
    if head is None and callable(find):
        head = find()
    excluded_ids |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else {id(p) for p in matrices[-1:]}
    return [p.dim() == 2 and id(p) not in excluded_ids and not is_table(p) for p in model.parameters()]
