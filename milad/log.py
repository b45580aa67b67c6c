"""The daemon's own log: one line per happening, on stderr or in a file, prompts never in it, control characters always escaped,
what looks like a key or a token always masked."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from typing import Any, TextIO

from .errors import UsageError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}

logger = logging.getLogger("milad")


def escape(text: str) -> str:
    """Control characters and line ends as \\xNN, so that no client writes log lines of its own or moves a terminal's cursor."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in text)


_SECRET = re.compile(r"(?<![A-Za-z0-9])((?:sk|hf|pk|ghp)[-_][A-Za-z0-9]{2})[A-Za-z0-9_-]{10,}|(?i:(bearer\s+\S{2}))\S{6,}")


def mask(text: str) -> str:
    """Keys and tokens, wherever they come from, down to their first letters."""
    return _SECRET.sub(lambda m: (m[1] or m[2]) + "***", text)


class _Formatter(logging.Formatter):
    def __init__(self, style: str, date: bool = False) -> None:
        super().__init__()
        self.style = style
        self.time = "%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += " | " + " / ".join(self.formatException(record.exc_info).splitlines()[-6:])
        text = escape(mask(text))
        if self.style == "json":
            return json.dumps({"time": round(record.created, 3), "level": record.levelname.lower(), "message": text},
                              ensure_ascii=False)
        if self.style == "journal":  # sd-daemon(3): <priority> before the line; the journal has the time
            return f"<{_PRIORITY.get(record.levelno, 6)}>{text}"
        at = time.strftime(self.time, time.localtime(record.created))
        mark = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{at} {mark}{text}"


class _Handler(logging.StreamHandler):
    """A full disk or a closed terminal loses log lines, and nothing else."""

    path = ""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def setup(level: str = "info", style: str = "text", stream: Any = None, path: str | None = None) -> None:
    """style: text, json, or journal (chosen by itself where $JOURNAL_STREAM says that stderr is the journal). path: a file to
    append to instead of stderr; UsageError where it can't be opened."""
    if style == "text" and not path and _is_journal():
        style = "journal"
    handler = _Handler(_open(path) if path else stream or sys.stderr)
    handler.path = path or ""
    handler.setFormatter(_Formatter(style, date=bool(path)))
    logger.handlers[:] = [handler]
    set_level(level)
    logger.propagate = False


def set_level(level: str) -> None:
    logger.setLevel(LEVELS[level])


def _open(path: str) -> TextIO:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from None
    return os.fdopen(fd, "a", encoding="utf-8", errors="backslashreplace")


def reopen() -> None:
    """The log file anew, after a rotation; a file that can't be opened leaves the old one in use."""
    for handler in logger.handlers:
        if isinstance(handler, _Handler) and handler.path:
            try:
                old = handler.setStream(_open(handler.path))
            except UsageError as e:
                logger.error("the log file stays as it is: %s", e)
                continue
            if old:
                old.close()


def _is_journal() -> bool:
    # systemd.exec(5): device:inode of the journal's stream
    try:
        device, inode = os.environ["JOURNAL_STREAM"].split(":")
        status = os.fstat(2)
        return (status.st_dev, status.st_ino) == (int(device), int(inode))
    except (KeyError, ValueError, OSError):
        return False


_said: set[str] = set()


def once(key: str, message: str, *args: object) -> None:
    """A warning that would otherwise come with every request: logged the first time only."""
    if key not in _said:
        if len(_said) > 10_000:
            _said.clear()
        _said.add(key)
        logger.warning(message, *args)
