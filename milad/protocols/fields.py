"""Reading a client's JSON: every value is checked where it is read, every error names its JSON path.

A path looks like `messages[3].content[0].type`; the error's message begins with it, so that protocols whose error body has
no `param` say it too. null is the same as absent everywhere. Strings for numbers, booleans for numbers, NaN and infinities
are refused; a whole float (5.0) passes for an integer. Pure; knows no protocol.
"""

from __future__ import annotations

import json
from typing import Any, Iterator, Mapping

from ..errors import MiladError, invalid

MAX_NAME = 256           # characters of a tool's or a model's name: longer ones are no names
INT32_MAX = 2**31 - 1    # what the core's counts hold


def bad(path: str, message: str, code: str | None = None) -> MiladError:
    """A 400 whose message begins with the path."""
    return invalid(path or None, f"{path}: {message}" if path else message, code)


def join(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def kind_of(value: Any) -> str:
    """The JSON word for a Python value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, (list, tuple)) else "an object"


def check_text(value: Any, path: str) -> str:
    """A string that can be written as UTF-8: JSON's \\ud800 alone can't."""
    if not isinstance(value, str):
        raise bad(path, f"must be a string, not {kind_of(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad(path, "holds half of a surrogate pair, which is no text") from None
    return value


def check_number(value: Any, path: str, low: float, high: float) -> float:
    """A finite number within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad(path, f"must be a number, not {kind_of(value)}")
    if not low <= value <= high:                                # NaN fails as well
        raise bad(path, f"must be between {low:g} and {high:g}")
    return float(value)


def check_integer(value: Any, path: str, low: int, high: int, clamp: bool = False) -> int:
    """A whole number within [low, high]; with `clamp`, what is above `high` becomes `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad(path, f"must be an integer, not {kind_of(value)}")
    if isinstance(value, float):
        if not value.is_integer():                              # NaN and infinities are not either
            raise bad(path, "must be a whole number")
        value = int(value)
    if clamp and value > high:
        return high
    if not low <= value <= high:
        raise bad(path, f"must be between {low} and {high}" if not clamp else f"must be at least {low}")
    return value


def check_json(value: Any, path: str) -> Any:
    """A free JSON value (a schema, arguments) that can be written again as strict JSON in UTF-8."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if not text.isascii():
            text.encode()
    except RecursionError:
        raise bad(path, "is nested too deeply") from None
    except UnicodeEncodeError:
        raise bad(path, "holds half of a surrogate pair, which is no text") from None
    except ValueError:
        raise bad(path, "holds a number that is not finite") from None
    return value


class Obj:
    """A JSON object at a path. Readers return None (or the default) for absent and null."""

    __slots__ = ("data", "path")

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, Mapping):
            raise bad(path, f"must be an object, not {kind_of(data)}" if path else "the body must be a JSON object")
        self.data = data
        self.path = path

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def raw(self, key: str) -> Any:
        return self.data.get(key)

    def text(self, key: str, default: str = "", most: int | None = None) -> str:
        value = self.data.get(key)
        if value is None:
            return default
        check_text(value, self.at(key))
        if most is not None and len(value) > most:
            raise bad(self.at(key), f"is longer than {most} characters")
        return value

    def required_text(self, key: str, most: int | None = None) -> str:
        if self.data.get(key) is None:
            raise bad(self.at(key), "is required")
        return self.text(key, most=most)

    def name(self, key: str = "name") -> str:
        """A name: required, not empty, not longer than names are."""
        value = self.required_text(key, MAX_NAME)
        if not value:
            raise bad(self.at(key), "must not be empty")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool | None:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad(self.at(key), f"must be true or false, not {kind_of(value)}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.data.get(key)
        return None if value is None else check_number(value, self.at(key), low, high)

    def integer(self, key: str, low: int, high: int, clamp: bool = False) -> int | None:
        value = self.data.get(key)
        return None if value is None else check_integer(value, self.at(key), low, high, clamp)

    def obj(self, key: str) -> "Obj | None":
        value = self.data.get(key)
        return None if value is None else Obj(value, self.at(key))

    def items(self, key: str, most: int | None = None) -> list[Any]:
        """The array under key, [] for absent."""
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise bad(self.at(key), f"must be an array, not {kind_of(value)}")
        if most is not None and len(value) > most:
            raise bad(self.at(key), f"has {len(value)} entries, more than {most}")
        return value

    def objs(self, key: str, most: int | None = None) -> Iterator["Obj"]:
        path = self.at(key)
        for i, value in enumerate(self.items(key, most)):
            yield Obj(value, f"{path}[{i}]")

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.text(key, default)
        if value not in allowed:
            raise bad(self.at(key), f"must be one of {', '.join(allowed)}")
        return value

    def error(self, key: str, message: str, code: str | None = None) -> MiladError:
        return bad(self.at(key), message, code)
