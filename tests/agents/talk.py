"""How each agent is talked to without a terminal, and the names of its tools."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any, Callable

Tool = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Talk:
    name: str
    first: Callable[[str], list[str]]        # prompt -> arguments of a new conversation
    again: Callable[[str], list[str]]        # of the next turn of the last one
    read: Callable[[str], Tool] | None       # file -> the call that reads it; None: the agent has no tools
    write: Callable[[str, str], Tool] | None
    env: dict[str, str] = field(default_factory=dict)


def _codex(command: str) -> Tool:
    return "exec_command", {"cmd": command}


_YOLO = "--dangerously-skip-permissions"
_FREE = "--dangerously-bypass-approvals-and-sandbox"
_AIDER = ["--yes-always", "--no-auto-commits", "--no-pretty", "--no-fancy-input", "--map-tokens", "0", "note.txt"]
TALKS = {t.name: t for t in (
    Talk("claude", lambda p: ["-p", p, _YOLO], lambda p: ["--continue", "-p", p, _YOLO],
         lambda f: ("Read", {"file_path": f}), lambda f, text: ("Write", {"file_path": f, "content": text}), {"IS_SANDBOX": "1"}),
    Talk("codex", lambda p: ["exec", _FREE, p], lambda p: ["exec", "resume", "--last", _FREE, p],
         lambda f: _codex(f"cat {f}"), lambda f, text: _codex(f"printf %s {shlex.quote(text)} > {f}")),
    Talk("opencode", lambda p: ["run", p], lambda p: ["run", "--continue", p],
         lambda f: ("read", {"filePath": f}), lambda f, text: ("write", {"filePath": f, "content": text}),
         {"OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"}),
    Talk("pi", lambda p: ["-p", p], lambda p: ["--continue", "-p", p],
         lambda f: ("read", {"path": f}), lambda f, text: ("write", {"path": f, "content": text})),
    Talk("qwen", lambda p: ["--yolo", "-p", p], lambda p: ["--yolo", "--continue", "-p", p],
         lambda f: ("read_file", {"file_path": f}), lambda f, text: ("write_file", {"file_path": f, "content": text})),
    Talk("copilot", lambda p: ["-p", p, "--allow-all-tools", "--allow-all-paths"],
         lambda p: ["--continue", "-p", p, "--allow-all-tools", "--allow-all-paths"],
         lambda f: ("view", {"path": f}), lambda f, text: ("create", {"path": f, "file_text": text})),
    Talk("goose", lambda p: ["run", "-t", p], lambda p: ["run", "--resume", "-t", p],
         lambda f: ("shell", {"command": f"cat {f}"}), lambda f, text: ("write", {"path": f, "content": text})),
    Talk("aider", lambda p: ["--message", p, *_AIDER], lambda p: ["--restore-chat-history", "--message", p, *_AIDER], None, None),
)}
