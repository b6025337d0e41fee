"""What a message must look like: JSON and queries from outside, every field checked for type and range before it is used."""

import json
import math
import re
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from heloco.engine.cluster.files import Denied, Key
from heloco.run.tensors import Layout

SMALL, LARGE = 1 << 16, 1 << 22
"""Bytes of a JSON body; the large ones hold a layout or names."""
MOST = 1 << 53
"""Above it a whole number is not safe in JSON."""
MODEL_BYTES = 1 << 45
_DIGITS = re.compile(r"[0-9]{1,16}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"(parameter|buffer)\.(0|[1-9][0-9]{0,6})")
_ABSENT = object()


def malformed(sentence: str) -> NoReturn:
    raise Denied("malformed", sentence)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        malformed("a name stands twice in the message.")
    return made


def _no_constant(name: str) -> NoReturn:
    malformed(f"{name} is no number in JSON.")


class Fields:
    """The named values of a message. Each is taken once; `end` refuses what is left over."""

    def __init__(self, values: dict[str, Any], *, spelt: bool) -> None:
        """`spelt`: numbers come as text, from a query."""
        self._values, self._spelt = values, spelt

    @classmethod
    def of_json(cls, text: bytes) -> "Fields":
        try:
            values = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except RecursionError:
            malformed("the message is nested too deeply.")
        except ValueError:
            malformed("the message is not JSON in UTF-8.")
        if not isinstance(values, dict):
            malformed("the message is not an object of named values.")
        return cls(values, spelt=False)

    @classmethod
    def of_query(cls, query: bytes) -> "Fields":
        try:
            text = query.decode("ascii")
            pairs = (
                parse_qsl(text, keep_blank_values=True, strict_parsing=True, max_num_fields=16, errors="strict") if text else []
            )
        except ValueError:
            malformed("the query is not name=value&….")
        return cls(_unique(pairs), spelt=True)

    def end(self) -> None:
        if self._values:
            malformed(f"there is no field {sorted(self._values)[0][:40]!r} here.")

    def _take(self, name: str, default: Any) -> Any:
        value = self._values.pop(name, _ABSENT)
        if value is _ABSENT or (value is None and default is None):
            if default is _ABSENT:
                malformed(f"{name} is missing.")
            return default
        return value

    def text(self, name: str, *, least: int = 1, most: int = 200, default: Any = _ABSENT) -> Any:
        """A string for people or a name: short, and without control characters or half characters."""
        value = self._take(name, default)
        if value is default:
            return value
        if not isinstance(value, str) or not value.isprintable() or not least <= len(value) <= most:
            malformed(f"{name} must be text of {least} to {most} printable characters.")
        return value

    def whole(self, name: str, *, most: int = MOST, default: Any = _ABSENT) -> int:
        value = self._take(name, default)
        if self._spelt and isinstance(value, str) and _DIGITS.fullmatch(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            malformed(f"{name} must be a whole number from 0 to {most}.")
        return value

    def number(self, name: str, *, least: float = -1e300, most: float = 1e300, default: Any = _ABSENT) -> float | None:
        value = self._take(name, default)
        if value is None and default is None:
            return None
        wrong = isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value)
        if wrong or not least <= value <= most:
            malformed(f"{name} must be a number from {least:g} to {most:g}.")
        return float(value)

    def digest(self, name: str) -> str:
        value = self._take(name, _ABSENT)
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            malformed(f"{name} must be an xxh3-128 in hexadecimal.")
        return value

    def key(self) -> Key:
        return self.whole("worker", most=1 << 31), self.whole("round"), self.whole("version")

    def texts(self, name: str, *, most: int) -> list[str]:
        value = self._take(name, _ABSENT)
        if not isinstance(value, list) or not all(isinstance(v, str) and v.isprintable() and len(v) <= most for v in value):
            malformed(f"{name} must be a list of texts of at most {most} printable characters.")
        return value

    def layout(self, name: str, *, default: Any = _ABSENT) -> Layout | None:
        """Names, dtypes and shapes of a model's blocks: parameter.0, parameter.1, …, buffer.0, …, in a file's order."""
        value = self._take(name, default)
        if value is None and default is None:
            return None
        if not isinstance(value, list) or not all(map(_is_block, value)):
            malformed(f"{name} must be a list of [name, dtype, shape], named parameter.0, …, buffer.0, ….")
        try:
            made = Layout.from_json(value)
        except ValueError as error:
            malformed(f"{name}: {error}")
        numbers: dict[str, set[int]] = {"parameter": set(), "buffer": set()}
        for block in made.names:
            kind, _, number = block.partition(".")
            numbers[kind].add(int(number))
        if not numbers["parameter"] or any(max(found) >= len(found) for found in numbers.values() if found):
            malformed(f"{name}: parameters and buffers must be numbered from 0 on.")
        if untrainable := made.untrainable():
            raise Denied("layout", untrainable)
        if made.size > MODEL_BYTES:
            malformed(f"{name}: that is more than {MODEL_BYTES} bytes.")
        return made


def _is_block(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str) or not isinstance(entry[1], str):
        return False
    shape = entry[2]
    sizes = isinstance(shape, list) and len(shape) <= 16 and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    return sizes and _BLOCK.fullmatch(entry[0]) is not None
