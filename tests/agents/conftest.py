"""Real agents on a daemon, as a person has them: `milad launch` in a git repository, in a clean environment, loopback only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import pytest

import programs
from e2e.conftest import Daemon
from recorder import Exchange, Recorder
from talk import TALKS, Talk

ROOT = Path(__file__).resolve().parent.parent.parent
DEAD = "http://127.0.0.1:9"                  # a proxy and registry that refuse at once: nothing leaves the machine


@dataclass
class Run:
    """How an agent ended, and what it asked meanwhile."""
    code: int
    out: str
    err: str
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def generations(self) -> list[Exchange]:
        """Requests that ran the model."""
        return [x for x in self.exchanges if x.method == "POST" and x.path.split("?")[0].endswith(
            ("/messages", "/responses", "/chat/completions"))]


class Place:
    """A repository with one file, a home of its own, and a relay to a server."""

    def __init__(self, folder: Path, talk: Talk, bin: Path, server: Any, library: Path, kind: str = "") -> None:
        self.talk, self.server, self.kind = talk, server, kind
        self.repo, self.home = folder / "repo", folder / "home"
        for made in (self.repo, self.home):
            made.mkdir(parents=True, exist_ok=True)
        self.recorder = Recorder(server.host, server.port)
        self.env = {
            "HOME": str(self.home), "PATH": f"{bin}:/usr/local/bin:/usr/bin:/bin", "TERM": "dumb", "LANG": "C.UTF-8", "CI": "1",
            "PYTHONPATH": str(ROOT), "MILAD_LIBRARY": str(library), "GIT_CONFIG_NOSYSTEM": "1",
            "HTTP_PROXY": DEAD, "HTTPS_PROXY": DEAD, "http_proxy": DEAD, "https_proxy": DEAD, "npm_config_registry": DEAD,
            "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", **talk.env}
        (self.repo / "note.txt").write_text("The secret word is XYLOPHONE-MARK.\n")
        for command in ("init -q .", "add .", "-c user.name=t -c user.email=t@t commit -qm first"):
            subprocess.run(["git", *command.split()], cwd=self.repo, env=self.env, check=True)

    def command(self, prompt: str, again: bool = False, options: tuple[str, ...] = ()) -> list[str]:
        kind = ("--kind", self.kind) if self.kind else ()
        return [sys.executable, "-m", "milad", "launch", self.talk.name, "--url", self.recorder.url, *kind, *options, "--",
                *(self.talk.again(prompt) if again else self.talk.first(prompt))]

    def start(self, prompt: str, again: bool = False, options: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        """The agent on its way, in a process group of its own."""
        return subprocess.Popen(self.command(prompt, again, options), cwd=self.repo, env=self.env, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                                start_new_session=True)

    def run(self, prompt: str, again: bool = False, options: tuple[str, ...] = (), timeout_s: float = 300) -> Run:
        before = len(self.recorder.exchanges())
        process = self.start(prompt, again, options)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{self.talk.name} did not end in {timeout_s} s:\n{out[-2000:]}\n{err[-2000:]}\n"
                                 f"{self.server.log[-4000:]}") from None
        time.sleep(0.1)                      # the relay's last bytes
        return Run(process.returncode, out, err, self.recorder.exchanges()[before:])


@pytest.fixture
def place(tmp_path: Path, library: Path, default_model: Path, cache_folder: Path):
    """place(name, script, daemon's options) -> Place on a daemon that plays what script(talk, repository) returns; script None:
    on the model itself."""
    made: list[Any] = []

    def make(name: str, script: Callable[[Talk, Path], list[dict[str, Any]]] | None,
             args: tuple[str, ...] = ("--ctx", "65536")) -> Place:
        bin = programs.folder(name, cache_folder)
        folder = tmp_path / str(len(made))
        lines = script(TALKS[name], folder / "repo") if script else None
        tools = ("--tools", "on") if script else ()
        daemon = Daemon(folder / "daemon", default_model, library, lines, (*tools, *args))
        made.append(daemon)
        here = Place(folder, TALKS[name], bin, daemon, library)
        made.append(here.recorder)
        return here

    yield make
    for one in made:
        one.stop() if isinstance(one, Daemon) else one.close()

