"""A plan as text that a shell takes: what `milad launch --dry-run` prints. Secrets never stand in it.

A key that came from a variable is shown as that variable, so that the text works where it is pasted; any other secret is ***.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, Mapping

from .base import DUMMY_KEY, Plan, Target

_SECRET = re.compile(r"(?i)(api_?key|token|secret|password|authorization)$")


def script(plan: Plan, target: Target, user: Mapping[str, str]) -> str:
    """The files, then one command line: env, what it unsets and sets, the program, its arguments."""
    parts = []
    for path, text in plan.files.items():
        end = "EOF" if "EOF" not in text.split("\n") else "END_OF_FILE"
        parts.append(f"(umask 077 && mkdir -p {shlex.quote(str(path.parent))} && cat > {shlex.quote(str(path))}) <<'{end}'\n"
                     f"{text}{end}\n")
    words = ["env"]
    for name in plan.unset:
        words += ["-u", name] if name in user else []
    words += [f"{name}={_quoted(name, value, target)}" for name, value in plan.added(user).items()]
    if len(words) == 1:
        words = []
    words += [_quoted("", word, target) for word in plan.command]
    return "".join(parts) + " \\\n    ".join(_lines(words)) + "\n"


def _lines(words: list[str]) -> list[str]:
    """The command's words, in lines of a readable length; options stay beside their values."""
    lines: list[str] = []
    for word in words:
        if lines and (len(lines[-1]) + len(word) < 110 or lines[-1].endswith((" -c", " -u"))):
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def _quoted(name: str, value: str, target: Target) -> str:
    if target.key_env and value == target.key:
        return f'"${{{target.key_env}}}"'
    if value.startswith("{"):
        value = _masked(value)
    elif _SECRET.search(name) and value != DUMMY_KEY:
        value = "***"
    return shlex.quote(value)


def _masked(text: str) -> str:
    """JSON without its secrets; {env:NAME} is none."""
    def walk(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {k: walk(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, name) for v in value]
        if isinstance(value, str) and _SECRET.search(name) and not value.startswith("{env:"):
            return "***"
        return value

    try:
        return json.dumps(walk(json.loads(text), ""), ensure_ascii=False)
    except ValueError:
        return text
