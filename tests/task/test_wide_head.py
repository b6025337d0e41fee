"""The mean loss of one model without the logits of all its tokens: the Triton kernel against torch in float64, and which models
are trunk and head.

On a machine without a GPU Triton's interpreter runs the same kernel.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.task import wide_head
from heloco.task.gpt import build, preset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(tokens: int, width: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, words = torch.randn(tokens, width, generator=draw), 0.3 * torch.randn(vocab, width, generator=draw)
    targets = torch.randint(vocab, (tokens,), generator=draw)
    return x.to(DEVICE).requires_grad_(), words.to(DEVICE).requires_grad_(), targets.to(DEVICE)


def loss_and_gradients(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, words: Tensor, targets: Tensor, scale: float
) -> list[Tensor]:
    value = loss(x, words, targets)
    return [value.detach(), *torch.autograd.grad(value * scale, (x, words))]


def plain(x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ words.T, targets)


def exactly(x: Tensor, words: Tensor, targets: Tensor, scale: float) -> list[Tensor]:
    return loss_and_gradients(
        plain, x.detach().double().requires_grad_(), words.detach().double().requires_grad_(), targets, scale
    )


def off_by(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("at_once", [1 << 30, 1 << 14], ids=["all tokens at once", "64 at once"])
@pytest.mark.parametrize(("tokens", "width", "vocab"), [(1, 8, 2), (7, 24, 65), (200, 16, 64), (130, 40, 5003)])
def test_loss_and_gradients(
    fused: None, monkeypatch: pytest.MonkeyPatch, tokens: int, width: int, vocab: int, at_once: int  # noqa: ARG001
) -> None:  # fmt: skip
    monkeypatch.setattr(wide_head, "LOGIT_BYTES", at_once)
    x, words, targets = inputs(tokens, width, vocab)
    exact = exactly(x, words, targets, 3.0)
    results = loss_and_gradients(wide_head.mean_cross_entropy, x, words, targets, 3.0)
    limit = 1e-3 if DEVICE == "cuda" else 1e-6  # a GPU's products keep 11 bits of their operands
    for ours, theirs in zip(results, exact, strict=True):
        assert ours.dtype is torch.float32 and off_by(ours, theirs) < limit


def test_under_autocast_it_rounds_as_torch_does(fused: None) -> None:  # noqa: ARG001
    x, words, targets = inputs(150, 32, 1000)
    exact = exactly(x, words, targets, 1.0)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = loss_and_gradients(wide_head.mean_cross_entropy, x, words, targets, 1.0)
        torchs = loss_and_gradients(plain, x, words, targets, 1.0)
    for our, torchs_own, best in zip(ours, torchs, exact, strict=True):
        assert our.dtype is torchs_own.dtype
        assert off_by(our, best) < 1.5 * off_by(torchs_own, best) + 1e-4
        assert off_by(our, best) > 1e-5, "it was not rounded"


def test_far_apart_and_broken_logits(fused: None) -> None:  # noqa: ARG001
    x, words = torch.zeros(2, 4, device=DEVICE), torch.zeros(70, 4, device=DEVICE)
    x[:, 0], words[3, 0] = 20.0, 20.0
    x.requires_grad_()
    loss = wide_head.mean_cross_entropy(x, words.requires_grad_(), torch.tensor([3, 5], device=DEVICE))
    assert float(loss.detach()) == pytest.approx(200.0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, words)))
    with torch.no_grad():
        x[0, 1] = float("nan")
    assert wide_head.mean_cross_entropy(x, words, torch.tensor([3, 5], device=DEVICE)).isnan()


def test_an_evaluation_and_float64_take_torchs_own(fused: None) -> None:  # noqa: ARG001
    x, words, targets = inputs(5, 8, 20)
    with torch.no_grad():
        assert torch.equal(wide_head.mean_cross_entropy(x, words, targets), F.cross_entropy(F.linear(x, words), targets))
    doubles = x.detach().double(), words.detach().double().requires_grad_()
    assert wide_head.mean_cross_entropy(*doubles, targets).dtype is torch.float64


# ---- a model as trunk and head


def hugging_face(kind: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=32, num_key_value_heads=2, **changes)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.to(DEVICE)


def test_logits_of_trunk_and_head_are_those_of_the_model(fused: None) -> None:  # noqa: ARG001
    tokens = torch.arange(12, device=DEVICE)[None] % 50
    for model in (build(preset("1m"), 0).to(DEVICE), hugging_face("Llama")):
        parts = wide_head.split(model)
        assert parts is not None and model.training
        trunk, head = parts
        output = model.eval()(tokens)
        torch.testing.assert_close(head(trunk(tokens)), getattr(output, "logits", output), rtol=1e-3, atol=1e-3)


def test_a_model_that_scales_its_logits_is_not_split(fused: None) -> None:  # noqa: ARG001
    assert wide_head.split(hugging_face("Granite", logits_scaling=8.0)) is None
    assert wide_head.split(hugging_face("Granite", logits_scaling=1.0)) is not None


def test_functions_and_models_without_a_known_head_are_not_split(fused: None) -> None:  # noqa: ARG001
    assert wide_head.split(lambda tokens: tokens) is None
    assert wide_head.split(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))) is None


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the kernel runs")
def test_without_the_kernel_nothing_is_split() -> None:
    assert wide_head.split(build(preset("1m"), 0)) is None
