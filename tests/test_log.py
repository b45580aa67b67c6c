"""The daemon's log: escaping, masking, formats, a handler that can't write, rotation."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from milad import log
from milad.errors import UsageError


@pytest.fixture(autouse=True)
def restored():
    before = log.logger.handlers[:], log.logger.level, log.logger.propagate
    yield
    log.logger.handlers[:], log.logger.level, log.logger.propagate = before


def written(style: str, *args: object, level: str = "info") -> str:
    out = io.StringIO()
    log.setup("debug", style, out)
    getattr(log.logger, level)(*args)
    return out.getvalue()


def test_nothing_breaks_a_line_or_moves_a_cursor():
    for text in ("a\nb", "\x1b[2J", "\r", "\x00", "\u2028", "\x9b1m", "\u202e"):
        line = written("text", "%s", f"<{text}>")
        assert line.count("\n") == 1 and line.endswith(">\n") and text not in line
    assert "grün €" in written("text", "grün €")


@pytest.mark.parametrize("secret", ["sk-proj-abcdefghij0123456789", "sk-ant-api03-AAAABBBBCCCC", "sk-milad-" + "x" * 43, "hf_abcdefghijklmnop",
                                    "Bearer abcdefghijklmnop", "bearer  xyz12345678", "ghp_0123456789abcdef"])
def test_keys_are_masked(secret):
    line = written("text", "client sent %s and left", secret)
    assert secret[-8:] not in line and "***" in line and line.endswith("and left\n")


@pytest.mark.parametrize("plain", ["sk-8 model", "risk-free-development", "POST /v1/messages 200", "req_0123456789abcdef01234567", "task-force"])
def test_words_are_not(plain):
    assert plain in written("text", plain)


def test_formats():
    found = json.loads(written("json", "a %s", 'quote " and \n', level="warning"))
    assert found["level"] == "warning" and found["message"] == 'a quote " and \\x0a' and found["time"] > 1e9
    assert written("journal", "x", level="error") == "<3>x\n" and written("journal", "x") == "<6>x\n"
    assert written("text", "x").endswith(" x\n") and " warning: x" in written("text", "x", level="warning")


def test_a_traceback_is_one_line():
    out = io.StringIO()
    log.setup("info", "text", out)
    try:
        raise ValueError("bad\nthing sk-proj-abcdefghij0123456789")
    except ValueError:
        log.logger.exception("it failed")
    assert out.getvalue().count("\n") == 1 and "ValueError" in out.getvalue() and "0123456789" not in out.getvalue()


def test_what_can_not_be_written_is_lost_quietly(capsys):
    log.setup("info", "text", path="/dev/full")
    for _ in range(3):
        log.logger.info("x")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UsageError, match="/nonexistent/x"):
        log.setup("info", path="/nonexistent/x")


def test_reopening(tmp_path, capsys):
    path = tmp_path / "folder" / "milad.log"
    path.parent.mkdir()
    log.setup("info", path=str(path))
    log.logger.info("one")
    path.rename(tmp_path / "old")
    log.reopen()
    log.logger.info("two")
    assert "one" in (tmp_path / "old").read_text() and "two" in path.read_text() and path.read_text().startswith("20")
    path.unlink()
    path.parent.rmdir()
    log.reopen()                                # can't: the open file goes on
    log.logger.info("three")
    assert log.logger.handlers and capsys.readouterr().err == ""


def test_once():
    out = io.StringIO()
    log.setup("info", "text", out)
    for i in range(5):
        log.once(f"{test_once} same", "told %s", i)
    assert out.getvalue().count("told") == 1


def test_stderr_by_default():
    log.setup()
    (handler,) = log.logger.handlers
    assert isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
