"""Formats: what a file holds of a block, what the outer step makes of it, and what error feedback keeps."""

import math
from itertools import pairwise

import pytest
import torch

from heloco.methods import METHODS
from heloco.outer.kernels import native
from heloco.outer.kernels.windows import dense
from heloco.wire import blocks
from heloco.wire.encoder import NO_ROUND, ContributionEncoder, check_scales
from heloco.wire.formats import FORMATS, FULL, decode_block, find_format, layout_of, name_parts, read_block
from heloco.wire.fragments import fragments_of, share_after_fragments
from heloco.wire.layout import pieces, view
from heloco.wire.link_options import LinkOptions
from heloco.wire.start_differences import add_difference, encode_difference

SHAPES = ((70, 300), (300,), (5, 4), (3, 2, 40), (0, 64), (), (1, 9000), (64, 129))
CODED = ("int8", "int4", "e3m0", "topk")


def random_blocks(seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]


def through_a_file(format, tensors, like):
    """The blocks as they come out of a file with these tensors."""
    layout = layout_of(format, blocks.PSEUDO_GRADIENT, like)
    content = bytearray(b"".join(pieces(layout, tensors)))
    assert len(content) == layout.size
    arrived = view(layout, content)
    return [read_block(format, blocks.PSEUDO_GRADIENT, i, arrived, block.shape) for i, block in enumerate(like)]


def encoded(format, tensors):
    named = {}
    for index, block in enumerate(tensors):
        named |= name_parts(blocks.PSEUDO_GRADIENT, index, format.encode(block))
    return named


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_block_comes_back_as_the_format_rounds_it(name, dtype):
    format, tensors = find_format(name), random_blocks(dtype=dtype)
    for block, arrived in zip(tensors, through_a_file(format, encoded(format, tensors), tensors), strict=True):
        expected = decode_block(format.block(format.encode(block), block.shape), block.device)
        assert arrived.shape == block.shape and torch.equal(dense(arrived), expected)
        if name == "fp32" or block.dim() < 2 or block.shape == (5, 4):  # as they are, at least in float32
            expected = block.to(torch.bfloat16 if name == "bf16" else torch.promote_types(dtype, torch.float32))
            assert torch.equal(dense(arrived), expected)


@pytest.mark.parametrize(("name", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8.25), ("int4", 4.25), ("e3m0", 4.25)])
def test_how_many_bits_a_number_takes(name, bits):
    layout = layout_of(find_format(name), blocks.PSEUDO_GRADIENT, [torch.empty(1000, 1024, device="meta")])
    assert find_format(name).bits == bits
    assert (layout.size - len(layout.header)) * 8 / 1_024_000 == bits


def test_the_header_of_a_file_tells_every_format_from_every_other():
    layouts = [layout_of(format, blocks.PSEUDO_GRADIENT, [torch.empty(64, 1024, device="meta")]) for format in FORMATS.values()]
    assert len({layout.header for layout in layouts}) == len(FORMATS)


def test_the_sparse_format_keeps_the_largest():
    format = find_format("topk")
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))  # two chunks
    y = dense(format.block(format.encode(x), x.shape))
    for chunk, kept in zip(x.view(2, -1), y.view(2, -1), strict=True):
        places = chunk.abs().topk(64).indices
        assert set(kept.nonzero().flatten().tolist()) == set(places.tolist())
        assert torch.equal(kept[places].sign(), chunk[places].sign()) and len(kept[places].abs().unique()) == 2
    assert format.bits == pytest.approx(0.234, abs=1e-3)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("method", METHODS)
def test_an_outer_step_reads_codes_as_it_reads_what_they_stand_for(name, method):
    """Blocks larger and smaller than what is decoded at once; momentum and parameters to the bit."""
    draw, shapes = torch.Generator().manual_seed(4), [(700, 1100), (2000, 17), (40,), (1, 40_000)]
    format = find_format(name)

    def outer():
        parameters = [torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in shapes]
        return METHODS[method].build(parameters, workers=2), parameters

    (coded_outer, coded_parameters), (dense_outer, dense_parameters) = outer(), outer()
    for _ in range(3):
        deltas = [torch.randn(shape, generator=draw) for shape in shapes]
        arrived = through_a_file(format, encoded(format, deltas), deltas)
        assert [isinstance(block, torch.Tensor) for block in arrived] == [False, False, True, False]
        coded_outer.step(weight=0.5, pseudo_gradients=arrived)
        dense_outer.step(weight=0.5, pseudo_gradients=[dense(block) for block in arrived])
        for ours, theirs in zip(coded_parameters, dense_parameters, strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(coded_outer.state[ours]["momentum_buffer"], dense_outer.state[theirs]["momentum_buffer"])
        assert coded_outer.outcomes == dense_outer.outcomes


@pytest.mark.skipif(not native.available, reason="the kernels are not compiled here")
def test_the_compiled_kernels_serve_codes():
    block = find_format("int4").block(find_format("int4").encode(torch.ones(4, 256)), (4, 256))
    assert native.serves(torch.ones(4, 256), torch.ones(4, 256), block)


# ---- error feedback


def encoder(name="int4", **options):
    return ContributionEncoder(find_format(name), LinkOptions(wire=name, **options), seed=1, worker=2)


def test_what_is_left_out_comes_with_the_next_contribution():
    sender, x = encoder(), torch.randn(4, 200, generator=torch.Generator().manual_seed(6))
    first = sender.encode(0, [x], last_accepted=NO_ROUND)
    left_out = x - dense(read_block(sender.format, blocks.PSEUDO_GRADIENT, 0, first, x.shape))
    assert torch.equal(sender.residual.blocks[0], left_out)
    second = sender.encode(1, [x], last_accepted=0)
    expected = sender.format.encode(left_out + x)
    assert all(torch.equal(a, b) for a, b in zip(second.values(), expected, strict=True))


@pytest.mark.parametrize(
    ("round_index", "last_accepted"),
    [(1, NO_ROUND), (2, 1), (1, 5)],
    ids=["the first was refused", "another machine did the one between", "it comes back much later"],
)
def test_a_residual_counts_only_after_the_last_accepted_round(round_index, last_accepted):
    sender, x = encoder(), torch.randn(4, 200, generator=torch.Generator().manual_seed(6))
    sender.encode(0, [x], last_accepted=NO_ROUND)
    again = sender.encode(round_index, [x], last_accepted=last_accepted)
    assert all(torch.equal(a, b) for a, b in zip(again.values(), sender.format.encode(x), strict=True))


def test_without_feedback_nothing_is_kept():
    for sender in (encoder(error_feedback=False), encoder("bf16")):
        sender.encode(0, [torch.randn(4, 200)], last_accepted=NO_ROUND)
        assert not sender.residual.blocks


def test_stochastic_codes_follow_from_seed_worker_round_and_block():
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(6))

    def codes_of(worker, round_index):
        sender = ContributionEncoder(
            find_format("int4"), LinkOptions(wire="int4", rounding="stochastic", error_feedback=False), seed=1, worker=worker
        )
        return sender.encode(round_index, [x, x], last_accepted=NO_ROUND)

    first, second = (codes_of(0, 3)[blocks.block_name(blocks.PSEUDO_GRADIENT, i)] for i in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, codes_of(0, 3)[blocks.block_name(blocks.PSEUDO_GRADIENT, 0)])
    for other in (codes_of(1, 3), codes_of(0, 4)):
        assert not torch.equal(first, other[blocks.block_name(blocks.PSEUDO_GRADIENT, 0)])


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e36, math.nan, math.inf])
def test_a_scale_that_makes_no_sense_is_noticed(scale):
    assert check_scales([torch.ones(3)]) is None
    assert check_scales([torch.ones(3), torch.tensor([1.0, scale])]) == "a scale is not a number above 0 and below 1e+36"


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "topk"])
def test_whatever_the_codes_are_their_numbers_are_finite_if_the_scales_make_sense(name):
    format, draw = find_format(name), torch.Generator().manual_seed(9)
    (dtype, shape), (_, scale_shape) = format.parts((16, 512), torch.float32)
    for _ in range(20):
        codes = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8).view(dtype)
        scales = torch.full(scale_shape, 0.999e36)
        assert check_scales([scales]) is None
        assert torch.isfinite(dense(format.block((codes, scales), (16, 512)))).all()


# ---- differences and fragments


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_differences_lead_to_the_start_and_do_not_drift(name, dtype):
    """Both sides compute the same start. What a difference leaves out is in the next: after the target has stopped, the
    distance shrinks."""
    format, draw = find_format(name), torch.Generator().manual_seed(8)
    target, base = torch.randn(40, 300, generator=draw).to(dtype), torch.zeros(40, 300, dtype=dtype)
    distances = []
    for _ in range(8):
        parts = encode_difference(format, target, base)
        sender, receiver = (add_difference(base, format.block(parts, base.shape)) for _ in range(2))
        assert torch.equal(sender, receiver) and sender.dtype == dtype
        base = sender
        distances.append((target.float() - base.float()).norm().item())
    if name == "fp32":
        assert distances[0] <= 1e-6 * target.float().norm()
    assert distances[-1] < 0.9 * target.float().norm() if name == "topk" else distances[-1] < 1e-2 * target.float().norm()
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(distances))


def test_fragments_are_balanced():
    assert fragments_of([10, 10, 10, 10], 2) == [0, 0, 1, 1]
    assert fragments_of([100, 1, 1, 98], 2) == [0, 1, 1, 1]
    assert fragments_of([1, 1, 1], 3) == [0, 1, 2]
    assert share_after_fragments([10, 10, 10, 10], 2) == [0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="only 2 blocks"):
        fragments_of([1, 1], 3)


@pytest.mark.parametrize(
    "options",
    [
        {"up_mbit_s": [10.0, 0.0]}, {"down_mbit_s": [-1.0]}, {"latency_s": [math.nan]}, {"up_mbit_s": [math.inf]},
        {"full_every": 0}, {"feedback_decay": 1.5}, {"merge_share": 1.0}, {"fragments": 0},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LinkOptions(**options)


def test_fp32_is_the_format_of_all_that_is_sent_as_it_is():
    assert find_format("fp32") is FULL and LinkOptions().down_format == "fp32" and LinkOptions(wire="int4").down_format == "int4"
