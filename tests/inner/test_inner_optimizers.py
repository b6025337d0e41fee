"""Muon and SGD as inner optimizers: against torch's own in a plain loop, and what Muon is given."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim._muon import _zeropower_via_newtonschulz

from heloco.errors import UserError
from heloco.inner import InnerOptions, SequentialInner
from heloco.inner.muon import COEFFICIENTS, EPS, ITERATIONS, Muon, orthogonalise
from heloco.inner.optimizers import hidden_matrices, make_optimizer
from heloco.run import RunConfig, resolve, with_fields
from heloco.synchronizer import Round
from heloco.task.datasets import DatasetTask
from heloco.task.gpt import TinyGPT, preset

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, BATCH = 4, 3


def task() -> DatasetTask:
    draw = torch.Generator().manual_seed(3)
    data = [(torch.randn(4, generator=draw), torch.randn(2, generator=draw)) for _ in range(60)]
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    return DatasetTask(model, lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), {"a": data})


def plain(options: InnerOptions, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers as somebody would write them down for this model."""
    p, momentum, decay = dict(model.named_parameters()), options.optimizer_momentum, options.weight_decay
    if options.inner_optimizer == "sgd":
        return [torch.optim.SGD(p.values(), lr=1.0, momentum=momentum, weight_decay=decay, foreach=False)]
    matrices = [p["0.weight"], p["2.weight"]]
    others = [p["0.bias"], p["2.bias"], p["4.weight"], p["4.bias"]]
    return [
        torch.optim.Muon(matrices, momentum=momentum, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, fused=True),
    ]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("settings", [("muon", None), ("muon", 0.5), ("sgd", None), ("sgd", 0.0)], ids=str)
def test_rounds_equal_a_plain_loop_to_the_bit(settings, keep):
    name, momentum = settings
    options = InnerOptions(
        inner_optimizer=name, inner_momentum=momentum, batch_size=BATCH, lr=0.01, lr_min=0.01, weight_decay=0.1, keep_state=keep
    )
    dataset_task = task()
    inner, model, memory = SequentialInner(dataset_task, options, seed=0), dataset_task.build_model(), None
    optimizers = plain(options, model)
    for index in range(3):
        start = [p.detach().clone() for p in model.parameters()]
        spans = ((index * STEPS * BATCH, STEPS * BATCH),)
        [ours] = inner.run([Round(0, index, 0, 0, spans, STEPS, 0, 0.0, start, [], memory)])
        optimizers = optimizers if keep else plain(options, model)
        for positions in np.arange(spans[0][0], spans[0][0] + STEPS * BATCH).reshape(STEPS, BATCH):
            dataset_task.loss(model, dataset_task.batch(0, positions)).backward()
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.01
                optimizer.step()
                optimizer.zero_grad()
        moved = [s - p.detach() for s, p in zip(start, model.parameters(), strict=True)]
        assert all(map(torch.equal, ours.pseudo_gradient, moved))
        memory = ours.memory
        assert (memory is not None) == keep


def test_the_state_is_named_after_the_models_parameters():
    model = task().build_model()
    optimizer = make_optimizer(InnerOptions(inner_optimizer="muon"), model)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    adamw = {f"{i}.{name}" for i in (1, 3, 4, 5) for name in ("step", "exp_avg", "exp_avg_sq")}
    assert optimizer.memory().keys() == adamw | {"0.momentum_buffer", "2.momentum_buffer"}


@pytest.mark.parametrize("shape", [(7, 16, 16), (5, 8, 24), (5, 24, 8), (1, 3, 1)])
def test_many_matrices_are_orthogonalised_as_torch_does_each(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    alone = [_zeropower_via_newtonschulz(m, COEFFICIENTS, ITERATIONS, EPS) for m in matrices]
    torch.testing.assert_close(orthogonalise(matrices), torch.stack(alone), rtol=0.02, atol=0.005)
    assert not orthogonalise(torch.zeros(shape)).any()


@pytest.mark.parametrize("sides", [(16, 16), (16, 48), (64, 16), (32, 128)], ids=str)
def test_muon_in_one_launch(sides, monkeypatch):
    """Rounding to bfloat16 is nine tenths of the error of either, and Triton's interpreter does not round to the nearest."""
    pytest.importorskip("triton", reason="triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    start, momenta, gradients = ([torch.randn(3, *sides, generator=draw) for _ in range(2)] for _ in range(3))
    gradients[1][1], momenta[1][1] = 0, 0
    lr, decay, active = torch.tensor([1e-2, 3e-3, 1.0]), torch.tensor([0.1, 0.0, 0.1]), torch.tensor([1.0, 1.0, 0.0])

    def moved(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parameters, state = ([x.to(device, dtype, copy=True) for x in tensors] for tensors in (start, momenta))
        Muon(parameters, state, 0.9).move([g.to(device, dtype) for g in gradients], *(x.to(device) for x in (lr, decay, active)))
        return [p.cpu() for p in parameters], [m.cpu() for m in state]

    operations, exact_state = moved(torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda x: x)
        exact, _ = moved(torch.float64)
    monkeypatch.setattr("heloco.inner.adamw.serves", lambda _: True)
    parameters, state = moved(torch.float32)
    for block, before in enumerate(start):
        for i in (0, 1):
            ours, theirs = ((result[block][i] - exact[block][i]).norm() for result in (parameters, operations))
            assert ours <= 2 * theirs
        assert torch.equal(parameters[block][2], before[2])  # not active: it stays as it is
        torch.testing.assert_close(state[block], exact_state[block], rtol=1e-6, atol=1e-7)
    assert torch.equal(parameters[1][1], start[1][1])  # nothing to orthogonalise


def names_of_hidden(model: nn.Module) -> list[str]:
    return [name for (name, _), hidden in zip(model.named_parameters(), hidden_matrices(model), strict=True) if hidden]


@pytest.mark.parametrize("tied", [False, True])
def test_muon_moves_the_matrices_between_embedding_and_head(tied):
    model = TinyGPT(preset("1m", width=16, layers=2, heads=2, context=8, vocab_size=257, tied=tied))
    names = names_of_hidden(model)
    assert len(names) == 8 and all("blocks" in name and name.endswith("weight") for name in names)


def test_a_model_that_names_no_head_has_its_last_matrix_as_head():
    assert names_of_hidden(task().build_model()) == ["0.weight", "2.weight"]
    assert names_of_hidden(nn.Linear(3, 1)) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inner_optimizer": "adam"}, "There is no inner optimizer 'adam' here; did you mean 'adamw'"),
        ({"inner_momentum": 0.9}, "inner_momentum is a setting of muon and sgd"),
        ({"inner_optimizer": "muon", "inner_momentum": 1.0}, "it must lie in"),
        ({"inner_optimizer": "sgd", "keep_state": True, "second_moment": "rows"}, "sgd has no such state"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        resolve(with_fields(RunConfig(), settings))


def test_a_run_has_another_digest_only_if_its_optimizer_is_another():
    def digest(**settings):
        return resolve(with_fields(RunConfig(), settings)).digest()

    assert digest() == digest(inner_optimizer="adamw")
    others = [{"inner_optimizer": "muon"}, {"inner_optimizer": "sgd"}, {"inner_optimizer": "sgd", "inner_momentum": 0.0}]
    assert len({digest(), *(digest(**settings) for settings in others)}) == 4
