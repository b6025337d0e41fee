"""A language model's head and its loss, for one model or a stack of them: x [S, T, width], words [S, V, width] -> losses [S, T].

On a GPU, where matrix products may round their operands (TF32), the logits never lie in memory: see `head_kernels`.
Liger and cut-cross-entropy do the same for one model, and a stack has a dimension of models.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heloco.task.rounding import may_round

TOKENS_AT_ONCE = 256  # of one slice, in a tile of the gradient's kernel
WIDTHS = (32, 64, 128)
TILE = 64  # tokens, and words
PROGRAMS = 1584  # that keep a GPU of 132 multiprocessors busy to the end: twelve for each
GRADIENT_CHUNK = 1024  # words per program
SHARED_BYTES = {1: 163_840, 3: 229_376}  # what the gradient's kernel takes, by how many tiles it loads ahead


def cross_entropy(x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(x wᵀ) at the target, token by token."""
    if fusable(x, words):
        x, words, targets = x.contiguous(), words.contiguous(), targets.contiguous()
        if not _trains(x, words):  # an evaluation needs no Σ p w
            return _losses(x, words, targets, mean=False)[0]
        fused: Tensor = FusedCrossEntropy.apply(x, words, targets)  # type: ignore[no-untyped-call]
        return fused
    logits = product(x, words)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def fusable(x: Tensor, words: Tensor) -> bool:
    """Whether the kernels serve these: they are written for some sizes."""
    if x.shape[2] not in WIDTHS or x.dtype is not torch.float32 or not may_round(x, words):
        return False
    return not _trains(x, words) or (x.shape[1] <= TOKENS_AT_ONCE and stages(x.device) > 0)


def _trains(x: Tensor, words: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or words.requires_grad)


@functools.cache
def stages(device: torch.device) -> int:
    """How many tiles ahead the gradient's kernel can load on this device; 0: it does not fit there."""
    shared_memory_bytes: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return max((count for count, bytes_needed in SHARED_BYTES.items() if bytes_needed <= shared_memory_bytes), default=0)


class FusedCrossEntropy(torch.autograd.Function):
    """The loss of each token without logits in memory."""

    @staticmethod
    def forward(context: Any, x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        losses, level, mean = _losses(x, words, targets, mean=True)
        target_words = F.embedding(targets + _firsts(words), words.flatten(0, 1))
        context.save_for_backward(x, words, targets, level, mean.sub_(target_words))
        return losses

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, words, targets, level, difference = context.saved_tensors
        return gradient[..., None] * difference, _words_gradient(x, words, targets, level, gradient.contiguous()), None


def _firsts(words: Tensor) -> Tensor:
    """Where each slice's words begin in the flattened table."""
    return torch.arange(len(words), device=words.device)[:, None] * words.shape[1]


def _losses(x: Tensor, words: Tensor, targets: Tensor, *, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, log-sum-exps, and where asked for Σ_v p_tv w_v: chunk by chunk of the vocabulary, then put together."""
    from heloco.task.head_kernels import losses_kernel

    (stack, tokens, width), vocab = x.shape, words.shape[1]
    blocks = -(-tokens // TILE)
    chunk = -(-vocab // max(1, PROGRAMS // (stack * blocks)))
    chunk = -(-chunk // TILE) * TILE
    chunks = -(-vocab // chunk)
    high, total, target_logit = x.new_empty(3, stack, tokens, chunks)
    means = x.new_empty(stack, tokens, chunks, width) if mean else high
    losses_kernel[(stack * blocks, chunks)](
        x, words, targets, high, total, target_logit, means, tokens, vocab, blocks, chunk,
        WIDTH=width, TOKENS=TILE, WORDS=TILE, MEANS=mean, num_warps=4, num_stages=3,
    )  # fmt: skip
    top = high.amax(-1)
    part = total.mul_(torch.exp(high - top[..., None]))
    whole = part.sum(-1)
    level = top + whole.log()
    if mean:
        weight = torch.exp(high - level[..., None])
        means = means[:, :, 0] * weight if chunks == 1 else means.mul_(weight[..., None]).sum(2)
    return level - target_logit.sum(-1), level, means


def _words_gradient(x: Tensor, words: Tensor, targets: Tensor, level: Tensor, gradient: Tensor) -> Tensor:
    from heloco.task.head_kernels import weight_gradient_kernel

    (stack, tokens, width), vocab = x.shape, words.shape[1]
    largest = gradient.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    gradients = torch.empty_like(words)
    weight_gradient_kernel[(stack, -(-vocab // GRADIENT_CHUNK))](
        x, words, targets, level, gradient * (1024 / largest), largest / 1024, gradients, tokens, vocab, GRADIENT_CHUNK,
        WIDTH=width, TOKENS=max(TILE, _power_of_two(tokens)), WORDS=TILE,
        num_warps=16, num_stages=stages(x.device),
    )  # fmt: skip
    return gradients


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


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


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ for each model of a stack: [stack, tokens, width] and [stack, vocabulary, width] -> [stack, tokens, vocabulary]. The
    gradient for W has W's own memory layout, so it need not be copied. Under autocast the operands are
    rounded as those of torch's own products."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    product: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return product
