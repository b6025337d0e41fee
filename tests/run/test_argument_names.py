"""Sentences about settings, for people who write Python."""

import pytest

from heloco.engine.simulate import simulate
from heloco.errors import RunStopped, UserError
from heloco.run.argument_names import in_python, python_errors


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("lower --lr or --outer-lr, or clip with --clip.", "lower lr or outer_lr, or clip with clip."),
        ("fewer paces, or --assign flexible.", 'fewer paces, or assign="flexible".'),
        ("give one per worker, e.g. --paces 1,1,6,6,6.", "give one per worker, e.g. paces=[1, 1, 6, 6, 6]."),
        ("give --keep-state too.", "give keep_state too."),
        ("leave --vocab-size out, or give at least 3.", "leave vocab_size out, or give at least 3."),
        ("choose another --out, or `heloco resume runs/a --log x`.", "choose another out, or `heloco resume runs/a --log x`."),
        ("pass --inner-steps 5; --norm-limit off", 'pass inner_steps=5; norm_limit="off"'),
        ("with --token-file or --port 3", "with --token-file or --port 3"),
        ("nothing -- at all", "nothing -- at all"),
    ],
)
def test_flags_become_arguments(sentence, expected):
    assert in_python(sentence) == expected


@pytest.mark.parametrize("kind", [UserError, RunStopped])
def test_the_error_stays_what_it_is(kind):
    with pytest.raises(kind) as error, python_errors():
        raise kind("lower --lr")
    assert str(error.value) == "lower lr"


def test_an_unknown_method_is_answered_without_flags():
    with pytest.raises(UserError, match=r"There is no method 'mine' here; .* or import the module that registers it\.$") as error:
        simulate(method="mine")
    assert "--" not in str(error.value)
