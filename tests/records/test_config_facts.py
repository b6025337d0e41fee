"""The settings that reports read from config.toml are those that a run writes to it."""

from pathlib import Path
from typing import get_type_hints

import pytest

from heloco.errors import UserError
from heloco.records.config_facts import ConfigFacts, parse_config, read_all_settings, read_config
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.config import SECTIONS
from heloco.run.settings import to_toml

FACTS = [
    (section, name, kind)
    for section, facts in get_type_hints(ConfigFacts).items()
    for name, kind in get_type_hints(facts).items()
]
SMALLEST = {"arrivals": 1, "eval_every": 0, "participation": 0, "min_workers": 1}


@pytest.mark.parametrize(("section", "name", "kind"), FACTS)
def test_each_setting_is_one_of_the_config_with_the_same_type(section, name, kind):
    assert get_type_hints(SECTIONS[section]).get(name) == kind


@pytest.mark.parametrize("changes", [{}, SMALLEST, {"task": "external"}], ids=["defaults", "smallest", "external"])
def test_what_a_run_writes_is_what_reports_read(tmp_path, changes):
    config, path = resolve(with_fields(RunConfig(), changes)), tmp_path / "config.toml"
    path.write_text(to_toml(config))
    facts = read_config(path)
    for section, name, _ in FACTS:
        value = getattr(getattr(config, section), name)
        assert getattr(getattr(facts, section), name) == read_all_settings(path)[section][name] == value


@pytest.mark.parametrize(
    ("line", "edit", "why"),
    [
        ("arrivals = 120", 'arrivals = "x"', r"edited at run\.arrivals \(Expected `int`, got `str`"),
        ("min_workers = 1", "min_workers = 0", r"edited at cluster\.min_workers \(Expected `int` >= 1"),
        ("eval_every = 10", "evaluations = 10", r"edited at eval_every \(Object missing required field `eval_every`"),
        ("[cluster]", "[machines]", r"edited at cluster \(Object missing required field `cluster`"),
        ("[run]", "[run", r"cannot be read \("),
    ],
)  # fmt: skip
def test_an_edited_config_is_refused_with_its_file_and_its_field(line, edit, why):
    text = to_toml(resolve(RunConfig()))
    assert text.count(line + "\n") == 1
    with pytest.raises(UserError, match=rf"^run/config\.toml (was )?{why}.*: restore it, or start the run again\.$"):
        parse_config(text.replace(line + "\n", edit + "\n"), Path("run/config.toml"))
