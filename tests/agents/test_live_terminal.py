"""Claude Code on a terminal through `milad launch`, typed at like a person does (scripts/test-agents)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import termios
import time
from typing import Any, Iterator

import pytest

from test_live import read_then_write, settled
from conftest import Run

pytestmark = [pytest.mark.agents, pytest.mark.skipif(os.environ.get("MILAD_TEST_AGENTS") != "all",
                                                     reason="scripts/test-agents runs these")]


class Terminal:
    """A program on a pseudo-terminal of 40 by 120."""

    def __init__(self, command: list[str], cwd: str, env: dict[str, str]) -> None:
        self.seen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execve(command[0], command, env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))

    def until(self, condition: Any, what: str, timeout_s: float = 200) -> None:
        """Reads, and answers the queries that a terminal answers, until condition()."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.seen[-1500:]!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                data = os.read(self.fd, 65536)
                self.seen += data
                if b"\x1b[c" in data:
                    os.write(self.fd, b"\x1b[?62;c")
                if b"\x1b[6n" in data:
                    os.write(self.fd, b"\x1b[1;1R")

    def type(self, text: str, pause_s: float = 1.0) -> None:
        """The text, and Enter when the program has taken it in."""
        os.write(self.fd, text.encode())
        end = time.monotonic() + pause_s
        self.until(lambda: time.monotonic() > end, "typing")
        os.write(self.fd, b"\r")

    def close(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    os.read(self.fd, 65536)
                except OSError:
                    pass
        os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]


@contextlib.contextmanager
def claude(here: Any, **env: str) -> Iterator[Terminal]:
    """Claude Code at its prompt."""
    (here.home / ".claude.json").write_text(json.dumps({
        "hasCompletedOnboarding": True, "theme": "dark", "projects": {str(here.repo): {"hasTrustDialogAccepted": True}}}))
    (here.home / ".claude").mkdir()
    (here.home / ".claude" / "settings.json").write_text(json.dumps({"skipDangerousModePermissionPrompt": True}))
    command = [*here.command("")[:-3], "--dangerously-skip-permissions"]
    terminal = Terminal(command, str(here.repo), {**here.env, "TERM": "xterm-256color", **env})
    try:
        terminal.until(lambda: "❯".encode() in terminal.seen, "no prompt")
        quiet = time.monotonic() + 5
        terminal.until(lambda: time.monotonic() > quiet, "settling")
        yield terminal
    finally:
        terminal.close()


def test_claude_code_on_a_terminal(place: Any) -> None:
    """Two turns with tools: nothing fails or comes twice, and from the second request on 95 % come from the cache."""
    here = place("claude", lambda talk, repo: [*read_then_write(talk, repo)[:2],
                                               {"output": "FIRST-MARK", "when": {"last": "(?s)(?!.*again).*"}}, {"output": "SECOND-MARK"}])
    with claude(here) as terminal:
        terminal.type("what is the secret word?")
        terminal.until(lambda: b"FIRST-MARK" in terminal.seen, "no first answer")
        terminal.type("once again please")
        terminal.until(lambda: b"SECOND-MARK" in terminal.seen, "no second answer")
    run = Run(0, terminal.seen.decode("utf-8", "replace"), "", here.recorder.exchanges())
    settled(run, here.server.log)
    main = [x for x in run.generations if len(x.json.get("tools") or ()) > 5]
    assert len(main) == 4 and (here.repo / "out.txt").exists()
    for turn in main[1:]:
        total, cached = turn.usage()
        assert cached >= 0.95 * total, (total, cached)


def test_claude_codes_title_beside_the_main_request(place: Any) -> None:
    """It asks for a title in a schema at the same time, where a user lets it: the main answer does not wait for that one."""
    here = place("claude", lambda talk, repo: [{"output": '{"title": "A TITLE"}', "delay_ms": 8000, "when": {"tools": False}},
                                               {"output": "The ANSWER-MARK"}])

    def titles() -> list[Any]:
        return [x for x in here.recorder.exchanges() if b'"json_schema"' in x.body]

    with claude(here, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="") as terminal:
        terminal.type("please explain what this repository is about")
        terminal.until(lambda: b"ANSWER-MARK" in terminal.seen, "no answer")
        (title,) = titles()
        assert b"message_stop" not in title.answer
        terminal.until(lambda: b"A TITLE" in terminal.seen, "no title")
    run = Run(0, terminal.seen.decode("utf-8", "replace"), "", here.recorder.exchanges())
    settled(run, here.server.log)
    assert len(run.generations) == 2
