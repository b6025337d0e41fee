"""A model's repeated blocks: found, compiled in their places, computed again in the backward pass."""

import os
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from heloco.errors import UserError
from heloco.inner import InnerOptions, SequentialInner
from heloco.inner.repeated_blocks import compile_model, recompute_blocks, repeated_blocks, undo_compilation
from heloco.task.gpt import build, preset
from support.inner_rounds import OPTIONS, mlp, round_for, seeded, task_of
from support.synchronizers import same

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),  # torch's own
]
with_a_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler, and there is none"
)


class Block(nn.Module):
    """Counts how often it is computed."""

    computed = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        Block.computed += 1
        return x + self.linear(x).tanh()


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def tower(block: type[nn.Module] = Block, depth: int = 3) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(block() for _ in range(depth))), nn.Linear(4, 2)))


def test_the_repeated_blocks_are_the_longest_list_of_one_class() -> None:
    assert len(repeated_blocks(build(preset("1m"), 0))) == 5
    assert [type(block) for block in repeated_blocks(tower())] == [Block] * 3
    assert repeated_blocks(mlp()) == repeated_blocks(nn.Linear(2, 2)) == repeated_blocks(nn.ModuleList([nn.Linear(2, 2)])) == []


def test_recomputed_blocks_give_the_same_round_to_the_bit_and_are_computed_twice() -> None:
    counts, rounds = [], []
    for recompute in (False, True):
        task, Block.computed = task_of(tower()), 0
        options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, recompute=recompute)
        rounds.append(SequentialInner(task, options, seed=0).run([round_for(task, options, steps=4)])[0])
        counts.append(Block.computed)
    assert same(rounds[0].pseudo_gradient, rounds[1].pseudo_gradient)
    assert rounds[0].loss == rounds[1].loss
    assert counts == [12, 24]


def test_recomputed_blocks_keep_their_inputs_alone() -> None:
    model, kept = tower(), list[int]()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            model(x)
        kept.append(len(saved))
        recompute_blocks(model)
    assert kept[1] < kept[0]


def test_a_model_without_blocks_cannot_recompute() -> None:
    options = InnerOptions(recompute=True)
    with pytest.raises(UserError, match=r"^recompute is set, but the model has no list of blocks of one kind: leave it out\.$"):
        SequentialInner(task_of(mlp()), options, seed=0)


@with_a_compiler
def test_blocks_that_are_compiled_agree_and_the_compiler_sees_one() -> None:
    model, x = tower(PlainBlock, 5), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    before = model(x)
    torch.compiler.reset()
    counters.clear()
    compile_model(model)
    torch.testing.assert_close(model(x), before)
    assert counters["stats"]["unique_graphs"] == 1
    undo_compilation(model)
    counters.clear()
    assert torch.equal(model(x), before) and not counters["stats"]


@with_a_compiler
@pytest.mark.usefixtures("fused")
def test_what_a_gpu_would_compile_is_computed_without_where_the_compiler_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`fused`: this machine counts as a GPU that our kernels run on."""
    task = task_of(tower(PlainBlock))
    worker_round = round_for(task, OPTIONS, steps=2)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    torch.compiler.reset()
    inner = SequentialInner(task, OPTIONS, seed=0)
    assert inner.is_compiled
    [ours] = inner.run([worker_round])
    plain = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, compile=False)
    [theirs] = SequentialInner(task, plain, seed=0).run([worker_round])
    assert same(ours.pseudo_gradient, theirs.pseudo_gradient) and not inner.is_compiled
    assert "torch.compile cannot compile this model" in capfd.readouterr().err
    [again] = inner.run([worker_round])
    assert same(ours.pseudo_gradient, again.pseudo_gradient) and not capfd.readouterr().err
