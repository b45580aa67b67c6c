"""Reads milad.conf, its .env and the environment into the option table's layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Mapping

from . import catalogue, options
from .errors import UsageError


def load(flags: Mapping[str, Any], path: str | None = None, env: Mapping[str, str] | None = None,
         notes: list[str] | None = None) -> dict[str, options.Value]:
    """The effective options: defaults < /etc/milad/milad.conf < the user's milad.conf (or `path` alone) < a .env beside the
    last one < environment < flags. notes gets a line for each variable that does nothing."""
    env = os.environ if env is None else env
    files = [Path(path)] if path else [Path("/etc/milad/milad.conf"),
                                       catalogue.data_folder("CONFIG", ".config") / "milad.conf"]
    layers: list[tuple[str, Mapping[str, Any]]] = []
    for file in files:
        if path or file.is_file():
            layers.append((str(file), _read_toml(file)))
    dotenv = files[-1].parent / ".env"
    said = [] if notes is None else notes
    if dotenv.is_file():
        variables = _read_dotenv(dotenv)
        layers += [(f"{dotenv}: {name}", layer) for name, layer in options.from_environment(variables)]
        said += [f"{dotenv}: {note}" for note in options.environment_notes(variables)]
    said += options.environment_notes(env)
    layers += options.from_environment(env)
    layers.append(("flag {name}", flags))
    return options.merge(*layers)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:              # Python 3.10
        import tomli as tomllib              # type: ignore[no-redef]
    try:
        with open(file, "rb") as f:
            table = tomllib.load(f)
    except OSError as e:
        raise UsageError(f"{file}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{file}: {e}") from e
    if isinstance(table.get("model"), str):
        table["model"] = [table["model"]]
    if "models" in table:
        models = table.pop("models")
        if not isinstance(models, dict) or not all(isinstance(v, str) and v and catalogue.ID.fullmatch(k) for k, v in models.items()):
            raise UsageError(f"{file}: [models] must have lines ID = \"FILE or name\"; an ID has letters, digits and . _ : -")
        if models and not isinstance(table.get("model", []), list):
            raise UsageError(f"{file}: model is not a list of texts")
        table["model"] = [*table.get("model", []), *(f"{k}={v}" for k, v in models.items())]
    return table


def _read_dotenv(file: Path) -> dict[str, str]:
    """NAME=value lines; blank lines, # comments, an `export` before the name and quotes around the value are fine."""
    found: dict[str, str] = {}
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{file}: {e}") from e
    for number, line in enumerate(lines, 1):
        line = line.strip().removeprefix("export ")
        if not line or line.startswith("#"):
            continue
        name, sep, value = line.partition("=")
        if not sep:
            raise UsageError(f"{file}: line {number} is not NAME=value")
        value = value.strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name.strip()] = value
    return found
