"""The forward of a stack: (parameters[S, …], buffers[S, …], batch[S, …]) -> losses[S].

`VmapLoss` is for any module, through torch.func; `GPTLoss` is TinyGPT written with batched matrix products.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from heloco.task import Task
from heloco.task.gpt import TinyGPT
from heloco.task.language import LanguageTask


class StackedLoss(Protocol):
    def __call__(self, parameters: list[Tensor], buffers: list[Tensor], batch: Any) -> Tensor:
        """Losses of all slices. Buffers are updated in place."""


def stacked_loss(task: Task, model: nn.Module) -> StackedLoss:
    """The tuned form where there is one, else the generic."""
    return GPTLoss(model) if isinstance(model, TinyGPT) and isinstance(task, LanguageTask) else VmapLoss(task, model)


class VmapLoss:
    """Any module and loss, vectorised over the stack. The task's loss may only call the model."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task = task
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.buffer_names = [name for name, _ in model.named_buffers()]

    def __call__(self, parameters: list[Tensor], buffers: list[Tensor], batch: Any) -> Tensor:
        def one(parameters: list[Tensor], buffers: list[Tensor], batch: Any) -> Tensor:
            state = dict(zip(self.names, parameters, strict=True)) | dict(zip(self.buffer_names, buffers, strict=True))

            def call(*inputs: Any, **named: Any) -> Any:
                return functional_call(self.model, state, inputs, named)

            return self.task.loss(call, batch)  # type: ignore[arg-type]

        losses: Tensor = vmap(one, randomness="different")(parameters, buffers, batch)
        return losses


class GPTLoss:
    """TinyGPT over a stack: each linear layer is one batched matrix product."""

    def __init__(self, model: TinyGPT) -> None:
        self.config = model.config

    def __call__(self, parameters: list[Tensor], buffers: list[Tensor], batch: Tensor) -> Tensor:  # noqa: ARG002
        config = self.config
        token, position, *rest = parameters
        stack, samples, length = batch.shape[0], batch.shape[1], batch.shape[2] - 1
        inputs, targets = batch[..., :-1].reshape(stack, -1), batch[..., 1:].reshape(-1)
        offsets = torch.arange(stack, device=batch.device)[:, None] * config.vocab_size
        x = F.embedding(inputs + offsets, token.flatten(0, 1))
        x = x + position[:, :length].repeat(1, samples, 1)
        for layer in range(config.layers):
            x = self._block(x, rest[12 * layer : 12 * (layer + 1)], stack * samples, length)
        weight, bias, *head = rest[12 * config.layers :]
        logits = _product(_normed(x, weight, bias), head[0] if head else token)
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="none").view(stack, -1).mean(1)

    def _block(self, x: Tensor, parameters: list[Tensor], sequences: int, length: int) -> Tensor:
        norm1, norm1_b, qkv, qkv_b, out, out_b, norm2, norm2_b, up, up_b, down, down_b = parameters
        heads = self.config.heads
        mixed = _linear(_normed(x, norm1, norm1_b), qkv, qkv_b)
        q, k, v = mixed.view(sequences, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + _linear(attended, out, out_b)
        return x + _linear(F.gelu(_linear(_normed(x, norm2, norm2_b), up, up_b)), down, down_b)


class _Product(torch.autograd.Function):
    """x Wᵀ slice by slice, whose gradient for W comes in W's own layout: torch's comes transposed, and would be copied."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return torch.bmm(x, weight.transpose(1, 2))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = context.saved_tensors
        return torch.bmm(gradient, weight), torch.bmm(gradient.transpose(1, 2), x)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return product


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _product(x, weight) + bias[:, None]


def _normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * weight[:, None] + bias[:, None]
