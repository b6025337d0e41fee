"""Which blocks go through the outer step's GPU kernels, and what serves the others, or all of them without Triton."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.outer import MLA, HeLoCo, NotFinite, kernels
from heloco.outer.kernels import portable
from support.equations import feed
from support.gpu_blocks import DEVICE, EPS, blocks, gpu, near, parameters, random, with_state

pytestmark = [
    pytest.mark.usefixtures("triton_runs", "through_the_gpu_kernels"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy's, about cases that are not chosen
]


class Wrapped(Tensor):
    """A tensor subclass, as DTensor is one: its data pointer may mean nothing."""


def test_plain_contiguous_blocks_of_these_precisions_are_served() -> None:
    x = torch.ones(4, 4, device=DEVICE)
    for p in (x, torch.nn.Parameter(x)):
        for u in (x, x.bfloat16(), x.half()):
            assert kernels.kernels_for(p, x, u)[0] is gpu
    unserved = [x.double(), x.t()[:3], torch.ones(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last)]
    for y in (*unserved, x.as_subclass(Wrapped)):
        assert kernels.kernels_for(y, y, y)[0] is portable
    assert kernels.kernels_for(x, x.half(), x)[0] is portable
    assert kernels.kernels_for(x.half(), x, x)[0] is portable


def test_a_model_of_mixed_blocks_is_stepped_in_one_go() -> None:
    kinds = [lambda x: x, lambda x: x.bfloat16(), lambda x: x.double(), lambda x: x.t(), lambda x: x, lambda x: x.half()]
    gradients = [kind(random(9, i).view(3, 3)) for i, kind in enumerate(kinds)]
    params = [torch.nn.Parameter(torch.zeros_like(x)) for x in gradients]
    optimizer = MLA(params)
    poisoned = [*gradients[:4], torch.full_like(gradients[4], math.nan), gradients[5]]
    feed(params, poisoned)
    with pytest.raises(NotFinite, match="block 4"):
        optimizer.step()
    assert not any(p.detach().any() for p in params)
    feed(params, gradients)
    optimizer.step()
    for p, gradient, outcome in zip(params, gradients, optimizer.outcomes, strict=True):
        near([p], [-0.7 * 1.09 * gradient.double()], 2, max(EPS, torch.finfo(p.dtype).eps))
        assert outcome.pseudo_gradient_norm == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def test_triton_is_not_imported_before_there_is_a_block_for_it() -> None:
    """In a process of its own, where it cannot be: a CPU does without it."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, heloco; p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
        "outer = heloco.HeLoCo([p]); outer.step(); outer.lookahead(); sys.exit('heloco.outer.kernels.gpu' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def without_triton(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(kernels, "gpu")
    patch.setitem(sys.modules, "heloco.outer.kernels.gpu", None)


def with_a_triton_that_fails(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu, "statistics_kernel", {})


@pytest.mark.parametrize("broken", [without_triton, with_a_triton_that_fails])
@pytest.mark.filterwarnings("ignore:Outer steps on this GPU take torch's operations")
def test_without_a_working_triton_the_portable_kernels_serve(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p, m, u = blocks([40, 3])
    params = parameters(p)
    with monkeypatch.context() as patch:
        broken(patch)
        assert kernels.kernels_for(p[0], m[0], u[0])[0] is portable
        with_state(HeLoCo(params), params, m, u).step()
    assert not torch.equal(params[0], p[0])


def test_a_triton_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_a_triton_that_fails(monkeypatch)
    x = torch.ones(1, device=DEVICE)
    with pytest.warns(UserWarning, match=r"^Outer steps on this GPU take .* KeyError.*\.$"):
        kernels.kernels_for(x, x, x)
