"""The head and the mean loss of one language model of any width, x [tokens, width], words [vocabulary, width].

On a GPU the logits of all tokens never lie in memory: some thousand tokens at a time have theirs, which are turned into losses
and gradients at once. So the backward pass computes no logits again. (`head` is for stacks of narrow models.)
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.task.gpt import TinyGPT
from heloco.task.rounding import kernels_serve

LOGIT_BYTES = 1 << 30  # of the tokens whose logits lie in memory
ALIGNMENT = 64  # a vocabulary of a multiple of this has rows that a GPU's matrix units read at full speed
BLOCK = 4096

Trunk = Callable[[Tensor], Tensor]


def mean_cross_entropy(x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
    """The mean of −log softmax(x wᵀ) at the targets."""
    trains = torch.is_grad_enabled() and (x.requires_grad or words.requires_grad)
    if not trains or not kernels_serve(x.device) or words.dtype is not torch.float32:
        return F.cross_entropy(F.linear(x, words), targets)
    loss: Tensor = _MeanCrossEntropy.apply(x, words, targets)  # type: ignore[no-untyped-call]
    return loss


class _MeanCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        with torch.autocast(device, enabled=False):
            losses, x_gradient, words_gradient = _losses_and_gradients(x.to(dtype), _padded(words, dtype), targets, len(words))
        context.save_for_backward(x_gradient.to(x.dtype), words_gradient)
        return losses.mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x_gradient, words_gradient = context.saved_tensors
        return x_gradient * gradient.to(x_gradient.dtype), words_gradient * gradient, None


def _padded(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The words in the dtype of the products, with rows of zeros up to a multiple of ALIGNMENT."""
    padding = -len(words) % ALIGNMENT
    return F.pad(words.to(dtype), (0, 0, 0, padding)) if padding else words.to(dtype)


def _losses_and_gradients(x: Tensor, words: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token its loss; and the gradients of the mean loss for x and for the words that are no padding."""
    from heloco.task.wide_head_kernel import loss_and_gradient_kernel

    (tokens, _), row_length = x.shape, len(words)
    at_once = min(tokens, max(ALIGNMENT, LOGIT_BYTES // (row_length * x.element_size())))
    buffer = x.new_empty(at_once, row_length)
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    x_gradient, words_gradient = torch.empty_like(x), torch.zeros(words.shape, dtype=torch.float32, device=x.device)
    for first in range(0, tokens, at_once):
        part = slice(first, min(first + at_once, tokens))
        logits = buffer[: part.stop - part.start]
        torch.mm(x[part], words.T, out=logits)
        loss_and_gradient_kernel[(len(logits),)](
            logits, targets[part].contiguous(), losses[part], 1 / tokens, vocab, row_length, BLOCK=BLOCK, num_warps=8
        )
        torch.mm(logits, words, out=x_gradient[part])
        words_gradient += _float32_product(logits.T, x[part])
    return losses, x_gradient, words_gradient[:vocab]


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """The product with sums and result in float32."""
    return (
        torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype is not torch.float32 else torch.mm(a.float(), b.float())
    )


# ---- a model as trunk and head

_SPLITS: "WeakKeyDictionary[nn.Module, tuple[Trunk, nn.Linear] | None]" = WeakKeyDictionary()


def split(model: Any) -> tuple[Trunk, nn.Linear] | None:
    """What computes the last hidden states, and the head that makes logits of them. None where the model's logits are something
    else than that, where it is no module (but a function, in a stack), and where the kernel does not run."""
    if not isinstance(model, nn.Module):
        return None
    device = next(model.parameters()).device
    if not kernels_serve(device):
        return None
    if isinstance(model, TinyGPT):
        return model.trunk, model.head
    if model not in _SPLITS:
        _SPLITS[model] = _split_hugging_face(model, device)
    return _SPLITS[model]


def _split_hugging_face(model: Any, device: torch.device) -> tuple[Trunk, nn.Linear] | None:
    """Checked with a few tokens: some models scale their logits, or cap them."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(head, nn.Linear) or head.bias is not None or not isinstance(decoder, nn.Module) or decoder is model:
        return None

    def trunk(tokens: Tensor) -> Tensor:
        hidden_states: Tensor = decoder(tokens).last_hidden_state
        return hidden_states

    tokens = torch.arange(8, device=device)[None] % head.out_features
    training = model.training
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        whole, parts = model(tokens).logits, head(trunk(tokens))
    model.train(training)
    return (trunk, head) if torch.allclose(whole, parts, rtol=1e-2, atol=1e-2 * float(whole.abs().max())) else None
