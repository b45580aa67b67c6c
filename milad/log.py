"""The daemon's own log: one line per happening on stderr, prompts never in it, control characters always escaped."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}

logger = logging.getLogger("milad")


def escape(text: str) -> str:
    """Control characters and line ends as \\xNN, so that no client writes log lines of its own or moves a terminal's cursor."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in text)


class _Formatter(logging.Formatter):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style

    def format(self, record: logging.LogRecord) -> str:
        text = escape(record.getMessage())
        if record.exc_info:
            text += " | " + escape(" / ".join(self.formatException(record.exc_info).splitlines()[-6:]))
        if self.style == "json":
            return json.dumps({"time": round(record.created, 3), "level": record.levelname.lower(), "message": text},
                              ensure_ascii=False)
        if self.style == "journal":  # sd-daemon(3): <priority> before the line; the journal has the time
            return f"<{_PRIORITY.get(record.levelno, 6)}>{text}"
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        mark = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{at} {mark}{text}"


def setup(level: str = "info", style: str = "text", stream=None) -> None:
    """style: text, json, or journal (chosen by itself where $JOURNAL_STREAM says that stderr is the journal)."""
    if style == "text" and _is_journal():
        style = "journal"
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(style))
    logger.handlers[:] = [handler]
    logger.setLevel(LEVELS[level])
    logger.propagate = False


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
