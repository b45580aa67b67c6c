"""Flags out of the option table, and the effective options out of flags, files and environment."""

from __future__ import annotations

import argparse
from typing import Any, Iterable

from .. import config, options


def add(parser: argparse.ArgumentParser, names: Iterable[str] | None = None) -> None:
    """Every option of the table (or those named) as a flag. No defaults here: absent means that a weaker layer decides."""
    wanted = None if names is None else set(names)
    groups: dict[str, Any] = {}
    for option in options.OPTIONS:
        if wanted is not None and option.name not in wanted:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group.lower())
        group = groups[option.group]
        text = f"{option.help} (default: {default_text(option)})".replace("%", "%%")
        if option.kind == "bool":
            group.add_argument(option.flag, dest=f"opt_{option.name}", default=None, help=text,
                               action=argparse.BooleanOptionalAction)
        else:
            metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.metavar or option.kind.upper()
            group.add_argument(option.flag, dest=f"opt_{option.name}", metavar=metavar, help=text,
                               action="append" if option.kind == "list" else "store")


def default_text(option: options.Option) -> str:
    """The default as a person reads it."""
    if option.shown:
        return option.shown
    if option.kind == "bool":
        return "yes" if option.default else "no"
    return options.toml(option, option.default).strip('"')


def effective(parsed: argparse.Namespace, notes: list[str] | None = None) -> dict[str, options.Value]:
    """Defaults < configuration files < environment < flags."""
    given = {k[4:]: v for k, v in vars(parsed).items() if k.startswith("opt_") and v is not None}
    return config.load(given, getattr(parsed, "config", None), notes=notes)
