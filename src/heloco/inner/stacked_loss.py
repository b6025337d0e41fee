"""The forward of a stack: (parameters[S, …], buffers[S, …], batch[S, …]) -> losses[S].

`VmapLoss` is for any module, through torch.func; `GPTLoss` is TinyGPT written with batched matrix products.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from heloco.task import Task
from heloco.task.attention import attend
from heloco.task.gpt import TinyGPT
from heloco.task.head import cross_entropy, product
from heloco.task.language import LanguageTask


@dataclass(frozen=True)
class Reads:
    """A parameter of which a batch reads only some rows."""

    index: int
    height: int
    rows: Callable[[Any], Tensor]
    """Which rows a batch reads."""


class StackedLoss(Protocol):
    """The loss of every slice of a stack in one forward pass."""

    @property
    def table(self) -> Reads | None: ...

    def __call__(self, parameters: list[Tensor], buffers: list[Tensor], batch: Any, rows: Tensor | None = None) -> Tensor:
        """Losses of all slices. Buffers are updated in place. `rows`: where what the batch reads lies in the table, if not at
        its own place."""


def stacked_loss(task: Task, model: nn.Module) -> StackedLoss:
    """The tuned form where there is one, else the generic."""
    return GPTLoss(model) if isinstance(model, TinyGPT) and isinstance(task, LanguageTask) else VmapLoss(task, model)


class VmapLoss:
    """Any module and loss, vectorised over the stack. The task's loss may only call the model."""

    table: Reads | None = None

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task = task
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.buffer_names = [name for name, _ in model.named_buffers()]

    def __call__(self, parameters: list[Tensor], buffers: list[Tensor], batch: Any, rows: Tensor | None = None) -> Tensor:
        assert rows is None

        def one(parameters: list[Tensor], buffers: list[Tensor], batch: Any) -> Tensor:
            state = dict(zip(self.names, parameters, strict=True)) | dict(zip(self.buffer_names, buffers, strict=True))

            def call(*inputs: Any, **keywords: Any) -> Any:
                return functional_call(self.model, state, inputs, keywords)

            return self.task.loss(call, batch)  # type: ignore[arg-type]

        on_gpu = parameters[0].is_cuda  # where the fused attention's backward pass fails within vmap
        with sdpa_kernel(SDPBackend.MATH) if on_gpu else nullcontext():
            losses: Tensor = vmap(one, randomness="different")(parameters, buffers, batch)
        return losses


class GPTLoss:
    """TinyGPT over a stack: each linear layer is one batched matrix product."""

    def __init__(self, model: TinyGPT) -> None:
        self.config = model.config
        self.table = None if model.config.tied else Reads(0, model.config.vocab_size, _inputs)
        on_gpu = model.head.weight.is_cuda
        # the halves of one block, compiled, serve all of them: in a fraction of the time that all in one piece take
        self._before = torch.compile(_before_attention, dynamic=False) if on_gpu else _before_attention
        self._after = torch.compile(_after_attention, dynamic=False) if on_gpu else _after_attention

    def __call__(
        self, parameters: list[Tensor], buffers: list[Tensor], batch: Tensor, rows: Tensor | None = None  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        token, position, *rest = parameters
        stack, length = batch.shape[0], batch.shape[2] - 1
        inputs = (_inputs(batch) if rows is None else rows).reshape(stack, -1)
        offsets = torch.arange(stack, device=batch.device)[:, None] * token.shape[1]
        x = self._trunk(F.embedding(inputs + offsets, token.flatten(0, 1)), position, rest, length)
        head = token if self.config.tied else rest[-1]
        return cross_entropy(x, head, batch[..., 1:].reshape(stack, -1)).mean(1)

    def _trunk(self, x: Tensor, position: Tensor, parameters: list[Tensor], length: int) -> Tensor:
        x = x + position[:, :length].repeat(1, x.shape[1] // length, 1)
        for layer in range(self.config.layers):
            x = self._block(x, parameters[12 * layer : 12 * (layer + 1)], length)
        weight, bias = parameters[12 * self.config.layers :][:2]
        return _normalise(x, weight, bias)

    def _block(self, x: Tensor, parameters: list[Tensor], length: int) -> Tensor:
        sequences = x.shape[0] * x.shape[1] // length
        qkv = self._before(x, *parameters[:4])
        attention_output = attend(qkv.view(sequences, length, 3, self.config.heads, -1)).view(x.shape)
        return self._after(x, attention_output, *parameters[4:])


def _inputs(batch: Tensor) -> Tensor:
    return batch[..., :-1]


def _before_attention(x: Tensor, norm: Tensor, norm_b: Tensor, qkv: Tensor, qkv_b: Tensor) -> Tensor:
    return _linear(_normalise(x, norm, norm_b), qkv, qkv_b)


def _after_attention(
    x: Tensor, attention_output: Tensor, out: Tensor, out_b: Tensor, norm: Tensor, norm_b: Tensor,
    up: Tensor, up_b: Tensor, down: Tensor, down_b: Tensor,
) -> Tensor:  # fmt: skip
    x = x + _linear(attention_output, out, out_b)
    return x + _linear(F.gelu(_linear(_normalise(x, norm, norm_b), up, up_b)), down, down_b)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mapped = product(x, weight)
    return mapped + bias[:, None].to(mapped.dtype)


def _normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * weight[:, None] + bias[:, None]
