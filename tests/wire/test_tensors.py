"""Tensors as files: what safetensors itself reads, believed only to the byte."""

import hashlib
import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from heloco.wire.layout import DTYPES, Layout, map_tensors, pieces, pieces_after, view, write

SHAPES = st.lists(st.integers(0, 4), max_size=3)
NAMED = st.dictionaries(
    st.text("abc.0123456789", min_size=1, max_size=6), st.tuples(st.sampled_from(list(DTYPES)), SHAPES), min_size=1, max_size=6
)


def random_tensors(described):
    numbers = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(0, 2, shape, generator=numbers).to(dtype) for name, (dtype, shape) in described.items()
    }  # fmt: skip


@given(NAMED)
def test_safetensors_reads_what_is_written_and_a_view_is_the_same(described):
    tensors = random_tensors(described)
    layout = Layout.from_tensors(tensors)
    content = b"".join(pieces(layout, tensors))
    assert len(content) == layout.size and content.startswith(layout.header)
    theirs, ours = load(content), view(layout, bytearray(content))
    for name, tensor in tensors.items():
        for copy in (theirs[name], ours[name]):
            assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and torch.equal(copy, tensor)


@given(NAMED, st.integers(0, 400))
def test_a_file_can_be_sent_from_any_byte_on_and_its_digest_is_of_the_whole(described, offset):
    tensors = random_tensors(described)
    layout = Layout.from_tensors(tensors)
    content, digest = b"".join(pieces(layout, tensors)), hashlib.sha256()
    assert b"".join(pieces_after(offset, layout, tensors, digest)) == content[offset:]
    assert digest.digest() == hashlib.sha256(content).digest()


@given(described=NAMED)
def test_a_layout_comes_back_from_json_and_from_its_file(described, tmp_path_factory):
    layout = Layout.from_tensors(random_tensors(described))
    assert Layout.from_json(json.loads(json.dumps(layout.entries))) == layout
    path = tmp_path_factory.mktemp("layout") / "file"
    with path.open("wb", buffering=0) as file:
        write(file, layout, random_tensors(described))
    assert Layout.in_file(path) == layout
    assert all(
        torch.equal(a, b)
        for a, b in zip(map_tensors(path, layout).values(), view(layout, bytearray(path.read_bytes())).values(), strict=True)
    )


def test_tensors_without_names_are_taken_in_the_layouts_order():
    tensors = {"a": torch.arange(3.0), "b": torch.arange(2, dtype=torch.int64)}
    layout = Layout.from_tensors(tensors)
    assert layout.names == ["b", "a"]  # wide ones first, so that each lies at a multiple of its size
    assert b"".join(pieces(layout, [tensors["b"], tensors["a"]])) == b"".join(pieces(layout, tensors))


@pytest.mark.parametrize(
    "rubbish",
    [
        None,
        3,
        "text",
        [1],
        [["a"]],
        [["a", "F32"]],
        [["a", "F33", [1]]],
        [["a", "F32", [-1]]],
        [["a", "F32", "x"]],
        [["a", "F32", [1]]] * 2,
    ],
)
def test_rubbish_is_no_layout(rubbish):
    with pytest.raises(ValueError, match="not a list of names"):
        Layout.from_json(rubbish)


def test_a_file_of_another_layout_or_size_is_not_mapped(tmp_path):
    layout = Layout.from_tensors({"a": torch.zeros(3)})
    for i, content in enumerate((b"", layout.header, b"".join(pieces(layout, {"a": torch.zeros(3)}))[:-1], b"\0" * layout.size)):
        path = tmp_path / str(i)
        path.write_bytes(content or b"x")
        with pytest.raises(ValueError, match="does not hold"):
            map_tensors(path, layout)


def test_the_first_difference_is_told():
    ours = Layout.from_tensors({"a": torch.zeros(3), "b": torch.zeros(2)})
    assert ours.difference(ours) is None
    assert ours.difference(Layout.from_tensors({"a": torch.zeros(3)})) == "b is missing"
    assert "a is F32 [4] and not F32 [3]" in ours.difference(Layout.from_tensors({"a": torch.zeros(4), "b": torch.zeros(2)}))
    assert "c is not in the model" in ours.difference(
        Layout.from_tensors({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)})
    )


def test_what_is_hashed_is_what_is_written():
    import hashlib

    tensors, file, hashed = {"a": torch.arange(5.0)}, io.BytesIO(), hashlib.sha256()
    write(file, Layout.from_tensors(tensors), tensors, hashed)
    assert hashed.hexdigest() == hashlib.sha256(file.getvalue()).hexdigest()


def test_a_mapped_file_is_not_changed_by_writing_to_its_tensors(tmp_path):
    tensors = {"a": torch.arange(5.0)}
    layout, path = Layout.from_tensors(tensors), tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        write(file, layout, tensors)
    before = path.read_bytes()
    map_tensors(path, layout)["a"].zero_()
    assert path.read_bytes() == before
