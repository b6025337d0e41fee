"""A setting's value, from TOML or from the text of a flag, as its field's type."""

from typing import Any, Literal, Union, get_args, get_origin

from heloco.errors import UserError, nearest


def convert(name: str, value: Any, hint: Any) -> Any:
    """A value from TOML, or the text of a flag, as the type of the field `name`; a UserError where that cannot be."""
    options = [a for a in get_args(hint) if a is not type(None)]
    if type(None) in get_args(hint):
        hint = options[0] if len(options) == 1 else hint
    try:
        return _as(hint, value)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        remedy = nearest(str(value), [str(c) for c in choices]) if choices else f"give {_in_words(hint)}."
        raise UserError(f"{name} cannot be {value!r}: {remedy}") from error


def _as(hint: Any, value: Any) -> Any:
    if get_origin(hint) is Union:  # a number, or one of some words
        words = [word for option in get_args(hint) for word in get_args(option)]
        [kind] = [option for option in get_args(hint) if get_origin(option) is not Literal]
        return value if value in words else _as(kind, value)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError
        return value
    if get_origin(hint) is list:
        [item] = get_args(hint)
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")] if value.strip() else []
        return [_as(item, part) for part in (value if isinstance(value, tuple) else _same(list, value))]
    if hint is bool:
        return (
            {"true": True, "false": False, "yes": True, "no": False}[value.lower()]
            if isinstance(value, str)
            else _same(bool, value)
        )
    if hint is int:
        return int(value) if isinstance(value, str) else _same(int, value)
    if hint is float:
        return float(value) if not isinstance(value, bool) else _same(float, value)
    return _same(str, value)


def _same(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _in_words(hint: Any) -> str:
    if get_origin(hint) is Union:
        return ", or ".join(_in_words(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is list:
        return "a list such as 1,6,6" if get_args(hint)[0] is float else "a list such as de,en,fr"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, "text")
