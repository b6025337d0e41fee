"""`examples/run.toml` is a file of settings that `heloco train` and `heloco serve` take, and says what the settings are."""

import tomllib
from pathlib import Path

import pytest

from heloco.run.settings import setting_sections
from support.programs import Programs, assert_whole
from support.repository import REPOSITORY
from support.runs import heloco, tape

EXAMPLE = REPOSITORY / "examples" / "run.toml"
SMALLER = (
    "--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--eval-windows", "4", "--inner-steps", "2",
    "--batch-size", "2", "--arrivals", "6", "--device", "cpu",
)  # fmt: skip


def test_every_setting_of_the_example_has_a_comment():
    document = tomllib.loads(EXAMPLE.read_text())
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    sections = setting_sections()
    settings = {name: section for section, entries in document.items() for name in entries}
    assert settings and all(sections[name] == section for name, section in settings.items())
    assert all("#" in line for line in lines if not line.startswith("["))


def test_train_takes_the_example(tmp_path: Path) -> None:
    result = heloco("train", "--config", EXAMPLE, *SMALLER, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["outer"]["method"] == "heloco-adaptive" and config["rounds"]["paces"] == [1, 1, 2, 3, 6]
    assert len(tape(tmp_path / "run")) == 6


def test_serve_takes_the_example(programs: Programs, tmp_path: Path) -> None:
    for part in ("uvicorn", "starlette", "httpx", "cryptography"):
        pytest.importorskip(part, reason=f"{part} is not installed")
    served = programs.serve(tmp_path / "run", "--workers", "1", *SMALLER, config=EXAMPLE)
    result = served.program.end()
    assert result.code == 0, result
    assert_whole(tmp_path / "run", 6)
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["rounds"]["paces"] == [1.0] * 5
