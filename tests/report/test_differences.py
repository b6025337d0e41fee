"""The changes of a live page's data: made one after the other, they give the new data, and they are short."""

import copy
import json

from hypothesis import given
from hypothesis import strategies as st

from heloco.report.differences import differences
from support.page_changes import with_changes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=20,
)


def same(a, b) -> bool:
    """To the letter: in Python 1 equals True."""
    return json.dumps(a) == json.dumps(b)


@given(VALUES, VALUES)
def test_the_changes_lead_from_any_data_to_any_other(old, new):
    changes = json.loads(json.dumps(differences(old, new)))
    assert old == new or with_changes(copy.deepcopy(old), changes) == new


@given(VALUES)
def test_equal_data_has_no_changes(data):
    assert differences(data, copy.deepcopy(data)) == []


def test_a_new_point_of_a_long_line_is_all_that_is_sent():
    old = {"title": "x", "lines": [{"label": "a", "y": list(range(1000))}, {"label": "b", "y": [1, 2]}]}
    new = copy.deepcopy(old)
    new["lines"][0]["y"].append(7)
    new["title"] = "y"
    assert differences(old, new) == [["set", ["title"], "y"], ["add", ["lines", 0, "y"], [7]]]


def test_a_line_that_was_thinned_out_is_sent_again():
    old, new = {"y": list(range(100))}, {"y": list(range(0, 100, 2)) + list(range(100, 160))}
    assert differences(old, new) == [["set", ["y"], new["y"]]]


def test_a_tuple_is_a_list():
    assert same(differences({"y": (1, 2)}, {"y": (1, 2, 3)}), [["add", ["y"], [3]]])
