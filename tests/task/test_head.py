"""The head's losses and gradients without logits: the Triton kernels against torch in float64.

On a machine without a GPU Triton's interpreter runs the same kernels.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heloco.task import head
from heloco.task.gpt import build, preset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(stack: int, tokens: int, width: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, words = torch.randn(stack, tokens, width, generator=draw), 0.3 * torch.randn(stack, vocab, width, generator=draw)
    return x.to(DEVICE), words.to(DEVICE), torch.randint(vocab, (stack, tokens), generator=draw).to(DEVICE)


def exact(x: Tensor, words: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, ∂x and ∂words in float64."""
    x, words = x.detach().double().requires_grad_(), words.detach().double().requires_grad_()
    losses = F.cross_entropy((x @ words.mT).flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return (losses, *torch.autograd.grad((losses * weight).sum(), (x, words)))


def off_by(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm())


# operands keep 11 bits: 2⁻¹¹ ≈ 5e-4 each, less in sums of many
@pytest.mark.parametrize(
    ("stack", "tokens", "width", "vocab"),
    [(1, 1, 32, 5), (2, 64, 32, 64), (3, 63, 64, 65), (2, 130, 128, 1025), (1, 256, 32, 2100)],
)
def test_losses_and_gradients(fused: None, stack: int, tokens: int, width: int, vocab: int) -> None:  # noqa: ARG001
    x, words, targets = inputs(stack, tokens, width, vocab)
    x.requires_grad_()
    words.requires_grad_()
    assert head.fusable(x, words)
    weight = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) / tokens
    losses = head.cross_entropy(x, words, targets)
    results = (losses, *torch.autograd.grad((losses * weight).sum(), (x, words)))
    for ours, theirs in zip(results, exact(x, words, targets, weight), strict=True):
        assert ours.dtype is torch.float32 and off_by(ours, theirs) < 1e-3


def test_a_product_is_rounded_under_autocast_as_torchs_own() -> None:
    x, words, _ = inputs(2, 10, 32, 50)
    gradients = []
    with torch.autocast(DEVICE, torch.bfloat16):
        for multiply in (head.product, lambda x, words: x @ words.mT):
            ours, theirs = x.clone().requires_grad_(), words.clone().requires_grad_()
            logits = multiply(ours, theirs)
            gradients.append([logits, *torch.autograd.grad(logits.float().square().sum(), (ours, theirs))])
        assert head.product(x.double(), words.double()).dtype is torch.float64
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-2)
    assert gradients[0][0].dtype is torch.bfloat16 and gradients[0][1].dtype is torch.float32


@pytest.mark.parametrize("size", [1e-12, 1e9])
def test_gradients_of_any_size(fused: None, size: float) -> None:  # noqa: ARG001
    x, words, targets = inputs(2, 20, 32, 100)
    x.requires_grad_()
    words.requires_grad_()
    weight = torch.full(targets.shape, size, device=DEVICE)
    gradients = torch.autograd.grad((head.cross_entropy(x, words, targets) * weight).sum(), (x, words))
    for ours, theirs in zip(gradients, exact(x, words, targets, weight)[1:], strict=True):
        assert off_by(ours, theirs) < 1e-3


def test_certain_and_hopeless_tokens(fused: None) -> None:  # noqa: ARG001
    """Logits far apart: a probability of one, and one of e⁻⁴⁰⁰."""
    x = torch.zeros(1, 2, 32, device=DEVICE)
    x[0, :, 0] = 20
    words = torch.zeros(1, 70, 32, device=DEVICE)
    words[0, 3, 0] = 20
    losses = head.cross_entropy(x, words, torch.tensor([[3, 5]], device=DEVICE))
    torch.testing.assert_close(losses.cpu(), torch.tensor([[0.0, 400.0]]), rtol=1e-6, atol=1e-6)


def test_without_gradients_any_number_of_tokens_is_served(fused: None) -> None:  # noqa: ARG001
    x, words, targets = inputs(1, 700, 32, 90)
    assert head.fusable(x, words) and not head.fusable(x.requires_grad_(), words)
    with torch.no_grad():
        assert head.fusable(x, words)
        losses = head.cross_entropy(x, words, targets)
    assert off_by(losses, exact(x, words, targets, torch.ones_like(losses))[0]) < 1e-3


def test_an_evaluation_computes_no_gradients(fused: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    x, words, targets = inputs(1, 20, 32, 90)
    monkeypatch.setattr(head, "FusedCrossEntropy", None)
    with torch.no_grad():
        assert head.cross_entropy(x, words.requires_grad_(), targets).grad_fn is None


def test_the_same_to_the_bit_each_time(fused: None) -> None:  # noqa: ARG001
    x, words, targets = inputs(2, 100, 64, 300)
    x.requires_grad_()
    words.requires_grad_()
    gradients = [torch.autograd.grad(head.cross_entropy(x, words, targets).sum(), (x, words)) for _ in range(2)]
    assert all(map(torch.equal, *gradients))


def test_where_products_must_not_be_rounded_torch_serves() -> None:
    x, words, targets = inputs(2, 10, 32, 50)
    assert not head.fusable(x, words)
    ours = head.cross_entropy(x, words, targets)
    assert off_by(ours, exact(x, words, targets, torch.ones_like(ours))[0]) < 1e-6


def test_an_evaluation_says_the_same_with_the_kernels(fused: None) -> None:  # noqa: ARG001
    from heloco.corpus import prepare, split
    from heloco.task.language import LanguageTask

    corpus = prepare("builtin", languages=["auren", "thelis"])
    config = preset("1m", width=32, layers=1, heads=2, context=16, vocab_size=257)
    task = LanguageTask(corpus, split(corpus, scheme="source", context=16), config, context=16, seed=0, eval_windows=9)
    rounded = task.evaluate(build(config, 3).to(DEVICE))
    whole = task.evaluate(build(config, 3).double().to(DEVICE))
    for name, scores in whole.items():
        assert rounded[name]["loss"] == pytest.approx(scores["loss"], rel=1e-3)
