"""The inner optimizer of one model: AdamW, Muon, or SGD, each of them torch's own.

Muon orthogonalises the momentum of a matrix, so it is for the matrices between embedding and head. As in MuLoCo
(arXiv 2505.23725), AdamW moves everything else: embeddings, the head, norms and biases. Muon's steps are scaled to the RMS of
AdamW's (`match_rms_adamw`), so both take the same learning rate and weight decay.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heloco.inner.options import InnerOptions
from heloco.inner.second_moment import is_table

MUON_LR = "match_rms_adamw"

Memory = dict[str, Tensor]
"""An optimizer's state as named tensors: "3.exp_avg" belongs to the fourth parameter."""


class InnerOptimizer:
    """One or two torch optimizers over the parameters of a model, as one."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        self.parameters, self.optimizers = list(parameters), list(optimizers)

    def set_lr(self, lr: float) -> None:
        for group in chain.from_iterable(each.param_groups for each in self.optimizers):
            group["lr"] = lr

    def step(self) -> None:
        for each in self.optimizers:
            each.step()
            each.zero_grad(set_to_none=True)

    def load(self, memory: Memory) -> None:
        owners = {p: each for each in self.optimizers for group in each.param_groups for p in group["params"]}
        for name, tensor in memory.items():
            index, key = name.split(".")
            parameter = self.parameters[int(index)]
            owners[parameter].state[parameter][key] = tensor.clone()

    def memory(self) -> Memory:
        places: dict[Tensor, int] = {p: i for i, p in enumerate(self.parameters)}
        states = [(places[p], state) for each in self.optimizers for p, state in each.state.items()]
        return {f"{i}.{key}": value for i, state in states for key, value in state.items()}


def make_optimizer(options: InnerOptions, model: nn.Module) -> InnerOptimizer:
    parameters = list(model.parameters())
    if options.inner_optimizer == "sgd":
        sgd = torch.optim.SGD(
            parameters, lr=options.lr, momentum=options.optimizer_momentum, weight_decay=options.weight_decay, foreach=False
        )
        return InnerOptimizer(parameters, [sgd])
    hidden = hidden_matrices(model) if options.inner_optimizer == "muon" else [False] * len(parameters)
    matrices = [p for p, is_hidden in zip(parameters, hidden, strict=True) if is_hidden]
    others = [p for p, is_hidden in zip(parameters, hidden, strict=True) if not is_hidden]
    optimizers: list[Optimizer] = []
    if others:
        adamw = torch.optim.AdamW(
            others,
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.adam_eps,
            weight_decay=options.weight_decay,
            fused=others[0].device.type in ("cpu", "cuda"),
        )
        optimizers.append(adamw)
    if matrices:
        momentum, decay = options.optimizer_momentum, options.weight_decay
        optimizers.append(torch.optim.Muon(matrices, lr=options.lr, momentum=momentum, weight_decay=decay, adjust_lr_fn=MUON_LR))
    return InnerOptimizer(parameters, optimizers)


def hidden_matrices(model: nn.Module) -> list[bool]:
    """Which parameters Muon moves: matrices that belong to no embedding and are not the head.

    The head is what the model names so (`head`, or Hugging Face's output embeddings), else its last matrix. A matrix with more
    than four times as many rows as columns counts as a table of tokens.
    """
    apart = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in apart]
    head = getattr(model, "head", None)
    find = getattr(model, "get_output_embeddings", None)
    if head is None and callable(find):
        head = find()
    apart |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else {id(p) for p in matrices[-1:]}
    return [p.dim() == 2 and id(p) not in apart and not is_table(p) for p in model.parameters()]
