"""Codes of 8 and 4 bits: each number is as near to its code as the format allows, and compiled or not, the bits are the same."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heloco.wire import codes, compiled_codes
from heloco.wire.codes import GROUP, KINDS, Noise

SHAPES = ((1, 1), (3, 5), (7, GROUP), (5, GROUP + 1), (4, 1000), (1, 70_001), (200, 17), (30, 768))
NOISES = (None, Noise(12345), Noise(7, first_row=10**8))
POWERS = [0.0, *(2.0**-k for k in range(6, -1, -1))]


def numbers(shape, seed=0, spread=3.0):
    """Numbers of many sizes, with zeros, tiny ones and a row of zeros among them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw) * torch.exp(spread * torch.randn(shape, generator=draw))
    x.view(-1)[:: max(1, x.numel() // 7)] = 0.0
    x.view(-1)[1 : 1 + max(0, x.numel() // 50)] *= 1e-35
    if shape[0] > 2:
        x[2] = 0.0
    return x


def decoded(code_bytes, scales, kind, shape, module=codes):
    out = torch.full((shape[0] * shape[1],), torch.nan)
    module.decode(code_bytes, scales, kind, shape[1], 0, out)
    return out.view(shape)


@pytest.mark.skipif(compiled_codes.library is None, reason="the kernels are not compiled here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("noise", NOISES, ids=["nearest", "stochastic", "far down a block"])
def test_compiled_or_not_the_bits_are_the_same(kind, shape, noise):
    x = numbers(shape)
    residuals = [numbers(shape, seed=1), numbers(shape, seed=1)]
    ours, theirs = (
        module.encode(x, kind, residual=residual, decay=0.9, noise=noise)
        for module, residual in zip((codes, compiled_codes), residuals, strict=True)
    )
    for a, b in zip((*ours, residuals[0]), (*theirs, residuals[1]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(decoded(*ours, kind, shape), decoded(*ours, kind, shape, compiled_codes))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where there is no GPU, Triton's interpreter runs the kernels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5), (5, GROUP + 1), (4, 300), (0, 40)], ids=str)
@pytest.mark.parametrize("noise", [None, Noise(4_000_000_007, first_row=10**8)], ids=["nearest", "stochastic"])
def test_on_a_gpu_the_bits_are_the_same(kind, shape, noise):
    pytest.importorskip("triton", reason="triton is not installed")
    from heloco.wire import gpu_codes

    x = numbers(shape) if shape[0] else torch.empty(shape)
    ours, theirs = (numbers(shape, seed=1) if shape[0] else torch.empty(shape) for _ in range(2))
    expected = codes.encode(x, kind, residual=ours, decay=0.9, noise=noise)
    on_device = theirs.to(DEVICE)
    encoded = gpu_codes.encode(x.to(DEVICE), kind, residual=on_device, decay=0.9, noise=noise)
    for a, b in zip((*expected, ours), (*encoded, on_device), strict=True):
        assert torch.equal(a, b.cpu())
    for first in (0, 2):
        part, other = (torch.empty(max(0, x.numel() - first)) for _ in range(2))
        codes.decode(*expected, kind, shape[1], first, part)
        other = other.to(DEVICE)
        gpu_codes.decode(*encoded, kind, shape[1], first, other)
        assert torch.equal(part, other.cpu())


@pytest.mark.parametrize("module", [codes, compiled_codes], ids=["portable", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_part_of_a_block_can_be_read(module, kind, data):
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 400)))
    x = numbers(shape, seed=data.draw(st.integers(0, 9)))
    first = data.draw(st.integers(0, x.numel() - 1))
    count = data.draw(st.integers(0, x.numel() - first))
    encoded = module.encode(x, kind)
    part = torch.full((count,), torch.nan)
    module.decode(*encoded, kind, shape[1], first, part)
    assert torch.equal(part, decoded(*encoded, kind, shape).view(-1)[first : first + count])


@pytest.mark.parametrize(("kind", "limit"), [("int8", 127), ("int4", 7)])
def test_whole_numbers_of_a_scale_round_to_the_nearest(kind, limit):
    """In each group of 128 the scale is the largest size over the largest code, and no number is further off than half of it."""
    x = numbers((5, 3 * GROUP + 9), spread=1.0)
    code_bytes, scales = codes.encode(x, kind)
    for row in range(5):
        for group in range(4):
            part = x[row, group * GROUP : (group + 1) * GROUP]
            largest = part.abs().max().item()
            expected = torch.tensor(largest) / limit if largest else torch.tensor(1.0)
            assert scales[row, group] == expected
            values = decoded(code_bytes, scales, kind, x.shape)[row, group * GROUP : (group + 1) * GROUP]
            assert torch.equal(values, (part / expected).round() * expected)
            assert ((values - part).abs() <= expected / 2 * (1 + 1e-6)).all()


def test_powers_of_two_round_to_the_nearest():
    x = torch.randn(4, GROUP, generator=torch.Generator().manual_seed(1))
    values = decoded(*codes.encode(x, "e3m0"), "e3m0", x.shape)
    for row, row_values in zip(x, values, strict=True):
        largest = row.abs().max()
        for number, value in zip((row / largest).tolist(), (row_values / largest).tolist(), strict=True):
            nearest = min(POWERS, key=lambda power: abs(abs(number) - power))
            assert value == math.copysign(nearest, number) or (value == nearest == 0.0)


@pytest.mark.parametrize(
    ("kind", "cosines"), [("int8", (0.9999, 0.9999, 0.999)), ("int4", (0.992, 0.986, 0.97)), ("e3m0", (0.98, 0.98, 0.98))]
)
def test_the_direction_survives(kind, cosines):
    """Cosine and norm of what arrives, for normal numbers, Laplace's and Student's with three degrees of freedom."""
    draw = torch.Generator().manual_seed(0)
    normal, uniform = torch.randn(1000, 1000, generator=draw), torch.rand(1000, 1000, generator=draw) - 0.5
    laplace = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    chi = torch.randn(3, 1000, 1000, generator=draw).square().sum(0)
    for x, at_least in zip((normal, laplace, normal / (chi / 3).sqrt()), cosines, strict=True):
        y = decoded(*codes.encode(x, kind), kind, x.shape)
        cosine = (x * y).double().sum() / (x.double().norm() * y.double().norm())
        assert cosine >= at_least
        assert 0.95 < y.double().norm() / x.double().norm() < 1.05


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_is_right_in_the_mean(kind):
    x = numbers((2, GROUP), spread=0.5)
    seeds, total = 4000, torch.zeros(2, GROUP, dtype=torch.float64)
    for seed in range(seeds):
        total += decoded(*codes.encode(x, kind, noise=Noise(seed * 2654435761 % 2**32)), kind, x.shape).double()
    step = codes.encode(x, kind)[1].double() * (0.5 if kind == "e3m0" else 1.0)  # neighbours are at most this far apart
    assert ((total / seeds - x.double()).abs() <= 5 * 0.5 * step / math.sqrt(seeds)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_with_feedback(kind):
    """The sum of what was sent and the last residual is the sum of what was to be sent."""
    draw = torch.Generator().manual_seed(2)
    residual, sent, meant = (
        torch.zeros(3, 200),
        torch.zeros(3, 200, dtype=torch.float64),
        torch.zeros(3, 200, dtype=torch.float64),
    )
    for _ in range(20):
        x = torch.randn(3, 200, generator=draw)
        meant += x.double()
        sent += decoded(*codes.encode(x, kind, residual=residual), kind, x.shape).double()
    assert torch.allclose(sent + residual.double(), meant, rtol=0, atol=20 * 4 * 2.0**-23)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [codes, compiled_codes], ids=["portable", "compiled"])
def test_what_is_not_finite_spoils_its_group_alone(module, kind, bad):
    x = torch.ones(2, 2 * GROUP)
    x[1, GROUP + 3] = bad
    values = decoded(*module.encode(x, kind), kind, x.shape)
    assert values[1, GROUP:].isnan().all() and torch.equal(values[0], x[0]) and torch.equal(values[1, :GROUP], x[1, :GROUP])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_be_encoded_by_themselves(kind):
    """A machine that has some rows of a block sends the same bytes as one that has all of them."""
    x = numbers((10, 300))
    whole = codes.encode(x, kind, noise=Noise(5))
    parts = [codes.encode(x[a:b], kind, noise=Noise(5, first_row=a)) for a, b in ((0, 4), (4, 4), (4, 9), (9, 10))]
    for index in range(2):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])
